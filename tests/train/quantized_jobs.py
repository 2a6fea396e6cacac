"""What ranks do in the tests of a base in four bits: updates of a recipe's model under DDP."""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from megabatch import GradientAccumulator, MegabatchError, losses
from megabatch.train.config import Config
from megabatch.train.config.parallel_layout import layout_of
from megabatch.train.model.adapters import stir
from megabatch.train.model.build import build
from megabatch.train.model.frozen import check_same_bits, four_bits
from megabatch.train.runtime.ranks import Ranks
from tests.comm.counting import Collectives
from tests.train.adapter_jobs import SAMPLES, SILENT, lora_recipe
from tests.train.model_recipes import LLAMA

WIDE = {**LLAMA, "hidden_size": 64, "intermediate_size": 96}  # blocks of numbers end within its rows, and at them


def four_bit_recipe(layout: str | None = None, **model: Any) -> Config:
    return lora_recipe(layout, **{"config": WIDE, "quantize": "nf4", "dtype": "float32", **model})


def on_ddp(ranks: Ranks) -> dict[str, Any]:
    """The gradient of an update, its collectives, and what was said of the model."""
    config = four_bit_recipe("ddp")
    laid = build(config, replace(ranks, layout=layout_of(config.parallel, ranks.size)), SILENT, None, None)
    stir(laid.base, seed=1)
    gradient = GradientAccumulator(laid.model, micro_batch_size=1)
    own = [{"input_ids": ids, "labels": ids} for ids in SAMPLES[ranks.dp_rank :: ranks.size]]
    counted = Collectives()
    with counted:
        gradient.forward_backward(own, losses.next_token)
        gradient.finalize()
    named = dict(laid.base.named_parameters())
    frozen = {name: each.detach() for name, each in named.items() if not each.requires_grad}
    return {
        "of other scales": said_of_other_scales(laid.base, ranks),
        "gradients": {name: each.grad.clone() for name, each in named.items() if each.grad is not None},
        "trained": named.keys() - frozen.keys(),
        "collectives": counted.table(),
        "identity": laid.identity,
        "bits": {name: each.as_subclass(torch.Tensor).clone() for name, each in frozen.items()},
    }


def said_of_other_scales(model: nn.Module, ranks: Ranks) -> str | None:
    """What is raised where a rank has another scale."""
    check_same_bits(model, ranks)
    _, layer = next(four_bits(model))
    cast(Any, layer.weight).quant_state.state2.absmax[0] += ranks.rank
    try:
        check_same_bits(model, ranks)
    except MegabatchError as error:
        return str(error)
    return None
