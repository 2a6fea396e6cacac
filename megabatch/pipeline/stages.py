"""The stages of a model on this rank, and the schedules of torch that run them.

torch fixes a schedule's shapes when it creates the schedule. There is therefore one schedule for each shape and number
of microbatches.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import count
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.nn.parallel import DistributedDataParallel

from megabatch.core.mesh import DataRanks
from megabatch.core.wrapper import SelfWrapped, Wrapper, stranding
from megabatch.errors import MegabatchError, PlanError, in_one_line
from megabatch.inspection.error_kinds import is_of_message, is_out_of_memory
from megabatch.inspection.mesh_axes import check_axes, is_expert
from megabatch.pipeline.pad_to_shape import Inputs, Shape, difference, meta_tensors
from megabatch.pipeline.tied import TiedParameters
from megabatch.torch_private.classes import is_fsdp1, is_fsdp2, is_replicate_module
from megabatch.torch_private.module_members import original_of
from megabatch.torch_private.operations import pytree
from megabatch.torch_private.pipeline_schedules import run_schedule
from megabatch.torch_private.versions import check_feature

# Schedule steps of a call.
MOST_STEPS = 4
# Each schedule keeps buffers for everything that its step sends from stage to stage.
KEPT_SCHEDULES = 2 * MOST_STEPS
STAGE_WRAPPERS = (FSDPModule, DistributedDataParallel)

# Called with the output of the last stage and the index of the microbatch; returns the objective.
Loss = Callable[[Any, int], Tensor]


class ScheduleKind(NamedTuple):
    """Requirements of a schedule.

    ``per_rank`` is None for any number of stages. ``runnable`` returns how many microbatches can run, of the numbers of
    microbatches, ranks and stages. One that ``goes_back`` has a V shape. One that ``splits`` computes gradients of
    weights later than those of inputs, without autograd's hooks.
    """

    make: Callable[..., Any]
    per_rank: int | None
    runnable: Callable[[int, int, int], int]
    goes_back: bool = False
    splits: bool = False

    def indices(self, rank: int, ranks: int, per_rank: int) -> list[int]:
        """Return the indices of a rank's stages."""
        return [rank, 2 * ranks - 1 - rank] if self.goes_back else [rank + ranks * turn for turn in range(per_rank)]


def _any(microbatches: int, ranks: int, stages: int) -> int:
    return microbatches


def _one_per_stage(microbatches: int, ranks: int, stages: int) -> int:
    return max(microbatches, stages)


