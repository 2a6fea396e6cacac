"""`audit`: watch the first updates of a training loop that knows nothing of it.

Hooks see the gradient of the logits, each parameter's gradient before any reduction, ``p.grad`` before clipping, and
calls of schedulers. Nothing is written to a tensor of the run, and no collective is added: each rank notes its own.
"""

import contextlib
import functools
import inspect
import linecache
import math
import sys
import sysconfig
import threading
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from megabatch.errors import in_one_line, require_count
from megabatch.inspection.model_facts import output_embeddings
from megabatch.torch_private.autograd import count_writes, is_in_backward
from megabatch.torch_private.classes import is_dtensor, is_flat_parameter, is_fsdp1, is_fsdp2
from megabatch.torch_private.fsdp2_groups import param_groups, unsharded_parameter
from megabatch.torch_private.module_members import has_compiled, original_of
from megabatch.torch_private.optimizers import call_before_clip
from megabatch.verification.audit_measures import Sketcher, TokenWeights, measure_weights
from megabatch.verification.audit_records import (
    EndRecord,
    LoopRecord,
    MicrobatchRecord,
    Record,
    SchedulerRecord,
    UpdateRecord,
    join_rows,
)
from megabatch.verification.audit_report import MAX_RESIDUAL, MEGABATCH, TINY, Audit

# Where logits were seen; those that are nearest to the loss are right.
FROM_LOSS, FROM_OUTPUT, FROM_HEAD = range(3)
# Forwards without a backward that are remembered.
MAX_FORWARDS = 64
# Beginnings of modules on the stack of an optimizer's step, and the library whose loop it is.
LIBRARIES = {
    "sentence_transformers.": "sentence-transformers", "trl.": "TRL", "transformers.trainer": "Trainer",
    "lightning.": "Lightning", "pytorch_lightning.": "Lightning", "torchtitan.": "torchtitan",
    "torchtune.": "torchtune", "megabatch.": "megabatch", "accelerate.": "Accelerate",
}  # fmt: skip
TRAINERS = {"transformers.trainer.Trainer", "lightning.pytorch.core.module.LightningModule",
            "pytorch_lightning.core.module.LightningModule"}  # fmt: skip
INSTALLED = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}


@contextlib.contextmanager
def audit(
    model: nn.Module | None = None, *, updates: int = 3, write: Callable[[Record], None] | None = None
) -> Generator[Audit]:
    """Watch the first updates of the training loop in a ``with`` block, and say what each target token weighs.

    The loop is not changed: weights are bit-equal with and without the audit. After ``updates`` optimizer steps all
    hooks are gone. ``print(found)`` says in ten lines how far the gradient is from the token mean, which microbatches
    were dropped, counted twice or leaked into the next update, how ranks differ, and what to change.

    Args:
        model: The model to watch, in its wrapper or not. None: every model that is called in training.
        updates: Optimizer steps to watch.
        write: Called with each record as soon as it is made; ``Audit.from_records`` reads the records of all ranks.

    Yields:
        The `Audit`, which fills while the loop runs. It has the records of this process; `Audit.gather` adds those of
        the other ranks.

    Raises:
        PlanError: ``updates`` is not a count.
    """
    findings = Audit()

    def note(record: Record) -> None:
        findings.add(record)
        if write is not None:
            write(record)

    recorder = _Recorder(model, require_count("updates", updates), note)
    recorder.start()
    try:
        yield findings
    finally:
        recorder.stop(is_end_of_run=True)


class _UnsavedHook:
    """A hook of a module, which pickles and copies as a function that does nothing: a script may save its model."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __call__(self, *args: Any) -> None:
        self._run(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # A function of the standard library: a reader has no megabatch.
        return getattr, (contextlib.nullcontext(), "__exit__")


class _Forward:
    """One call of a model in training, until its backward has run.

    While the model runs, ``watched`` has the logits with a hook, since those of a head may be the output's.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.shape: tuple[int, ...] = ()
        self.row_hashes: list[int] = []
        self.row_tokens: list[int] = []
        self.num_positions = 0
        self.has_logits = False
        # Logits with a hook, while the model runs. Those of a head may be the output's.
        self.watched: dict[int, Tensor] = {}
        self.nearest = FROM_HEAD
        self.microbatch: _Microbatch | None = None
        ids, mask, self.places = _find_inputs(args, kwargs)
        if ids is None:
            return
        self.shape = tuple(ids.shape)
        self.row_hashes = _hash_rows(ids, mask)
        if mask is not None and ids.ndim == 2:
            self.row_tokens = mask.bool().sum(-1).tolist()
            self.num_positions = ids.numel()


