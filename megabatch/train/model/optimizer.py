"""The optimizer and its learning rate. Everything counts updates."""

import difflib
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from megabatch import Learner
from megabatch.errors import MegabatchError, PlanError, in_one_line
from megabatch.optim import LowBits, keep_state_dtypes, split_parameters
from megabatch.planning import TunedLimit
from megabatch.train.config import Config, OptimConfig, UpdateConfig
from megabatch.train.config.batch_size import BatchSizes
from megabatch.train.data.updates import NumUpdates
from megabatch.train.model.build import ParallelModel
from megabatch.train.model.build_accumulator import build_accumulator, use_recipe_keys
from megabatch.train.model.expert_balance import move_biases
from megabatch.train.runtime.plugins import blamed, load_function

# The entry "params", and its own "weight_decay".
Group = dict[str, Any]

# wsd falls over a tenth of its updates.
COOLDOWN_SHARE = 10
REFUSED = {
    "LBFGS": "it runs the loss many times a step",
    "SparseAdam": "it takes sparse gradients, and a model's are dense",
}
# A finite gradient is never clipped to it.
LARGEST_NORM = sys.float_info.max
# Weights of a rank, for their median.
NUM_LOOKED_AT = 2**18
# Options that are keys of [optim], or not the recipe's.
OWNED_OPTIONS = ("params", "lr", "betas", "weight_decay")


def build_learner(
    parallel_model: ParallelModel, config: Config, num_updates: NumUpdates, fit: TunedLimit | None
) -> Learner:
    """Return the model with its accumulator, optimizer and schedule. Raises `MegabatchError`. Collective."""
    gradient = build_accumulator(parallel_model.model, config, fit)
    decay_steps = decay_steps_of(config, num_updates)
    device = next(parallel_model.base.parameters()).device
    optimizer = build_optimizer(parallel_model.base, optim_of(config, device))
    inner = optimizer.optimizer if isinstance(optimizer, LowBits) else optimizer
    if isinstance(inner, MuonAndAdamW):
        matrices, *adamw_groups = [group["params"] for group in inner.param_groups]
        num_weights = sum(matrix.numel() for matrix in matrices)
        share = num_weights / (num_weights + sum(parameter.numel() for group in adamw_groups for parameter in group))
        parallel_model.words.append(
            f"Muon: {len(matrices)} matrices of hidden layers, {share:.0%} of the trained weights; AdamW: the rest"
        )
    parallel_model.warnings.extend(too_long_warmup(config.optim, num_updates.of_run))
    if isinstance(optimizer, LowBits):
        parallel_model.words.append("steps: in float32, by 16 low bits beside each bfloat16 weight")
    else:
        parallel_model.warnings.extend(too_small_steps(optimizer, config.optim))
    move_biases(gradient, optimizer, config)
    scheduler = LambdaLR(optimizer, lambda step: lr_factor(step, config.optim, decay_steps))
    with use_recipe_keys():
        return Learner(
            parallel_model.base, optimizer, gradient, scheduler=scheduler, max_norm=max_norm_of(config.update)
        )


def optim_of(config: Config, device: torch.device) -> OptimConfig:
    """Return the settings of the optimizer. With update.same_bits on a CPU it is fused only if the recipe says so."""
    optim = config.optim
    if not config.update.same_bits or device.type != "cpu" or optim.function is not None:
        return optim
    stepped_by = "AdamW" if optim.name == "Muon" else optim.name
    plain = {"fused": False} if takes(kind_of(stepped_by), "fused") else {}
    return optim.model_copy(update={"options": plain | optim.options})


def max_norm_of(update: UpdateConfig) -> float | None:
    """Return the norm that gradients are clipped to.

    An update that may be skipped needs a norm, even where it is never clipped. With "raise" the next loss shows that
    weights are not finite, and no checkpoint is saved before (`Checkpointing`).
    """
    return LARGEST_NORM if update.max_norm is None and update.on_nonfinite != "raise" else update.max_norm


