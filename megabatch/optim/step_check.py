"""`verify_step`: compare an optimizer's steps on a model's shards with the same steps on whole tensors."""

import copy
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from megabatch.errors import PlanError
from megabatch.torch_private import is_dtensor

NUM_STEPS = 3  # states of the first ones enter the later ones
TOLERANCE = 1e-12  # of a parameter's movement in float64, for an optimizer that is not elementwise
Change = Callable[[Tensor], Tensor]  # a copy of a parameter, or of a state of its shape


@dataclass(frozen=True)
class StepVerification:
    """Result of `verify_step`."""

    ok: bool
    is_bit_equal: bool  # every parameter, in its own dtype
    worst: float  # largest relative error of a parameter in float64; 0.0 where bits are equal
    errors: dict[str, float]  # of the parameters whose bits differ: ||wrapped - whole|| / ||movement||, in float64
    causes: tuple[str, ...]  # in words; empty if nothing is wrong

    def __str__(self) -> str:
        verdict = "exact" if self.ok else "NOT exact"
        measured = "bit-equal to one process" if self.is_bit_equal else f"{self.worst:.1e} from one process, in float64"
        return "\n".join([f"{verdict}: {NUM_STEPS} optimizer steps are {measured}", *self.causes])


def verify_step(model: nn.Module, optimizer: Optimizer) -> StepVerification:
    """Compare three steps of a copy of an optimizer on this model's shards with those of a copy on whole parameters.

    Both begin with the weights and states of now and get the same random gradients, the same on all ranks. The model,
    the optimizer and torch's generators stay as they are, and hooks of the step do not run. An elementwise optimizer
    must have the same bits. Another one, such as one with a norm over a matrix, may sum in another order: it must agree
    within 1e-12 in float64. All ranks must end with the same whole parameters.

    Args:
        model: Plain, in DDP, or sharded by FSDP2. All ranks call `verify_step`. Each needs room for two copies of the
            whole model with its states, in float64 where bits differ.
        optimizer: Over parameters of the model, as you step it.

    Raises:
        PlanError: The optimizer has no parameter of the model, or cannot be copied.
    """
    held = {each for group in optimizer.param_groups for each in group["params"]}
    names: dict[Tensor, str] = {each: name for name, each in model.named_parameters() if each in held}
    if not names:
        raise PlanError(f"{type(optimizer).__name__} has no parameter of the model; give the model that it steps")
    own, whole = (_stepped(optimizer, names, change) for change in (_own, _whole))
    differing, causes = _agree([name for name in own if not torch.equal(own[name], whole[name])], own)
    if not differing:
        return StepVerification(not causes, True, 0.0, {}, causes)
    wide = [_stepped(optimizer, names, _in_float64(change)) for change in (_own, _whole, _half)]
    start = {name: _in_float64(_whole)(each) for each, name in names.items()}
    here = [name for name in own if name in differing]  # a stage of a pipeline has parameters of its own
    errors = {name: _error(wide[0][name], wide[1][name], start[name]) for name in here}
    halves = [_error(wide[2][name], _half(wide[1][name]), _half(start[name])) for name in here]
    worst = max(errors.values(), default=0.0, key=lambda each: math.inf if math.isnan(each) else each)
    kind, found = type(optimizer).__name__, f"{differing[0]} and {len(differing) - 1} other parameters differ"
    if not worst <= TOLERANCE:
        why = f"{kind} computes something over a parameter of which each rank has a shard; use an elementwise optimizer"
        causes = (f"{found}: {why}", *causes)
    elif all(each <= TOLERANCE for each in halves):
        instead = "leave fused=True out" if any(each.get("fused") for each in optimizer.param_groups) else "use AdamW"
        why = f"{kind} is elementwise, and rounds by the size of a shard; {instead} where bits matter"
        causes = (f"{found} in their last digits: {why}", *causes)
    return StepVerification(not causes, False, worst, errors, causes)


