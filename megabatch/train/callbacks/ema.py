"""EMA: an exponential average of the weights, kept beside them, one step an update."""

import contextlib
from collections.abc import Generator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megabatch.errors import MegabatchError
from megabatch.train.model.wrap import reshard


class Average:
    """The average of a model's trainable parameters: ``decay * average + (1 - decay) * weights`` at each `update`.

    It begins with the weights that the model has, and lies over the ranks as they do. It is kept in float32 where they
    have fewer digits, for which most updates would be too small to be seen.

    Args:
        model: The model without its DDP wrapper, laid over the ranks: its own parameters are read from now on.
        decay: Share of the average that an update leaves.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        reshard(model)
        self._model, self._decay = model, decay
        self._weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._average = {name: at_least_float32(weight.detach()).clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are after an update."""
        groups: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
        for name, weight in self._weights.items():
            average, now = local(self._average[name]), at_least_float32(local(weight))
            averages, weights = groups.setdefault((average.device, average.dtype), ([], []))
            averages.append(average)
            weights.append(now)
        for averages, weights in groups.values():
            torch._foreach_lerp_(averages, weights, 1 - self._decay)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]

    @contextlib.contextmanager
    def swapped(self) -> Generator[None]:
        """Inside, the model holds the average; afterwards its own weights again, bit for bit."""
        kept = {name: local(weight).detach().clone() for name, weight in self._weights.items()}
        try:
            self._put(self._average)
            yield
        finally:
            self._put(kept)

    def state_dict(self) -> dict[str, Tensor]:
        """The average by the names of the model's parameters; no copies, so that it can be loaded into."""
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
        """Write values into the model; FSDP2 would go on with the weights that it has gathered, so it drops them."""
        for name, weight in self._weights.items():
            local(weight).copy_(local(values[name]))
        reshard(self._model)


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor, in float32 if its own type has fewer digits."""
    return tensor.float() if torch.finfo(tensor.dtype).bits < 32 else tensor
