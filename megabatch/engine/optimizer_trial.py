"""Try an optimizer on small parameters, together and one by one, before it steps parameter by parameter.

No attribute says whether an optimizer looks at several parameters at once. A copy without state is tried; the
optimizer itself, its state, its hooks and its schedules are not touched. No other rank is asked.
"""

import contextlib
import copy
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from megabatch.engine import random_state
from megabatch.errors import PlanError, in_one_line
from megabatch.torch_private import count_writes, global_step_hooks, pytree

LEAVE_OUT = "or leave step_in_backward() out"
NUM_STEPS = 3  # a count that parameters share runs ahead in these
SIZE = 4  # of each dimension of a small parameter, at most
SIZE_IN_PARTS = 37  # of parameters whose parts are compared: a CPU steps the last few elements by other instructions
SCALES = (-3.0, 3.0)  # log10 of gradients: very different ones, so that who mixes them is seen
LEARNING_RATE = 0.1  # a schedule may have begun at 0
MANY = 2**16  # elements: larger tensors are not copied
TOLERANCE = 2.0**-6  # of how far a parameter moves: the rounding of an optimizer that computes in bfloat16
Group = dict[str, Any]
Found = TypeVar("Found")


def check_step_hooks(optimizer: Optimizer) -> None:
    """Raise `PlanError` for hooks of a step, which would run once for each parameter."""
    both = optimizer, getattr(optimizer, "optimizer", None)  # the one inside, where Accelerate has wrapped it
    own = [getattr(each, f"_optimizer_step_{when}_hooks", {}) for each in both for when in ("pre", "post")]
    for hooks in (*own, *global_step_hooks()):
        for hook in hooks.values():
            raise PlanError(
                f"{type(optimizer).__name__} has the step hook {getattr(hook, '__name__', type(hook).__name__)!r}, "
                f"which would run once for each parameter; remove the hook, {LEAVE_OUT}"
            )


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise `PlanError` where parameters that are stepped one by one move otherwise than together."""
    if any(parameter.is_meta for group in optimizer.param_groups for parameter in group["params"]):
        return  # it has no numbers
    name = type(optimizer).__name__
    together, in_turn, by_itself = _try(optimizer)
    if not any(each.has_moved for each in together):
        raise PlanError(
            f"{name} moved nothing in {NUM_STEPS} steps of a copy on small parameters, so that nobody knows whether it "
            f"can step parameter by parameter; take another optimizer, {LEAVE_OUT}"
        )
    if not all(map(_Small.is_like, together, in_turn)):
        cause = "looks at several parameters at once"
        if all(map(_Small.is_like, together, by_itself)):
            cause = "counts its steps by itself, or keeps something else that is not of one parameter"
        raise PlanError(
            f"{name} {cause}, so that it cannot step parameter by parameter; take another optimizer, {LEAVE_OUT}"
        )


def depends_on_shards(optimizer: Optimizer) -> bool:
    """Return True if a copy moves parts of small parameters to other bits than whole ones. Raises `PlanError`."""

    def run(with_state: bool) -> bool:
        whole, parts = (_stepped_in_parts(optimizer, num_rows, with_state) for num_rows in (SIZE_IN_PARTS, 1))
        return not all(map(torch.equal, whole, parts))

    return _try_copy(optimizer, run, "and on parts of them", "or leave same_bits out")


def _try_copy(optimizer: Optimizer, run: Callable[[bool], Found], how: str, advice: str) -> Found:
    """Return ``run(with_state)`` of the first kind of copy that can step. Raises `PlanError` if none can."""
    failure: Exception | None = None
    for with_state in (False, True):  # some make their state when they are made, and miss it in a step
        try:
            return run(with_state)
        except PlanError:
            raise
        except Exception as error:  # whatever a step raises
            failure = error
    assert failure is not None
    raise PlanError(
        f"{type(optimizer).__name__} failed when a copy was tried on small parameters {how} "
        f"({in_one_line(failure)}); take another optimizer, {advice}"
    ) from failure


def _stepped_in_parts(optimizer: Optimizer, num_rows: int, with_state: bool) -> list[Tensor]:
    """Return small parameters after some steps of a copy that has each in two parts, the first of so many rows."""
    generator = torch.Generator().manual_seed(0)
    groups, states, instead = _small_groups(optimizer, generator, SIZE_IN_PARTS)

    def parts_of(tensor: Tensor) -> list[Tensor]:
        is_whole = tensor.ndim == 0 or len(tensor) <= num_rows
        return [tensor] if is_whole else [tensor[:num_rows], tensor[num_rows:]]

    whole = [each for group in groups for each in group["params"]]
    parts = {each: [nn.Parameter(part.clone()) for part in parts_of(each.detach())] for each in whole}
    of_parts: dict[Tensor, Any] = {}
    for each, own in parts.items():
        for index, part in enumerate(own):
            of_parts[part] = {
                name: parts_of(value)[index].clone() if isinstance(value, Tensor) and value.ndim else value
                for name, value in states[each].items()
            }
    cut = [group | {"params": [part for each in group["params"] for part in parts[each]]} for group in groups]
    made = _copy(optimizer, cut, of_parts if with_state else {}, instead)
    with random_state.replay(random_state.note(whole[0].device)), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it has to say, it says in its own step
        for _ in range(NUM_STEPS):
            for each in whole:
                gradient = _gradient(optimizer, each, generator)
                for index, part in enumerate(parts[each]):
                    part.grad = None if gradient is None else parts_of(gradient)[index].clone()
            made.step()
    return [torch.cat([part.detach().flatten() for part in own]) for own in parts.values()]


def step_alone(optimizer: Optimizer, group: Group, parameter: Tensor) -> None:
    """Step one parameter of a group, and drop its gradient. Raises `PlanError` where the group is written to."""
    alone = group | {"params": [parameter]}
    before = _marks(alone)
    groups, optimizer.param_groups = optimizer.param_groups, [alone]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups
    parameter.grad = None
    if _marks(alone) != before:
        raise PlanError(
            f"{type(optimizer).__name__} writes to its parameter groups in a step, so that it cannot step parameter by "
            f"parameter; take another optimizer, {LEAVE_OUT}"
        )


def _marks(group: Group) -> dict[str, object]:
    """Return ids and write counts of a parameter group's values, which reveal any write to it."""
    return {
        name: (id(value), count_writes(value) if isinstance(value, Tensor) else None) for name, value in group.items()
    }