def _stepped(optimizer: Optimizer, names: Mapping[Tensor, str], change: Change) -> dict[str, Tensor]:
    """Step a copy on changed parameters and return these, whole: name → values."""
    copies = {each: nn.Parameter(change(each.detach())) for each in names}
    made = _copy(optimizer, copies, change)
    for step in range(NUM_STEPS):
        for number, (each, changed) in enumerate(copies.items()):
            changed.grad = change(_gradient(each, NUM_STEPS * number + step))
        made.step()
    return {name: _whole(copies[each].detach()) for each, name in names.items()}


def _copy(optimizer: Optimizer, copies: Mapping[Tensor, Tensor], change: Change) -> Any:
    """Return an optimizer over other parameters, with states changed as these are."""
    memo: dict[int, Any] = {id(each): changed for each, changed in copies.items()}
    for each in copies:
        for state in optimizer.state.get(each, {}).values():
            if isinstance(state, Tensor):
                memo[id(state)] = change(state) if state.shape == each.shape and state.ndim else state.clone()
    try:
        made: Any = copy.deepcopy(optimizer, memo)
        for name, value in vars(optimizer).items():  # which Optimizer.__getstate__ leaves out; schedules wrap "step"
            if name not in vars(made) and name != "step" and not name.startswith("_optimizer_"):
                vars(made)[name] = copy.deepcopy(value, memo)
    except Exception as error:  # whatever an attribute of somebody's optimizer raises
        raise PlanError(f"{type(optimizer).__name__} cannot be copied ({error}); verify_step steps copies") from error
    return made


def _gradient(parameter: Tensor, seed: int) -> Tensor:
    """Return the same random numbers on every rank, laid over ranks as the parameter is."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(parameter.shape, generator=generator, device="cpu").to(parameter.device, parameter.dtype)
    if not is_dtensor(parameter):
        return values
    from torch.distributed.tensor import distribute_tensor  # slow, and imported where there is a DTensor

    return distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _own(value: Tensor) -> Tensor:
    return value.detach().clone()


def _whole(value: Tensor) -> Tensor:
    if not is_dtensor(value):
        return _own(value)
    is_short = value.dtype == torch.int16  # low bits, a dtype that gloo does not send
    return (value.int() if is_short else value).full_tensor().to(value.dtype, copy=True).detach()


def _half(value: Tensor) -> Tensor:
    """Return the first rows, as a shard without a word from the others: an elementwise step of them is the same."""
    whole = _whole(value)
    return whole[: (len(whole) + 1) // 2] if whole.ndim else whole


def _in_float64(change: Change) -> Change:
    def changed(value: Tensor) -> Tensor:
        return change(value).to(torch.float64 if value.is_floating_point() else value.dtype)

    return changed


def _error(found: Tensor, expected: Tensor, start: Tensor) -> float:
    """Return the distance over the movement."""
    distance, movement = (float((expected - other).norm()) for other in (found, start))
    return distance / max(movement, 1e-300)


def _agree(differing: list[str], values: Mapping[str, Tensor]) -> tuple[list[str], tuple[str, ...]]:
    """Return the names that differ on any rank, and a cause if a rank ends with other bits than an earlier one."""
    if not dist.is_initialized():
        return differing, ()
    digests = {name: _digest(each) for name, each in values.items()}
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (differing, digests))
    first: dict[str, tuple[int, str]] = {}
    causes: list[str] = []
    for rank, (_, found) in enumerate(told):
        others = [name for name in found if first.setdefault(name, (rank, found[name]))[1] != found[name]]
        if others:
            causes.append(
                f"{others[0]} ends with other bits on rank {rank} than on rank {first[others[0]][0]}; "
                "look at the optimizer, and at the versions and hardware of both"
            )
    return list(dict.fromkeys(name for names, _ in told for name in names)), tuple(causes)


def _digest(values: Tensor) -> str:
    return hashlib.sha256(values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
