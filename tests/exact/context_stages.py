"""Stages of a pipeline whose sequences are cut over ranks, against the whole model by plain torch on one process."""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch import GradientAccumulator, losses
from megabatch.train.callbacks.evaluation import build_terms, evaluate_set
from megabatch.train.config import EvalConfig
from megabatch.train.runtime.ranks import Ranks
from tests.exact.oracle import worst_error
from tests.train.model_recipes import recipe
from tests.train.test_pipeline import CPU, FEW, SILENT, config_of, distance, laid_of, of_all_stages, plain_of, samples
from tests.train.test_tensor import whole


def run_job(name: str) -> dict[str, Any]:
    """The errors of "family schedule wrapper kind", with sequences cut over two ranks: gradient, loss, evaluation."""
    family, schedule, wrapper, kind = name.split()
    warnings.simplefilter("ignore")  # torch's own, about gloo
    laid, ranks = laid_of(config_of(family, "float64", pp=2, cp=2, schedule=schedule, wrapper=wrapper))
    plain = plain_of(family, "float64")
    gradient = GradientAccumulator(laid.model, micro_batch_size=2)
    calls, steps = [rows_of(kind, call) for call in range(2)], list[int]()
    for rows in calls:
        gradient.forward_backward(rows[ranks.dp_rank :: ranks.dp_degree], losses.next_token)
        assert gradient.last_plan is not None
        steps.append(len(gradient.last_plan.steps))
    update = gradient.finalize()
    own = {name: whole(each.grad) for name, each in laid.base.named_parameters()}
    total, weight = torch.zeros(()), 0
    for row in (row for rows in calls for row in rows):  # each alone, as transformers keeps documents of one row apart
        inputs = {key: value[None] for key, value in row.items() if key != "labels"}
        logits = plain(**inputs).logits  # [1, T, V]
        total = total + F.cross_entropy(logits[0, :-1], row["labels"][1:], reduction="sum")
        weight += int((row["labels"][1:] != -100).sum())
    (total / weight).backward()
    error, worst = worst_error(of_all_stages(laid, own), {name: each.grad for name, each in plain.named_parameters()})
    terms, some = build_terms(EvalConfig(), losses.next_token), (calls[0] * 4)[:FEW]
    sets = [
        [evaluate_set(model, terms, some, recipe().update, each, SILENT)]
        for model, each in ((laid.run, ranks), (plain, Ranks(0, 1, CPU)))
    ]
    return {
        "error": error,
        "parameter": worst,
        "loss": abs(float(update.loss * weight / total) - 1),
        "counts": (int(update.weight), update.num_samples) == (weight, sum(map(len, calls))),
        "evaluation": distance(*sets),
        "steps": steps,
    }


def rows_of(kind: str, call: int) -> list[dict[str, Tensor]]:
    """Samples of unequal lengths, with a mask, or several documents in each row or some, whose positions begin anew."""
    found = samples(call)
    if kind == "masked":
        return [each | {"attention_mask": torch.ones_like(each["input_ids"])} for each in found]
    if kind == "ragged":
        return found
    documents = [each | {"position_ids": torch.arange(len(each["input_ids"]))} for each in found]
    packed = [
        {name: torch.cat([each[name] for each in documents[start : start + 2]]) for name in documents[0]}
        for start in range(0, len(documents), 2)
    ]
    return packed[:2] + documents[4:] if kind == "mixed" else packed