def settings_of(config: Config) -> dict[str, object]:
    """Return the settings besides data and model that decide what a run learns, by key. A resumed run has the same."""
    optim = config.optim.model_dump(exclude={"decay_steps"})
    update = config.update
    cut = (update.same_bits, update.micro_batch_size, update.max_microbatch_tokens) if update.same_bits else None
    optim["master"] = "low_bits" if keeps_low_bits(config.optim, is_bfloat16=config.model.dtype == "bfloat16") else None
    return {
        "run.seed": config.run.seed,
        "model.function": config.model.function,
        "model.options": config.model.options,
        "model.compute_dtype": config.model.compute_dtype,
        "model.freeze": config.model.freeze,
        "model.lora": config.model.lora,
        "model.experts": config.model.experts,
        "loss.function": config.loss.function,
        "loss.router_loss": None if config.loss.router_loss == "auto" else config.loss.router_loss,
        # In another cut, microbatches have other bits.
        "update.same_bits": cut,
        **{
            f"update.{key}": getattr(config.update, key)
            for key in ("global_batch_size", "tail", "max_norm", "accumulate_dtype")
        },
        **{f"optim.{key}": value for key, value in optim.items()},
    }


def decay_steps_of(config: Config, num_updates: NumUpdates) -> int | None:
    """Return the updates until the learning rate is down, or None for a constant one. Raises `MegabatchError`."""
    schedule, cooldown_steps = config.optim.schedule, config.optim.cooldown_steps
    if cooldown_steps is not None and schedule != "wsd":
        raise MegabatchError(
            f'optim.cooldown_steps is set and optim.schedule is "{schedule}", which has no fall at the end; '
            'set optim.schedule to "wsd" or leave optim.cooldown_steps out'
        )
    if schedule == "constant":
        return None
    decay_steps = config.optim.decay_steps or num_updates.of_data
    if decay_steps is None:
        raise MegabatchError(
            f'optim.schedule is "{schedule}" and the number of updates in a stream is not known beforehand; '
            'set optim.decay_steps, or optim.schedule to "constant"'
        )
    if cooldown_steps is not None and cooldown_steps > decay_steps:
        raise MegabatchError(
            f"optim.cooldown_steps is {cooldown_steps} and the learning rate is to be down after {decay_steps} updates "
            "(optim.decay_steps); set it to fewer"
        )
    return decay_steps


def lr_factor(step: int, config: OptimConfig, decay_steps: int | None) -> float:
    """Return the share of the peak learning rate for the update after ``step`` updates."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant" or decay_steps is None:
        return 1.0
    start = config.warmup_steps
    if config.schedule == "wsd":
        start = max(start, decay_steps - (config.cooldown_steps or max(1, decay_steps // COOLDOWN_SHARE)))
    progress = min(1.0, max(0, step - start) / max(1, decay_steps - start))
    height = (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
    return config.final_lr_share + (1 - config.final_lr_share) * height


def rate_factor(optim: OptimConfig, sizes: BatchSizes, size: int) -> float:
    """Return the factor of the learning rate in an update of ``size`` samples; optim.lr is for the first size."""
    return 1.0 if optim.lr_follows_batch is None else math.sqrt(size / sizes.sizes[0])


def follow(optimizer: optim.Optimizer, scheduler: LRScheduler, factor: float) -> None:
    """Set the rates for the next update: the scheduler's times ``factor``. The scheduler counts from its own."""
    for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate * factor)
        else:
            group["lr"] = rate * factor


