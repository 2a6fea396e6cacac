"""Features of the library that a recipe asks for by a key: the weights are those of an uncut run on one process."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megabatch.train.config.parallel_layout import layout_of
from megabatch.train.config.recipe import load_config
from megabatch.train.data.load import load_data
from megabatch.train.data.updates import Updates
from megabatch.train.model.architecture import load_tokenizer
from megabatch.train.model.build import build, check_loss, in_precision
from megabatch.train.model.expert_balance import train_with_router
from megabatch.train.model.optimizer import build_learner
from megabatch.train.runtime.plugins import load_function
from megabatch.train.runtime.ranks import Ranks
from megabatch.verification.float64_copy import Float64WithoutDropout
from tests.train.adapter_jobs import whole
from tests.train.conftest import Bench, timeless
from tests.train.contexts import ALONE, SILENT
from tests.train.on_ranks import on_ranks
from tests.train.processes import overrides
from tests.unit.failures.table import line_of

NUM_UPDATES = 3


def trained(ranks: Ranks, recipe: Path, values: dict[str, Any]) -> dict[str, Tensor]:
    """Weights and buffers after three updates, and their losses."""
    config = load_config(recipe, overrides(values))
    ranks = replace(ranks, layout=layout_of(config.parallel, ranks.size))
    tokenizer = load_tokenizer(config.model)
    data = load_data(config, tokenizer, ranks, SILENT)
    updates = Updates(data, config, ranks)
    loss_fn: Any = load_function(config.loss.function, "loss.function")
    with Float64WithoutDropout():  # norms and routers of transformers round to float32 otherwise
        parallel_model = build(config, ranks, SILENT, data.longest_tokens, tokenizer)
        check_loss(loss_fn, config, has_sets=bool(data.sets))
        loss_fn = in_precision(
            train_with_router(loss_fn, config, parallel_model, updates), config.model, parallel_model, ranks.device
        )
        learner = build_learner(parallel_model, config, updates.num_updates, None)
        losses: list[float] = []
        for batch in islice(updates, NUM_UPDATES):
            torch.manual_seed(0)
            learner.forward_backward(batch, loss_fn)
            losses.append(float(learner.optim_step().loss))
    weights = {name: whole(each) for name, each in parallel_model.base.state_dict().items()}
    return {**weights, "losses": torch.tensor(losses, dtype=torch.float64)}


def trained_ways(ranks: Ranks, recipe: Path, ways: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    return [trained(ranks, recipe, values) for values in ways]


UNCUT = {"update__max_microbatch_tokens": "none", "update__micro_batch_size": 8}
CUT = {"update__max_microbatch_tokens": "none", "update__micro_batch_size": 3}
ON_RANKS = {wrapper: {**CUT, "parallel__wrapper": wrapper} for wrapper in ("ddp", "fsdp2")}
JOINT = {"eval__num_samples": 0}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8,
    "num_hidden_layers": 2, "num_attention_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 0, "vocab_size": 384, "max_position_embeddings": 256,
}  # fmt: skip
OWN = """
import torch
import torch.nn.functional as F
from torch import nn
from megabatch import JointLoss, loss

def data():
    draw = torch.Generator().manual_seed(0)
    return [{name: torch.randint(1, 40, (3 + k % 5,), generator=draw) for name in ("query", "document")}
            for k in range(24)]

class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(40, 8, padding_idx=0), nn.Linear(8, 4)

    def forward(self, tokens):
        return F.normalize(self.out(self.embed(tokens).sum(1)), dim=-1)  # [B, T] -> [B, 4]

class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.document = Tower(), Tower()

    def forward(self, query, document):
        return self.query(query), self.document(document)

def both():
    return Both()

def named():
    return {"query": Tower(), "document": Tower()}

def listed():
    return [Tower(), Tower()]

def with_teacher():
    return {"query": Tower(), "document": Tower().requires_grad_(False)}

def strange():
    return {"query": 1}

def encode(model, m):
    if isinstance(model, nn.ModuleDict):
        return model["query"](m["query"]), model["document"](m["document"])
    if isinstance(model, nn.ModuleList):
        query, document = model
        return query(m["query"]), document(m["document"])
    return model(**m)

def contrast(queries, documents):
    return F.cross_entropy(queries @ documents.T, torch.arange(len(queries)), reduction="sum"), len(queries)

joint = JointLoss(encode, contrast)

@loss(weigh=lambda m: len(m["query"]))
def far(model, m):
    queries, documents = encode(model, m)
    return (queries - documents.detach().roll(1, 1)).pow(2).sum() + (documents * queries).sum(), len(queries)
"""


@pytest.fixture
def own(bench: Bench) -> dict[str, Any]:
    """Keys of a recipe of two towers."""
    path = bench.path / "own.py"
    path.write_text(OWN)
    bench.recipe.write_text(
        f"""
