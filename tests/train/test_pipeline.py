"""A recipe whose layers are dealt out over ranks: the same weights, gradients, evaluations, runs and checkpoints."""

import warnings
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from megabatch import GradientAccumulator, Learner, MegabatchError, Plan, losses
from megabatch.pipeline.run import Pipeline, evaluate
from megabatch.planning.dealing import plan
from megabatch.train.callbacks.checkpointing import StagedLearner
from megabatch.train.callbacks.evaluation import build_terms, evaluate_set, split_set
from megabatch.train.callbacks.messages import fill_up
from megabatch.train.checkpoints.export import export
from megabatch.train.config import Config, EvalConfig, ParallelConfig, UpdateConfig
from megabatch.train.config.parallel_layout import Layout, layout_of
from megabatch.train.model.build import ParallelModel, build
from megabatch.train.parallel.pipeline_stages import deal_layers, parts_of, per_rank, stages_of
from megabatch.train.parallel.wrap import WrapperChoice
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks
from tests.exact.launch import launch
from tests.exact.oracle import answer, relative_error, worst_error
from tests.train.conftest import NO_DROPOUT, Bench, timeless
from tests.train.model_recipes import recipe
from tests.train.test_tensor import GPT2, SIZES, VOCABULARY, exact_norm, sums, whole
from tests.unit.failures.table import line_of, names, told

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
MODELS |= {f"tied-{family}": {**MODELS[family], "tie_word_embeddings": True} for family in ("gpt2", "llama", "qwen3")}
MODELS["deep-llama"] = {**MODELS["llama"], "num_hidden_layers": 7}
LENGTHS = ((29, 4, 28, 3, 2, 26, 3, 27, 4), (5, 12, 3, 8, 6))  # of the samples of two calls; the first in several steps
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


def with_exact_norms(parallel_model: ParallelModel) -> ParallelModel:
    """Norms that compute in the weights' type; transformers' go through float32."""
    for module in parallel_model.base.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(exact_norm, module)
    return parallel_model


def of_all_stages(parallel_model: ParallelModel, values: dict[str, Any]) -> dict[str, Any]:
    """The tensors of every stage, by the names of the whole model."""
    model: Any = parallel_model.model
    return {name: each for own in model.stage_ranks.exchange_objects(values) for name, each in own.items()}


