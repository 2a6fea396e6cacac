"""An exponential moving average of the weights, updated after each update. See decisions/0043."""

import contextlib
from collections.abc import Generator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from megabatch.errors import MegabatchError
from megabatch.train.context import Callback, RunContext
from megabatch.train.parallel.wrap import reshard


class MovingAverage(Callback):
    """Average the weights, save the average with the checkpoint, and evaluate it in place of the weights."""

    def __init__(self, context: RunContext) -> None:
        assert context.config.optim.ema_decay is not None
        self._average = context.saved["average"] = Average(context.model.base, context.config.optim.ema_decay)
        context.evaluated_weights = self._average.swapped

    def after_update(self, context: RunContext) -> None:
        if context.values["finite"]:
            self._average.update()


class Average:
    """The average of a model's trainable parameters: ``decay * average + (1 - decay) * weights`` at each `update`.

    It starts as the model's weights and is sharded as they are. It is in float32 where their type has fewer digits:
    most updates would be too small for it.

    Args:
        model: The model without its DDP wrapper, sharded. `update` reads its parameters.
        decay: Share of the average that an update leaves.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        reshard(model)
        self._model, self._average_with = model, get_ema_multi_avg_fn(decay)
        self._weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._average = {name: at_least_float32(weight.detach()).clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        groups: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
        for name, weight in self._weights.items():
            average, now = local(self._average[name]), at_least_float32(local(weight))
            averages, weights = groups.setdefault((average.device, average.dtype), ([], []))
            averages.append(average)
            weights.append(now)
        for averages, weights in groups.values():
            self._average_with(averages, weights, 0)

    @contextlib.contextmanager
    def swapped(self) -> Generator[None]:
        """Put the average into the model, and the weights again afterwards, bit for bit."""
        weights = {name: local(weight).detach().clone() for name, weight in self._weights.items()}
        try:
            self._put(self._average)
            yield
        finally:
            self._put(weights)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the average by the names of the parameters, without copies: a checkpoint loads into it."""
        return dict(self._average)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on where `state_dict` was taken. Raises `MegabatchError` for another model's."""
        differing = sorted(state.keys() ^ self._average.keys())
        if differing:
            raise MegabatchError(
                f"the saved average and the model differ in the parameter {differing[0]}; resume with the same "
                "model.freeze and model"
            )
        with torch.no_grad():
            for name, average in self._average.items():
                average.copy_(state[name])

    @torch.no_grad()
    def _put(self, values: Mapping[str, Tensor]) -> None:
        """Write values into the model. FSDP2 drops the weights that it has gathered: they are the old ones."""
        for name, weight in self._weights.items():
            local(weight).copy_(local(values[name]))
        reshard(self._model)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return the tensor, in float32 if its own type has fewer digits."""
    return tensor.float() if torch.finfo(tensor.dtype).bits < 32 else tensor
