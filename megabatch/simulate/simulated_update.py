"""Simulation of one update on one rank of N, with megabatch's reducers and torch's wrappers, but without memory.

- It runs two updates and reports the second: the first makes the optimizer's states, late, as a real run does, and the
  allocator remembers that. Two microbatches in each show the peak of any number: from the second on, the gradient of
  the first is in memory. Only the seconds of more microbatches are a little short, since additions to a gradient are
  counted once.
- It includes the temporaries of the step (``foreach=True`` copies all parameters), buckets and buffers, and the memory
  that FSDP2 keeps when a backward is not the last or when parameters stay gathered.
- Code runs on fake tensors of the CPU. Give the longest microbatch, the attention of the real run, and an optimizer
  with ``foreach=True`` or ``fused=True``, since torch's default depends on the device. A fused CUDA kernel that saves
  less than the CPU's is not seen; nor are workspaces, the context and NCCL (``Device.overhead_bytes``).
- Tensors have no contents: experts get tokens by shape only, and code that reads numbers is refused.
- ``peak_bytes`` is allocated memory. Reserved memory decides what fits: call `Simulated.reserved` with a limit.
- On a real CPU the system does not count memory that was never touched, so a measurement can be below the prediction.
- A rank of a `Pipeline` runs torch's own schedule, and the other ranks answer at once. `join_ranks` adds how long it
  waits, from the simulations of the first and the last rank along "pp".
- With CPU offload, copies run beside computing, and the host's computing holds up its launches.
"""

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.pipelining import PipelineStage

from megabatch.core.contract import CoupledLoss, LossFunction, differentiable, terms_of
from megabatch.core.gradients import clip_gradients, drop_gradients
from megabatch.core.wrapper import Wrapper, local
from megabatch.errors import LossContractError, PlanError, require_count, require_positive
from megabatch.inspection.checksum import checksum
from megabatch.pipeline.order import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Action,
    finish_seconds,
    orders_of,
)
from megabatch.pipeline.pad_to_shape import Inputs, in_one_shape
from megabatch.pipeline.stages import SCHEDULES, Pipeline
from megabatch.simulate.allocator import Reserved, reserved
from megabatch.simulate.devices import Device, device_named
from megabatch.simulate.fake_cluster import (
    FakeMode,
    OnlyRank,
    check_model,
    disabled_gc,
    fake_mesh,
    fsdp_groups,
    give_fake_memory,
    one_text_per_row,
    refuse_data_access,
    uncut_steps,
)
from megabatch.simulate.ledger import HOST, Ledger, Phase, Step, replaced, tagging_shards, trace_of
from megabatch.simulate.replica import Replica
from megabatch.simulate.traffic import SEND, Sent, message_seconds
from megabatch.torch_private.operations import pytree
from megabatch.torch_private.pipeline_schedules import agreement_of_stages, messages_of_stages
from megabatch.torch_private.versions import check_feature
from megabatch.wrappers.detect import Models, choose_policy, detect_wrapper
from megabatch.wrappers.pipeline_wrapper import PipelineWrapper
from megabatch.wrappers.wide_gradients import WideGradients

NUM_DISTINCT = 2  # microbatches, of which every other one repeats the first backward or the second forward
REPEATED_FORWARD = "forward 2"  # the phase that stands for forwards that are not run, those without a graph too
INPUTS = "inputs"  # kind of an action of a pipeline: a microbatch is brought to the device
WORDS = {
    INPUTS: "inputs",
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT_GRADIENT: "gradients of inputs",
    WEIGHT_GRADIENT: "gradients of weights",
}
SCHEDULE, BUBBLE = "schedule", "bubble"  # phases of a pipeline: it makes its buffers; it waits for other ranks
NUM_GATHERED_ONCE = 3  # of these the second: under "gather_once" the first gathers and the last frees parameters


def phase_of(action: Action) -> str:
    """Return the name of the phase in which a pipeline's rank runs an action."""
    return f"{WORDS[action.kind]} {action.microbatch + 1} of stage {action.stage}"