def samples(call: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(call)
    found = [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS[call]]
    return [{"input_ids": ids, "labels": ids.where(torch.arange(len(ids)) > len(ids) // 3, -100)} for ids in found]


def run_job(name: str) -> Any:
    """The job "kind ..."."""
    kind, _, rest = name.partition(" ")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about gloo
        return {"gradient": gradient_job, "groups": groups_job}[kind](rest)


def gradient_job(name: str) -> dict[str, Any]:
    """The errors of "family schedule wrapper tp stream dtype": weights, evaluations, gradient and its norm.

    A schedule may be "Interleaved1F1B/3", for three stages on each rank.
    """
    family, schedule, wrapper, tp, stream, dtype = name.split()
    schedule, _, number = schedule.partition("/")
    parallel_model, ranks = laid_of(
        config_of(
            family, dtype, pp=2, tp=int(tp), schedule=schedule, wrapper=None if wrapper == "plain" else wrapper,
            sequence_parallel=stream == "sequence", stages_per_rank=int(number) if number else None,
        )
    )  # fmt: skip
    assert len(cast(Any, parallel_model.model).stages) == int(
        number or per_rank(ParallelConfig(pp=2, schedule=schedule))
    )
    plain = plain_of(family, dtype)
    weights = of_all_stages(
        parallel_model, {name: whole(each.detach()).clone() for name, each in parallel_model.base.named_parameters()}
    )
    gradient = GradientAccumulator(parallel_model.model, micro_batch_size=2)
    found = [evaluated(parallel_model.run, ranks, MANY)]
    planned, computed, embedded, steps = 0, 0, tokens_embedded(parallel_model.base), list[int]()
    for call in range(len(LENGTHS)):
        before = sum(embedded)
        gradient.forward_backward(samples(call)[ranks.dp_rank :: ranks.dp_degree], losses.next_token)
        assert gradient.last_plan is not None
        steps.append(len(gradient.last_plan.steps))
        planned += tokens_with_stand_ins(gradient.last_plan)
        computed += sum(embedded) - before
        found.append(evaluated(parallel_model.run, ranks, FEW))
    update = gradient.finalize(max_norm=1e9)
    own = {name: whole(each.grad) for name, each in parallel_model.base.named_parameters()}
    expected = answer(plain, sums, [*samples(0), *samples(1)]).gradients
    error, worst = worst_error(of_all_stages(parallel_model, own), expected)
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
        "nothing": evaluate(cast(Pipeline, parallel_model.model), [], losses.next_token),
        "training": all(module.training for module in parallel_model.run.modules()),
        "computed": computed in (0, planned),  # 0: the embedding is on another stage
        "embedded": computed,
        "steps": steps,
    }


def tokens_embedded(model: nn.Module) -> list[int]:
    """Tokens that go through the embedding from here on, forward by forward; none if it is elsewhere."""
    seen: list[int] = []
    for name, module in model.named_modules():
        if name.endswith(("wte", "embed_tokens")):
            module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel()))
    return seen


def tokens_with_stand_ins(plan: Plan) -> int:
    """All microbatches of a schedule step have one shape, and a dummy microbatch repeats the last real one."""
    tokens, start, (*_, last) = 0, 0, filter(None, plan.microbatches)
    for number in plan.steps:
        tokens += number * (max(plan.microbatch_tokens[start : start + number]) or plan.tokens_of(last))
        start += number
    return tokens


def groups_job(_: str) -> str:
    """The error if one stage has vectors to train and the other has none."""
    config = config_of("gpt2", "float32", pp=2, freeze=["*.bias", "*.h.0.ln*", "*.h.1.ln*", "*.h.2.ln*"])
    parallel_model = laid_of(config)[0]
    kinds = [[each for each in parallel_model.base.parameters() if each.requires_grad and (each.ndim > 1) == matrix]
             for matrix in (True, False)]  # fmt: skip
    optimizer = torch.optim.SGD([{"params": each} for each in kinds if each], lr=0.1)
    learner = Learner(parallel_model.model, optimizer, GradientAccumulator(parallel_model.model, micro_batch_size=2))
    return told(lambda: StagedLearner(learner, parallel_model))


def evaluated(model: nn.Module, ranks: Ranks, num_samples: int) -> list[dict[str, Any]]:
    """The rows of a set with a metric, by next tokens and by a loss of several terms."""
    with_metric = build_terms(EvalConfig(metrics="tests.train.test_pipeline:confidence"), losses.next_token)
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


GRADIENTS = {  # ranks → "family schedule wrapper tp stream dtype"
    2: [
        "gpt2 1F1B plain 1 whole float64",
        "gpt2 ZBVZeroBubble plain 1 whole float64",
        "llama Interleaved1F1B plain 1 whole float64",
        "qwen2 GPipe plain 1 whole float64",
        "qwen3 LoopedBFS plain 1 whole float32",
        "tied-gpt2 1F1B plain 1 whole float64",
        "tied-qwen3 Interleaved1F1B plain 1 whole float64",
        "deep-llama Interleaved1F1B/3 plain 1 whole float64",
    ],
    4: [
        "gpt2 1F1B fsdp2 1 whole float64",
        "gpt2 InterleavedZeroBubble fsdp2 1 whole float32",
        "llama DualPipeV replicate 1 whole float64",
        "gpt2 1F1B ddp 1 whole float64",
        "llama 1F1B plain 2 whole float64",
        "qwen3 InterleavedZeroBubble plain 2 sequence float64",
        "gpt2 Interleaved1F1B plain 2 sequence float64",
        "tied-gpt2 InterleavedZeroBubble fsdp2 1 whole float64",
        "tied-gpt2 1F1B ddp 1 whole float64",
        "tied-llama LoopedBFS replicate 1 whole float64",
        "tied-llama 1F1B plain 2 sequence float64",
    ],
}
JOBS = {ranks: [f"gradient {name}" for name in names] for ranks, names in GRADIENTS.items()}
JOBS[2].append("groups")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for ranks, jobs in JOBS.items():
        found |= launch(ranks, "tests.train.test_pipeline:run_job", jobs, tmp_path_factory.mktemp(f"stages{ranks}"))
    return found


def value_of(result: dict[str, Any]) -> Any:
    assert "error" not in result, result["error"]
    return result["value"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for names in GRADIENTS.values() for name in names])
