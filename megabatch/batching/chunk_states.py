"""States at the seams of chunks: of linear attention, state-space layers and convolutions of transformers.

A chunk begins with the state that the chunk before it has left. The gradient of that state goes back to the chunk that
has left it. A state that has read a token cannot forget it, so the model does not read the token that two chunks hold
a second time: the first of them runs without it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megabatch.errors import LossContractError
from megabatch.inspection.tree import each_leaf

STATES = "a sample is cut into chunks and the model has layers with a state"


class KeptState:
    """One state of one layer, before each chunk."""

    def __init__(self, states: "ChunkStates") -> None:
        self._states = states
        self._values: dict[int, Tensor] = {}  # by number of the chunk that begins with it
        self.leaves: dict[int, Tensor] = {}  # the same with a gradient, of chunks that run with a graph
        states.kept.append(self)

    def read(self) -> Tensor | None:
        """Return the state with which the running chunk begins. None in the first chunk."""
        number = self._states.running.chunk.number
        value = self._values.get(number)
        if value is None or not torch.is_grad_enabled():
            return value
        if number not in self.leaves:
            self.leaves[number] = value.detach().requires_grad_()
        return self.leaves[number]

    def write(self, state: Tensor) -> None:
        """Keep the state that the running chunk leaves."""
        self._states.running.note_forward(self)
        self._values[self._states.running.chunk.number + 1] = state.detach().clone()
        self._states.num_written += 1
        if torch.is_grad_enabled():
            self._states.final.append((self, state))

    def fill_up(self, num_chunks: int) -> None:
        """Keep a state without contents for each chunk that has left none, for simulations of a part of the chunks."""
        state = next(iter(self._values.values()), None)
        if state is None:
            return
        for number in range(1, num_chunks + 1):
            self._values.setdefault(number, torch.empty_like(state))

    def take_gradient(self, number: int) -> Tensor | None:
        """Return the gradient of the state with which a chunk has begun.

        Raises `LossContractError` if the layer has not read it, as where a kernel begins with zeros.
        """
        leaf = self.leaves.pop(number, None)
        if leaf is not None and leaf.grad is None:
            raise LossContractError(f"{STATES}, one of which does not go on from the state that it is given")
        return None if leaf is None else leaf.grad


class ChunkStates:
    """The states of all layers of one sample."""

    def __init__(self, running: Any) -> None:
        self.running = running
        self.kept: list[KeptState] = []
        self.final: list[tuple[KeptState, Tensor]] = []  # that the running chunk has left, with their graph
        self.num_written = 0  # by the running chunk

    def leaves(self) -> list[Tensor]:
        """Return the states with which the running chunk has begun."""
        number = self.running.chunk.number
        return [state.leaves[number] for state in self.kept if number in state.leaves]

    def shorten(self, placed: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Take the token that the next chunk holds too out of a model's inputs."""
        self.final.clear()
        self.num_written = 0
        num_tokens = self.running.chunk.stop - self.running.chunk.start
        if self.running.num_forwards > 1:
            raise LossContractError(f"{STATES}, which the loss calls twice; let the loss call it once")
        if num_tokens == 1:
            raise LossContractError(f"{STATES}, of which chunks are of one token; raise max_microbatch_tokens to 3")
        if self.running.chunk.is_last:
            return placed, named

        def cut_off(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or num_tokens + 1 not in leaf.shape[1:]:
                return leaf
            return leaf.narrow(leaf.shape[1:].index(num_tokens + 1) + 1, 0, num_tokens)

        return tuple(map(cut_off, placed)), {name: cut_off(value) for name, value in named.items()}

    def lengthen(self, _: nn.Module, __: Any, output: Any) -> Any:
        """Add zeros for the token that was left out, and let the gradient of later chunks reach the states."""
        chunk = self.running.chunk
        num_tokens = chunk.stop - chunk.start
        if torch.is_grad_enabled():
            if self.num_written != len(self.final):
                raise LossContractError(f"{STATES} and recomputes activations; turn that off")
            output = self._attach(output)

        def fill_up(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.ndim < 3 or leaf.shape[1] != num_tokens:
                return leaf
            return F.pad(leaf, (*(0, 0) * (leaf.ndim - 2), 0, 1))

        return output if chunk.is_last else each_leaf(output, fill_up)

    def _attach(self, output: Any) -> Any:
        """Return the output, each tensor of which lets the gradient of later chunks reach the states."""
        tensors: dict[int, Tensor] = {id(output[0]): output[0]}

        def collect(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                tensors[id(leaf)] = leaf
            return leaf

        each_leaf(output, collect)
        attached: Any = _Attach.apply(self, len(tensors), *tensors.values(), *(state for _, state in self.final))
        self.running.source = id(self) if attached[0].requires_grad else None
        replacements: dict[int, Any] = dict(zip(tensors, attached, strict=True))

        def replaced(leaf: Any) -> Any:
            return replacements.get(id(leaf), leaf)

        return each_leaf(output, replaced)


class _Attach(torch.autograd.Function):
    """The outputs of a chunk, whose backward also hands on the gradient of the states that the chunk has left."""

    @staticmethod
    def forward(ctx: Any, states: ChunkStates, num_outputs: int, *tensors: Tensor) -> Any:  # pyright: ignore
        ctx.set_materialize_grads(False)
        ctx.kept, ctx.states, ctx.chunk = [state for state, _ in states.final], states, states.running.chunk
        return tuple(output.view_as(output) for output in tensors[:num_outputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore
        ctx.states.running.note_backward(ctx.chunk, ctx.states)
        return None, None, *gradients, *(state.take_gradient(ctx.chunk.number + 1) for state in ctx.kept)


class KeepsStates:
    """The states of one layer, as a layer of a cache of transformers."""

    record_past = False

    def keep_states(self, states: ChunkStates, num_states: int) -> None:
        """Set up so many convolutions and as many other states."""
        self._states = states
        self.number_of_states = num_states
        self._convolutions = [KeptState(states) for _ in range(num_states)]
        self._recurrent = [KeptState(states) for _ in range(num_states)]
        self._widths: dict[int, int] = {}

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """True for each state, but in the first chunk."""
        has_previous: bool = self._states.running.chunk.number > 0
        return dict.fromkeys(range(self.number_of_states), has_previous)

    @property
    def conv_states(self) -> dict[int, Tensor | None]:
        """The last inputs of each convolution, [B, C, width]."""
        return {index: state.read() for index, state in enumerate(self._convolutions)}

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:
        """The other states."""
        return {index: state.read() for index, state in enumerate(self._recurrent)}

    @torch.compiler.disable
    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Return the inputs [B, C, width + T] of a convolution, those of the chunk before it first."""
        width = self._widths.setdefault(state_idx, conv_kernel_size or conv_states.shape[-1])
        earlier = self._convolutions[state_idx].read()
        if earlier is not None:
            inputs = torch.cat([earlier, conv_states], dim=-1)
        else:
            inputs = F.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        self._convolutions[state_idx].write(inputs[..., -width:])
        return inputs

    @torch.compiler.disable
    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        """Keep the state that a chunk leaves."""
        self._recurrent[state_idx].write(recurrent_states)
        return recurrent_states