[model]
function = "{path}:both"
dtype = "float64"
[data]
function = "{path}:data"
[loss]
function = "{path}:far"
[update]
global_batch_size = 8
micro_batch_size = 8
[optim]
lr = 0.01
[run]
folder = "{bench.folder}"
"""
    )
    return {"path": path}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=name)


def refused(bench: Bench, values: dict[str, Any]) -> str:
    return line_of(lambda: trained(ALONE, bench.recipe, values))


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"model__experts__bias_rat": 0.1}, "model.experts.bias_rat is 0.1 ("),
        ({"model__experts__bias_rate": 0.1}, "model.experts.bias_rate is 0.1 and no module of the model has a tensor"),
        ({"model__experts__bias_name": "b"}, "model.experts.bias_name is set and model.experts.bias_rate is not"),
        ({"model__experts__router_loss": 0.1, "loss__router_loss": 0.2}, "loss.router_loss and model.experts.router_l"),
        ({"model__experts__router_loss": 0.1}, "model.experts.router_loss is 0.1 and the model has no experts"),
    ],
)
def test_what_does_not_go_together_gets_its_line(bench: Bench, values: dict[str, Any], line: str) -> None:
    assert refused(bench, values).startswith(line)


def test_a_joint_loss_is_that_of_all_samples(bench: Bench, own: dict[str, Any], tmp_path: Path) -> None:
    joint = {**JOINT, "loss__function": f"{own['path']}:joint"}
    expected = trained(ALONE, bench.recipe, {**UNCUT, **joint})
    assert_same(trained(ALONE, bench.recipe, {**CUT, **joint}), expected)
    alone = trained(ALONE, bench.recipe, {**CUT, "update__micro_batch_size": 1, **joint})
    assert_same(alone, expected)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"advice__every": 2}, "loss.function is a JointLoss, which needs all samples of an update at once, and advi"),
        (
            {"eval__num_samples": 5},
            "loss.function is a JointLoss, which an evaluation cannot sum sample by sample; set ",
        ),
    ],
)
def test_what_cuts_a_joint_loss_is_refused(
    bench: Bench, own: dict[str, Any], values: dict[str, Any], line: str
) -> None:
    assert refused(bench, {**JOINT, "loss__function": f"{own['path']}:joint", **values}).startswith(line)


@pytest.mark.slow
def test_runs_of_a_joint_loss_and_of_several_models(
    bench: Bench, refuse: Callable[..., str], own: dict[str, Any]
) -> None:
    several = {"model__function": f"{own['path']}:named"}
    values = {**JOINT, "loss__function": f"{own['path']}:joint", **several}
    bench.train(run__folder=bench.path / "whole", **values)
    bench.train(run__max_steps=2, **values)
    bench.train(run__resume=True, **values)
    assert timeless(bench.rows()) == timeless(bench.rows(bench.path / "whole"))
    bench.train(run__folder=bench.path / "of samples", optim__ema_decay=0.5, **several)
    assert sum("eval_loss" in row for row in bench.rows(bench.path / "of samples")) >= 2
    refused_line = refuse(ranks=2, run__folder=bench.path / "no", parallel__pp=2, **values)
    assert "parallel.pp is 2, and a model of your own is not cut into stages" in refused_line


@pytest.mark.parametrize("kind", ["named", "listed"])
def test_several_models_are_trained_as_parts_of_one(bench: Bench, own: dict[str, Any], kind: str) -> None:
    expected = trained(ALONE, bench.recipe, UNCUT)
    found = trained(ALONE, bench.recipe, {**CUT, "model__function": f"{own['path']}:{kind}"})
    names = {"0.": "query.", "1.": "document."} if kind == "listed" else {}
    assert_same({names.get(name[:2], name[:2]) + name[2:]: each for name, each in found.items()}, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["named", "with_teacher"])
def test_several_models_on_two_ranks(bench: Bench, own: dict[str, Any], kind: str, tmp_path: Path) -> None:
    several = {"model__function": f"{own['path']}:{kind}"}
    expected = trained(ALONE, bench.recipe, {**UNCUT, **several})
    for ranks_found in on_ranks(2, tmp_path, trained_ways, bench.recipe, [{**x, **several} for x in ON_RANKS.values()]):
        for found in ranks_found:
            assert_same(found, expected)


def test_several_that_are_no_models_get_their_line(bench: Bench, own: dict[str, Any]) -> None:
    line = refused(bench, {"model__function": f"{own['path']}:strange"})
    assert "returns a dict that is none of torch modules" in line


@pytest.fixture
def experts(bench: Bench) -> Bench:
    text = bench.recipe.read_text()
    start, end = text.index("[model.config]"), text.index("[data]")
    table = "".join(f"{key} = {value!r}\n".replace("'", '"') for key, value in DEEPSEEK.items())
    bench.recipe.write_text(f"{text[:start]}[model.config]\n{table}\n[model.experts]\nbias_rate = 0.1\n\n{text[end:]}")
    return bench


def assert_same_biases(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert_same(found, expected)
    biases = [name for name in found if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2
    assert all(expected[name].any() for name in biases)


def test_biases_of_experts_follow_the_load_of_the_update(experts: Bench) -> None:
    expected, found = (trained(ALONE, experts.recipe, values) for values in (UNCUT, CUT))
    assert_same_biases(found, expected)


def test_a_router_loss_is_asked_for_in_either_table(experts: Bench) -> None:
    keys = {"model__experts__scores": "sigmoid", "model__experts__router_loss": 0.3}
    with_loss, without = (trained(ALONE, experts.recipe, {**CUT, **each}) for each in (keys, {}))
    assert not torch.equal(with_loss["losses"], without["losses"])