def test_stages_compute_what_the_whole_model_does(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    """Evaluations stand before, between and after the calls of the update, and leave nothing behind."""
    bound = 1e-12 if name.endswith("float64") else 1e-5
    for value in map(value_of, results[f"gradient {name}"]):
        assert value["weights"] == value["more"] == value["nothing"] == []
        assert value["error"] < bound, value["parameter"]
        assert max(value["norm"], value["loss"], value["evaluation"]) < bound
        assert value["training"]
        assert value["computed"]
        assert value["steps"][0] > 1
    assert any(value["embedded"] for value in map(value_of, results[f"gradient {name}"]))


@pytest.mark.slow
def test_optimizers_that_no_checkpoint_can_hold_are_refused(results: dict[str, list[dict[str, Any]]]) -> None:
    said = {value_of(result) for result in results["groups"]}
    assert said == {
        "MegabatchError: the stages of the pipeline have 1 and 2 groups of parameters in their optimizers, or groups "
        "of other settings, which a checkpoint cannot hold; leave every stage matrices and vectors to train "
        "(model.freeze), or set parallel.pp to 1"
    }


TWO_STAGES = Ranks(0, 2, CPU, Layout(pp=2))
UNTIED_KEYS = {"model__config__tie_word_embeddings": "false", "model__config__n_layer": 4}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp": (2, {}),
    "two stages a rank": (2, {"parallel__schedule": "Interleaved1F1B"}),
    "fsdp2": (4, {"parallel__dp_shard": 2}),
    "tp": (4, {"parallel__tp": 2, "parallel__sequence_parallel": True}),
}


def numbers(rows: list[dict[str, Any]]) -> list[float]:
    keys = ("loss", "grad_norm", "weight", "eval_loss", "eval_accuracy", "num_target_tokens")
    return [row[key] for row in rows for key in keys if row.get(key) is not None]


def exported(folder: Path, to: Path) -> dict[str, torch.Tensor]:
    export(folder, to, step=None)
    return AutoModelForCausalLM.from_pretrained(to, dtype=torch.float64).state_dict()


def check_same_run(bench: Bench, layouts: dict[str, tuple[int, dict[str, Any]]], **values: Any) -> None:
    """The same numbers in metrics.jsonl, and weights that are exported, as on one process."""
    values["run__max_steps"] = 3
    bench.train(run__folder=bench.path / "plain", **values)
    reference, weights = bench.rows(bench.path / "plain"), exported(bench.path / "plain", bench.path / "plain-model")
    assert len([row for row in reference if "loss" in row]) == 3
    for name, (ranks, keys) in layouts.items():
        bench.train(ranks=ranks, run__folder=bench.path / name, parallel__pp=2, **values, **keys)
        assert numbers(bench.rows(bench.path / name)) == pytest.approx(numbers(reference), rel=1e-10), name
        for parameter, found in exported(bench.path / name, bench.path / f"{name}-model").items():
            assert torch.allclose(found, weights[parameter], rtol=1e-10, atol=1e-13), (name, parameter)


