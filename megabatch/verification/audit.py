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
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

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
)
from megabatch.verification.audit_report import MAX_RESIDUAL, MEGABATCH, Audit

FROM_LOSS, FROM_OUTPUT, FROM_HEAD = range(3)  # where logits were found; the nearest to the loss are right
MAX_FORWARDS = 64  # without a backward that are remembered
LIBRARIES = {  # beginning of a module's name on the stack of an optimizer's step → the library whose loop it is
    "sentence_transformers.": "sentence-transformers", "trl.": "TRL", "transformers.trainer": "Trainer",
    "lightning.": "Lightning", "pytorch_lightning.": "Lightning", "torchtitan.": "torchtitan",
    "torchtune.": "torchtune", "megabatch.": "megabatch", "accelerate.": "Accelerate",
}  # fmt: skip
TRAINERS = ("transformers.trainer.Trainer", "lightning.pytorch.core.module.LightningModule",
            "pytorch_lightning.core.module.LightningModule")  # fmt: skip
INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})  # not the script's own files


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
        return getattr, (contextlib.nullcontext(), "__exit__")  # of the standard library: a reader has no megabatch


class _Forward:
    """One call of a model in training, until its backward has run."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        ids, mask, self.places = _find_inputs(args, kwargs)
        self.shape = () if ids is None else tuple(ids.shape)  # of the token ids
        self.row_hashes = _hash_rows(ids, mask)
        self.row_tokens, self.num_positions = _count_tokens(ids, mask)
        self.has_logits = False
        self.watched: dict[int, Tensor] = {}  # logits with a hook, while the model runs: a head's may be the output's
        self.nearest: int | None = None  # of the logits whose gradient was seen
        self.microbatch: _Microbatch | None = None


class _Microbatch:
    """One backward: what it was made of, and the sketch of its gradient."""

    def __init__(self) -> None:
        self.forwards: list[_Forward] = []
        self.parts: list[MicrobatchRecord] = []  # one for each tensor of logits
        self.sketch: Tensor | None = None
        self.seen: set[int] = set()  # parameters whose gradient is in the sketch

    def record(self) -> MicrobatchRecord:
        """Return the record: the logits that a cross-entropy was taken of, or else all."""
        best = min((part.residual or 0.0 for part in self.parts), default=0.0)
        parts = [part for part in self.parts if best > MAX_RESIDUAL or (part.residual or 0.0) <= MAX_RESIDUAL]
        record = MicrobatchRecord(sketch=None if self.sketch is None else self.sketch.cpu())
        if parts:
            record.weights = torch.cat([part.weights for part in parts])
            record.residual = max(part.residual or 0.0 for part in parts)
            record.smoothing = parts[0].smoothing
        samples: list[Tensor] = []
        sequences: list[Tensor] = []
        for part in parts:
            samples.append(_renumber(part.samples, samples))
            sequences.append(_renumber(part.sequences, sequences))
        if parts:
            record.samples, record.sequences = torch.cat(samples), torch.cat(sequences)
        for forward in self.forwards:
            record.row_hashes += forward.row_hashes
            record.row_tokens += forward.row_tokens
            record.num_positions += forward.num_positions
        return record


def _renumber(rows: Tensor, before: Sequence[Tensor]) -> Tensor:
    """Return numbers that follow those before: rows of several forwards are different rows."""
    if not rows.numel() or bool((rows < 0).any()):
        return rows
    return rows + max((int(numbers.max()) + 1 for numbers in before if numbers.numel()), default=0)


def _quietly(method: Callable[..., None]) -> Callable[..., None]:
    """Note what goes wrong in a hook: the audited run goes on."""

    @functools.wraps(method)
    def run(self: "_Recorder", *args: Any) -> None:
        if not self.is_open:
            return
        try:
            with torch.no_grad():
                method(self, *args)
        except Exception as error:
            self.note(f"an error of the audit itself ({in_one_line(error)})")

    return run


class _Recorder:
    """Hooks of one process, and the update that they watch."""

    def __init__(self, model: nn.Module | None, updates: int, write: Callable[[Record], None]) -> None:
        self._models = None if model is None else {id(module) for module in original_of(model).modules()} | {id(model)}
        self._limit, self._write = updates, write
        self.is_open = False
        self._undo: list[Callable[[], None]] = []
        self._sketcher = Sketcher()
        self._known: set[int] = set()  # tensors and modules with hooks
        self._keep: list[Any] = []  # so that their ids stay theirs
        self._depth = 0
        self._number = 0  # of the update
        self._microbatches: list[_Microbatch] = []
        self._forwards: list[_Forward] = []  # without a backward yet
        self._current: _Forward | None = None
        self._before_clip: Tensor | None = None
        self._clips_values = self._is_finalized = self._is_compiled = False
        self._clip_factor: Tensor | None = None  # of megabatch's clip
        self._num_clips = 0
        self._notes: dict[str, None] = {}
        self._steppers: set[int] = set()
        self._schedulers: dict[int, int] = {}  # steps of each since the update's first forward
        self._is_stepping_scheduler = False
        self._awaits_schedulers = False
        self._profiler: Any = None

    def note(self, text: str) -> None:
        """Remember something that the audit cannot tell."""
        self._notes[text] = None

    # Patches and hooks

    def start(self) -> None:
        """Set the hooks that need no model."""
        self.is_open = True
        self._replace(nn.Module, "__call__", self._wrap_call)
        self._replace(functional, "cross_entropy", self._wrap_cross_entropy)
        self._replace(nn.utils, "clip_grad_value_", self._wrap_clip)
        self._replace(nn.utils.clip_grad, "clip_grad_value_", self._wrap_clip)
        self._undo.append(call_before_clip(self._see_clip))
        self._undo.append(register_optimizer_step_pre_hook(self._before_step).remove)
        if dist.is_available():
            self._replace(dist, "destroy_process_group", self._wrap_end_of_group)

    def _replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        wrapped = wrap(original)
        setattr(owner, name, wrapped)

        def undo() -> None:
            if getattr(owner, name) is wrapped:  # else somebody has wrapped it again, and ours only passes on
                setattr(owner, name, original)

        self._undo.append(undo)

    def stop(self, *, is_end_of_run: bool) -> None:
        """Remove every hook; note the microbatches that no optimizer step has used."""
        if not self.is_open:
            return
        self._close_update()
        unused_weights = [sum(part.weights.numel() for part in microbatch.parts) for microbatch in self._microbatches]
        self.is_open = False
        if threading.main_thread().is_alive():  # at the end of the process torch's profiler can crash it
            self._stop_profiler()
        for undo in reversed(self._undo):
            undo()
        rank, _ = _place()
        self._write(EndRecord(rank, is_end_of_run, unused_weights if is_end_of_run else [], list(self._notes)))
        self._microbatches, self._forwards, self._keep, self._before_clip = [], [], [], None
        self._sketcher = Sketcher()

    # Forwards

    def _wrap_call(self, original_call: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._depth or not self.is_open:
                return original_call(module, *args, **kwargs)
            if not self._is_root(module):
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
        if isinstance(module, DistributedDataParallel):  # hands on other tensors than the loss is made of
            return False
        if not torch.is_grad_enabled() or is_in_backward():  # a checkpoint runs a part again
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
        if id(module) not in self._known:
            self._add_model(module)
        if self._number == 0 and self._profiler is None and not self._microbatches and _place()[1] > 1:
            self._start_profiler()
        del self._forwards[:-MAX_FORWARDS]
        self._current = _Forward(args, kwargs)
        self._forwards.append(self._current)

    def _add_model(self, module: nn.Module) -> None:
        self._known.add(id(module))
        self._keep.append(module)
        for kind in _subclasses(LRScheduler):
            if "step" in vars(kind) and id(kind) not in self._known:
                self._known.add(id(kind))
                self._replace(kind, "step", self._wrap_scheduler)
        if has_compiled(module):
            self._is_compiled = True
            return  # a hook inside would break the compiled graph
        if "megabatch.gradient_accumulator" in sys.modules:
            self._watch_accumulators(sys.modules["megabatch.gradient_accumulator"].GradientAccumulator)
            return  # megabatch.losses leaves out the logits where no hook sees them
        for submodule in module.modules():
            head = output_embeddings(submodule)
            if isinstance(head, nn.Module) and id(head) not in self._known:
                self._known.add(id(head))
                self._undo.append(head.register_forward_hook(_UnsavedHook(self._see_head)).remove)

    def _watch_accumulators(self, kind: type) -> None:
        """Note that an update is megabatch's, and by what its `finalize` clips the gradient."""
        if id(kind) not in self._known:
            self._known.add(id(kind))
            self._replace(kind, "finalize", self._wrap_finalize)

    def _wrap_finalize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        from megabatch.core.gradients import CLIP_EPSILON

        @functools.wraps(original)
        def finalize(*args: Any, max_norm: float | None = None, **kwargs: Any) -> Any:
            self._is_finalized = True
            update = original(*args, max_norm=max_norm, **kwargs)
            if max_norm is not None and update.grad_norm is not None:  # None without weight
                self._clip_factor = torch.clamp(max_norm / (update.grad_norm + CLIP_EPSILON), max=1.0)
            return update

        return finalize

    @_quietly
    def _see_head(self, head: nn.Module, inputs: Any, output: Any) -> None:
        if self._forwards and not is_in_backward():
            self._watch_logits(self._forwards[-1], output, FROM_HEAD)

    @_quietly
    def _end_forward(self, module: nn.Module, forward: _Forward, output: Any) -> None:
        log_probs, mask = (getattr(output, name, None) for name in ("log_probs", "label_mask"))  # of TRL's fused head
        if isinstance(log_probs, Tensor) and log_probs.requires_grad and isinstance(mask, Tensor):
            forward.has_logits = True
            targets = mask.detach().expand(log_probs.shape)
            log_probs.register_hook(partial(self._see_log_probs, forward, targets))
        chunks = _find_logits(output)
        if len(chunks) > 1:
            forward.places = None  # they are those of whole rows
        for logits in chunks:
            self._watch_logits(forward, logits, FROM_OUTPUT)
        forward.watched.clear()
        self._watch_parameters(module)

    def _watch_logits(self, forward: _Forward, logits: Any, distance: int) -> None:
        if not isinstance(logits, Tensor) or not logits.requires_grad or logits.ndim < 2:
            return
        if is_dtensor(logits):
            self.note("the weights of tokens: the classes of the logits are sharded")
            return
        if not logits.is_floating_point() or logits.shape[-1] < 2:
            return
        forward.has_logits = True
        if id(logits) in forward.watched:
            return
        forward.watched[id(logits)] = logits
        values, writes = logits.detach(), count_writes(logits)
        # The hook goes with the tensor, and does nothing once the audit has stopped.
        logits.register_hook(partial(self._see_logits, forward, values, writes, distance))

    def _wrap_cross_entropy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def cross_entropy(input: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and self.is_open and torch.is_grad_enabled():
                self._see_cross_entropy(input)
            return original(input, *args, **kwargs)

        cast(Any, cross_entropy).__prepare_scriptable__ = lambda: original  # torch.jit.script compiles torch's own
        return cross_entropy

    @_quietly
    def _see_cross_entropy(self, logits: Any) -> None:
        if self._forwards and not self._forwards[-1].has_logits and not is_in_backward() and logits.ndim == 2:
            forward = self._forwards[-1]
            self._watch_logits(forward, logits, FROM_LOSS)
            forward.has_logits = False  # another call may follow, and the output's logits may be nearer

    # Backwards

    @_quietly
    def _see_logits(self, forward: _Forward, values: Tensor, writes: int, distance: int, d: Tensor | None) -> None:
        if d is None:  # the loss is inside of a compiled graph
            self._is_compiled = True
            return
        if forward.nearest is not None and distance > forward.nearest:
            return
        if count_writes(values) != writes:
            self.note("the weights of tokens: the logits were changed in place")
            return
        forward.nearest = distance
        measured = measure_weights(d, values)
        self._add_part(forward, measured, values.shape[:-1])

    @_quietly
    def _see_log_probs(self, forward: _Forward, mask: Tensor, d: Tensor) -> None:
        forward.nearest = FROM_LOSS
        flat = (d.detach() * mask).flatten().double().cpu()  # those of other positions are constants
        positions = flat.nonzero()[:, 0]
        self._add_part(forward, TokenWeights(-flat[positions], positions, 0.0, 0.0), d.shape)

    def _add_part(self, forward: _Forward, measured: TokenWeights, shape: Sequence[int]) -> None:
        samples, sequences = _find_samples(measured.positions, shape, forward.shape, forward.places)
        part = MicrobatchRecord(measured.weights, samples, sequences, measured.residual, measured.smoothing)
        self._microbatch_of(forward).parts.append(part)

    def _microbatch_of(self, forward: _Forward) -> _Microbatch:
        if forward.microbatch is None or forward.microbatch.seen:  # seen: its backward runs a second time
            last = self._microbatches[-1] if self._microbatches else None
            forward.microbatch = last if last is not None and not last.seen else self._open_microbatch()
            forward.microbatch.forwards.append(forward)
            self._forwards = [recent for recent in self._forwards if recent.microbatch is None or recent is forward]
        return forward.microbatch

    def _open_microbatch(self) -> _Microbatch:
        self._microbatches.append(_Microbatch())
        return self._microbatches[-1]

    def _watch_parameters(self, module: nn.Module) -> None:
        """Set a hook on each parameter; under FSDP2 on the unsharded ones, which the first forward makes."""
        if any(map(is_fsdp1, module.modules())) or any(map(is_flat_parameter, module.parameters())):
            self.note("how often a microbatch is counted: FSDP1's parameters are flat")
            return
        groups = param_groups([submodule for submodule in module.modules() if is_fsdp2(submodule)])
        sharded = [wrapped for group in groups for wrapped in group.fsdp_params]
        known = {id(wrapped.sharded_param) for wrapped in sharded}
        known |= {id(unsharded_parameter(wrapped)) for wrapped in sharded}
        for wrapped in sharded:
            if wrapped.sharded_param.requires_grad:
                self._watch_gradient(module, wrapped.sharded_param, unsharded_parameter(wrapped))
        for parameter in module.parameters():
            if id(parameter) not in known and parameter.requires_grad:
                self._watch_gradient(module, parameter, parameter)

    def _watch_gradient(self, module: nn.Module, parameter: Tensor, tensor: Tensor | None) -> None:
        self._sketcher.add_parameter(parameter)
        if tensor is None or id(tensor) in self._known or not tensor.requires_grad:
            return
        self._known.add(id(tensor))
        self._keep.append(tensor)
        self._undo.append(tensor.register_hook(partial(self._see_gradient, module, parameter)).remove)

    @_quietly
    def _see_gradient(self, module: nn.Module, parameter: Tensor, d: Tensor) -> None:
        if self._models is None and not module.training:  # a trial in eval mode, as MegabatchTrainer's
            return
        last = self._microbatches[-1] if self._microbatches else None
        if last is None or id(parameter) in last.seen:
            last = self._open_microbatch()  # a loss without logits
        if not last.seen and not last.forwards:
            last.forwards = [forward for forward in self._forwards if forward.microbatch is None]
            for forward in last.forwards:
                forward.microbatch = last
            self._forwards = self._forwards[-1:]
        last.seen.add(id(parameter))
        self._before_clip = None
        last.sketch = self._sketcher.add_sketch(last.sketch, parameter, d)

    # The step

    def _wrap_clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def clip(*args: Any, **kwargs: Any) -> Any:
            self._see_clip()
            self._clips_values = True
            return original(*args, **kwargs)

        return clip

    @_quietly
    def _see_clip(self) -> None:
        self._num_clips += 1
        if self._before_clip is None and self._microbatches:
            self._before_clip = self._sketch_gradient()

    def _sketch_gradient(self) -> Tensor | None:
        total = None
        for parameter in self._sketcher.parameters:
            if parameter.grad is not None:
                total = self._sketcher.add_sketch(total, parameter, parameter.grad)
        return total

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.is_open:
            return None
        inner = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(inner):
            self._take_update(optimizer)
            return None

        def closure(*args: Any, **named: Any) -> Any:  # the last backward runs inside of the step
            result = inner(*args, **named)
            self._take_update(optimizer)
            return result

        return ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})

    @_quietly
    def _take_update(self, optimizer: Optimizer) -> None:
        if is_in_backward():
            self.note("the update: the optimizer steps inside of the backward")
            return
        if not self._microbatches or self._number == self._limit:  # no model that is watched, or the update was taken
            if self._awaits_schedulers and id(optimizer) not in self._steppers:
                self.note("what a second optimizer steps in the same update")
            return
        self._steppers.add(id(optimizer))
        if len(self._steppers) > 1:
            self.note("how often a microbatch is counted: several optimizers step in turns")
            gradient = self._before_clip = None  # a parameter may have a gradient that is not for this step
        else:
            gradient = self._sketch_gradient()
        if any(forward.has_logits and forward.microbatch is None for forward in self._forwards):
            self.note(
                "what became of a forward whose logits got no gradient before the step: its samples may be missing"
            )
        if self._before_clip is not None and (self._clips_values or _is_shortened(gradient, self._before_clip)):
            gradient = self._before_clip
        elif self._before_clip is not None:
            self.note("what changed the gradient between the clip and the step")
            self._before_clip = None
        if self._clip_factor is not None and gradient is not None:
            gradient = gradient / self._clip_factor.to(gradient)
        scale = getattr(optimizer, "grad_scale", None)
        if isinstance(scale, Tensor) and gradient is not None and self._before_clip is None:
            gradient = gradient / scale.to(gradient)
        rank, world = _place()
        parameters = self._sketcher.parameters
        is_sharded = any(map(is_dtensor, parameters))
        record = UpdateRecord(
            self._number,
            rank,
            world,
            [microbatch.record() for microbatch in self._microbatches],
            gradient=None if gradient is None else gradient.cpu(),
            is_sharded=is_sharded,
            weights_checksum=None if is_sharded or world == 1 else self._checksum(parameters),
            num_clips=self._num_clips,
            collectives=self._stop_profiler() if world > 1 else {},
            loop=_find_loop(is_finalized=self._is_finalized),
            is_compiled=self._is_compiled,
            notes=list(self._notes),
        )
        self._write(record)
        self._microbatches, self._forwards, self._before_clip, self._num_clips = [], [], None, 0
        self._clips_values, self._is_finalized, self._awaits_schedulers = False, False, True
        self._clip_factor = None

    def _checksum(self, parameters: Sequence[Tensor]) -> int:
        total = None
        for parameter in parameters:
            total = self._sketcher.add_sketch(total, parameter, parameter)
        return 0 if total is None else zlib.crc32(total.cpu().numpy().tobytes())

    def _close_update(self) -> None:
        """Write how often schedulers stepped: most do after the optimizer."""
        if not self._awaits_schedulers:
            return
        rank, _ = _place()
        self._write(SchedulerRecord(self._number, rank, max(self._schedulers.values(), default=0)))
        self._number += 1
        self._awaits_schedulers, self._schedulers = False, {}

    def _wrap_scheduler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            is_outer = self.is_open and not self._is_stepping_scheduler
            if is_outer and (self._forwards or self._microbatches or self._awaits_schedulers):
                self._schedulers[id(scheduler)] = self._schedulers.get(id(scheduler), 0) + 1
            self._is_stepping_scheduler = True
            try:
                return original(scheduler, *args, **kwargs)
            finally:
                self._is_stepping_scheduler = self._is_stepping_scheduler and not is_outer

        return step

    # Collectives

    def _start_profiler(self) -> None:
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)
        try:
            profiler.start()
        except RuntimeError:  # one of the run's own
            self._profiler = False
        else:
            self._profiler = profiler

    def _stop_profiler(self) -> dict[str, list[int]] | None:
        if not self._profiler:
            return None
        profiler, self._profiler = self._profiler, False
        profiler.stop()
        return _count_collectives(profiler.profiler.kineto_results.events())

    def _wrap_end_of_group(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def destroy(*args: Any, **kwargs: Any) -> Any:
            self._stop_profiler()  # it must not outlive the group
            return original(*args, **kwargs)

        return destroy


def _is_shortened(now: Tensor | None, before: Tensor) -> bool:
    """Return True if one sketch is the other, times a factor of at most one, as after a clip by norm."""
    if now is None or not before.isfinite().all():
        return now is not None
    cosine = (now @ before) / (now.norm() * before.norm()).clamp_min(1e-300)
    return bool(cosine > 1 - 1e-6) and bool(now.norm() <= 1.001 * before.norm())


def _place() -> tuple[int, int]:
    """Return rank and number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _subclasses(kind: type) -> Iterator[type]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _subclasses(subclass)


def _find_loop(*, is_finalized: bool) -> LoopRecord:
    """Return the library whose loop calls the optimizer, its trainer, and the line of the script that leads here."""
    loop, modules = LoopRecord(), list[str]()
    frame = inspect.currentframe()
    while frame is not None:
        owner = type(frame.f_locals.get("self"))
        module, path = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
        modules += [module, *(kind.__module__ for kind in owner.__mro__)]
        if not loop.trainer and any(f"{kind.__module__}.{kind.__qualname__}" in TRAINERS for kind in owner.__mro__):
            loop.trainer = owner.__name__
        if not loop.file and not module.startswith("megabatch.") and _is_of_script(path):
            loop.file, loop.line = path.replace("\\", "/").rpartition("/")[2], frame.f_lineno
            loop.code = linecache.getline(path, frame.f_lineno).strip()
        frame = frame.f_back
    modules = [name for name in modules if not name.startswith("megabatch.verification.")]
    libraries = (name for start, name in LIBRARIES.items() if any(module.startswith(start) for module in modules))
    loop.library = MEGABATCH if is_finalized else next(libraries, "")
    return loop


def _is_of_script(path: str) -> bool:
    return not path.startswith(("<", *INSTALLED))


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
    are_chunks = isinstance(output, list) and len(matrices) == len(tensors) and len(sizes) == 1
    return matrices if are_chunks else matrices[:1]


Inputs = tuple[Tensor | None, Tensor | None, Tensor | None]  # of the samples, their mask, and their positions


def _find_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inputs:
    named: dict[str, Any] = dict(kwargs)
    for argument in args:
        if isinstance(argument, Mapping):
            named = {**cast(Mapping[str, Any], argument), **named}
    arguments = (named.get("input_ids"), *args, *named.values())
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    ids = next((tensor.detach() for tensor in tensors if tensor.ndim), None)
    mask, positions = named.get("attention_mask"), named.get("position_ids")
    fits = [
        ids is not None and isinstance(tensor, Tensor) and tensor.shape == ids.shape for tensor in (mask, positions)
    ]
    return ids, mask if fits[0] else None, positions if fits[1] else None


def _hash_rows(ids: Tensor | None, mask: Tensor | None) -> list[int]:
    """Return a checksum of each row without padding."""
    if ids is None:
        return []
    rows = [row if mask is None else row[mask[number].bool()] for number, row in enumerate(ids)]
    return [zlib.crc32(row.contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes()) for row in rows]


def _count_tokens(ids: Tensor | None, mask: Tensor | None) -> tuple[list[int], int]:
    """Return the tokens of each row, and those of all with padding; nothing where no mask says them."""
    if ids is None or mask is None or ids.ndim != 2:
        return [], 0
    return [int(length) for length in mask.bool().sum(-1)], ids.numel()


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
    if places is None or len(inputs) != 2 or length > inputs[1] or length == 1:
        return samples, samples
    starts = (places[:, 1:] <= places[:, :-1]).cumsum(-1)  # a new sequence of a packed row begins at 0 again
    within = functional.pad(starts, (1, 0)).cpu()
    return samples, samples * inputs[1] + within[samples, positions % length]


def _count_collectives(events: Sequence[Any]) -> dict[str, list[int]]:
    """Return number and bytes of each collective; lists of tensors have shapes in the backend's own event alone."""
    collectives: dict[str, list[int]] = {}
    waiting: list[int] | None = None  # the collective whose bytes are not known yet
    for event in events:
        library, _, name = event.name().partition(":")
        if library == "c10d":
            kind = str(name).strip(":_").replace("_base", "").replace("_", "")
            waiting = collectives.setdefault(KINDS.get(kind, kind), [0, 0])
            waiting[0] += 1
        elif library not in ("gloo", "nccl") or waiting is None:
            continue
        if size := _bytes_of(event):
            waiting[1] += size
            waiting = None
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
