"""What every rank does in the tests of pipelines in recipes: a model that `build` lays out, against plain torch."""

import warnings
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabatch import GradientAccumulator, Learner, Plan, losses
from megabatch.pipeline.run import Pipeline, evaluate
from megabatch.train.callbacks.checkpointing import StagedLearner
from megabatch.train.callbacks.evaluation import build_terms, evaluate_set
from megabatch.train.config import Config, EvalConfig, ParallelConfig
from megabatch.train.config.parallel_layout import layout_of
from megabatch.train.model.build import ParallelModel, build
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks
from tests.exact.oracle import answer, relative_error, worst_error
from tests.train.model_recipes import recipe
from tests.train.tensor_jobs import GPT2, LENGTHS, SIZES, exact_norm, samples, sums, whole
from tests.unit.failures.table import told

CPU, SILENT = torch.device("cpu"), Console(enabled=False, loss_digits=4)
LAYERS = 5  # which neither two stages nor four divide
UNTIED = {"tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {**GPT2, "model_type": "gpt2", "n_layer": LAYERS, **UNTIED},
    **{
        family: {**SIZES, "model_type": family, "num_hidden_layers": LAYERS, **UNTIED}
        for family in ("llama", "qwen2", "qwen3")
    },
}


MANY = 34  # samples of an evaluation, in twos: 8, 8 and 1 microbatches, or 8 and 1 on each of two data ranks
FEW = 6  # fewer microbatches than schedules need


def config_of(family: str, dtype: str, **keys: Any) -> Config:
    """A recipe of a model; ``keys`` of [parallel], and ``freeze``."""
    architecture = {key: value for key, value in MODELS[family].items() if key != "use_cache"}  # the trainer sets it
    frozen = keys.pop("freeze", [])
    config = recipe({"config": architecture, "dtype": dtype, "freeze": frozen})
    return config.model_copy(update={"parallel": ParallelConfig(**keys)})


def laid_of(config: Config) -> tuple[ParallelModel, Ranks]:
    """The model as it lies over these ranks."""
    layout = layout_of(config.parallel, dist.get_world_size())
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), CPU, layout)
    return with_exact_norms(build(config, ranks, SILENT, None, None)), ranks


def plain_of(family: str, dtype: str) -> nn.Module:
    """The same model on a process of its own."""
    return with_exact_norms(build(config_of(family, dtype), Ranks(0, 1, CPU), SILENT, None, None)).base


def with_exact_norms(laid: ParallelModel) -> ParallelModel:
    """Norms that compute in the weights' type; transformers' go through float32."""
    for module in laid.base.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(exact_norm, module)
    return laid


def of_all_stages(laid: ParallelModel, values: dict[str, Any]) -> dict[str, Any]:
    """What every stage has, by the names of the whole model."""
    model: Any = laid.model
    return {name: each for own in model.stage_ranks.exchange_objects(values) for name, each in own.items()}


def run_job(name: str) -> Any:
    """The job "kind ..."."""
    kind, _, rest = name.partition(" ")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about gloo
        return {"gradient": gradient_job, "groups": groups_job}[kind](rest)


