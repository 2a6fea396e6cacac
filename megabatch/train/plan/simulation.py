"""Simulation: a recipe on many ranks, with its own model, wrapper, loss and optimizer, as fake tensors of one rank.

All ranks do the same, but for those of a pipeline: of these, the first and the last are simulated. Ranks between hold
no more layers than the first and keep fewer microbatches, and they have no embedding and no head.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import scaled_dot_product_attention
from torch.optim import Optimizer
from transformers import PreTrainedModel

from megabatch import JointLoss, UpdateSampler
from megabatch.batching import OneRow, context_parallel, find_chunks
from megabatch.errors import MegabatchError
from megabatch.losses import LossFunction
from megabatch.simulate import (
    QUANTIZED_OPTIMIZERS,
    Device,
    FourBitLinear,
    Replica,
    Simulated,
    extend,
    join_ranks,
    repeat_microbatches,
    simulate,
    simulate_long_samples,
)
from megabatch.train.callbacks.ema import Average
from megabatch.train.config import Config, ModelConfig
from megabatch.train.config.batch_size import sizes_of
from megabatch.train.config.parallel_layout import Layout, layout_of
from megabatch.train.data.load import Data, load_data
from megabatch.train.model.adapters import choose_trained
from megabatch.train.model.architecture import architecture_of, check_fit, load_tokenizer, outline
from megabatch.train.model.build import divide, prepare
from megabatch.train.model.build_accumulator import use_recipe_keys
from megabatch.train.model.expert_balance import router_coefficient, with_router_loss
from megabatch.train.model.frozen import check_four_bits, four_bit_candidates
from megabatch.train.model.weights import is_several, own_source
from megabatch.train.parallel.pipeline_stages import Stages, pipeline, stages_of
from megabatch.train.parallel.tensor_parallel import plain_terms
from megabatch.train.parallel.wrap import (
    WrapperChoice,
    accumulation_of,
    attend_over,
    blocks_of,
    check_attention_is_causal,
    choose_wrapper,
    computing,
    computing_dtype,
)
from megabatch.train.plan.estimate import (
    Estimate,
    ModelSizes,
    PipelineShare,
    estimate_cost,
    estimate_pipeline,
    measure_sizes,
    planned_optimizer,
)
from megabatch.train.plan.grid import Choice, Grid, build_grid
from megabatch.train.plan.request import PlanRequest
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.plugins import in_place_of, load_function
from megabatch.train.runtime.ranks import CPU, ONE_RANK, Ranks

# Shapes and dtypes by name.
Fields = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
# The error of fake tensors.
DATA_DEPENDENT = "DataDependentOutputException"
# Updates of the data whose lengths stand for all.
NUM_UPDATES = 4
# Layers of different kinds that take turns.
MAX_PERIOD = 8
# The first and the last layer are gathered at other times than those between.
MIN_BLOCKS = 3
# Layers for each one that is simulated.
MIN_SPARED = 1.25


def build_simulator(
    config: Config,
    request: PlanRequest,
    console: Console,
    sample: "LongestSample | None" = None,
    outlines: "Outlines | None" = None,
) -> "Simulator":
    """Prepare a recipe for simulation. Raises `MegabatchError` for keys that exclude each other or the plan.

    Layouts of a recipe share ``sample`` and ``outlines``.
    """
    layout = layout_of(config.parallel, request.world)
    if config.update.shapes is not None:
        raise MegabatchError(
            f"update.shapes is {config.update.shapes}, and the plan does not count tokens that fill microbatches up; "
            "plan without it: no microbatch is larger"
        )
    sample = sample or find_longest_sample(config, request.length_tokens, console)
    cap = config.update.max_microbatch_tokens
    if "update.max_microbatch_tokens" in request.stated_keys and isinstance(cap, int) and cap < sample.length_tokens:
        raise MegabatchError(
            f"update.max_microbatch_tokens is {cap} and the longest sample has {sample.length_tokens} tokens "
            f"({sample.source}); raise it, or leave it out"
        )
    outlines = outlines or Outlines(config, sample.length_tokens)
    if config.update.long_samples is not None:
        sample = sample.cut_into_chunks(cast(int, cap))
    model = outlines.whole
    if layout.cp > 1:
        check_attention_is_causal(cast(PreTrainedModel, model))
    wrapper = choose_wrapper(config.parallel.wrapper, request.world, model, layout)
    check_four_bits(model, config.model, wrapper)
    axes = _mesh_axes(layout, wrapper, request.world)
    is_hybrid = wrapper.name == "fsdp2" and (axes or {}).get("dp_replicate", 1) > 1
    wrapped = "hsdp" if is_hybrid else wrapper.name
    dp_degree = layout.dp_degree(request.world)
    grid = build_grid(
        config, request.stated_keys, wrapped, dp_degree, sample.length_tokens, sample.updates, sample.num_chunks
    )
    sizes = measure_sizes(model, config, layout, wrapped, request.world)
    router = router_coefficient(config, model, load_function(config.loss.function, "loss.function"))
    simulator = Simulator(config, request.device, wrapper, axes, sample, grid, sizes, router)
    if layout.pp > 1:
        ends = [find_end(simulator, outlines, layout, wrapped, rank) for rank in (0, layout.pp - 1)]
        return replace(simulator, ends=ends)
    if layout.ep > 1:
        from megabatch.train.parallel.expert_ranks import EVEN, check_experts_of

        check_experts_of(model, layout.ep)
        simulator = replace(simulator, divide=partial(divide, exchange=EVEN))
    # DDP's buckets do not end with layers.
    repeats = None if wrapper.name == "ddp" else find_repeats(model)
    return replace(simulator, repeats=repeats)


def bare_model(config: Config, longest_tokens: int | None = None) -> nn.Module:
    """Build the recipe's model without memory; a model of the user's function is built as the function does it."""
    if config.model.function is not None:
        model = own_source(config.model, config.run.seed).model
        if is_several(model):
            raise MegabatchError("model.function returns several models, of which no plan is made; plan one of them")
        return model
    # Flash attention keeps what torch's own does, and its package may be missing.
    attention = "eager" if config.model.attention == "eager" else "sdpa"
    simulated: ModelConfig = config.model.model_copy(update={"attention": attention})
    architecture = architecture_of(simulated)
    architecture.use_cache = False
    check_fit(architecture, longest_tokens, None)
    return outline(simulated, architecture)


class Outlines:
    """Models of a recipe without memory, whole and cut into stages, whose sizes are counted. Layouts share them."""

    def __init__(self, config: Config, longest_tokens: int) -> None:
        self.whole = bare_model(config, longest_tokens)
        quantize_outline(self.whole, config)
        choose_trained(self.whole, config.model)
        self._stages: dict[tuple[object, ...], Stages] = {}

    def stages(self, simulator: "Simulator", ranks: Ranks) -> "Stages":
        """Return the stages of a rank. Raises `MegabatchError` for a model that cannot be cut."""
        config, wrapper = simulator.config, simulator.wrapper
        parallel = config.parallel
        key = wrapper.name, parallel.schedule, parallel.stages_per_rank, parallel.pp, ranks.pp_rank
        if key not in self._stages:
            model = bare_model(config)
            choose_trained(model, config.model)
            self._stages[key] = simulator.cut(model, config, ranks)
        return self._stages[key]


def quantize_outline(model: nn.Module, config: Config) -> None:
    """Put the layers of ``model.quantize`` into four bits, without bitsandbytes. They have no memory yet."""
    if config.model.quantize is None:
        return
    for name, layer in four_bit_candidates(model).items():
        bias = cast("Tensor | None", layer.bias)
        computed = computing_dtype(config.model) if bias is None else bias.dtype
        four_bit = FourBitLinear(layer, computed, double_quantization=config.model.double_quantization)
        model.set_submodule(name, four_bit)


def _mesh_axes(layout: Layout, wrapper: WrapperChoice, world: int) -> dict[str, int] | None:
    """Return the axes of the mesh that the trainer would make; DDP has one."""
    if world == 1 and wrapper.name == "plain":
        return None
    is_one_axis = wrapper.name == "ddp" and layout.pp == 1
    return {"dp": world} if is_one_axis else layout.axes(wrapper.name, world)


@dataclass(frozen=True)
class PipelineEnd:
    """The first or the last rank of a pipeline."""

    rank: int  # along pp
    sizes: ModelSizes
    repeats: "Repeats | None"  # of the layers of its stage

    @property
    def share(self) -> PipelineShare:
        """Return the place of the rank."""
        return cast(PipelineShare, self.sizes.pipeline)


@dataclass(frozen=True)
class Simulator:
    """A recipe whose choices can be simulated."""

    config: Config
    device: Device
    wrapper: WrapperChoice
    axes: dict[str, int] | None  # of the mesh; None: one rank
    sample: "LongestSample"
    grid: Grid
    sizes: ModelSizes
    router: float | None = None  # coefficient of the router loss
    repeats: "Repeats | None" = None  # of a deep model, of which two shallow ones are simulated
    ends: Sequence[PipelineEnd] = ()  # of a pipeline: the first rank and the last; ``sizes`` are of the whole model
    divide: Callable[..., object] = divide  # over the mesh; published runs have ways of their own

    @property
    def update_tokens(self) -> float:
        """Tokens of an update over all ranks, without padding."""
        lengths = self.grid.lengths
        longest = sizes_of(self.config.update).largest * self.sample.whole_tokens
        return longest if lengths is None else lengths.num_tokens

    @property
    def is_least(self) -> bool:
        """True if memory is a lower bound: an optimizer is planned by its states, without the kernels of its step."""
        return self.config.optim.function in QUANTIZED_OPTIMIZERS

    def simulate(self, choice: Choice) -> Simulated:
        """Simulate an update. Raises `MegabatchError` for what fake tensors cannot do."""
        if not self.ends:
            return self._simulate(choice, self.repeats)
        first, last = (self._simulate_end(choice.largest_step, end) for end in self.ends)
        share = self.ends[0].share
        simulated = join_ranks(first, last, share.schedule, share.num_ranks, share.per_rank)
        return simulated.in_schedule_steps(choice.num_steps, choice.bubbles) if choice.num_together else simulated

    @property
    def num_ranks(self) -> int:
        """Processes of the run."""
        return prod((self.axes or {}).values())

    @property
    def num_layers(self) -> int:
        return self.ends[0].sizes.num_layers if self.ends else self.sizes.num_layers

    def num_held(self, choice: Choice) -> float:
        """Return the microbatches whose activations a rank holds at once."""
        return self.ends[0].share.num_held(choice.largest_step.num_microbatches) if self.ends else 1.0

    def estimate(self, choice: Choice) -> Estimate:
        if self.ends:
            sizes = [end.sizes for end in self.ends]
            return estimate_pipeline(choice, sizes, self.sample.length_tokens, self.device)
        return estimate_cost(choice, self.sizes, self.sample.length_tokens, self.device)

    def _simulate_end(self, choice: Choice, end: PipelineEnd) -> Simulated:
        """Simulate a rank of a pipeline, by a few of its microbatches where they tell of the others."""
        few = end.share.num_telling
        if few is not None and few < choice.num_microbatches:
            simulated = self._simulate(replace(choice, num_microbatches=few), end.repeats, end)
            if (simulated := repeat_microbatches(simulated, choice.num_microbatches)) is not None:
                return simulated
        return self._simulate(choice, end.repeats, end)

    def _simulate(self, choice: Choice, repeats: "Repeats | None", end: PipelineEnd | None = None) -> Simulated:
        if repeats is not None:
            num_first, period, num_blocks = repeats
            shallow, deeper = (self._simulate_layers(choice, end, depth) for depth in (num_first, num_first + period))
            if (simulated := extend(shallow, deeper, num_blocks)) is not None:
                return simulated.filled(choice.fill)
        return self._simulate_layers(choice, end).filled(choice.fill)

    def _simulate_layers(self, choice: Choice, end: PipelineEnd | None, num_layers: int | None = None) -> Simulated:
        """Simulate the first layers of the model, or of a stage; None: all of them."""
        config = _with_choice(self.config, choice, self.device)
        # Averages stay alive during the update.
        averages: list[Average] = []
        num_ranks = self.num_ranks
        rank = 0 if end is None else end.rank * num_ranks // config.parallel.pp
        stages: list[Stages] = []

        def make_model(mesh: DeviceMesh | None) -> nn.Module:
            if end is None:
                return self._build_model(config, num_layers, mesh)
            ranks = Ranks(rank, num_ranks, CPU, layout_of(config.parallel, num_ranks))
            stages.append(self._build_stages(config, num_layers, ranks))
            return self._build_pipeline(config, stages[0], cast(DeviceMesh, mesh))

        def make_optimizer(model: nn.Module) -> Optimizer:
            # Its parameters have the names of the whole model.
            base = stages[0].model if stages else model
            if config.optim.ema_decay is not None:
                averages.append(Average(base, config.optim.ema_decay))
            try:
                return planned_optimizer(base, config.optim)
            except MegabatchError as error:
                if DATA_DEPENDENT not in str(error):
                    raise
                raise MegabatchError(
                    f"optim.name is {config.optim.name!r}, whose step looks at numbers, and a plan has none; plan with "
                    "AdamW, which keeps no less"
                ) from None

        def run(loss_fn: LossFunction) -> Simulated:
            averages.clear()
            return simulate(
                make_model,
                make_optimizer,
                self._microbatch_maker(choice.micro_batch_size),
                loss_fn,
                axes=self.axes,
                num_microbatches=choice.num_microbatches,
                sync=choice.sync,
                max_norm=config.update.max_norm,
                accumulate_dtype=accumulation_of(config.update),
                device=self.device,
                around=loss_parallel if config.parallel.loss_parallel else contextlib.nullcontext,
                rank=rank,
            )

        loss_fn, sample = self._loss_fn(config), self.sample
        with use_recipe_keys():
            if sample.uncut_tokens is None:
                return run(loss_fn)
            return simulate_long_samples(sample.uncut_tokens, sample.length_tokens, loss_fn, run, sync=choice.sync)

    def _microbatch_maker(self, num_samples: int) -> Callable[[], Any]:
        """Return what makes a microbatch of rank 0. Under cp all ranks have stretches that cost the same."""
        if (degree := self.config.parallel.cp) == 1:
            return partial(self.sample.microbatch, num_samples)
        part = context_parallel.stretch(self.sample.microbatch(num_samples), 0, degree)
        return lambda: context_parallel.Stretch({name: torch.zeros_like(value) for name, value in part.items()})

    def _build_model(self, config: Config, num_layers: int | None, mesh: DeviceMesh | None) -> nn.Module:
        model = bare_model(config)
        if num_layers is not None:
            del cast(nn.ModuleList, model.get_submodule(_stack_of(model)))[num_layers:]
        quantize_outline(model, config)
        if config.parallel.cp > 1:
            assert mesh is not None
            attend_over(cast(PreTrainedModel, model), AttentionCost(mesh.get_group("cp")))
        prepare(model, config.model)
        if self.wrapper.is_of_fsdp or config.parallel.tp > 1:
            assert mesh is not None
            self.divide(model, config, self.wrapper, mesh, None)
        unused = config.model.function is not None
        return Replica(model, find_unused_parameters=unused) if self.wrapper.name == "ddp" else model

    def _build_stages(self, config: Config, num_layers: int | None, ranks: Ranks) -> Stages:
        """Build the stages of a rank as the trainer does, without memory; or the first layers of its only stage."""
        model = bare_model(config)
        prepare(model, config.model)
        stages = self.cut(model, config, ranks)
        if num_layers is not None:
            layers = stages.model.get_submodule(_stack_of(stages.model))
            for name in [name for name, _ in layers.named_children()][num_layers:]:
                delattr(layers, name)
            (part,) = stages.parts
            stages = replace(stages, parts=[replace(part, layers=part.layers[:num_layers])])
        return stages

    def cut(self, model: nn.Module, config: Config, ranks: Ranks) -> Stages:
        """Cut a model into the stages of a rank. Raises `MegabatchError` if they could not run."""
        stages = stages_of(model, config, self.wrapper, ranks, lambda: cast(PreTrainedModel, bare_model(config)))
        return cast(Stages, stages)

    def _build_pipeline(self, config: Config, stages: Stages, mesh: DeviceMesh) -> nn.Module:
        if self.wrapper.is_of_fsdp or config.parallel.tp > 1:
            self.divide(stages.model, config, self.wrapper, mesh, stages)
        for module in stages.modules if config.parallel.cp > 1 else []:
            attend_over(module, AttentionCost(mesh.get_group("cp")))
        return pipeline(stages, config, self.wrapper, mesh, Replica)

    def _loss_fn(self, config: Config) -> LossFunction:
        loss_fn = load_function(config.loss.function, "loss.function")
        if isinstance(loss_fn, JointLoss):
            raise MegabatchError("loss.function is a JointLoss, of which no plan is made; plan with a loss of samples")
        loss_fn = with_router_loss(loss_fn, self.router)
        if config.parallel.loss_parallel:
            loss_fn = plain_terms(loss_fn)

        def in_precision(model: Any, microbatch: Any) -> Any:
            with computing(config.model, self.wrapper.casts_as, CPU):
                return loss_fn(model, microbatch)

        return in_place_of(loss_fn, in_precision)


def find_end(simulator: Simulator, outlines: Outlines, layout: Layout, wrapped: str, rank: int) -> PipelineEnd:
    """Return a rank along pp. Raises `MegabatchError` for a model that cannot be cut into stages."""
    config, num_ranks = simulator.config, simulator.num_ranks
    embedding = cast(PreTrainedModel, outlines.whole).get_input_embeddings()
    stages = outlines.stages(simulator, Ranks(rank * num_ranks // layout.pp, num_ranks, CPU, layout))
    sizes = measure_sizes(stages.model, config, layout, wrapped, num_ranks)
    num_embedded = 0 if rank else sum(parameter.numel() for parameter in embedding.parameters())
    share = PipelineShare(config.parallel.schedule, layout.pp, rank, len(stages.parts), num_embedded)
    if not any(part.is_last for part in stages.parts):
        sizes = replace(sizes, num_vocabulary=0)
    if rank:
        # What comes from another stage carries a gradient.
        sizes = replace(sizes, num_kept=sizes.num_layers)
    has_one = len(stages.parts) == 1
    repeats = find_repeats(stages.model) if has_one and simulator.wrapper.name != "ddp" else None
    return PipelineEnd(rank, replace(sizes, pipeline=share), repeats)


class AttentionCost(context_parallel.GatheredAttention):
    """Attention over context ranks for fake tensors, which torch's causal bias does not take.

    Pairs of a query and a later key are counted, as without context parallelism.
    """

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor, piece: int, scale: float | None,
        dropout: float,
    ) -> Tensor:  # fmt: skip
        if documents.dtype != torch.bool:
            return super()._attend(query, key, value, documents, piece, scale, dropout)
        return scaled_dot_product_attention(
            query, key, value, None, dropout, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )


class Repeats(NamedTuple):
    """Layers of a deep model: the first ones, and blocks of some more that are all alike."""

    num_first: int
    period: int  # layers of a block
    num_blocks: int

    @property
    def spares_work(self) -> bool:
        """True if two shallow models have fewer layers than the whole one."""
        num_layers = self.num_first + self.num_blocks * self.period
        return MIN_SPARED * (2 * self.num_first + self.period) <= num_layers


def find_repeats(model: nn.Module) -> Repeats | None:
    """Return how the layers of a model of transformers repeat; None if that spares no work.

    Other code may use its layers in any order, so that a few of them tell nothing about the others.
    """
    stack = _stack_of(model)
    is_of_transformers = isinstance(model, PreTrainedModel) and type(model).__module__.startswith(
        "transformers.models."
    )
    if not stack or not is_of_transformers:
        return None
    layers = [_describe_layer(layer) for layer in cast(nn.ModuleList, model.get_submodule(stack))]
    num = len(layers)
    for period in range(1, MAX_PERIOD + 1):
        start = max((index + 1 for index in range(num - period) if layers[index] != layers[index + period]), default=0)
        shortest = start + MIN_BLOCKS * period
        num_first = shortest + (num - shortest) % period
        repeats = Repeats(num_first, period, (num - num_first) // period)
        if repeats.spares_work:
            return repeats
    return None


def _stack_of(model: nn.Module) -> str:
    """Return the name of the list with all layers; "" if there are several lists or none."""
    stacks = {name.rpartition(".")[0] for name in blocks_of(model)}
    stack = stacks.pop() if len(stacks) == 1 else ""
    return stack if stack and isinstance(model.get_submodule(stack), nn.ModuleList) else ""


def _describe_layer(layer: nn.Module) -> list[object]:
    modules: list[object] = []
    for name, module in layer.named_modules():
        settings = {
            key: value for key, value in vars(module).items() if isinstance(value, int | float | str | tuple | None)
        }
        settings.pop("layer_idx", None)
        modules.append((name, type(module).__name__, settings))
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    return [*modules, *((name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors)]


def _with_choice(config: Config, choice: Choice, device: Device) -> Config:
    """Return the recipe with a choice made, without compiling: fake tensors have no kernels."""
    model = {"activation_checkpointing": choice.recompute, "compile": False}
    options = config.optim.options
    is_open = config.optim.function is None and config.optim.name != "Muon" and not {"foreach", "fused"} & set(options)
    # torch steps experts and other weights, which lie on two meshes, one by one.
    if not device.is_cpu and is_open and config.parallel.ep == 1:
        # torch's default depends on the device.
        options = {**options, "fused" if choice.fused else "foreach": True}
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=model),
            "optim": config.optim.model_copy(update={"options": options}),
            "parallel": config.parallel.model_copy(update={"reshard_after_forward": choice.reshard}),
        }
    )


@dataclass(frozen=True)
class LongestSample:
    """Shapes of the longest sample, which the plan must have room for."""

    fields: Fields  # of one sample
    length_tokens: int
    source: str  # of the length, in words
    one_row: bool = False  # the samples of a microbatch lie one after another in a row
    updates: tuple[tuple[int, ...], ...] = ()  # lengths of the samples of a few updates; (): the data is not read
    uncut_tokens: int | None = None  # of the sample, if this is a chunk of it

    @property
    def whole_tokens(self) -> int:
        return self.uncut_tokens or self.length_tokens

    @property
    def num_chunks(self) -> int:
        return len(find_chunks(0, self.whole_tokens, self.length_tokens))

    def cut_into_chunks(self, max_tokens: int) -> "LongestSample":
        if self.length_tokens <= max_tokens:
            return self
        fields = {name: ((max_tokens, *shape[1:]), dtype) for name, (shape, dtype) in self.fields.items()}
        return replace(self, fields=fields, length_tokens=max_tokens, uncut_tokens=self.length_tokens)

    def microbatch(self, num_samples: int) -> dict[str, Tensor]:
        """Return zeros in the shape of that many samples: name → [B, ...]."""
        zeros = {name: torch.zeros(num_samples, *shape, dtype=dtype) for name, (shape, dtype) in self.fields.items()}
        return {name: value.flatten(0, 1)[None] for name, value in zeros.items()} if self.one_row else zeros


def find_longest_sample(config: Config, length_tokens: int | None, console: Console) -> LongestSample:
    """Return the longest sample by the command line or the recipe; else by the data, read as for training."""
    if config.data.function is not None:
        if length_tokens is not None:
            raise MegabatchError(
                "--length is given and the samples are those of data.function, which may be anything; leave it out: "
                "they are read"
            )
        return _sample_of_function(config, console)
    if length_tokens is not None:
        return text_sample(length_tokens, "--length", config)
    for key in ("pack_tokens", "max_sample_tokens"):
        if (stated := getattr(config.data, key)) is not None:
            return text_sample(stated, f"data.{key}", config)
    advice = "give --length N, the tokens of the longest sample, or data.max_sample_tokens, and no data is read"
    unbounded = config.update.model_copy(update={"micro_batch_size": 1, "max_microbatch_tokens": None})
    try:
        data = load_data(
            config.model_copy(update={"update": unbounded}), load_tokenizer(config.model), ONE_RANK, console
        )
    except MegabatchError as error:
        raise MegabatchError(f"{error}; or {advice}") from None
    if data.longest_tokens is None:
        raise MegabatchError(f"the longest sample of a stream is not known; {advice}")
    sample = text_sample(data.longest_tokens, "the longest of its data", config)
    return replace(sample, updates=_first_updates(data, config))


def text_sample(length_tokens: int, source: str, config: Config) -> LongestSample:
    names = ["input_ids", "labels", *(["position_ids"] if config.data.pack_tokens is not None else [])]
    return _in_row(LongestSample(dict.fromkeys(names, ((length_tokens,), torch.long)), length_tokens, source), config)


def _sample_of_function(config: Config, console: Console) -> LongestSample:
    data = load_data(config, load_tokenizer(config.model), ONE_RANK, console)
    samples: Any = data.train
    index = int(samples.lengths.argmax())
    tensors = {name: torch.as_tensor(value) for name, value in samples[index].items()}
    fields = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    longest = LongestSample(fields, int(samples.lengths[index]), "the longest of data.function")
    return replace(_in_row(longest, config), updates=_first_updates(data, config))


def _in_row(sample: LongestSample, config: Config) -> LongestSample:
    """Return the sample as `OneRow` collates it, if the recipe asks for that."""
    if not config.update.one_row:
        return sample
    # A mask of zeros would hide everything.
    fill = {"attention_mask": torch.ones}
    tensors = {name: fill.get(name, torch.zeros)(shape, dtype=dtype) for name, (shape, dtype) in sample.fields.items()}
    fields = {name: (tuple(value.shape[1:]), value.dtype) for name, value in OneRow()([tensors]).items()}
    return LongestSample(fields, sample.length_tokens, sample.source, one_row=True)


def _first_updates(data: Data, config: Config) -> tuple[tuple[int, ...], ...]:
    lengths = cast(np.ndarray, data.lengths)  # [N]
    sampler = UpdateSampler(
        lengths.tolist(), global_batch_size=sizes_of(config.update).largest, seed=config.run.seed, dp_rank=0,
        dp_degree=1, tail="carry", order=data.order,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    return tuple(tuple(lengths[ids].tolist()) for ids in islice(sampler, NUM_UPDATES))
