"""FSDP2 with its shards in host memory: the bits of a run without, in updates, checkpoints and exports."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from megabatch.train.config.parallel_layout import layout_of
from megabatch.train.config.recipe import load_config
from megabatch.train.model.build import build
from megabatch.train.model.weights import fill, fresh_source
from megabatch.train.runtime.ranks import Ranks
from tests.train.conftest import NO_DROPOUT, Bench, timeless
from tests.train.contexts import SILENT
from tests.train.model_recipes import recipe
from tests.train.on_ranks import on_ranks
from tests.train.processes import overrides
from tests.train.test_library_features import CUT, trained_ways
from tests.train.test_pipeline import exported, model_of

FSDP2 = {"parallel__wrapper": "fsdp2"}
OFFLOADED = {**FSDP2, "parallel__cpu_offload": True}
HSDP = {"parallel__dp_replicate": 2, "parallel__dp_shard": 2}
LOW_BITS = {"model__dtype": "bfloat16", "optim__master": "low_bits", "update__accumulate_dtype": "float32"}
WAYS: dict[int, list[dict[str, Any]]] = {  # ranks → settings that are run with and without the key
    1: [NO_DROPOUT],
    2: [{**NO_DROPOUT, **LOW_BITS}, {**NO_DROPOUT, "update__sync": "last"}],
    3: [NO_DROPOUT],
    4: [{**NO_DROPOUT, **HSDP}],
}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", WAYS)
def test_updates_have_the_bits_of_those_without(bench: Bench, num_ranks: int, tmp_path: Path) -> None:
    ways = [{**CUT, **keys, **each} for each in WAYS[num_ranks] for keys in (FSDP2, OFFLOADED)]
    for found in on_ranks(num_ranks, tmp_path, trained_ways, bench.recipe, ways):
        for without, offloaded in zip(found[::2], found[1::2], strict=True):
            assert all(torch.equal(offloaded[name], value) for name, value in without.items())


def policies(ranks: Ranks, path: Path) -> list[bool]:
    config = load_config(path, overrides(OFFLOADED))
    ranks = replace(ranks, layout=layout_of(config.parallel, ranks.size))
    base = build(config, ranks, SILENT, None, None).base
    states = [module._get_fsdp_state() for module in base.modules() if isinstance(module, FSDPModule)]
    groups = [group for state in states for group in state._fsdp_param_groups]
    return [isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups]


@pytest.mark.slow
def test_every_layer_is_offloaded(bench: Bench, tmp_path: Path) -> None:
    assert on_ranks(1, tmp_path, policies, bench.recipe) == [[True] * 3]  # two layers and the rest


def test_only_parameters_are_in_host_memory() -> None:
    """The device is meta here, for lack of another one."""
    model = model_of("llama")
    source = fresh_source(model, recipe().model, model.config, 0)
    assert source.units is not None
    fill(model, source.units, 0, torch.device("meta"), None, torch.device("cpu"))
    assert {each.device.type for each in model.parameters()} == {"cpu"}
    assert {each.device.type for each in model.buffers()} == {"meta"}


@pytest.mark.slow
def test_a_stopped_run_resumes_to_the_bit_and_exports_the_same(bench: Bench) -> None:
    """With dropout and an average of the weights, which is evaluated; resumed without the key, then with it."""
    values = {"optim__ema_decay": 0.5, **FSDP2}
    bench.train(ranks=2, run__folder=bench.path / "whole", **values)
    bench.train(ranks=2, run__max_steps=2, **{**values, **OFFLOADED})
    assert "host memory" in (bench.folder / "plan.txt").read_text()
    bench.train(ranks=2, run__max_steps=4, run__resume=True, **values)
    bench.train(ranks=2, run__resume=True, **{**values, **OFFLOADED})
    assert timeless(bench.rows()) == timeless(bench.rows(bench.path / "whole"))
    one, other = (exported(each, each / "model") for each in (bench.path / "whole", bench.folder))
    assert all(torch.equal(other[name], value) for name, value in one.items())