def gradient_job(name: str) -> dict[str, Any]:
    """What is wrong with "family schedule wrapper tp stream dtype": weights, evaluations, gradient and its norm."""
    family, schedule, wrapper, tp, stream, dtype = name.split()
    laid, ranks = laid_of(
        config_of(
            family, dtype, pp=2, tp=int(tp), schedule=schedule, wrapper=None if wrapper == "plain" else wrapper,
            sequence_parallel=stream == "sequence",
        )
    )  # fmt: skip
    plain = plain_of(family, dtype)
    weights = of_all_stages(laid, {name: whole(each.detach()).clone() for name, each in laid.base.named_parameters()})
    gradient = GradientAccumulator(laid.model, micro_batch_size=2)
    found = [evaluated(laid.run, ranks, MANY)]
    planned, computed, embedded = 0, 0, tokens_embedded(laid.base)
    for call in range(len(LENGTHS)):
        before = sum(embedded)
        gradient.forward_backward(samples(call)[ranks.dp_rank :: ranks.dp_degree], losses.next_token)
        assert gradient.last_plan is not None
        planned += tokens_with_stand_ins(gradient.last_plan)
        computed += sum(embedded) - before
        found.append(evaluated(laid.run, ranks, FEW))
    update = gradient.finalize(max_norm=1e9)
    own = {name: whole(each.grad) for name, each in laid.base.named_parameters()}
    expected = answer(plain, sums, [*samples(0), *samples(1)]).gradients
    error, worst = worst_error(of_all_stages(laid, own), expected)
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in expected.values()]))
    right = {number: evaluated(plain, Ranks(0, 1, CPU), number) for number in (MANY, FEW)}
    return {
        "weights": [name for name, each in plain.named_parameters() if not torch.equal(weights.pop(name), each)],
        "more": sorted(weights),
        "error": error,
        "parameter": worst,
        "norm": relative_error(update.grad_norm, norm),
        "loss": abs(float(update.loss) / answer(plain, sums, [*samples(0), *samples(1)]).loss - 1),
        "evaluation": max(distance(each, right[number]) for each, number in zip(found, (MANY, FEW, FEW), strict=True)),
        "nothing": evaluate(cast(Pipeline, laid.model), [], losses.next_token),
        "training": all(module.training for module in laid.run.modules()),
        "computed": computed in (0, planned),  # 0: the embedding is on another stage
        "embedded": computed,
    }


def tokens_embedded(model: nn.Module) -> list[int]:
    """What goes through the embedding of tokens from here on, forward by forward; nothing where it is elsewhere."""
    seen: list[int] = []
    for name, module in model.named_modules():
        if name.endswith(("wte", "embed_tokens")):
            module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel()))
    return seen


def tokens_with_stand_ins(plan: Plan) -> int:
    """All microbatches have one shape in a pipeline."""
    num_real = sum(map(bool, plan.microbatches))
    return plan.padded_tokens // num_real * plan.num_microbatches


def groups_job(_: str) -> str:
    """What is said where one stage has vectors to train and the other has none."""
    config = config_of("gpt2", "float32", pp=2, freeze=["*.bias", "*.h.0.ln*", "*.h.1.ln*", "*.h.2.ln*"])
    laid = laid_of(config)[0]
    kinds = [[each for each in laid.base.parameters() if each.requires_grad and (each.ndim > 1) == matrix]
             for matrix in (True, False)]  # fmt: skip
    optimizer = torch.optim.SGD([{"params": each} for each in kinds if each], lr=0.1)
    learner = Learner(laid.model, optimizer, GradientAccumulator(laid.model, micro_batch_size=2))
    return told(lambda: StagedLearner(learner, laid))


def evaluated(model: nn.Module, ranks: Ranks, num_samples: int) -> list[dict[str, Any]]:
    """The rows of a set with a metric, by next tokens and by a loss of several terms."""
    with_metric = build_terms(EvalConfig(metrics="tests.train.pipeline_jobs:confidence"), losses.next_token)
    some = ([*samples(0), *samples(1)] * 4)[:num_samples]
    update = recipe().update
    return [evaluate_set(model, terms, some, update, ranks, SILENT) for terms in (with_metric, squares)]


def confidence(model: nn.Module, microbatch: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    """A metric that runs the model: how likely its likeliest tokens are."""
    likeliest = model(input_ids=microbatch["input_ids"]).logits.softmax(-1).amax(-1)  # [B, T]
    learned = microbatch["labels"] != -100
    return {"confidence": (likeliest[learned].sum(), int(learned.sum()))}


def squares(model: nn.Module, microbatch: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    """A loss of two terms, and a metric among them that is no part of it."""
    logits = model(microbatch["input_ids"]).logits  # [B, T, V]
    learned = microbatch["labels"] != -100  # [B, T]
    per_token = logits.square().sum(-1)[learned]
    return {
        "square": (per_token.sum(), int(learned.sum())),
        "first": (logits[:, 0, 0].abs().sum(), len(logits)),
        "largest": (per_token.detach().sqrt().sum(), int(learned.sum())),
    }


def distance(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> float:
    """The largest relative difference of their numbers; infinite where keys differ."""
    if [each.keys() for each in rows] != [each.keys() for each in expected]:
        return float("inf")
    pairs = [(row[key], other[key]) for row, other in zip(rows, expected, strict=True) for key in row if key != "set"]
    return max(abs(one - other) / (abs(other) or 1.0) for one, other in pairs)