def read_phase(name: str) -> Action | None:
    """Return the action of a phase; None for one of another kind."""
    match = re.fullmatch(r"(.+) (\d+) of stage (\d+)", name)
    if match is None:
        return None
    word, number, stage = match.groups()
    return Action(next(kind for kind, phase_word in WORDS.items() if phase_word == word), int(stage), int(number) - 1)


def _is_first_forward(name: str) -> bool:
    """Return True for the phase of a stage's first microbatch."""
    action = read_phase(name)
    return action is not None and (action.kind, action.microbatch) == (FORWARD, 0)


class Repetition(NamedTuple):
    """Microbatches of a pipeline's rank with one stage, of which a few were run and one stands for more of them."""

    num_run: int
    num: int
    num_early: int  # forwards that are alike, before the first backward

    def simulated(self, action: Action) -> Action:
        """Return the action that was run in place of another."""
        middle, more = self._middle(action.kind), self.num - self.num_run
        return action._replace(microbatch=max(min(action.microbatch, middle), action.microbatch - more))

    def microbatches(self, action: Action) -> Sequence[int]:
        """Return the microbatches for which an action that was run stands."""
        middle, more = self._middle(action.kind), self.num - self.num_run
        index = action.microbatch
        return range(index + more * (index > middle), index + more * (index >= middle) + 1)

    def _middle(self, kind: str) -> int:
        if kind == FORWARD:
            return self.num_early
        # The schedule holds what microbatch num_early - 2 sends for longer than what others send.
        return 2 if kind == BACKWARD and self.num_early == 3 else 1


@dataclass(frozen=True)
class Simulated:
    """Memory, traffic and time of one update of ``num_microbatches`` on one rank."""

    phases: dict[str, Phase]  # that were run, in order
    where: str  # the phase with the peak
    steady_bytes: int  # from update to update: parameters, states, buckets
    host_bytes: int  # peak of CPU offload on the host; part of no other number
    sync: str  # the policy of the run
    num_microbatches: int
    times: dict[str, int]  # count of each phase in an update
    num_parameters: int  # of the whole model, or of a pipeline's rank
    steps: tuple[Step, ...]  # of memory, of both updates
    device: Device
    num_ranks: int = 1  # of the mesh
    repetition: Repetition | None = None
    on_host: frozenset[str] = frozenset()  # categories that CPU offload keeps on the host

    @property
    def peak_bytes(self) -> int:
        """The most memory allocated at once."""
        return self.phases[self.where].peak_bytes

    @property
    def at_peak(self) -> dict[str, int]:
        """Memory at the peak, by category."""
        return self.phases[self.where].at_peak

    @property
    def sent(self) -> tuple[Sent, ...]:
        """Traffic of this rank, by collective and axis."""
        sums: dict[object, Sent] = {}
        for name, phase in self.phases.items():
            for key, sent in phase.sent.items():
                sums[key] = sent.times_plus(self.times[name], sums.get(key))
        return tuple(sums.values())

    @property
    def sent_bytes(self) -> int:
        return sum(sent.sent_bytes for sent in self.sent)

    @property
    def flops(self) -> int:
        return sum(self.times[name] * phase.flops for name, phase in self.phases.items())

    @property
    def seconds(self) -> float:
        """Seconds of the phases, one after the other."""
        return sum(self.times[name] * phase.seconds for name, phase in self.phases.items())

    @property
    def compute_seconds(self) -> float:
        return sum(self.times[name] * phase.fill * phase.compute_seconds for name, phase in self.phases.items())

    @property
    def traffic_seconds(self) -> float:
        return sum(
            self.times[name] * (phase.traffic_seconds - (1 - phase.fill) * phase.awaited_seconds)
            for name, phase in self.phases.items()
        )

    @property
    def bound(self) -> str:
        """The limit that takes most of the time, as in `Phase.bound`."""
        sums: defaultdict[str, float] = defaultdict(float)
        for name, phase in self.phases.items():
            sums[phase.bound] += self.times[name] * phase.seconds
        return max(sums, key=sums.__getitem__)

    def filled(self, fill: float) -> "Simulated":
        """Return the same update with the seconds of microbatches that have ``fill`` times the tokens on average.

        Memory stays that of the microbatch that was simulated, the longest one.
        """
        phases = {name: phase if name == "step" else replace(phase, fill=fill) for name, phase in self.phases.items()}
        return replace(self, phases=phases)

    def in_schedule_steps(self, num_steps: float, bubbles: float) -> "Simulated":
        """Return an update of a pipeline in several schedule steps, of which this is the largest.

        FSDP2 keeps what the last backward of a step gathers, so that the next step's first forward gathers nothing.

        Args:
            num_steps: Microbatches of all steps, divided by those of this one.
            bubbles: Idle time of all steps, divided by that of this one.
        """
        phases = {
            name: phase if name == "step" else phase.repeated(num_steps, gathers_once=_is_first_forward(name))
            for name, phase in self.phases.items()
        }
        bubble = replace(self.phases[BUBBLE], idle_seconds=bubbles * self.phases[BUBBLE].idle_seconds)
        num_microbatches = round(num_steps * self.num_microbatches)
        return replace(self, phases=phases | {BUBBLE: bubble}, num_microbatches=num_microbatches)

    def reserved(self, limit_bytes: int | None = None, *, expandable: bool = False) -> Reserved:
        """Return the memory that CUDA's caching allocator reserves over both updates, within ``limit_bytes``."""
        return reserved(trace_of(self.steps, self.on_host), limit_bytes=limit_bytes, expandable=expandable)