class _Part(NamedTuple):
    """The target tokens of one tensor of logits."""

    weights: Tensor
    samples: Tensor
    sequences: Tensor
    residual: float
    smoothing: float


class _Microbatch:
    """One backward: what it was made of, the sketch of its gradient, and the parameters whose gradients are in it."""

    def __init__(self) -> None:
        self.forwards: list[_Forward] = []
        self.parts: list[_Part] = []
        self.sketch: Tensor | None = None
        self.seen: set[int] = set()

    def record(self) -> MicrobatchRecord:
        """Return the record: the logits that a cross-entropy was taken of, or else all."""
        record = MicrobatchRecord(sketch=None if self.sketch is None else self.sketch.cpu())
        parts = [part for part in self.parts if part.residual <= MAX_RESIDUAL] or self.parts
        if parts:
            weights, samples, sequences, residuals, smoothings = zip(*parts, strict=True)
            record.weights = torch.cat(weights)
            record.samples, record.sequences = join_rows(samples), join_rows(sequences)
            record.residual, record.smoothing = max(residuals), smoothings[0]
        for forward in self.forwards:
            record.row_hashes += forward.row_hashes
            record.row_tokens += forward.row_tokens
            record.num_positions += forward.num_positions
        return record


@dataclass
class _OpenUpdate:
    """Observations since the last optimizer step: among them forwards without a backward, and a sketch before clips."""

    forwards: list[_Forward] = field(default_factory=list[_Forward])
    microbatches: list[_Microbatch] = field(default_factory=list[_Microbatch])
    before_clip: Tensor | None = None
    num_clips: int = 0
    clips_values: bool = False
    clip_factor: Tensor | None = None
    is_finalized: bool = False


def _quietly(method: Callable[..., None]) -> Callable[..., None]:
    """Note what goes wrong in a hook: the audited run goes on."""

    @functools.wraps(method)
    def run(self: "_Recorder", *args: Any, **kwargs: Any) -> None:
        if not self.is_open:
            return
        try:
            with torch.no_grad():
                method(self, *args, **kwargs)
        except Exception as error:
            self.note(f"an error of the audit itself ({in_one_line(error)})")

    return run