class _Small(NamedTuple):
    """A small parameter before and after some steps."""

    before: Tensor
    after: Tensor

    @property
    def has_moved(self) -> bool:
        return not torch.equal(self.before, self.after)

    def is_like(self, other: "_Small") -> bool:
        """Return True if both moved alike, up to rounding."""
        if not self.after.requires_grad:
            return True
        before, a, b = (each.detach().to(torch.complex128) for each in (self.before, self.after, other.after))
        moved = float(torch.nan_to_num((a - before).abs()).max())
        eps = torch.finfo(self.after.dtype).eps
        return torch.allclose(a, b, rtol=16 * eps, atol=TOLERANCE * moved, equal_nan=True)


def _try(optimizer: Optimizer) -> list[list[_Small]]:
    """Step small parameters in three ways: together, one by one, and each by its own optimizer."""

    def run(with_state: bool) -> list[list[_Small]]:
        return [_stepped(optimizer, way, with_state) for way in ("together", "in turn", "by itself")]

    return _try_copy(optimizer, run, "together and one by one", LEAVE_OUT)


def _stepped(optimizer: Optimizer, way: str, with_state: bool) -> list[_Small]:
    generator = torch.Generator().manual_seed(0)
    groups, states, instead = _small_groups(optimizer, generator)
    each = [(group, parameter) for group in groups for parameter in group["params"]]
    before = [parameter.detach().clone() for _, parameter in each]
    copies = [_copy(optimizer, groups, states if with_state else {}, instead)]
    if way == "by itself":
        copies += [_copy(optimizer, groups, states if with_state else {}, instead) for _ in each[1:]]
    state = random_state.note(each[0][1].device)
    with random_state.replay(state), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it has to say, it says in its own step
        for _ in range(NUM_STEPS):
            for _, parameter in each:
                parameter.grad = _gradient(optimizer, parameter, generator)
            if way == "together":
                copies[0].step()
                continue
            for number, (group, parameter) in reversed(list(enumerate(each))):  # as a backward comes to them
                step_alone(copies[number % len(copies)], group, parameter)
    return [_Small(old, parameter) for old, (_, parameter) in zip(before, each, strict=True)]