def build_optimizer(model: nn.Module, config: OptimConfig) -> optim.Optimizer:
    """Return the recipe's optimizer over the trainable parameters; only matrices decay. Raises `MegabatchError`."""
    groups = groups_of(model.parameters(), config.weight_decay)
    if not groups:
        raise MegabatchError("the model has no parameter to train; free some from model.freeze, or give another model")
    if config.function is not None:
        optimizer = own_optimizer(groups, config)
    elif config.name == "Muon":
        optimizer = muon_optimizer(model, config)
    else:
        optimizer = torch_optimizer(groups, config)
    is_bfloat16 = any(parameter.dtype == torch.bfloat16 for group in groups for parameter in group["params"])
    if keeps_low_bits(config, is_bfloat16=is_bfloat16):
        try:
            optimizer = LowBits(optimizer, state_dtype=getattr(torch, config.state_dtype or "float32"))
        except PlanError as error:
            reason = str(error).partition(";")[0]
            raise MegabatchError(f'optim.master is "low_bits" and {reason}; set it to "none"') from None
    else:
        if config.state_dtype is not None:
            raise MegabatchError(
                f"optim.state_dtype is {config.state_dtype!r} and optim.master keeps no low bits here; leave "
                'optim.state_dtype out, or set optim.master = "low_bits" with model.dtype = "bfloat16"'
            )
        keep_state_dtypes(optimizer)
    optimizer.register_step_pre_hook(fill_gradients)
    return optimizer


def keeps_low_bits(config: OptimConfig, *, is_bfloat16: bool) -> bool:
    """Return True if the recipe asks for low bits, or leaves it open and they suit the parameters and optim.name."""
    if config.master == "auto":
        return is_bfloat16 and config.function is None and LowBits.supports(kind_of(config.name))
    return config.master == "low_bits"


def too_long_warmup(config: OptimConfig, num_updates: int | None) -> list[str]:
    """Return a warning if the run ends before its learning rate is reached."""
    if num_updates is None or config.warmup_steps <= num_updates:
        return []
    last = config.lr * num_updates / config.warmup_steps
    return [
        f"the warmup of {config.warmup_steps} updates is longer than the run of {num_updates}, whose learning rate "
        f"rises to {last:.2g} of {config.lr:g}; lower optim.warmup_steps"
    ]


def too_small_steps(optimizer: optim.Optimizer, config: OptimConfig) -> list[str]:
    """Return a warning if most weights would be rounded back to where they were before a step."""
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    dtypes = {parameter.dtype for parameter in trained if parameter.is_floating_point()}
    if not dtypes or config.function is not None:
        return []
    dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    weights = [parameter for parameter in trained if parameter.dtype == dtype]
    here = [(weight.to_local() if isinstance(weight, DTensor) else weight).detach().reshape(-1) for weight in weights]
    every = sum(map(len, here)) // NUM_LOOKED_AT + 1
    median = float(torch.cat([part[::every] for part in here]).float().abs().median())
    is_known = 0 < median < math.inf
    half_step = 2.0 ** math.floor(math.log2(median)) * torch.finfo(dtype).eps / 2 if is_known else 0.0
    if config.lr >= half_step:
        return []
    if dtype != torch.bfloat16:
        kind = str(dtype).removeprefix("torch.")
        return [
            f"optim.lr is {config.lr:g}, below half a {kind} step of the median weight ({half_step:.1e}): most weights "
            "will not move; raise optim.lr"
        ]
    reason = 'optim.master is "none"' if config.master is None else f"optim.name is {config.name!r}"
    change = "leave optim.master out" if LowBits.supports(type(optimizer)) else "choose AdamW"
    return [
        f"{reason} and optim.lr is {config.lr:g}, below half a bfloat16 step of the median weight ({half_step:.1e}): "
        f"most weights will not move; {change}, or raise optim.lr"
    ]


def groups_of(parameters: Iterable[Tensor], weight_decay: float) -> list[Group]:
    """Return the trainable parameters: matrices, and vectors (norms, biases), which do not decay."""
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    groups: list[Group] = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def torch_optimizer(groups: list[Group], config: OptimConfig) -> optim.Optimizer:
    """One of torch.optim by its name, fused where it can be."""
    kind = kind_of(config.name)
    arguments = arguments_of(kind, config)
    taken = [group if takes(kind, "weight_decay") else {"params": group["params"]} for group in groups]
    return kind(taken, **tried(kind, arguments, groups))