@pytest.mark.slow
def test_a_run_of_gpt2_is_that_of_one_process(bench: Bench) -> None:
    layouts = {name: LAYOUTS[name] for name in ("pp", "fsdp2")}
    check_same_run(bench, layouts, model__config__n_layer=4, **NO_DROPOUT, optim__ema_decay=0.5)


def llama(bench: Bench) -> None:
    """Let the bench train a Llama."""
    text = bench.recipe.read_text()
    lines = "\n".join(f"{key} = {value}" for key, value in {**LLAMA}.items())
    before, after = text.index("[model.config]"), text.index("[data]")
    bench.recipe.write_text(f"{text[:before]}[model.config]\n{lines}\n\n{text[after:]}")


LLAMA = {
    "model_type": '"llama"', "vocab_size": 384, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0,
    "eos_token_id": 1, "tie_word_embeddings": "false",
}  # fmt: skip


@pytest.mark.slow
def test_a_run_of_llama_is_that_of_one_process(bench: Bench) -> None:
    llama(bench)
    layouts = {name: LAYOUTS[name] for name in ("two stages a rank", "tp")}
    check_same_run(bench, layouts, model__activation_checkpointing=True)


@pytest.mark.slow
def test_a_run_over_three_axes_is_that_of_one_process(bench: Bench) -> None:
    llama(bench)
    check_same_run(bench, {"eight": (8, {"parallel__tp": 2, "parallel__dp_shard": 2})})


@pytest.mark.slow
def test_a_run_of_stages_and_cut_sequences_is_that_of_one_process(bench: Bench) -> None:
    llama(bench)
    check_same_run(bench, {"cp": (4, {"parallel__cp": 2, "parallel__schedule": "Interleaved1F1B"})})


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_never_stopped(bench: Bench, tmp_path: Path) -> None:
    """With dropout, in the middle of an epoch, to the bit."""
    values = {"parallel__pp": 2, "parallel__schedule": "Interleaved1F1B", "optim__ema_decay": 0.5, **UNTIED_KEYS}
    whole = tmp_path / "whole"
    bench.train(ranks=2, run__folder=whole, **values)
    bench.train(ranks=2, run__max_steps=3, **values)
    bench.train(ranks=2, run__resume=True, **values)
    assert len(bench.losses()) == 6
    assert timeless(bench.rows()) == timeless(bench.rows(whole))
    for one, other in zip(*(exported(each, each / "model").values() for each in (whole, bench.folder)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_a_checkpoint_of_stages_is_that_of_the_whole_model(bench: Bench) -> None:
    """Two updates in stages, two on one process, two in stages parallel_model out otherwise."""
    values = {"optim__decay_steps": 6, "optim__ema_decay": 0.5, "model__config__n_layer": 4, **NO_DROPOUT}
    bench.train(run__folder=bench.path / "whole", **values)
    bench.train(ranks=2, run__max_steps=2, parallel__pp=2, **values)
    bench.train(run__max_steps=4, run__resume=True, **values)
    bench.train(
        ranks=4, run__resume=True, parallel__pp=2, parallel__dp_shard=2, parallel__schedule="InterleavedZeroBubble",
        **values,
    )  # fmt: skip
    assert bench.losses() == pytest.approx(bench.losses(bench.path / "whole"), rel=1e-10)


@pytest.mark.slow
def test_saved_weights_packed_documents_and_a_part_that_is_frozen(bench: Bench) -> None:
    """Each stage reads its own layers; documents stay apart; the first stage's embeddings do not move."""
    bench.train(run__max_steps=1, **UNTIED_KEYS, **NO_DROPOUT)
    exported(bench.folder, bench.path / "saved")
    recipe = bench.path / "saved.toml"
    text = bench.recipe.read_text()
    recipe.write_text(text[: text.index("[model.config]")] + text[text.index("[data]") :])
    values = {
        "recipe": recipe, "model__name": bench.path / "saved", "model__tokenizer": "bytes",
        "model__freeze": '["*.wpe.*", "*.h.0.*"]', "data__pack_tokens": 200, "update__global_batch_size": 3,
        "run__max_steps": 3,
    }  # fmt: skip
    found = {}
    for name, ranks, keys in (("one", 1, {}), ("stages", 2, {"parallel__pp": 2})):
        bench.train(ranks=ranks, run__folder=bench.path / name, **keys, **values)
        assert "documents are isolated" in (bench.path / name / "plan.txt").read_text()
        found[name] = numbers(bench.rows(bench.path / name))
    assert found["stages"] == pytest.approx(found["one"], rel=1e-10)


def test_a_set_stays_under_the_cap_when_it_is_filled_up() -> None:
    some = [{"input_ids": torch.ones(length, dtype=torch.long)} for length in (3, 3, 3, 3, 50, 3, 3)]
    update = UpdateConfig(global_batch_size=4, max_microbatch_tokens=100)
    alone, staged = (split_set(some, update, ranks, None) for ranks in (Ranks(0, 1, CPU), TWO_STAGES))
    assert max(map(len, alone.microbatches)) > 2
    assert max(map(len, staged.microbatches)) == 2


def test_the_plan_of_a_run_says_the_microbatches_that_run() -> None:
    (planned,) = plan([3, 3], micro_batch_size=2)
    filled = fill_up(replace(planned, steps=(2,)))
    assert filled.num_microbatches == 2
    assert "2 microbatches of 2, 1 of them dummy microbatches of no weight" in filled.explain()
    assert fill_up(planned) == planned


def test_layers_are_dealt_out_evenly() -> None:
    assert [len(part.layers) for part in deal_layers(5, 2)] == [3, 2]
    assert [part.layers for part in deal_layers(5, 4)] == [(0, 1), (2,), (3,), (4,)]
    assert [(part.is_first, part.is_last) for part in deal_layers(3, 3)] == [(1, 0), (0, 0), (0, 1)]


def model_of(family: str, **keys: Any) -> Any:
    sizes = {**MODELS[family], **keys}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(sizes.pop("model_type"), **sizes))


def frozen(model: nn.Module, layers: tuple[int, ...]) -> nn.Module:
    for name, parameter in model.named_parameters():
        if name.startswith(("model.embed_tokens.", *(f"model.layers.{layer}." for layer in layers))):
            parameter.requires_grad_(False)
    return model


MIXED = {"layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"], "use_sliding_window": True}