def _small_groups(
    optimizer: Optimizer, generator: torch.Generator, most: int = SIZE
) -> tuple[list[Group], dict[Tensor, Any], dict[int, Any]]:
    """Return groups with two small parameters of each kind, small states, and the substitutes by id of a tensor."""
    tensors = [each for each in pytree.tree_leaves(list(optimizer.state.values())) if isinstance(each, Tensor)]
    instead: dict[int, Any] = {id(each): _zeros_like(each, most) for each in tensors}
    groups: list[Group] = []
    states: dict[Tensor, Any] = {}
    for group in optimizer.param_groups:
        kinds: dict[object, list[nn.Parameter]] = {}
        for each in group["params"]:
            kind = each.ndim, each.dtype, each.device
            if kind not in kinds:
                kinds[kind] = [_small_parameter(each, generator, most) for _ in range(2)]
                states |= {small: copy.deepcopy(optimizer.state.get(each, {}), dict(instead)) for small in kinds[kind]}
            instead[id(each)] = kinds[kind][0]
        options = copy.deepcopy({name: value for name, value in group.items() if name != "params"}, dict(instead))
        lr = options.get("lr")
        if lr is not None:
            options["lr"] = torch.full_like(lr, LEARNING_RATE) if isinstance(lr, Tensor) else LEARNING_RATE
        groups.append(options | {"params": [small for pair in kinds.values() for small in pair]})
    return groups, states, instead


def _copy(optimizer: Optimizer, groups: list[Group], states: dict[Tensor, Any], instead: dict[int, Any]) -> Optimizer:
    """Copy the optimizer over small parameters, without hooks and without the step wrappers of schedules."""
    made = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_"):
            vars(made)[name] = OrderedDict[int, Any]()
        elif name not in ("param_groups", "state", "step"):
            leaves = [each for each in pytree.tree_leaves(value) if isinstance(each, Tensor) and each.numel() > MANY]
            with contextlib.suppress(Exception):  # a process group or a file: it is missed if a step needs it
                vars(made)[name] = copy.deepcopy(value, {id(each): _zeros_like(each) for each in leaves} | instead)
    keep = {id(small): small for group in groups for small in group["params"]}
    made.param_groups = copy.deepcopy(groups, dict(keep))
    made.state = defaultdict(dict, copy.deepcopy(list(states.items()), dict(keep)))
    return made


def _small_parameter(parameter: Tensor, generator: torch.Generator, most: int) -> nn.Parameter:
    values = torch.randn(_size(parameter, most), dtype=torch.float64, generator=generator, device="cpu")
    is_trained = parameter.is_floating_point() or parameter.is_complex()
    small = nn.Parameter(values.to(parameter.device, parameter.dtype), requires_grad=is_trained)
    vars(small).update({name: value for name, value in vars(parameter).items() if not isinstance(value, Tensor)})
    return small


def _zeros_like(tensor: Tensor, most: int = SIZE) -> Tensor:
    """Return zeros of the size of a small parameter, or a copy of a single number."""
    if tensor.ndim == 0:
        return tensor.detach().clone()
    return torch.zeros(_size(tensor, most), dtype=tensor.dtype, device=tensor.device)


def _size(tensor: Tensor, most: int) -> Sequence[int]:
    return [min(max(size, 1), most) for size in tensor.shape]


def _gradient(optimizer: Optimizer, parameter: Tensor, generator: torch.Generator) -> Tensor | None:
    if not parameter.requires_grad:
        return None
    scale = torch.empty((), dtype=torch.float64, device="cpu").uniform_(*SCALES, generator=generator)
    values = torch.randn(parameter.shape, dtype=torch.float64, generator=generator, device="cpu")
    dense = (values * 10**scale).to(parameter.device, parameter.dtype)
    return dense.to_sparse(1) if isinstance(optimizer, torch.optim.SparseAdam) else dense
