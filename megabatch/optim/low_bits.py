"""bfloat16 parameters that are stepped in float32: the 16 bits that bfloat16 lacks are kept beside each weight.

The bits of a float32 weight are ``(high << 16) + low``. The model has ``high``, the nearest bfloat16, and the
optimizer's state has ``low``, an int16. A step joins both in a scratch of float32, steps there, and splits the result.
"""

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megabatch.errors import PlanError
from megabatch.torch_private.autograd import count_writes
from megabatch.torch_private.classes import is_dtensor
from megabatch.torch_private.optimizers import step_hooks, unhooked

# The entry "params" and the options of a group.
Group = dict[str, Any]
# Key of a parameter's state.
LOW = "low_bits"
# Half of a step of the high bits.
HALF = 0x8000
# Elements that are joined or split at one time on a CPU: 1 MiB of float32.
PIECE = 2**18
# Classes that cannot keep low bits, and parts of the names of classes whose states are scaled by block.
REFUSED = {
    "Adafactor": "its states are those of whole rows and columns",
    "LBFGS": "it runs the loss many times a step",
    "LowBits": "it keeps low bits already",
    "SparseAdam": "it takes sparse gradients",
}
# Parts of the names of optimizers whose states are scaled by block.
BLOCKWISE = ("8bit", "4bit", "Fp8")


