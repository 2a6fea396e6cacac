"""Experts of a recipe dealt out over ranks: one process's weights, losses, checkpoints and export."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megabatch.train.checkpoints.export import export
from megabatch.train.config import Config
from megabatch.train.config.parallel_layout import Layout
from megabatch.train.model.build import build
from megabatch.train.parallel.expert_ranks import FAMILIES, check_experts_of
from megabatch.train.runtime.ranks import Ranks
from tests.train.conftest import Bench
from tests.train.contexts import ALONE, SILENT
from tests.train.model_recipes import recipe
from tests.train.on_ranks import on_ranks
from tests.train.processes import Run, overrides
from tests.train.test_cli import python
from tests.unit.failures.table import line_of, names

SIZES: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 256, "num_experts_per_tok": 2,
}  # fmt: skip
LATENT = {
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 12, "kv_lora_rank": 8,
    "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "head_dim": 4,
    "num_key_value_heads": 2, "first_k_dense_replace": 1,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT,
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 64},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 12},
}
CLOSE, BFLOAT16_CLOSE = 1e-5, 1e-3  # of losses, in the types in which torch multiplies groups of experts


def model_of(family: str) -> dict[str, Any]:
    return {"model_type": family, **SIZES, **OWN[family]}


def dealt(config: Config, ranks: Ranks, ep: int = 2) -> nn.Module:
    """The recipe's model on ranks, each with some of its experts."""
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"ep": ep})})
    return build(config, replace(ranks, layout=Layout(ep=ep)), SILENT, None, None).base


def weights_on(ranks: Ranks, folder: Path) -> dict[str, list[dict[str, Tensor]]]:
    """Fresh weights of every family, and saved ones of one, put together; the experts that this rank holds."""
    found: dict[str, list[dict[str, Tensor]]] = {}
    for family in FAMILIES:
        saved = [{"name": str(folder / family)}] if family == "mixtral" else []
        for keys in ({"config": model_of(family)}, *saved):
            named = dict(dealt(recipe(keys), ranks).named_parameters())
            whole = {name: each.full_tensor().detach() for name, each in named.items()}
            local = {name: each.to_local().shape for name, each in named.items() if is_expert(each)}
            found.setdefault(family, []).append(whole | {"local": local})
    return found


def shards_on(ranks: Ranks) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]]]:
    """The weights of a model with two experts, each of them on two of four ranks, and the shapes that a rank holds."""
    model = dealt(recipe({"config": model_of("gpt_oss") | {"num_local_experts": 2}}), ranks)
    named = dict(model.named_parameters())
    held = {name: tuple(each.to_local().shape) for name, each in named.items() if is_expert(each)}
    return {name: each.full_tensor().detach() for name, each in named.items()}, held