class _Recorder:
    """Hooks of one process, and the update that they watch."""

    def __init__(self, model: nn.Module | None, updates: int, write: Callable[[Record], None]) -> None:
        self._models: set[int] | None = None
        if model is not None:
            self._models = {id(model), *map(id, original_of(model).modules())}
        self._limit, self._write = updates, write
        self.is_open = False
        self._undo: list[Callable[[], None]] = []
        self._sketcher = Sketcher()
        # Tensors, modules and classes with hooks, by their ids, which stay theirs.
        self._known: dict[int, Any] = {}
        self._depth = 0
        # Number of the update.
        self._number = 0
        self._update = _OpenUpdate()
        self._current: _Forward | None = None
        self._is_compiled = False
        self._notes: dict[str, None] = {}
        self._steppers: set[int] = set()
        self._schedulers: Counter[int] = Counter()
        self._is_stepping_scheduler = False
        self._awaits_schedulers = False
        self._profiler: Any = None

    def note(self, text: str) -> None:
        """Remember something that the audit cannot tell."""
        self._notes[text] = None

    def start(self) -> None:
        """Set the hooks that need no model."""
        self.is_open = True
        self._replace(nn.Module, "__call__", self._wrap_call)
        self._watch_calls(functional, "cross_entropy", self._see_cross_entropy)
        self._watch_calls(nn.utils, "clip_grad_value_", self._see_value_clip)
        self._watch_calls(nn.utils.clip_grad, "clip_grad_value_", self._see_value_clip)
        self._undo.append(call_before_clip(self._see_clip))
        self._undo.append(register_optimizer_step_pre_hook(self._before_step).remove)
        if dist.is_available():
            # The profiler must not outlive the group.
            self._watch_calls(dist, "destroy_process_group", self._stop_profiler)

    def _replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        wrapped = functools.wraps(original)(wrap(original))
        setattr(owner, name, wrapped)

        def undo() -> None:
            # A function of others around ours stays, and ours only passes on.
            if getattr(owner, name) is wrapped:
                setattr(owner, name, original)

        self._undo.append(undo)

    def _watch_calls(self, owner: Any, name: str, see: Callable[..., Any]) -> None:
        """Let ``see`` run before each call of a function, with its arguments."""

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if not torch.compiler.is_compiling():
                    see(*args, **kwargs)
                return original(*args, **kwargs)

            # torch.jit.script compiles torch's own function.
            cast(Any, call).__prepare_scriptable__ = lambda: original
            return call

        self._replace(owner, name, wrap)

    def _is_new(self, watched: Any) -> bool:
        """Return True the first time that a tensor, a module or a class is to get a hook."""
        is_new = id(watched) not in self._known
        self._known[id(watched)] = watched
        return is_new

    def stop(self, *, is_end_of_run: bool) -> None:
        """Remove every hook; note the microbatches that no optimizer step has used."""
        if not self.is_open:
            return
        self._close_update()
        self.is_open = False
        # At the end of the process torch's profiler can crash it.
        if threading.main_thread().is_alive():
            self._stop_profiler()
        for undo in reversed(self._undo):
            undo()
        end = EndRecord(_place()[0], is_end_of_run, notes=list(self._notes))
        if is_end_of_run:
            end.left_over = [microbatch.record().num_targets for microbatch in self._update.microbatches]
        self._write(end)
        self._update, self._sketcher = _OpenUpdate(), Sketcher()
        self._known.clear()

    def _wrap_call(self, original_call: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self._is_root(module):
                return original_call(module, *args, **kwargs)
            self._current = None
            self._begin_forward(module, args, kwargs)
            forward = self._current
            self._depth += 1
            try:
                output = original_call(module, *args, **kwargs)
            finally:
                self._depth -= 1
            if forward is not None:
                self._end_forward(module, forward, output)
            return output

        return call

    def _is_root(self, module: nn.Module) -> bool:
        if self._depth or not self.is_open:
            return False
        # DDP hands on other tensors than the loss is made of. In a backward a checkpoint runs a part again.
        if isinstance(module, DistributedDataParallel) or not torch.is_grad_enabled() or is_in_backward():
            return False
        if self._models is not None:
            return id(module) in self._models
        return module.training and any(parameter.requires_grad for parameter in module.parameters())

    @_quietly
    def _begin_forward(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self._awaits_schedulers:
            self._close_update()
        if self._number == self._limit:
            self.stop(is_end_of_run=False)
            return
        if self._is_new(module):
            self._add_model(module)
        if self._profiler is None:
            self._start_profiler()
        self._current = _Forward(args, kwargs)
        self._update.forwards = [*self._update.forwards[-MAX_FORWARDS:], self._current]

    def _add_model(self, module: nn.Module) -> None:
        for kind in _subclasses(LRScheduler):
            if "step" in vars(kind) and self._is_new(kind):
                self._replace(kind, "step", self._wrap_scheduler)
        # A hook inside would break the compiled graph.
        if has_compiled(module):
            self._is_compiled = True
            return
        # megabatch.losses leaves out the logits where no hook sees them.
        if "megabatch.gradient_accumulator" in sys.modules:
            accumulator = sys.modules["megabatch.gradient_accumulator"].GradientAccumulator
            if self._is_new(accumulator):
                self._replace(accumulator, "finalize", self._wrap_finalize)
            return
        for submodule in module.modules():
            head = output_embeddings(submodule)
            if isinstance(head, nn.Module) and self._is_new(head):
                self._undo.append(head.register_forward_hook(_UnsavedHook(self._see_head)).remove)

    def _wrap_finalize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Note that an update is megabatch's, and by what its `finalize` clips the gradient."""
        from megabatch.core.gradients import CLIP_EPSILON

        def finalize(*args: Any, max_norm: float | None = None, **kwargs: Any) -> Any:
            self._update.is_finalized = True
            update = original(*args, max_norm=max_norm, **kwargs)
            if max_norm is not None and update.grad_norm is not None:
                self._update.clip_factor = torch.clamp(max_norm / (update.grad_norm + CLIP_EPSILON), max=1.0)
            return update

        return finalize

    @_quietly
    def _see_head(self, head: nn.Module, inputs: Any, output: Any) -> None:
        if self._update.forwards and not is_in_backward():
            self._watch_logits(self._update.forwards[-1], output, FROM_HEAD)

    @_quietly
    def _end_forward(self, module: nn.Module, forward: _Forward, output: Any) -> None:
        # TRL's fused head gives these in place of logits.
        log_probs, mask = getattr(output, "log_probs", None), getattr(output, "label_mask", None)
        if isinstance(log_probs, Tensor) and log_probs.requires_grad and isinstance(mask, Tensor):
            forward.has_logits = True
            targets = mask.detach().expand(log_probs.shape)
            log_probs.register_hook(partial(self._see_log_probs, forward, targets))
        chunks = _find_logits(output)
        # The positions are those of whole rows.
        if len(chunks) > 1:
            forward.places = None
        for logits in chunks:
            self._watch_logits(forward, logits, FROM_OUTPUT)
        forward.watched.clear()
        self._watch_parameters(module)

    def _watch_logits(self, forward: _Forward, logits: Any, distance: int) -> None:
        if not isinstance(logits, Tensor) or not logits.requires_grad or logits.ndim < 2 or logits.shape[-1] < 2:
            return
        if is_dtensor(logits):
            self.note("the weights of tokens: the classes of the logits are sharded")
            return
        forward.has_logits = True
        if id(logits) in forward.watched:
            return
        forward.watched[id(logits)] = logits
        values, writes = logits.detach(), count_writes(logits)
        # The hook goes with the tensor, and does nothing once the audit has stopped.
        logits.register_hook(partial(self._see_logits, forward, values, writes, distance))

    @_quietly
    def _see_cross_entropy(self, input: Tensor, *_: Any, **_options: Any) -> None:
        forwards = self._update.forwards
        if not forwards or forwards[-1].has_logits or is_in_backward() or input.ndim != 2:
            return
        self._watch_logits(forwards[-1], input, FROM_LOSS)
        # Another call may follow, and the output's logits may be nearer.
        forwards[-1].has_logits = False

    @_quietly
    def _see_logits(self, forward: _Forward, values: Tensor, writes: int, distance: int, d: Tensor | None) -> None:
        if d is None:
            self._is_compiled = True
            return
        if distance > forward.nearest:
            return
        if count_writes(values) != writes:
            self.note("the weights of tokens: the logits were changed in place")
            return
        forward.nearest = distance
        self._add_part(forward, measure_weights(d, values), values.shape[:-1])

    @_quietly
    def _see_log_probs(self, forward: _Forward, mask: Tensor, d: Tensor) -> None:
        forward.nearest = FROM_LOSS
        # Log-probabilities of other positions are constants.
        flat = (d.detach() * mask).flatten().double().cpu()
        positions = flat.nonzero()[:, 0]
        self._add_part(forward, TokenWeights(-flat[positions], positions, 0.0, 0.0), d.shape)

    def _add_part(self, forward: _Forward, measured: TokenWeights, shape: Sequence[int]) -> None:
        samples, sequences = _find_samples(measured.positions, shape, forward.shape, forward.places)
        # Where a parameter was seen already, the backward runs a second time.
        if forward.microbatch is None or forward.microbatch.seen:
            self._join_microbatch(forward)
        part = _Part(measured.weights, samples, sequences, measured.residual, measured.smoothing)
        cast(_Microbatch, forward.microbatch).parts.append(part)

    def _join_microbatch(self, forward: _Forward) -> None:
        """Count a forward to the microbatch whose backward has reached no parameter yet."""
        update = self._update
        if not update.microbatches or update.microbatches[-1].seen:
            update.microbatches.append(_Microbatch())
        forward.microbatch = update.microbatches[-1]
        forward.microbatch.forwards.append(forward)
        update.forwards = [recent for recent in update.forwards if recent.microbatch is None or recent is forward]

    def _watch_parameters(self, module: nn.Module) -> None:
        """Set a hook on each parameter; under FSDP2 on the unsharded ones, which the first forward makes."""
        if any(map(is_fsdp1, module.modules())) or any(map(is_flat_parameter, module.parameters())):
            self.note("how often a microbatch is counted: FSDP1's parameters are flat")
            return
        sharded: set[int] = set()
        for group in param_groups(filter(is_fsdp2, module.modules())):
            for wrapped in group.fsdp_params:
                unsharded = unsharded_parameter(wrapped)
                sharded |= {id(wrapped.sharded_param), id(unsharded)}
                self._watch_gradient(module, wrapped.sharded_param, unsharded)
        for parameter in module.parameters():
            if id(parameter) not in sharded:
                self._watch_gradient(module, parameter, parameter)

    def _watch_gradient(self, module: nn.Module, parameter: Tensor, tensor: Tensor | None) -> None:
        if not parameter.requires_grad:
            return
        self._sketcher.add_parameter(parameter)
        if tensor is not None and tensor.requires_grad and self._is_new(tensor):
            self._undo.append(tensor.register_hook(partial(self._see_gradient, module, parameter)).remove)

    @_quietly
    def _see_gradient(self, module: nn.Module, parameter: Tensor, d: Tensor) -> None:
        # A trial in eval mode, as MegabatchTrainer's.
        if self._models is None and not module.training:
            return
        update = self._update
        if not update.microbatches or id(parameter) in update.microbatches[-1].seen:
            update.microbatches.append(_Microbatch())
        microbatch = update.microbatches[-1]
        if not microbatch.seen and not microbatch.forwards:
            microbatch.forwards = [forward for forward in update.forwards if forward.microbatch is None]
            for forward in microbatch.forwards:
                forward.microbatch = microbatch
            update.forwards = update.forwards[-1:]
        microbatch.seen.add(id(parameter))
        update.before_clip = None
        microbatch.sketch = self._sketcher.add_sketch(microbatch.sketch, parameter, d)

    def _see_value_clip(self, *_: Any, **_options: Any) -> None:
        self._see_clip()
        self._update.clips_values = True

    @_quietly
    def _see_clip(self) -> None:
        self._update.num_clips += 1
        if self._update.before_clip is None and self._update.microbatches:
            self._update.before_clip = self._sketch(attrgetter("grad"))

    def _sketch(self, read: Callable[[Any], Tensor | None]) -> Tensor | None:
        """Return the sketch of a tensor of each parameter."""
        total = None
        for parameter in self._sketcher.parameters:
            tensor = read(parameter)
            if tensor is not None:
                total = self._sketcher.add_sketch(total, parameter, tensor)
        return total

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inner = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(inner):
            self._take_update(optimizer)
            return None

        # The last backward runs inside of the step.
        def closure(*args: Any, **named: Any) -> Any:
            result = inner(*args, **named)
            self._take_update(optimizer)
            return result

        if len(args) > 1:
            return (args[0], closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure}

    @_quietly
    def _take_update(self, optimizer: Optimizer) -> None:
        update = self._update
        if is_in_backward():
            self.note("the update: the optimizer steps inside of the backward")
            return
        # No model is watched, or the update was taken.
        if not update.microbatches or self._number == self._limit:
            if self._awaits_schedulers and id(optimizer) not in self._steppers:
                self.note("what a second optimizer steps in the same update")
            return
        self._steppers.add(id(optimizer))
        if any(forward.has_logits and forward.microbatch is None for forward in update.forwards):
            self.note(
                "what became of a forward whose logits got no gradient before the step: its samples may be missing"
            )
        rank, world = _place()
        record = UpdateRecord(
            self._number, rank, world, [microbatch.record() for microbatch in update.microbatches],
            gradient=self._find_gradient(optimizer),
            is_sharded=any(map(is_dtensor, self._sketcher.parameters)), num_clips=update.num_clips,
            collectives=self._stop_profiler(), loop=_find_loop(), is_compiled=self._is_compiled,
            notes=list(self._notes),
        )  # fmt: skip
        if update.is_finalized:
            record.loop.library = MEGABATCH
        if world > 1 and not record.is_sharded and self._sketcher.parameters:
            weights = cast(Tensor, self._sketch(lambda parameter: parameter))
            record.weights_checksum = zlib.crc32(weights.cpu().numpy().tobytes())
        self._write(record)
        self._update = _OpenUpdate()
        self._awaits_schedulers = True

    def _find_gradient(self, optimizer: Optimizer) -> Tensor | None:
        """Return the sketch of the gradient as it was before clips and scales; None if it cannot be told."""
        # A parameter may have a gradient that is not for this step.
        if len(self._steppers) > 1:
            self.note("how often a microbatch is counted: several optimizers step in turns")
            return None
        gradient = self._sketch(attrgetter("grad"))
        if gradient is None:
            return None
        update, before_clip = self._update, self._update.before_clip
        factors = [update.clip_factor]
        if before_clip is None:
            factors.append(getattr(optimizer, "grad_scale", None))
        elif update.clips_values or _is_shortened(gradient, before_clip):
            gradient = before_clip
        else:
            self.note("what changed the gradient between the clip and the step")
        for factor in factors:
            if isinstance(factor, Tensor):
                gradient = gradient / factor.to(gradient)
        return gradient.cpu()

    def _close_update(self) -> None:
        """Write how often schedulers stepped: most do after the optimizer."""
        if not self._awaits_schedulers:
            return
        self._write(SchedulerRecord(self._number, _place()[0], max(self._schedulers.values(), default=0)))
        self._number += 1
        self._awaits_schedulers = False
        self._schedulers.clear()

    def _wrap_scheduler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            is_inner = self._is_stepping_scheduler
            is_in_update = self._update.forwards or self._update.microbatches or self._awaits_schedulers
            if self.is_open and is_in_update and not is_inner:
                self._schedulers[id(scheduler)] += 1
            self._is_stepping_scheduler = True
            try:
                return original(scheduler, *args, **kwargs)
            finally:
                self._is_stepping_scheduler = is_inner

        return step

    def _start_profiler(self) -> None:
        self._profiler = False
        if _place()[1] == 1:
            return
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)
        with contextlib.suppress(RuntimeError):
            profiler.start()
            self._profiler = profiler

    def _stop_profiler(self, *_: Any, **_options: Any) -> dict[str, list[int]] | None:
        if not self._profiler:
            return None
        profiler, self._profiler = self._profiler, False
        profiler.stop()
        return _count_collectives(profiler.profiler.kineto_results.events())


def _is_shortened(gradient: Tensor, before: Tensor) -> bool:
    """Return True if one sketch is the other, times a factor of at most one, as after a clip by norm."""
    if not before.isfinite().all():
        return True
    cosine = (gradient @ before) / (gradient.norm() * before.norm()).clamp_min(TINY)
    return bool((cosine > 1 - 1e-6) & (gradient.norm() <= 1.001 * before.norm()))


def _place() -> tuple[int, int]:
    """Return rank and number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _subclasses(kind: type) -> Iterator[type]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _subclasses(subclass)


def _find_loop() -> LoopRecord:
    """Return the library whose loop calls the optimizer, its trainer, and the line of the script that leads here."""
    loop, stack = LoopRecord(), ""
    for frame, line in traceback.walk_stack(inspect.currentframe()):
        module, path = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
        if module.startswith("megabatch.verification."):
            continue
        owner = type(frame.f_locals.get("self"))
        kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in owner.__mro__]
        stack = "\n".join([stack, module, *kinds])
        if not loop.trainer and not TRAINERS.isdisjoint(kinds):
            loop.trainer = owner.__name__
        if not loop.file and not module.startswith("megabatch.") and not path.startswith(("<", *INSTALLED)):
            loop.file, loop.line = path.replace("\\", "/").rpartition("/")[2], line
            loop.code = linecache.getline(path, line).strip()
    loop.library = next((name for start, name in LIBRARIES.items() if f"\n{start}" in stack), "")
    return loop


def _find_logits(output: Any) -> list[Any]:
    """Return the logits in what a model returned: itself, ``logits`` of it, or the first matrix of a tuple.

    A list of matrices of the same rows and classes are chunks of the logits, as torchtune's.
    """
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        return [cast(Mapping[str, Any], output).get("logits")]
    if not isinstance(output, tuple | list):
        return [getattr(output, "logits", None)]
    tensors = [element for element in cast(Iterable[Any], output) if isinstance(element, Tensor)]
    matrices = [tensor for tensor in tensors if tensor.ndim > 1 and tensor.requires_grad]
    sizes = {(matrix.ndim, matrix.shape[0], matrix.shape[-1]) for matrix in matrices}
    return matrices if isinstance(output, list) and len(sizes) == 1 else matrices[:1]


def _find_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the samples, their mask and their positions."""
    named: dict[str, Any] = dict(kwargs)
    for argument in args:
        if isinstance(argument, Mapping):
            named = {**cast(Mapping[str, Any], argument), **named}
    arguments = (named.get("input_ids"), *args, *named.values())
    tensors = [argument.detach() for argument in arguments if isinstance(argument, Tensor)]
    ids = next((tensor for tensor in tensors if tensor.ndim), None)
    if ids is None:
        return None, None, None
    shaped = {name: value for name, value in named.items() if isinstance(value, Tensor) and value.shape == ids.shape}
    return ids, shaped.get("attention_mask"), shaped.get("position_ids")


def _hash_rows(ids: Tensor, mask: Tensor | None) -> list[int]:
    """Return a checksum of each row without padding."""
    rows = list(ids)
    if mask is not None:
        rows = [row[is_token] for row, is_token in zip(ids, mask.bool(), strict=True)]
    return [zlib.crc32(row.contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes()) for row in rows]


def _find_samples(
    positions: Tensor, shape: Sequence[int], inputs: Sequence[int], places: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the row of each target, and its sequence in a packed row; -1 where the logits have no rows."""
    rows = math.prod(shape)
    if len(shape) > 1:
        length = rows // shape[0]
    elif len(inputs) == 2 and rows in (math.prod(inputs), inputs[0] * (inputs[1] - 1)):
        length = rows // inputs[0]
    elif not inputs or inputs[0] == rows:
        length = 1
    else:
        return torch.full_like(positions, -1), torch.full_like(positions, -1)
    samples = positions // max(1, length)
    if places is None or len(inputs) != 2 or not 1 < length <= inputs[1]:
        return samples, samples
    # A new sequence of a packed row begins at 0 again.
    starts = (places[:, 1:] <= places[:, :-1]).cumsum(-1)
    within = functional.pad(starts, (1, 0)).cpu()
    return samples, samples * inputs[1] + within[samples, positions % length]


def _count_collectives(events: Sequence[Any]) -> dict[str, list[int]]:
    """Return number and bytes of each collective; lists of tensors have shapes in the backend's own event alone."""
    collectives: dict[str, list[int]] = {}
    waiting = [0, 0]
    for event in events:
        library, _, name = event.name().partition(":")
        if library == "c10d":
            kind = str(name).strip(":_").replace("_base", "").replace("_", "")
            waiting = collectives.setdefault(KINDS.get(kind, kind), [0, 0])
            waiting[0] += 1
        if library in ("c10d", "gloo", "nccl") and (size := _bytes_of(event)):
            waiting[1] += size
            waiting = [0, 0]
    return collectives


KINDS = {
    "allreduce": "all-reduce", "allgather": "all-gather", "reducescatter": "reduce-scatter", "alltoall": "all-to-all",
}  # fmt: skip
ITEM_BYTES = {"double": 8, "long int": 8, "long": 8, "float": 4, "int": 4, "c10::Half": 2, "c10::BFloat16": 2}


def _bytes_of(event: Any) -> int:
    """Return the bytes of the larger side of a collective; 0 where its event has no shapes."""
    sizes = [0]
    for shape, kind in zip(event.shapes(), event.dtypes(), strict=False):
        if shape and all(isinstance(size, int) for size in shape):
            sizes.append(ITEM_BYTES.get(kind, 1) * math.prod(shape))
    return max(sizes)