def _whole_rounds(microbatches: int, ranks: int, stages: int) -> int:
    return next(number for number in count(microbatches) if number % max(1, number // ranks) == 0)


SCHEDULES = {
    "GPipe": ScheduleKind(torch_schedules.ScheduleGPipe, 1, _any),
    "1F1B": ScheduleKind(torch_schedules.Schedule1F1B, 1, _one_per_stage),
    "Interleaved1F1B": ScheduleKind(torch_schedules.ScheduleInterleaved1F1B, None, _whole_rounds),
    "LoopedBFS": ScheduleKind(torch_schedules.ScheduleLoopedBFS, None, _any),
    "InterleavedZeroBubble": ScheduleKind(
        torch_schedules.ScheduleInterleavedZeroBubble, None, _whole_rounds, splits=True
    ),
    "ZBVZeroBubble": ScheduleKind(torch_schedules.ScheduleZBVZeroBubble, 2, _any, goes_back=True, splits=True),
    "DualPipeV": ScheduleKind(torch_schedules.ScheduleDualPipeV, 2, _one_per_stage, goes_back=True, splits=True),
}
"""The schedules of a `Pipeline` by name, as in torch. Each value says how many stages a rank holds."""


class Pipeline(SelfWrapped):
    """A model in stages, which run on the ranks along the mesh axis "pp". Give it to `GradientAccumulator`.

    The first stage gets the arguments with which the loss calls its model. Each later stage gets the output of the
    stage before it and the same keyword arguments. The loss gets the output of the last stage. Name the parameters
    that stages share in ``tied``: a rank cannot detect them.

    A call runs as one schedule step, or as a few where samples differ so much in length that this computes fewer
    tokens. All microbatches of a step have one shape. Smaller ones are padded with copies of their last row and with
    zeros on the right of dim 1. The model must ignore this padding. The output is cut back before the loss gets it.

    All inputs of a call are on the device at once. A stage keeps its whole gradient until the end of the call, sharded
    or not.

    Args:
        stages: This rank's modules, in order, each already wrapped over the mesh's other axes, or not. Rank r of R
            holds the stages r, r + R, ...; for ZBVZeroBubble and DualPipeV the stages r and 2 * R - 1 - r.
        mesh: A mesh with the axis "pp" and the data axes.
        schedule: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble or DualPipeV.
        boundary: Returns the shape and dtype of what goes from stage to stage, as a meta tensor or a tuple of them. It
            is called with the model's inputs. For a language model,
            ``lambda input_ids: torch.empty(*input_ids.shape, width, dtype=torch.bfloat16, device="meta")``.
        output: Returns the same for the output of the last stage.
        tied: This rank's copies of the parameters that stages of several ranks share, by names that are the same on
            these ranks: ``{"embedding": first.embedding.weight}`` and ``{"embedding": last.head.weight}``, each of the
            wrapped stage. Copies must start equal. Each update compares them, sums their gradients, and counts the sum
            once in the norm.

    Raises `PlanError` for stages and schedules that cannot run exactly.
    """

    def __init__(
        self, stages: Sequence[nn.Module], mesh: DeviceMesh, *, boundary: Shape, output: Shape, schedule: str = "1F1B",
        tied: Mapping[str, nn.Parameter] | None = None,
    ) -> None:  # fmt: skip
        check_feature("pipelines")
        super().__init__()
        check_axes(mesh)
        if "pp" not in (mesh.mesh_dim_names or ()):
            raise PlanError(
                f"the mesh has the axes {mesh.mesh_dim_names} but no axis 'pp'; name the axis of the stages 'pp'"
            )
        if schedule not in SCHEDULES:
            raise PlanError(f"schedule is {schedule!r}; expected one of {', '.join(SCHEDULES)}")
        self.kind = SCHEDULES[schedule]
        if not stages or self.kind.per_rank not in (None, len(stages)):
            raise PlanError(
                f"{schedule} runs {self.kind.per_rank or 'one or more'} stages on each rank but was given {len(stages)}"
                "; give a list of that many modules, or choose another schedule"
            )
        for stage in stages:
            check_stage(stage, schedule)
        self.mesh, self.boundary, self.output = mesh, boundary, output
        # None after `agree_on_tied`, which sets ``tied`` when the first accumulator is made.
        self._copies: dict[str, nn.Parameter] | None = dict(tied or {})
        # `agree_on_tied` sets it, when the first accumulator is made.
        self.tied: TiedParameters | None = None
        self.group = mesh.get_group("pp")
        rank, ranks = self.group.rank(), self.group.size()
        self.num_stages = ranks * len(stages)
        self.indices = self.kind.indices(rank, ranks, len(stages))
        self.stages = nn.ModuleList()
        # The names of stages are unique over ranks.
        for index, stage in zip(self.indices, stages, strict=True):
            self.stages.add_module(str(index), stage)
        # The rank along "pp" on which the loss is computed.
        self.last_rank = 0 if self.kind.goes_back else ranks - 1
        # The first error of the last call, with its stage.
        self.failure: tuple[int, Exception] | None = None
        # Ranks with the same stage wait for each other in its forward or backward.
        self.ranks_meet = False
        # Structure of the last stage's output.
        self.structure: pytree.TreeSpec | None = None
        # By shape and number of microbatches, the last used at the end.
        self._schedules: OrderedDict[object, Any] = OrderedDict()
        self._loss: Loss | None = None

    @cached_property
    def ranks(self) -> DataRanks:
        """All ranks that work on an update."""
        return DataRanks.of_mesh(self.mesh)

    @cached_property
    def stage_ranks(self) -> DataRanks:
        """Ranks that hold the stages of this rank's pipeline."""
        return DataRanks(pipeline_groups=[self.group])

    def agree_on_tied(self) -> None:
        """Set ``tied`` to the parameters that stages share, if there are any. Collective, the first time."""
        if self._copies is not None:
            tied = TiedParameters(self._copies, list(self.parameters()), self.group, self.ranks)
            self.tied, self._copies = tied if tied.names else None, None

    @property
    def has_last_stage(self) -> bool:
        """True if the loss is computed on this rank."""
        return self.group.rank() == self.last_rank

    @property
    def bubble(self) -> float:
        """Number of microbatches that would fit into the time in which a rank waits in a schedule step."""
        return (self.group.size() - 1) / len(self.stages)

    def runnable(self, num_microbatches: int) -> int:
        """Return the number of microbatches that the schedule needs to run these. The others are dummy microbatches."""
        return num_microbatches and self.kind.runnable(num_microbatches, self.group.size(), self.num_stages)

    def forward(self, *_: Any, **__: Any) -> Any:
        """Raise `MegabatchError`: the stages run only together with those of other ranks."""
        raise MegabatchError(
            "a Pipeline cannot be called; give it to GradientAccumulator, whose forward_backward runs it, and in the "
            "loss call the model that it is given"
        )

    def make_wrapper(self, mesh: DeviceMesh | None, wrap_stages: Callable[..., Wrapper]) -> Wrapper:
        """Return a wrapper that reduces each stage by its own wrapper, over the mesh without its axis "pp"."""
        if mesh is not None and mesh != self.mesh:
            raise PlanError("mesh= is another mesh than that of the Pipeline; leave mesh= out")
        # A stage is reduced over the ranks that hold the same stage.
        axes = tuple(axis for axis in self.mesh.mesh_dim_names or () if axis != "pp")
        return wrap_stages(self, self.mesh[axes] if axes else None)

    @property
    def new_planner(self) -> Any:
        """Makes the planner of calls, which splits samples into schedule steps."""
        from megabatch.pipeline.schedule_steps import SchedulePlanner

        return partial(SchedulePlanner, pipeline=self)

    def run_call(self, call: Any, reducing: contextlib.AbstractContextManager[None]) -> Any:
        """Run the microbatches of a call through the schedule. Return the sums, the same on every stage.

        Args:
            call: The call.
            reducing: Surrounds the schedule steps, in which gradients are reduced.
        """
        from megabatch.pipeline.run import run_schedule

        return run_schedule(self, call, reducing)

    def step(
        self, inputs: Sequence[Inputs], loss: Loss, device: torch.device, *, backward: bool, reduces: bool = True
    ) -> None:
        """Run forward, and optionally backward, of microbatches of one shape. The last stage calls ``loss``.

        Gradients are reduced at the end. With ``reduces=False`` they stay on their rank: a later step reduces them.
        """
        schedule, stages = self._schedule(inputs[0], len(inputs), device, backward)
        self._loss = loss
        for stage in stages:
            if self.kind.splits and backward:
                _keep_unsharded(stage.submod)
            stage.has_backward, stage.reduces = backward, reduces
            stage.clear_runtime_states()
        args, kwargs = map(list, zip(*inputs, strict=True))
        try:
            run_schedule(schedule, args, kwargs, backward=backward)
        except RuntimeError as error:
            # torch wraps the error of a stage.
            if isinstance(cause := error.__cause__, MegabatchError):
                raise cause from cause.__cause__
            raise
        finally:
            self._loss = None

    def forget(self) -> None:
        """Drop the schedules. A step that failed half-way leaves them in an unusable state."""
        self._schedules.clear()

    def _schedule(
        self, inputs: Inputs, num_microbatches: int, device: torch.device, backward: bool
    ) -> tuple[Any, list["_Stage"]]:
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in inputs.tensors)
        key = (shapes, tuple(inputs.kwargs), num_microbatches, backward)
        if key not in self._schedules:
            while len(self._schedules) >= KEPT_SCHEDULES:
                self._schedules.popitem(last=False)
            self._schedules[key] = self._made(inputs, num_microbatches, device)
        self._schedules.move_to_end(key)
        return self._schedules[key]

    def _made(self, inputs: Inputs, num_microbatches: int, device: torch.device) -> tuple[Any, list["_Stage"]]:
        between = tuple(leaf.requires_grad_(leaf.is_floating_point()) for leaf in meta_tensors(self.boundary, inputs))
        first = tuple(value for value in inputs.args if isinstance(value, Tensor))
        # The tensors before each stage, and after the last.
        sent = [first, *[between] * (self.num_stages - 1), meta_tensors(self.output, inputs)]
        stages = [
            _Stage(self, module, index, device, sent[index], sent[index + 1])
            for module, index in zip(self.stages, self.indices, strict=True)
        ]
        # torch's schedules of one stage take the stage itself.
        stage_or_stages = stages[0] if self.kind.per_rank == 1 else stages
        return self.kind.make(stage_or_stages, num_microbatches, loss_fn=self._ask, scale_grads=False), stages

    def _ask(self, output: Any, index: int) -> Tensor:
        """Call the loss of the running step. The schedule outlives a step, so it cannot hold the loss itself."""
        return cast(Loss, self._loss)(output, index)


class _Stage(PipelineStage):
    """A stage with known input and output shapes, which checks what it sends against them.

    Without a backward, torch's schedules still call the stage's backward methods, which then do nothing.
    """

    def __init__(
        self, pipeline: Pipeline, module: nn.Module, index: int, device: torch.device, inputs: tuple[Tensor, ...],
        outputs: tuple[Tensor, ...],
    ) -> None:  # fmt: skip
        super().__init__(
            module, index, pipeline.num_stages, device, input_args=inputs, output_args=outputs, group=pipeline.group
        )
        self._pipeline, self._outputs, self.reduces = pipeline, outputs, True

    def _post_metadata_inference_cleanup(self) -> None:
        """Do nothing: all shapes are known. torch would drop the gradients of earlier calls here."""

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        try:
            output = returned = super().forward_maybe_with_nosync(*args, **kwargs)
            # torch needs a tensor or a tuple, the loss the original structure.
            if self.is_last:
                leaves, self._pipeline.structure = pytree.tree_flatten(output)
                returned = tuple(leaves)
            self._check(returned)
        except Exception as error:
            # The error broadcast reports these.
            if is_out_of_memory(error) or is_of_message(error):
                raise
            # This rank has left the collectives of the stage half-way.
            if self._pipeline.ranks_meet:
                cause = error if isinstance(error, MegabatchError) else in_one_line(error)
                failed = MegabatchError(f"stage {self.stage_index} failed ({cause}); mend that, and start again")
                raise stranding(failed) from error
            # The other ranks wait for the step, so it goes on with zeros.
            self._pipeline.failure = self._pipeline.failure or (self.stage_index, error)
            zeros = (torch.zeros_like(output, device=self.device) for output in self._outputs)
            return tuple(zero + nothing_of((args, kwargs)) if zero.is_floating_point() else zero for zero in zeros)
        return returned

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        returned = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        # torch would keep the outputs of all microbatches.
        if self.is_last and not self.has_backward:
            self.fwd_cache[fwd_chunk_id] = ((), [])
        return returned

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        # DDP reduces in the last backward.
        is_last = last_backward and self.reduces
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward=is_last)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.has_backward and self.reduces:
            super().perform_reduce_grad(grad_scale_factor)

    def _check(self, returned: Any) -> None:
        if (problem := difference(returned, self._outputs)) is not None:
            says = "output=" if self.is_last else "boundary="
            raise PlanError(f"stage {self.stage_index} returned {problem}; say in {says} of Pipeline what it returns")
        if self.has_backward and not any(leaf.requires_grad for leaf in pytree.tree_leaves(returned)):
            raise PlanError(
                f"stage {self.stage_index} returned nothing that carries a gradient; compute it from the stage's "
                "parameters, undetached"
            )