class LowBits(Optimizer):
    """An optimizer whose bfloat16 parameters move as float32 parameters do, bit for bit, for 2 bytes a weight.

    bfloat16 has 8 binary digits: a weight of 0.02 with a learning rate of 1e-5 is rounded back to where it was after
    almost every step. With this wrapper, weights and states have the bits that ``optimizer`` would give float32
    parameters which begin at the same values and get the same gradients. The model computes with the nearest bfloat16.

    Use the wrapper in place of the optimizer: schedulers, hooks, `state_dict` and `torch.distributed.checkpoint` work
    on it, with the parameter groups of ``optimizer``. Its state has an int16 tensor ``low_bits`` for each parameter,
    sharded as the parameter is: save it sharded, since gloo sends no int16 and ``full_state_dict=True`` fails. Other
    states of bfloat16 parameters are in ``state_dtype``. Parameters of other dtypes are stepped as they are.

    A step works on a few parameters at a time. Its scratch is 8 bytes for each element of the largest parameter on this
    rank, 4 more for each state that is not in float32, and what ``foreach=True`` takes for as many elements. Use
    ``foreach``, ``fused`` or neither. Shards of FSDP2 have the bits of one process, except with ``fused=True`` on a
    CPU, which rounds the last few elements of a tensor in another way, in float32 too.

    Weights that other code has changed since the last step start from what the model has: their low bits are zero. A
    change that is undone before the next step (evaluating an average of the weights) counts as none. After
    `load_state_dict` the loaded low bits belong to the weights at the next step, so that the model may be loaded before
    or after. Writes through ``parameter.data`` are not seen. Bits that belong to another weight never change what the
    model computes, and move the next step by less than half a bfloat16 step.

    Args:
        optimizer: Any elementwise optimizer over at least one bfloat16 parameter (AdamW, Adam, SGD, NAdam, Lion, ...),
            or torch's Muon over whole matrices. States that it has already are taken over.
        state_dtype: torch.float32, or torch.bfloat16 for 4 bytes a weight less of AdamW's states. These are then
            rounded after each step, as they are without low bits, and weights have no longer the bits of float32.

    Raises:
        PlanError: The optimizer is not elementwise (Adafactor, LBFGS, SparseAdam, states in blocks, Muon over shards),
            has step hooks, or has no bfloat16 parameter. `step` raises it, before any such weight has moved, for an
            optimizer that keeps states of other shapes than the parameter's or writes to its parameter groups.
    """

    optimizer: Optimizer  # the wrapped one
    state_dtype: torch.dtype

    def __init__(self, optimizer: Optimizer, *, state_dtype: torch.dtype = torch.float32) -> None:
        name = type(optimizer).__name__
        reason = _reason_against(type(optimizer))
        if reason is not None:
            raise PlanError(f"{name} cannot keep low bits: {reason}; use an elementwise optimizer, such as AdamW")
        if not any(map(_is_narrow, _parameters_of(optimizer))):
            raise PlanError(f"{name} has no bfloat16 parameter; leave LowBits out, or convert the model")
        if any("ns_steps" in group and any(map(is_dtensor, group["params"])) for group in optimizer.param_groups):
            raise PlanError(f"{name} cannot keep low bits of shards: Muon steps whole matrices; use DDP, or AdamW")
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise PlanError(f"state_dtype is {state_dtype}; give torch.float32 or torch.bfloat16")
        for hook in step_hooks(optimizer):
            raise PlanError(
                f"{name} has the step hook {getattr(hook, '__name__', type(hook).__name__)!r}; register it on LowBits, "
                "whose step it belongs to"
            )
        # torch's __init__ would add the groups again.
        self.__setstate__({
            "defaults": optimizer.defaults, "state": optimizer.state, "param_groups": optimizer.param_groups,
            "optimizer": optimizer, "state_dtype": state_dtype,
        })  # fmt: skip
        # Adagrad makes states before the first step.
        for parameter, state in self.state.items():
            if _is_narrow(parameter):
                self.state[parameter] = {**_in_dtype(state_dtype, parameter, state), LOW: self._low_bits(parameter)}

    @staticmethod
    def supports(kind: Callable[..., Optimizer]) -> bool:
        """Return True for a class of optimizers that can keep low bits, as far as its name tells."""
        return _reason_against(kind) is None

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step every parameter that has a gradient.

        Args:
            closure: Computes the gradients again and returns the loss; it runs once.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        narrow = filter(_is_narrow, _parameters_of(self))
        # The elements of the largest bfloat16 parameter on this rank.
        limit = max((_local(parameter).numel() for parameter in narrow), default=0)
        with torch.no_grad():
            for group in self.param_groups:
                for parameters in _divided(group["params"], limit):
                    self._step_few(group, parameters)
        return loss

    def master_weight(self, parameter: Tensor) -> Tensor:
        """Return a parameter in float32 with its low bits, as the next step sees it; a DTensor for a DTensor."""
        with torch.no_grad():
            if LOW not in self.state.get(parameter, {}):
                return parameter.detach().float()
            values = _local(parameter)
            flat = torch.empty(values.numel(), dtype=torch.float32, device=values.device)
            _join([parameter], [self._low_bits(parameter)], flat)
            return _as_laid(parameter, flat.as_strided(values.shape, _strides(values)))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "optimizer": self.optimizer, "state_dtype": self.state_dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        is_new = "_written" not in vars(self)
        super().__setstate__(state)
        self.optimizer.__setstate__({"state": self.state, "param_groups": self.param_groups})
        # load_state_dict comes here, too: the next step takes the low bits as they are.
        self._written: dict[Tensor, _Written] = {}
        if is_new:
            keep_state_dtypes(self)

    def _step_few(self, group: Group, parameters: Sequence[Tensor]) -> None:
        """Step some parameters of a group, all of which have gradients, as float32 tensors."""
        narrow = [parameter for parameter in parameters if _is_narrow(parameter)]
        low = [self._low_bits(parameter) for parameter in narrow]
        sizes = [_local(parameter).numel() for parameter in narrow]
        flat = torch.empty(sum(sizes), dtype=torch.float32, device=parameters[0].device)
        _join(narrow, low, flat)
        wide = {
            parameter: _as_laid(parameter, values.as_strided(_local(parameter).shape, _strides(_local(parameter))))
            for parameter, values in zip(narrow, flat.split(sizes), strict=True)
        }
        for parameter, scratch in wide.items():
            assert parameter.grad is not None
            scratch.grad = parameter.grad.to(torch.float32)
        self._step_inner(group, [wide.get(parameter, parameter) for parameter in parameters], parameters)
        _split(flat, narrow, low)
        for parameter, bits in zip(narrow, low, strict=True):
            self.state[parameter][LOW] = bits
            self._written[parameter] = _Written(_local(parameter))

    def _step_inner(self, group: Group, stepped: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """Let the wrapped optimizer step tensors in place of the parameters, with the states of these."""
        inner, lent = self.optimizer, {**group, "params": list(stepped)}
        states: dict[Tensor, dict[str, Any]] = {}
        for tensor, parameter in zip(stepped, parameters, strict=True):
            if parameter in self.state:
                states[tensor] = _in_dtype(torch.float32, parameter, self.state[parameter])
                states[tensor].pop(LOW, None)
        before = _marks(lent)
        inner.param_groups, inner.state = [lent], defaultdict(dict, states)
        try:
            unhooked(type(inner).step)(inner)
            after = inner.state
        finally:
            inner.param_groups, inner.state = self.param_groups, self.state
        self._check_elementwise(_marks(lent) == before, after)
        for tensor, parameter in zip(stepped, parameters, strict=True):
            if tensor in after:
                self.state[parameter] = _in_dtype(self.state_dtype, parameter, after[tensor])

    def _check_elementwise(self, keeps_groups: bool, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        name = type(self.optimizer).__name__
        if not keeps_groups:
            raise PlanError(f"{name} writes to its parameter groups in a step; use another optimizer, such as AdamW")
        for tensor, state in states.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.numel() > 1 and value.shape != tensor.shape:
                    raise PlanError(
                        f"{name} keeps {key!r} of shape {tuple(value.shape)} for a parameter of shape "
                        f"{tuple(tensor.shape)}, so that it is not elementwise; use one that is, such as AdamW"
                    )

    def _low_bits(self, parameter: Tensor) -> Tensor:
        """Return the low bits that belong to a parameter's value now: zeros where other code has changed it."""
        low, values = self.state.get(parameter, {}).get(LOW), _local(parameter)
        if low is None:
            return _as_laid(parameter, torch.zeros_like(values.detach(), dtype=torch.int16))
        written = self._written.get(parameter)
        if written is None or written.is_last(values):
            return low
        # The host does not wait for this comparison.
        return _as_laid(parameter, _local(low) * (written.checksum == _checksum(values)))


class _Written:
    """A parameter's local values as a step has left them."""

    def __init__(self, values: Tensor) -> None:
        self._tensor, self._num_writes = weakref.ref(values), count_writes(values)
        self.checksum = _checksum(values)

    def is_last(self, values: Tensor) -> bool:
        """Return True if nobody has written since."""
        return self._tensor() is values and count_writes(values) == self._num_writes


def _reason_against(kind: Callable[..., Optimizer]) -> str | None:
    """Return the reason why a class of optimizers cannot keep low bits, or None if it can."""
    names = [base.__name__ for base in getattr(kind, "__mro__", ())]
    if any(part in name for name in names for part in BLOCKWISE):
        return "its states are scaled by block"
    return next((REFUSED[name] for name in names if name in REFUSED), None)


def keep_state_dtypes(optimizer: Optimizer) -> None:
    """Make `load_state_dict` keep the dtypes of saved states, which torch casts to that of the parameter."""
    saved: list[Mapping[str, Any]] = []

    def before(_: Optimizer, state: dict[str, Any]) -> None:
        parameters = itertools.chain.from_iterable(group["params"] for group in state["param_groups"])
        saved[:] = [state["state"].get(parameter, {}) for parameter in parameters]

    def after(optimizer: Optimizer) -> None:
        for parameter, values in zip(_parameters_of(optimizer), saved, strict=True):
            here = optimizer.state[parameter] if values else {}
            for key, value in values.items():
                if isinstance(value, Tensor) and value.dtype != here[key].dtype:
                    here[key] = value.detach().clone().to(here[key].device)
        saved.clear()

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return list(itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def _is_narrow(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bfloat16


def _in_dtype(dtype: torch.dtype, parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state, that of a bfloat16 parameter with its tensors, but for single numbers, in ``dtype``."""
    converted = dict(state)
    for key, value in state.items():
        if _is_narrow(parameter) and isinstance(value, Tensor) and value.ndim and value.is_floating_point():
            converted[key] = value.to(dtype)
    return converted


def _strides(values: Tensor) -> tuple[int, ...]:
    """Return the strides of such a tensor without gaps: kernels may want a weight and its gradient in one order."""
    return torch.empty_like(values, device="meta").stride()


def _divided(parameters: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Yield the parameters with a gradient in runs of at most ``limit`` bfloat16 elements on one device."""
    run: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if parameter.grad is None:
            continue
        more = _local(parameter).numel() if _is_narrow(parameter) else 0
        if run and (size + more > limit or parameter.device != run[0].device):
            yield run
            run, size = [], 0
        run.append(parameter)
        size += more
    if run:
        yield run


def _join(parameters: Sequence[Tensor], low: Sequence[Tensor], flat: Tensor) -> None:
    """Write the float32 weights of bfloat16 parameters and their low bits to ``flat`` [sum of their elements]."""
    for values, low_part, bits in _pieces(parameters, low, flat):
        # The bits are high << 16. Torch adds two dtypes at a third of the speed.
        bits.view(torch.float32).copy_(values)
        bits.add_(low_part.int())


def _split(flat: Tensor, parameters: Sequence[Tensor], low: Sequence[Tensor]) -> None:
    """Write float32 weights to bfloat16 parameters, rounded to the nearest and ties away from zero, and low bits.

    ``flat`` is overwritten.
    """
    for values, low_part, bits in _pieces(parameters, low, flat):
        # The NaN of the bits 0x7fffffff would become -0.
        bits.view(torch.float32).nan_to_num_(nan=float("nan"), posinf=float("inf"), neginf=float("-inf"))
        bits.add_(HALF)
        # The last 16 bits, less HALF.
        low_part.copy_(bits).bitwise_xor_(-HALF)
        values.view(torch.int16).copy_(bits.bitwise_right_shift_(16))


def _pieces(
    parameters: Sequence[Tensor], low: Sequence[Tensor], flat: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield values, low bits and float32 weights as int32 of this rank, in pieces that stay in a CPU's cache."""
    parts = flat.view(torch.int32).split([_local(parameter).numel() for parameter in parameters])
    for parameter, low_bits, part in zip(parameters, low, parts, strict=True):
        values, low_part = _local(parameter).detach(), _local(low_bits)
        strides = _strides(values)
        if values.device.type == "cpu" and values.stride() == low_part.stride() == strides:
            in_order = (tensor.as_strided((tensor.numel(),), (1,)).split(PIECE) for tensor in (values, low_part, part))
            yield from zip(*in_order, strict=True)
        else:
            yield values, low_part, part.as_strided(values.shape, strides)


def _as_laid(parameter: Tensor, values: Tensor) -> Tensor:
    """Return values of this rank laid over ranks as the parameter is."""
    if not is_dtensor(parameter):
        return values
    from torch.distributed.tensor import DTensor

    sharded: Any = parameter
    mesh, placements = sharded.device_mesh, sharded.placements
    return DTensor.from_local(values, mesh, placements, run_check=False, shape=sharded.shape, stride=sharded.stride())


def _checksum(values: Tensor) -> Tensor:
    """Return a sum of the bits, four weights at a time, which another order of weights hardly ever has."""
    bits = values.detach().view(torch.int16).reshape(-1)
    num_in_fours = bits.numel() // 4 * 4
    if bits.storage_offset() % 4:
        bits = bits.clone()
    return bits[:num_in_fours].view(torch.int64).sum() + bits[num_in_fours:].sum()


def _marks(group: Group) -> dict[str, object]:
    """Return ids and write counts of a parameter group's values, which reveal any write to it."""
    return {
        name: (id(value), count_writes(value) if isinstance(value, Tensor) else None) for name, value in group.items()
    }