def simulate(
    make_model: Callable[[Any], Models],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    make_batch: Callable[[], Any],
    loss_fn: LossFunction,
    *,
    axes: Mapping[str, int] | None = None,
    num_microbatches: int = 1,
    sync: str = "auto",
    max_norm: float | None = None,
    accumulate_dtype: torch.dtype | None = None,
    device: Device | str = "h100-80g",
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    run_all: bool = False,
    rank: int = 0,
) -> Simulated:
    """Simulate one update on a rank of a mesh, without memory, peers and data; half a minute for 34B parameters.

    Args:
        make_model: ``make_model(mesh)`` makes the model on the meta device and wraps it over the mesh (None for one
            rank); it gets fake memory afterwards. Use `Replica` in place of DistributedDataParallel. A `Pipeline` runs
            every microbatch; parameters that its stages share are on the first and the last rank along "pp".
        make_optimizer: ``make_optimizer(model)`` makes the optimizer.
        make_batch: Makes a microbatch; give the longest one.
        loss_fn: As for `GradientAccumulator`; a weight may depend on the data.
        axes: The axes of the mesh in order, with their sizes: ``{"dp_replicate": 2, "dp_shard": 8}``.
        num_microbatches: Microbatches of an update, on each rank.
        sync: As for `GradientAccumulator`.
        max_norm: As for `GradientAccumulator.finalize`.
        accumulate_dtype: As for `GradientAccumulator`.
        device: The rank's device, by name or as a `Device`.
        around: Makes a context manager around each forward and backward, for example torch's loss_parallel.
        run_all: Run every microbatch. False: run two of them, and count the second for the others.
        rank: Of the mesh; other ranks do the same, but for those of other stages.

    Raises:
        PlanError: For a model or loss that cannot be simulated. No process group and no change in torch stays behind.
    """
    check_feature("plan")
    require_count("num_microbatches", num_microbatches)
    if max_norm is not None:
        require_positive("max_norm", max_norm)
    if ":" in sync:
        raise PlanError(
            f"sync is {sync!r}, and simulate() runs the first microbatches alone; give 'last', which keeps as much, or "
            "'every', which sends more"
        )
    if isinstance(loss_fn, CoupledLoss):
        raise PlanError("a JointLoss needs the representations of other ranks, which are not there; simulate encode")
    place = device_named(device) if isinstance(device, str) else device
    num_run = num_microbatches if run_all else min(num_microbatches, num_distinct(sync))
    with fake_mesh(axes or {}, rank) as mesh, refuse_data_access(), disabled_gc(), uncut_steps(place):
        model = make_model(mesh)
        models = check_model(model)
        if isinstance(model, Pipeline):
            num_microbatches = num_run = model.runnable(num_microbatches)
        ledger = Ledger(place, axes, _host_categories(models))
        run = _Run(model, models, mesh, ledger, make_optimizer, accumulate_dtype, sync)
        with run.tagging(), one_text_per_row(make_batch):
            run.update(make_batch, loss_fn, max_norm, num_run, around)
            run.begin_second()
            run.update(make_batch, loss_fn, max_norm, num_run, around)
    log = ledger.log
    return Simulated(
        phases=dict(log.phases),
        where=log.peak[0],
        steady_bytes=log.steady_bytes,
        host_bytes=log.host_peak_bytes,
        sync=run.policy,
        num_microbatches=num_microbatches,
        times=count_phases(num_run, num_microbatches) if SCHEDULE not in log.phases else dict.fromkeys(log.phases, 1),
        num_parameters=sum(parameter.numel() for parameter in run.parameters()),
        steps=tuple(log.steps),
        device=place,
        num_ranks=prod((axes or {}).values()),
        on_host=frozenset(log.on_host),
    )


