"""Subject: a recipe on so many ranks, and how a choice of it is run: its own model, wrapper, loss and optimizer."""

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer

from megabatch import JointLoss
from megabatch.errors import MegabatchError
from megabatch.losses import LossFunction
from megabatch.simulate import Device, Replica, Simulated, simulate
from megabatch.train.callbacks.ema import Average
from megabatch.train.config import Config, ModelConfig, OptimConfig
from megabatch.train.config.parallel_layout import Layout, layout_of
from megabatch.train.model.adapters import choose_trained
from megabatch.train.model.architecture import architecture_of, check_fit, outline
from megabatch.train.model.build import check_keys, check_together, divide, prepare
from megabatch.train.model.expert_balance import router_coefficient, with_router_loss
from megabatch.train.model.optimizer import build_optimizer
from megabatch.train.model.tensor_parallel import plain_terms
from megabatch.train.model.weights import is_several, own_source
from megabatch.train.model.wrap import Wrapper, accumulation_of, choose_wrapper, computing
from megabatch.train.plan.asked import Asked
from megabatch.train.plan.choices import Choice, Grid, grid_of
from megabatch.train.plan.closed import Sizes, sizes_of
from megabatch.train.plan.sample import LongestSample, longest_sample
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.plugins import load_function
from megabatch.train.runtime.ranks import Ranks

DATA_DEPENDENT = "DataDependentOutputException"  # of fake tensors
CPU = torch.device("cpu")  # where what is simulated says that it is


@dataclass(frozen=True)
class Subject:
    """What is planned; its model has shapes and no memory."""

    config: Config
    device: Device
    wrapper: Wrapper
    axes: dict[str, int] | None  # of the mesh; None: one rank
    sample: LongestSample
    grid: Grid
    sizes: Sizes
    router: float | None = None  # coefficient of the router loss

    def simulated(self, choice: Choice) -> Simulated:
        """An update of rank 0. Raises `MegabatchError` for what cannot be simulated."""
        config = chosen(self.config, choice, self.device)
        averages: list[Average] = []  # of the weights, which are there for as long as the update

        def make(model: nn.Module) -> Optimizer:
            if config.optim.ema_decay is not None:
                averages.append(Average(model, config.optim.ema_decay))
            return make_optimizer(config.optim, model)

        return simulate(
            partial(self.make_model, config, choice),
            make,
            partial(self.sample.microbatch, choice.micro_batch_size),
            self.loss_fn(config),
            axes=self.axes,
            num_microbatches=choice.num_microbatches,
            sync=choice.sync,
            max_norm=config.update.max_norm,
            accumulate_dtype=accumulation_of(config.update),
            device=self.device,
            around=loss_parallel if config.parallel.loss_parallel else contextlib.nullcontext,
        )

    def make_model(self, config: Config, choice: Choice, mesh: DeviceMesh | None) -> nn.Module:
        """The model as the trainer lays it, without memory."""
        model = bare_model(config)
        prepare(model, config.model)
        if self.wrapper.is_of_fsdp or config.parallel.tp > 1:
            assert mesh is not None  # these have axes
            divide(model, config, self.wrapper, mesh, None)
        unused = config.model.function is not None
        return Replica(model, find_unused_parameters=unused) if self.wrapper.name == "ddp" else model

    def loss_fn(self, config: Config) -> LossFunction:
        """The recipe's loss, in its precision."""
        loss_fn = load_function(config.loss.function, "loss.function")
        if isinstance(loss_fn, JointLoss):
            raise MegabatchError("loss.function is a JointLoss, of which no plan is made; plan with a loss of samples")
        loss_fn = with_router_loss(loss_fn, self.router)
        if config.parallel.loss_parallel:
            loss_fn = plain_terms(loss_fn)

        def computed(model: Any, microbatch: Any) -> Any:
            with computing(config.model, self.wrapper.casts_as, CPU):
                return loss_fn(model, microbatch)

        return computed


def make_optimizer(config: OptimConfig, model: nn.Module) -> Optimizer:
    """The recipe's optimizer. Raises `MegabatchError` for one that asks how large a number is, which no shape tells."""
    try:
        return build_optimizer(model, config)
    except MegabatchError as error:
        if DATA_DEPENDENT not in str(error):
            raise
        raise MegabatchError(
            f"optim.name is {config.name!r}, whose step looks at numbers, and a plan has none; plan with AdamW, which "
            "keeps no less"
        ) from None