@pytest.mark.parametrize(
    ("make", "keys", "seen"),
    [
        (lambda: nn.Linear(2, 2), {}, "a Linear … leave parallel.pp out"),
        (
            lambda: model_of("tied-llama"),
            {"schedule": "DualPipeV"},
            "tie_word_embeddings is true … 'DualPipeV', which has … set parallel.schedule",
        ),
        (lambda: model_of("qwen2", **MIXED), {}, "full_attention and sliding_attention … leave parallel.pp out"),
        (lambda: model_of("gpt2", n_layer=3), {"schedule": "LoopedBFS"}, "model.config.n_layer is 3 … 4 stages … set"),
        (lambda: frozen(model_of("llama"), (0, 1, 2)), {}, "stage 0 of 2, which has the layers 0 to 2; free"),
    ],
)
def test_a_model_that_cannot_be_dealt_out_is_one_line(make: Any, keys: dict[str, Any], seen: str) -> None:
    said = line_of(lambda: parts_of(make(), config_of("llama", "float32", pp=2, **keys)))
    assert names(said, seen), said


def test_autocast_does_not_reach_stages() -> None:
    config = config_of("llama", "float32", pp=2)
    model, mixed = model_of("llama"), config.model.model_copy(update={"compute_dtype": "bfloat16"})
    with pytest.raises(MegabatchError, match=r"^model.compute_dtype is 'bfloat16' and parallel.pp is 2, whose stages"):
        stages_of(
            model, config.model_copy(update={"model": mixed}), WrapperChoice("plain", ""), TWO_STAGES, lambda: model
        )
