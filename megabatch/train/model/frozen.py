"""Frozen: what of a model is not trained: by patterns, or the base of adapters, which no checkpoint has.

Whoever goes on has the base from where the run had it; a sum over the bits of each weight says that it is the same.
"""

import fnmatch
import json
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from megabatch import Learner
from megabatch.errors import MegabatchError
from megabatch.train.config import ModelConfig
from megabatch.train.model.adapters import MARK, adapt
from megabatch.train.model.quantized import four_bits, num_numbers, stored
from megabatch.train.runtime.ranks import Ranks

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number
SLICE = 2**22  # numbers that are summed at a time: the sum is over copies of eight bytes each


def choose_trained(model: nn.Module, config: ModelConfig) -> list[str]:
    """Put in adapters and freeze as the recipe says; what was done, in words."""
    words = [] if config.lora is None else [adapt(model, config)]
    return [*words, freeze(model, config.freeze)] if config.freeze else words


def freeze(model: nn.Module, patterns: list[str]) -> str:
    """Let the parameters that the patterns match stay as they are; tied ones by any of their names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matched = fnmatch.filter(parameters, pattern)
        if not matched:
            raise MegabatchError(
                f"model.freeze has {pattern!r}, which matches no parameter; the nearest name is "
                f"{get_close_matches(pattern, parameters, n=1, cutoff=0.0)[0]}"
            )
        for name in matched:
            parameters[name].requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise MegabatchError("model.freeze matches every parameter; leave some to be trained")
    num_all, num_trained = (sum(num_numbers(each) for each in some) for some in (model.parameters(), trained))
    return f"frozen: {num_all - num_trained:,} of {num_all:,} parameters"


def left_out(model: nn.Module, config: ModelConfig) -> frozenset[str]:
    """Names of the parameters that checkpoints do not have: those of a base that adapters are trained on."""
    if config.lora is None:
        return frozenset()
    return frozenset(
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad and MARK not in name
    )


def sealed(identity: dict[str, Any], model: nn.Module, names: Collection[str], ranks: Ranks) -> dict[str, Any]:
    """A model's identity, with a sum over the bits of each of these weights beside its shape; collective."""
    own = {name: sum_of_bits(each, ranks) for name, each in model.named_parameters() if name in names}
    told: list[dict[str, int]] = [json.loads(text) for text in ranks.gather(json.dumps(own))] if names else []
    described = identity["parameters"]
    added = {
        name: [*described[name], f"{sum(each[name] for each in told) % 2**64:016x}"] for name in (own if told else ())
    }
    return {**identity, "parameters": {**described, **added}}


@torch.no_grad()
def sum_of_bits(weight: Tensor, ranks: Ranks) -> int:
    """This rank's part of the sum of a weight's numbers, each read as a whole number; 0 of what others count."""
    if not is_counted(weight, ranks):
        return 0
    return sum_of([weight.to_local()] if isinstance(weight, DTensor) else stored(weight))


def sum_of(tensors: Iterable[Tensor]) -> int:
    """The sum of all of their numbers, each read as a whole number."""
    read = (each.detach().contiguous().view(BITS[each.element_size()]).flatten() for each in tensors)
    return sum(int(part.sum(dtype=torch.int64)) for each in read for part in each.split(SLICE))


def check_same_bits(model: nn.Module, ranks: Ranks) -> None:
    """Raise where ranks have made other bits of the same base, as processors of another kind may; collective."""
    own = {name: sum_of(stored(layer.weight)) for name, layer in four_bits(model)}
    told: list[dict[str, int]] = [json.loads(text) for text in ranks.gather(json.dumps(own))] if own else []
    name = next((name for name in own if len({each[name] for each in told}) > 1), None)
    if name is not None:
        raise MegabatchError(
            f"model.quantize is set and {name} has other bits on other ranks: their processors or versions of "
            "bitsandbytes differ; use machines of one kind, or leave quantize out"
        )


def is_counted(weight: Tensor, ranks: Ranks) -> bool:
    """Whether this rank is the first of those that hold the same numbers of a weight."""
    if not isinstance(weight, DTensor):
        return ranks.is_main
    mesh = weight.device_mesh
    return all(
        mesh.get_local_rank(axis) == 0 for axis, placement in enumerate(weight.placements) if placement.is_replicate()
    )


class TrainedOnly:
    """A learner that is saved without some of its model's weights, which are where they were when it goes on."""

    def __init__(self, learner: Learner, left_out: Collection[str]) -> None:
        self._learner, self._left_out = learner, left_out

    def state_dict(self) -> dict[str, Any]:
        """The learner's state, less what is left out."""
        state = self._learner.state_dict()
        return {**state, "model": {name: each for name, each in state["model"].items() if name not in self._left_out}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        whole = get_model_state_dict(self._learner.model)
        self._learner.load_state_dict({**state, "model": {**whole, **state["model"]}})