def subject_of(config: Config, asked: Asked, fixed: Collection[str], console: Console) -> Subject:
    """The recipe as so many ranks would run it. Raises `MegabatchError` for what does not go together."""
    layout = layout_of(config.parallel, asked.world)
    check_planned(config, asked.world)
    check_keys(config.model)
    check_together(config, Ranks(0, asked.world, CPU, layout))
    sample = longest_sample(config, asked.length_tokens, console)
    model = bare_model(config, sample.length_tokens)
    wrapper = choose_wrapper(config.parallel.wrapper, asked.world, model, layout)
    choose_trained(model, config.model)
    axes = axes_of(layout, wrapper, asked.world)
    wrapped = wrapped_as(wrapper, axes)
    grid = grid_of(config, fixed, wrapped, layout.dp_degree(asked.world), sample.length_tokens)
    sizes = sizes_of(model, config, layout, wrapped, asked.world)
    router = router_coefficient(config, model, load_function(config.loss.function, "loss.function"))
    return Subject(config, asked.device, wrapper, axes, sample, grid, sizes, router)


def check_planned(config: Config, world: int) -> None:
    """Raise for what a recipe may have and no plan is made of."""
    if config.model.quantize is not None:
        raise MegabatchError(
            f"model.quantize is {config.model.quantize!r}, whose layers the plan does not simulate; plan without "
            "it: the base then counts in full"
        )
    if config.optim.in_backward:
        raise MegabatchError(
            "optim.in_backward is true, which the plan does not simulate; plan without it: gradients then count in full"
        )
    for axis in ("cp", "pp"):
        if (degree := getattr(config.parallel, axis)) > 1:
            raise MegabatchError(
                f"parallel.{axis} is {degree}, which the plan does not simulate; plan with parallel.{axis}=1 and "
                f"--world {world // degree}"
            )


def bare_model(config: Config, longest_tokens: int | None = None) -> nn.Module:
    """The recipe's model without memory; that of a function is made as the function makes it."""
    if config.model.function is not None:
        model = own_source(config.model, config.run.seed).model
        if is_several(model):
            raise MegabatchError("model.function returns several models, of which no plan is made; plan one of them")
        return model
    model = planned_model(config.model)
    architecture = architecture_of(model)
    architecture.use_cache = False
    check_fit(architecture, longest_tokens, None)
    return outline(model, architecture)


def planned_model(model: ModelConfig) -> ModelConfig:
    """What is simulated in its place: flash attention keeps what torch's own does, and its package may be missing."""
    return model.model_copy(update={"attention": "eager" if model.attention == "eager" else "sdpa"})


def chosen(config: Config, choice: Choice, device: Device) -> Config:
    """The recipe with a choice made, as it runs on the device; a compiler is not simulated."""
    switched = {"activation_checkpointing": choice.recompute, "compile": False}
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=switched),
            "optim": config.optim.model_copy(update={"options": options_of(config.optim, choice, device)}),
            "parallel": config.parallel.model_copy(update={"reshard_after_forward": choice.reshard}),
        }
    )


def options_of(config: OptimConfig, choice: Choice, device: Device) -> dict[str, object]:
    """Options of the optimizer; torch's default depends on the device, and what is simulated says it is a CPU."""
    if device.name == "cpu" or config.function is not None or {"foreach", "fused"} & set(config.options):
        return config.options
    return {**config.options, "fused": True} if choice.fused else {**config.options, "foreach": True}


def axes_of(layout: Layout, wrapper: Wrapper, world: int) -> dict[str, int] | None:
    """The mesh that the trainer would make; DDP has one axis."""
    if world == 1 and wrapper.name == "plain":
        return None
    if wrapper.name == "ddp":
        return {"dp": world}
    return layout.axes(wrapper.name, world)


def wrapped_as(wrapper: Wrapper, axes: dict[str, int] | None) -> str:
    """How gradients are reduced."""
    is_hybrid = wrapper.name == "fsdp2" and (axes or {}).get("dp_replicate", 1) > 1
    return "hsdp" if is_hybrid else wrapper.name