def _keep_unsharded(stage: nn.Module) -> None:
    """Keep FSDP2's parameters gathered after the forward: a split backward silently skips sharded weights."""
    for module in stage.modules():
        if is_fsdp2(module) and not is_replicate_module(module):
            module.set_reshard_after_forward(False, recurse=False)


def nothing_of(output: Any) -> Tensor:
    """Return zero, with a graph through every tensor of an output."""
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not tensors:
        return torch.zeros((), requires_grad=True, device="cpu")
    return torch.stack([tensor.sum() * 0.0 for tensor in tensors]).sum()


def check_stage(stage: nn.Module, schedule: str) -> None:
    """Refuse a stage without trained parameters, or in a wrapper that would reduce at the wrong time."""
    wrapped = cast(nn.Module, original_of(stage))
    if any(map(is_expert, stage.parameters())):
        raise PlanError(
            "a stage has experts on ranks of their own (mesh axis 'ep'), and a pipeline's schedules do not wait for "
            "other data ranks; keep every expert on every rank, or leave the pipeline out"
        )
    if not any(parameter.requires_grad for parameter in stage.parameters()):
        raise PlanError("no parameter of a stage requires a gradient; cut the model so that every stage trains some")
    if not isinstance(stage, STAGE_WRAPPERS) and any(
        isinstance(module, STAGE_WRAPPERS) for module in wrapped.modules()
    ):
        raise PlanError(
            "a wrapper is inside a stage, where the schedule does not find it; call fully_shard on the stage itself "
            "too, and compile with stage.compile() instead of torch.compile(stage)"
        )
    if any(map(is_fsdp1, wrapped.modules())):
        raise PlanError("a stage is wrapped by FSDP1, which a pipeline cannot hold back; use FSDP2's fully_shard")
    if not isinstance(stage, DistributedDataParallel):
        return
    if SCHEDULES[schedule].splits:
        raise PlanError(
            f"{schedule} computes gradients without the hooks by which DDP reduces; wrap the stages with fully_shard "
            "or replicate, or choose 1F1B"
        )
    if stage.static_graph:
        raise PlanError(
            "DDP with static_graph reduces in its first backward, which a pipeline holds back; leave static_graph out"
        )