def join_ranks(first: Simulated, last: Simulated, schedule: str, num_ranks: int, per_rank: int = 1) -> Simulated:
    """Return the simulation of the rank of a pipeline that needs more memory, with the time that it waits for others.

    The ranks between do no more than the first one does: give stages in the middle no more layers.

    Args:
        first: Of rank 0 of the mesh, whose outermost axis is "pp".
        last: Of the first of those that are the last along "pp".
        schedule: As for `Pipeline`.
        num_ranks: Ranks along "pp".
        per_rank: Stages of each.
    """
    orders = orders_of(schedule, num_ranks, per_rank, first.num_microbatches)

    def simulated(rank: int, action: Action) -> Action:
        repetition = simulations[rank].repetition
        return action if repetition is None else repetition.simulated(action)

    like = [SCHEDULES[schedule].indices(rank, num_ranks, per_rank) for rank in range(num_ranks)]
    messages = next(sent for sent in first.sent if sent.collective == SEND)
    simulations = [first] * (num_ranks - 1) + [last]

    def seconds_of(rank: int, action: Action) -> float:
        action = simulated(rank, action)
        at = 0 if simulations[rank] is first else rank
        stage = like[at][like[rank].index(action.stage)]
        return simulations[rank].phases[phase_of(action._replace(stage=stage))].seconds

    def seconds_between(*pair: int) -> float:
        stride = first.num_ranks // num_ranks
        ranks = [rank * stride for rank in pair]
        return message_seconds(messages.sent_bytes // messages.calls, ranks, first.device)

    ends = finish_seconds(orders, seconds_of, seconds_between)
    scheduled = [sum(seconds_of(rank, action) for action in order) for rank, order in enumerate(orders)]
    unscheduled = [simulation.seconds - seconds for simulation, seconds in zip(simulations, scheduled, strict=True)]
    worst = max(first, last, key=lambda ran: ran.peak_bytes if first.device.is_cpu else ran.reserved().peak_bytes)
    waits = max(end + seconds for end, seconds in zip(ends, unscheduled, strict=True)) - worst.seconds
    phases = worst.phases | {BUBBLE: Phase(idle_seconds=waits)}
    return replace(worst, phases=phases, times=worst.times | {BUBBLE: 1})


def count_phases(num_run: int, num_microbatches: int) -> dict[str, int]:
    """Count each phase of an update. Phases that are not run repeat the first backward and the second forward.

    Of three that are run, they repeat the second microbatch.
    """
    times = {f"{phase} {index + 1}": 1 for index in range(num_run) for phase in ("forward", "backward")} | {"step": 1}
    if num_run < num_microbatches:
        backward = "backward 2" if num_run == NUM_GATHERED_ONCE else "backward 1"
        times[backward] = times[REPEATED_FORWARD] = num_microbatches - num_run + 1
    return times


def num_distinct(sync: str) -> int:
    """Return the number of microbatches of an update that tell of all others."""
    return NUM_GATHERED_ONCE if sync == "gather_once" else NUM_DISTINCT


class _Run:
    """A model with fake memory, its wrapper and its optimizer."""

    def __init__(
        self,
        model: Models,
        models: list[nn.Module],
        mesh: Any,
        ledger: Ledger,
        make_optimizer: Callable[[Any], torch.optim.Optimizer],
        accumulate_dtype: torch.dtype | None,
        sync: str,
    ) -> None:
        self._model, self._models, self._ledger = model, models, ledger
        self._fake = FakeMode()
        with self._fake, ledger, _keeping_tied(model):
            give_fake_memory(self._models)
            for listed in self._models:
                ledger.tag(listed.parameters(), "parameters")
                ledger.tag(listed.buffers(), "buffers")
        self._wrapper = detect_wrapper(model, mesh)  # outside of the mode, since it reads the mesh
        _use_only_rank(self._wrapper)
        self._wide = WideGradients(self._wrapper.parameters, accumulate_dtype)
        self._wrapper.accumulate_in(self._wide)
        self.policy = choose_policy(self._wrapper, sync)[0]
        with self._fake, ledger:
            self._optimizer = make_optimizer(model)
            self._tag_states()
        ledger.begin_log()

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for model in self._models for parameter in model.parameters()]

    @contextlib.contextmanager
    def tagging(self) -> Generator[None]:
        """Tag gradients, buckets and shards during the updates."""
        hooks = [
            parameter.register_post_accumulate_grad_hook(self._tag_gradient) for parameter in self._wrapper.parameters
        ]
        hooks += [replica.module.register_forward_pre_hook(self._tag_buckets) for replica in self._replicas()]
        try:
            with self._fake, self._ledger, tagging_shards(self._ledger):
                yield
        finally:
            self._wide.discard()
            for hook in hooks:
                hook.remove()

    def begin_second(self) -> None:
        """Drop the gradients of the first update, and count anew."""
        drop_gradients(self._wrapper.parameters)
        self._ledger.begin()

    def update(
        self,
        make_batch: Callable[[], Any],
        loss_fn: LossFunction,
        max_norm: float | None,
        num: int,
        around: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Run what `GradientAccumulator` does in an update of one call, and the optimizer's step."""
        wrapper, ledger = self._wrapper, self._ledger
        drop_gradients(wrapper.parameters)
        self._wide.begin()
        if isinstance(wrapper, PipelineWrapper):
            with around():
                self._run_schedule(wrapper, make_batch, loss_fn, num)
        else:
            self._run_microbatches(make_batch, loss_fn, num, around)
        ledger.enter_phase("step", HOST if ledger.log.on_host - {HOST} else "temporaries")
        wrapper.finish_update()
        if max_norm is not None:
            clip_gradients(wrapper.parameters, max_norm, None, wrapper.norm_groups, uncounted=wrapper.uncounted)
        self._wide.finish()
        ledger.tag((parameter.grad for parameter in wrapper.parameters), "gradients")
        self._optimizer.step()
        self._tag_states()

    def _run_microbatches(
        self, make_batch: Callable[[], Any], loss_fn: LossFunction, num: int,
        around: Callable[[], AbstractContextManager[Any]],
    ) -> None:  # fmt: skip
        wrapper, ledger = self._wrapper, self._ledger
        for index in range(num):
            with wrapper.microbatch(self.policy, last=index == num - 1), around():
                ledger.enter_phase(f"forward {index + 1}", "activations")
                objective = _sum_totals(loss_fn(self._model, make_batch())) * wrapper.loss_factor
                ledger.enter_phase(f"backward {index + 1}", "temporaries")
                objective.backward()
                del objective
            ledger.tag((parameter.grad for parameter in wrapper.parameters), "gradients")

    def _run_schedule(
        self, wrapper: PipelineWrapper, make_batch: Callable[[], Any], loss_fn: LossFunction, num: int
    ) -> None:
        """Run all microbatches of a call through the stages of this rank, with their inputs on the device at once."""
        pipeline, ledger = cast(Pipeline, wrapper.pipeline), self._ledger
        batches: list[Any] = []
        for index in range(num):
            ledger.enter_phase(phase_of(Action(INPUTS, pipeline.indices[0], index)), "activations")
            batches.append(make_batch())

        def loss(output: Any, index: int) -> Tensor:
            if pipeline.failure is not None:
                raise pipeline.failure[1]
            answer = pytree.tree_unflatten(list(output), cast(Any, pipeline.structure))

            def model(*_: object, **__: object) -> Any:
                return answer

            return _sum_totals(loss_fn(model, batches[index])) * wrapper.loss_factor

        inputs = in_one_shape([_record_inputs(loss_fn, batch) for batch in batches])
        ledger.enter_phase(SCHEDULE, "communication")  # a new one allocates what is going to be received
        with wrapper.reducing(), _entering_actions(ledger):
            pipeline.step(inputs, loss, wrapper.device, backward=True)
        ledger.tag((parameter.grad for parameter in wrapper.parameters), "gradients")
        if pipeline.failure is not None:
            raise pipeline.failure[1]

    def _replicas(self) -> list[Replica]:
        return [module for model in self._models for module in model.modules() if isinstance(module, Replica)]

    def _tag_buckets(self, *_: object) -> None:
        self._ledger.tag((bucket for replica in self._replicas() for bucket in replica.memory()), "communication")

    def _tag_gradient(self, parameter: Tensor) -> None:
        self._ledger.tag((parameter.grad,), "gradients")

    def _tag_states(self) -> None:
        for parameter in self._optimizer.state:
            self._tag_state(parameter)

    def _tag_state(self, parameter: Tensor) -> None:
        state = self._optimizer.state.get(parameter, {})
        self._ledger.tag((value for value in state.values() if isinstance(value, Tensor)), "optimizer states")


def _sum_totals(returned: Any) -> Tensor:
    """Return the sum of the totals of a loss; its weights may depend on data, so they are left out."""
    if isinstance(returned, Mapping):
        returned = {name: _drop_weight(pair) for name, pair in cast(Mapping[str, Any], returned).items()}
    else:
        returned = _drop_weight(returned)
    terms = terms_of(returned)
    names = differentiable(terms)
    if not names:
        raise LossContractError(
            "no total of the loss carries a gradient; compute one from the model's output, undetached"
        )
    totals = [terms[name].total for name in names]
    return totals[0] if len(totals) == 1 else torch.stack(totals).sum()


def _drop_weight(pair: Any) -> Any:
    is_pair = isinstance(pair, tuple | list) and len(cast(tuple[Any, ...], pair)) == 2
    return (cast(tuple[Any, ...], pair)[0], 1.0) if is_pair else pair


class _Called(BaseException):
    """Raised when the loss calls the model, with the inputs."""


def _record_inputs(loss_fn: LossFunction, batch: Any) -> Inputs:
    """Return the inputs that the loss gives the model."""

    def record(*args: Any, **kwargs: Any) -> Any:
        raise _Called(Inputs(args, kwargs))

    try:
        loss_fn(record, batch)
    except _Called as called:
        return called.args[0]
    raise PlanError("the loss returned without calling the model that it is given; under a Pipeline call it once")


@contextlib.contextmanager
def _entering_actions(ledger: Ledger) -> Generator[None]:
    """Enter a phase with each action of a pipeline's stage. Shapes are taken as they are said."""

    def forward(run: Callable[..., Any]) -> Callable[..., Any]:
        def forward_one_chunk(stage: PipelineStage, index: int, *args: Any, **kwargs: Any) -> Any:
            ledger.enter_phase(phase_of(Action(FORWARD, stage.stage_index, index)), "activations")
            return run(stage, index, *args, **kwargs)

        return forward_one_chunk

    def backward(run: Callable[..., Any]) -> Callable[..., Any]:
        def backward_one_chunk(stage: PipelineStage, index: int, *args: Any, **kwargs: Any) -> Any:
            kind = BACKWARD if kwargs.get("full_backward", True) else INPUT_GRADIENT
            ledger.enter_phase(phase_of(Action(kind, stage.stage_index, index)), "temporaries")
            return run(stage, index, *args, **kwargs)

        return backward_one_chunk

    def weights(run: Callable[..., Any]) -> Callable[..., Any]:
        def backward_weight_one_chunk(stage: PipelineStage, index: int, **kwargs: Any) -> Any:
            ledger.enter_phase(phase_of(Action(WEIGHT_GRADIENT, stage.stage_index, index)), "temporaries")
            return run(stage, index, **kwargs)

        return backward_weight_one_chunk

    def reduction(run: Callable[..., Any]) -> Callable[..., Any]:
        def perform_reduce_grad(stage: PipelineStage, factor: int) -> Any:
            ledger.enter_phase(f"reduction of stage {stage.stage_index}", "temporaries")
            return run(stage, factor)

        return perform_reduce_grad

    def keep_sent(send: Callable[..., Any]) -> Callable[..., Any]:
        def batch_p2p(operations: Sequence[dist.P2POp], *args: Any, **kwargs: Any) -> _Works:
            return _Works(send(operations, *args, **kwargs), operations)

        return batch_p2p

    stages, agreement, silent = agreement_of_stages()
    with (
        replaced(PipelineStage, "forward_one_chunk", forward),
        replaced(PipelineStage, "backward_one_chunk", backward),
        replaced(PipelineStage, "backward_weight_one_chunk", weights),
        replaced(PipelineStage, "perform_reduce_grad", reduction),
        replaced(stages, agreement, lambda _: silent),
        replaced(*messages_of_stages(), keep_sent),
    ):
        yield


class _Works(list[Any]):
    """Works that keep what they send, as those of a real process group do."""

    def __init__(self, works: list[Any], operations: Sequence[dist.P2POp]) -> None:
        super().__init__(works)
        self.sent = [operation.tensor for operation in operations]


class _TiedCopies:
    """Copies of the parameters that the first and the last rank of a pipeline share. Fake ones cannot be compared."""

    def __init__(self, pipeline: Pipeline, copies: Mapping[str, nn.Parameter]) -> None:
        group = pipeline.group
        self._copies, self._is_first = [copy for copy in copies.values() if copy.requires_grad], group.rank() == 0
        ends = [dist.get_process_group_ranks(group)[rank] for rank in (0, -1)]
        self._group = group if group.size() == len(ends) else dist.new_group(ends, use_local_synchronization=True)

    @property
    def uncounted(self) -> list[nn.Parameter]:
        return [] if self._is_first else self._copies

    def sum_gradients(self) -> None:
        """Do what a run does: compare checksums of the copies, and sum their gradients."""
        for copy in self._copies:
            checksum(local(copy.detach()))
        for copy in self._copies:
            dist.all_reduce(local(cast(Tensor, copy.grad)), group=self._group)


@contextlib.contextmanager
def _keeping_tied(model: Any) -> Generator[None]:
    """Let a pipeline know its tied parameters after they got other memory."""
    if not isinstance(model, Pipeline):
        yield
        return
    copies: dict[str, nn.Parameter] = cast(Any, model)._copies
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places = {key: names[id(parameter)] for key, parameter in copies.items()}
    yield
    tied_parameters = {key: model.get_parameter(place) for key, place in places.items()}
    model.tied = cast(Any, _TiedCopies(model, tied_parameters) if tied_parameters else None)
    cast(Any, model)._copies = None  # `agree_on_tied` has nothing to do


def _use_only_rank(wrapper: Wrapper) -> None:
    """Let every other rank answer as this one, since none is there."""
    wrapper.ranks = OnlyRank.like(wrapper.ranks)
    for member in getattr(wrapper, "wrappers", ()):
        _use_only_rank(member)


def _host_categories(models: list[nn.Module]) -> tuple[str, ...]:
    """Return the categories that FSDP2's CPU offload keeps on the host."""
    groups = [group for model in models for group in fsdp_groups(model)]
    is_offloaded = any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups)
    return ("parameters", "gradients", "optimizer states") if is_offloaded else ()