def is_expert(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and "ep" in parameter.device_mesh.mesh_dim_names


def test_every_rank_has_its_experts_of_one_model(tmp_path: Path) -> None:
    expected: dict[str, dict[str, Tensor]] = {}
    for family in FAMILIES:
        model = build(recipe({"config": model_of(family)}), ALONE, SILENT, None, None).base
        model.save_pretrained(tmp_path / family)
        expected[family] = dict(model.named_parameters())
    for rank in on_ranks(2, tmp_path, weights_on, tmp_path):
        for family, ways in rank.items():
            for found in ways:
                local = found.pop("local")
                assert found.keys() == expected[family].keys()
                assert all(torch.equal(found[name], each) for name, each in expected[family].items()), family
                assert local
                assert all(shape[0] == 2 and ".experts." in name for name, shape in local.items())


def test_fewer_experts_than_ranks_are_cut_each(tmp_path: Path) -> None:
    model = build(recipe({"config": model_of("gpt_oss") | {"num_local_experts": 2}}), ALONE, SILENT, None, None).base
    expected = dict(model.named_parameters())
    for weights, held in on_ranks(4, tmp_path, shards_on):
        assert all(torch.equal(weights[name], each) for name, each in expected.items())
        assert held
        for name, shape in held.items():
            assert shape == (1, expected[name].shape[1] // 2, *expected[name].shape[2:]), name


FAMILIES_WITHOUT: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "vocab_size": 64, "n_embd": 16, "n_head": 2},
    "qwen2_moe": {"model_type": "qwen2_moe", **SIZES, "num_experts": 4, "moe_intermediate_size": 8,
                  "shared_expert_intermediate_size": 8},
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "no experts": (FAMILIES_WITHOUT["gpt2"], 2, "the experts of a model of type gpt2 … take one of deepseek_v3, gpt"),
    "another family": (FAMILIES_WITHOUT["qwen2_moe"], 2, "of a model of type qwen2_moe are not tested"),
    "a number that is not divided": (model_of("mixtral"), 3, "parallel.ep is 3 … num_local_experts = 4; set parallel"),
    "another name of the number": (model_of("deepseek_v3"), 3, "parallel.ep is 3 … n_routed_experts = 4; set"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_dealt_out_gets_its_line(name: str) -> None:
    keys, num_ranks, seen = REFUSED[name]
    model = build(recipe({"config": keys | {"num_hidden_layers": 1}}), ALONE, SILENT, None, None).base
    said = line_of(lambda: check_experts_of(model, num_ranks))
    assert names(said, seen), said


def moe(bench: Bench, family: str = "mixtral") -> Bench:
    """The bench's recipe with a mixture of experts."""
    head, _, rest = bench.recipe.read_text().partition("[model.config]")
    _, _, rest = rest.partition("[data]")
    lines = "\n".join(f"{key} = {value!r}" for key, value in model_of(family).items())
    head = head.replace("float64", "float32")  # in which torch multiplies groups of experts
    bench.recipe.write_text(f"{head}[model.config]\n{lines}\n\n[data]{rest}")
    return bench


def assert_losses(found: list[float], expected: list[float], close: float = CLOSE) -> None:
    assert len(found) == len(expected) > 1
    assert all(abs(one / other - 1) < close for one, other in zip(found, expected, strict=True)), (found, expected)


@pytest.mark.slow
def test_torchrun_trains_as_one_process_and_checkpoints_go_between_layouts(bench: Bench, tmp_path: Path) -> None:
    """Losses are those of one process, also of a run that goes on with other ranks for the experts."""
    whole = tmp_path / "whole"
    moe(bench).train(run__folder=whole)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "megabatch")
    values = {"parallel__ep": 2, "run__max_steps": 2}
    done = python(*torchrun, "train", str(bench.recipe), *overrides(values), folder=bench.path)
    assert done.returncode == 0, done.stderr
    assert "mesh: dp_shard 1 x ep 2\n" in done.stdout
    assert "experts of 2 layers are dealt out over 2 ranks\n" in done.stdout
    bench.train(run__max_steps=4, run__resume=True)
    bench.train(ranks=2, parallel__ep=2, run__resume=True)
    assert_losses(bench.losses(), bench.losses(whole))
    for number, folder in enumerate((whole, bench.folder)):
        export(folder, tmp_path / f"model{number}", step=None)
    one, other = (load_file(tmp_path / f"model{number}" / "model.safetensors") for number in (0, 1))
    assert one.keys() == other.keys()
    assert all(torch.allclose(other[name], each, atol=1e-4) for name, each in one.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("qwen3_moe", {"model__activation_checkpointing": True, "optim__ema_decay": 0.5, "update__one_row": True}),
        ("olmoe", {"model__experts__router_loss": 0.01, "update__max_microbatch_tokens": "auto"}),
        ("gpt_oss", {"update__sync": "last"}),
        ("deepseek_v3", {"model__experts__bias_rate": 0.01, "update__sync": "gather_once"}),
    ],
)
def test_every_family_trains_with_what_goes_with_it(
    bench: Bench, tmp_path: Path, family: str, values: dict[str, Any]
) -> None:
    whole = tmp_path / "whole"
    sync = {key: value for key, value in values.items() if key != "update__sync"}
    moe(bench, family).train(run__folder=whole, run__max_steps=3, **sync)
    bench.train(ranks=2, parallel__ep=2, run__max_steps=3, **values)
    assert_losses(bench.losses(), bench.losses(whole))
    held_out = [[row["eval_loss"] for row in bench.rows(folder) if "eval_loss" in row] for folder in (None, whole)]
    assert_losses(*held_out)


@pytest.mark.slow
@pytest.mark.parametrize("values", [{"model__dtype": "bfloat16"}, {"model__compute_dtype": "bfloat16"}])
def test_bfloat16_trains_too(bench: Bench, tmp_path: Path, values: dict[str, Any]) -> None:
    """With low bits beside the weights, which lie on two meshes, and with FSDP2's casts."""
    whole = tmp_path / "whole"
    moe(bench).train(run__folder=whole, run__max_steps=4, **values)
    bench.train(ranks=2, parallel__ep=2, run__max_steps=4, **values)
    assert_losses(bench.losses(), bench.losses(whole), BFLOAT16_CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_experts", "degrees"),
    [(2, {"dp_shard": 4}), (4, {"dp_shard": 4}), (4, {"dp_shard": 4, "ep": 4}), (4, {"dp_replicate": 2})],
)
def test_copies_of_experts_are_sharded_and_replicated(
    bench: Bench, tmp_path: Path, num_experts: int, degrees: dict[str, int]
) -> None:
    whole, model = tmp_path / "whole", {"model__config__num_local_experts": num_experts}
    moe(bench).train(run__folder=whole, run__max_steps=3, **model)
    parallel = {f"parallel__{key}": degree for key, degree in ({"ep": 2} | degrees).items()}
    bench.train(ranks=4, run__max_steps=2, **parallel, **model)
    bench.train(run__max_steps=3, run__resume=True, **model)
    assert_losses(bench.losses(), bench.losses(whole))


@pytest.mark.slow
def test_ranks_of_experts_verify_the_recipe(bench: Bench, tmp_path: Path, refuse: Callable[..., str]) -> None:
    finished = Run(["verify", str(moe(bench).recipe), "--parallel.ep=2"], tmp_path / "logs", 2).wait()
    assert [rank.status for rank in finished] == [0, 0], finished[0].err
    assert "cut in several ways on 2 ranks (fsdp2)" in finished[0].out
    assert "exact: worst relative error" in finished[0].out
    assert refuse(ranks=2, parallel__ep=3).startswith("parallel.ep is 3 and 2 ranks have the shards of the model")