class MuonAndAdamW(optim.Optimizer):
    """torch's Muon and AdamW as one optimizer, so that one schedule, one checkpoint and one `LowBits` serve both."""

    def __init__(self, *parts: optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            # Loading a state, and `LowBits`, put other groups and another state in place.
            part.param_groups = [group for group in self.param_groups if group.keys() >= part.defaults.keys()]
            part.state = self.state
            part.step()
        return loss


def muon_optimizer(model: nn.Module, config: OptimConfig) -> MuonAndAdamW:
    """Return Muon for the matrices of hidden layers, with AdamW for the rest."""
    matrices, adamw_parameters = split_parameters(model)
    if not matrices:
        raise MegabatchError(
            'optim.name is "Muon" and the model trains no matrix of a hidden layer (embeddings and the head are not); '
            "choose AdamW, or free some from model.freeze"
        )
    if any(isinstance(matrix, DTensor) for matrix in matrices):
        raise MegabatchError(
            "optim.name is 'Muon', and torch's Muon rounds sums over shards to bfloat16 (7 to 12 % of a step of "
            'small matrices); choose AdamW, say, or parallel.wrapper = "ddp"'
        )
    groups: list[Group] = [{"params": matrices, "weight_decay": config.weight_decay}]
    options = {"adjust_lr_fn": "match_rms_adamw", **config.options}
    fused = {"fused": options.pop("fused")} if "fused" in options else {}
    arguments = tried(optim.Muon, arguments_of(optim.Muon, config.model_copy(update={"options": options})), groups)
    rate = config.lr if config.adamw_lr is None else config.adamw_lr
    of_rest = config.model_copy(update={"name": "AdamW", "lr": rate, "options": fused})
    adamw_groups = groups_of(adamw_parameters, config.weight_decay)
    beside = [torch_optimizer(adamw_groups, of_rest)] if adamw_groups else []
    return MuonAndAdamW(optim.Muon(groups, **arguments), *beside)


def kind_of(name: str) -> Callable[..., optim.Optimizer]:
    kinds = {
        key: kind
        for key, kind in vars(optim).items()
        if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer
    }
    if name in REFUSED:
        raise MegabatchError(f"optim.name is {name!r}, which cannot be used: {REFUSED[name]}; choose AdamW, say")
    if name not in kinds:
        usable = {key.lower(): key for key in kinds if key not in REFUSED}
        nearest = usable[difflib.get_close_matches(name.lower(), usable, n=1, cutoff=0.0)[0]]
        raise MegabatchError(f"optim.name is {name!r}, which torch.optim does not have; the nearest name is {nearest}")
    return kinds[name]


def takes(kind: Callable[..., optim.Optimizer], argument: str) -> bool:
    return argument in inspect.signature(kind).parameters


def arguments_of(kind: Callable[..., optim.Optimizer], config: OptimConfig) -> dict[str, Any]:
    """Keyword arguments from the recipe; one that the class does not take is an error if the user has set it."""
    for key in ("betas", "weight_decay"):
        # With Muon, betas are those of its AdamW.
        if not takes(kind, key) and is_set(config, key) and kind is not optim.Muon:
            raise MegabatchError(f"optim.{key} is set and {config.name} has none; leave optim.{key} out")
    known = [key for key in inspect.signature(kind).parameters if key not in OWNED_OPTIONS]
    for key in config.options:
        refuse_owned(key)
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise MegabatchError(f"unknown key optim.options.{key} for {config.name}; the nearest key is {nearest}")
    betas = {"betas": config.betas} if takes(kind, "betas") else {}
    return {"lr": config.lr, **betas, **config.options}


def is_set(config: OptimConfig, key: str) -> bool:
    """Return True if a setting is not the default; a resolved recipe names every key."""
    return getattr(config, key) != OptimConfig.model_fields[key].default


def refuse_owned(key: str) -> None:
    """Raise for an option that is a setting of its own."""
    if key in OWNED_OPTIONS:
        instead = "the trainer gives it: leave it out" if key == "params" else f"set optim.{key}"
        raise MegabatchError(f"optim.options.{key} is not an option; {instead}")


def tried(kind: Callable[..., optim.Optimizer], arguments: dict[str, Any], groups: Sequence[Group]) -> dict[str, Any]:
    """Return the arguments, fused if that works, which a step on one tensor of zeros of each kind shows."""
    smallest: dict[object, Tensor] = {}
    for parameter in sorted((part for group in groups for part in group["params"]), key=Tensor.numel):
        # Experts have a mesh of their own.
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        smallest.setdefault((mesh, parameter.dtype, parameter.device, parameter.ndim < 2), parameter)
    likes = list(smallest.values())
    # Fused on a CPU, the last elements of a tensor are rounded in another way, so that bits depend on the shards.
    depends_on_shards = any(isinstance(like, DTensor) and like.device.type == "cpu" for like in likes)
    fusable = takes(kind, "fused") and "fused" not in arguments and not depends_on_shards
    if fusable and problem_of(kind, {**arguments, "fused": True}, likes) is None:
        return {**arguments, "fused": True}
    problem = problem_of(kind, arguments, likes)
    if problem is None:
        return arguments
    name = getattr(kind, "__name__", str(kind))
    if problem_of(kind, arguments, [like.to_local() if isinstance(like, DTensor) else like for like in likes]) is None:
        raise MegabatchError(
            f"optim.name is {name!r}, and torch's {name} cannot step sharded parameters ({problem}); "
            'choose AdamW, say, or parallel.wrapper = "ddp"'
        )
    raise MegabatchError(f"torch's {name} refuses its arguments ({problem}); change optim.options")


def problem_of(
    kind: Callable[..., optim.Optimizer], arguments: Mapping[str, Any], likes: Sequence[Tensor]
) -> str | None:
    zeros = [nn.Parameter(torch.zeros_like(like)) for like in likes]
    for parameter in zeros:
        parameter.grad = torch.zeros_like(parameter)
    try:
        kind(zeros, **arguments).step()
    except Exception as error:
        return in_one_line(error)
    return None


def own_optimizer(groups: list[Group], config: OptimConfig) -> optim.Optimizer:
    """Return the optimizer that ``optim.function`` makes of the groups, checked."""
    assert config.function is not None
    title = f"optim.function {config.function!r}"
    for key in ("name", "betas"):
        if is_set(config, key):
            raise MegabatchError(
                f"optim.{key} is set and is not passed to {title}; put it into optim.options, or leave it out"
            )
    for key in config.options:
        refuse_owned(key)
    function = load_function(config.function, "optim.function")
    with blamed(title, "mend it, or its optim.options"):
        optimizer = function([dict(group) for group in groups], lr=config.lr, **config.options)
    if not isinstance(optimizer, optim.Optimizer):
        kind = type(optimizer).__name__
        raise MegabatchError(f"{title} returned a {kind}; return a torch.optim.Optimizer over the groups it is given")
    wanted = {id(parameter) for group in groups for parameter in group["params"]}
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    if set(held) != wanted or len(held) != len(wanted):
        raise MegabatchError(
            f"{title} made an optimizer of {len(set(held) & wanted)} of the {len(wanted)} parameters to train and "
            f"{len(set(held) - wanted)} others; give it all of the groups (model.freeze leaves parameters out)"
        )
    if not all("lr" in group for group in optimizer.param_groups):
        raise MegabatchError(f'{title} made an optimizer without "lr" in its groups; optim.schedule needs it there')
    return optimizer


def fill_gradients(optimizer: optim.Optimizer, *_: Any) -> None:
    """Before a step: a parameter that no sample has reached has the gradient zero, not none.

    So it is with FSDP2, and every parameter has a state from the first step on, as a checkpoint's reader expects.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
