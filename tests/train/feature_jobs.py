"""What ranks do in the tests of library features in recipes: some updates of a recipe, as the trainer makes them."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megabatch.train.config.parallel_layout import layout_of
from megabatch.train.config.recipe import load_config
from megabatch.train.data.load import load_data
from megabatch.train.data.updates import Updates
from megabatch.train.model.architecture import load_tokenizer
from megabatch.train.model.build import build, check_loss, in_precision
from megabatch.train.model.expert_balance import train_with_router
from megabatch.train.model.optimizer import build_learner
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.plugins import load_function
from megabatch.train.runtime.ranks import Ranks
from megabatch.verification.float64_copy import Float64WithoutDropout
from tests.train.processes import overrides

SILENT = Console(enabled=False, loss_digits=4)
ALONE = Ranks(0, 1, torch.device("cpu"))
NUM_UPDATES = 3


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(ranks: Ranks, recipe: Path, values: dict[str, Any]) -> dict[str, Tensor]:
    """Weights and buffers after three updates, and their losses."""
    config = load_config(recipe, overrides(values))
    ranks = replace(ranks, layout=layout_of(config.parallel, ranks.size))
    tokenizer = load_tokenizer(config.model)
    data = load_data(config, tokenizer, ranks, SILENT)
    updates = Updates(data, config, ranks)
    loss_fn: Any = load_function(config.loss.function, "loss.function")
    with Float64WithoutDropout():  # norms and routers of transformers round to float32 otherwise
        laid = build(config, ranks, SILENT, data.longest_tokens, tokenizer)
        check_loss(loss_fn, config, has_sets=bool(data.sets))
        loss_fn = in_precision(train_with_router(loss_fn, config, laid, updates), config.model, laid, ranks.device)
        learner = build_learner(laid, config, updates.num_updates, None)
        losses: list[float] = []
        for batch in islice(updates, NUM_UPDATES):
            torch.manual_seed(0)
            learner.forward_backward(batch, loss_fn)
            losses.append(float(learner.optim_step().loss))
    weights = {name: whole(each) for name, each in laid.base.state_dict().items()}
    return {**weights, "losses": torch.tensor(losses, dtype=torch.float64)}


def trained_ways(ranks: Ranks, recipe: Path, ways: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    return [trained(ranks, recipe, values) for values in ways]
