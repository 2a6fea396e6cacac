"""`update.long_samples`: runs whose samples are longer than a microbatch have the losses of those that fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megabatch import MegabatchError, PlanError, losses
from megabatch.simulate import Simulated, device_named, simulate, simulate_long_samples
from megabatch.train.cli import commands
from megabatch.train.config.recipe import load_config
from megabatch.train.data.stream import check_fit
from megabatch.train.plan.request import PlanRequest
from megabatch.train.plan.simulation import Simulator, build_simulator
from megabatch.train.runtime.console import Console
from tests.train.conftest import NO_DROPOUT, Bench
from tests.train.model_recipes import LLAMA, recipe
from tests.train.processes import overrides

CUT = {"update__max_microbatch_tokens": 40, "update__long_samples": "cut"}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "wrapper"), [(1, None), (2, "fsdp2")])
@pytest.mark.parametrize("streaming", [False, True])
def test_losses_are_those_of_samples_that_fit(bench: Bench, ranks: int, wrapper: str | None, streaming: bool) -> None:
    folders = [bench.path / name for name in ("whole", "cut")]
    for folder in folders:
        keys: dict[str, Any] = {"parallel__wrapper": wrapper, "run__folder": folder, **NO_DROPOUT}
        if streaming:
            keys |= {"data__streaming": True, "run__max_steps": 4, "optim__decay_steps": 4}
        bench.train(ranks=ranks, **keys, **(CUT if folder.name == "cut" else {}))
    whole, cut = (bench.losses(folder) for folder in folders)
    assert len(cut) >= 4
    assert cut == pytest.approx(whole, rel=1e-10)
    held_out = [[row["eval_loss"] for row in bench.rows(folder) if "eval_loss" in row] for folder in folders]
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-10)


def test_a_sample_that_does_not_fit_is_no_error_where_it_is_cut(bench: Bench) -> None:
    config = load_config(bench.recipe, overrides(CUT))
    check_fit("a", 150, config)
    without = load_config(bench.recipe, overrides({"update__max_microbatch_tokens": 40}))
    with pytest.raises(MegabatchError, match="has 150 tokens"):
        check_fit("a", 150, without)


def simulator_of(length_tokens: int, max_tokens: int = 64) -> Simulator:
    update = {"micro_batch_size": None, "max_microbatch_tokens": max_tokens, "long_samples": "cut"}
    request = PlanRequest(world=1, device=device_named("cpu"), memory_bytes=2**34, length_tokens=length_tokens)
    model = {"config": LLAMA | {"max_position_embeddings": 4096}}
    return build_simulator(recipe(model, update=update), request, Console(enabled=False, loss_digits=4))


def test_a_plan_counts_chunks_and_the_keys_of_the_whole_sample() -> None:
    """Keys, values and masks grow with the sample, activations do not."""
    peaks_bytes: list[int] = []
    for num_chunks in (8, 16, 32):
        simulator = simulator_of(63 * num_chunks + 1)
        (choice,) = simulator.grid.choices()
        assert (choice.micro_batch_size, choice.num_microbatches) == (1, 4 * num_chunks)  # 4 samples an update
        found = simulator.simulate(choice)
        assert found.times["forward 2"] == 4 * num_chunks - 1 + 4 * num_chunks - 4  # all but the last run twice
        peaks_bytes.append(found.peak_bytes)
    few, some, many = peaks_bytes
    assert many - some == 2 * (some - few) > 0


def simulate_chunks(config: dict[str, Any], length_tokens: int, num_microbatches: int) -> Simulated:
    def make_model(_: Any) -> Any:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))

    def run(loss_fn: Any) -> Simulated:
        return simulate(
            make_model,
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            lambda: dict.fromkeys(("input_ids", "labels"), torch.zeros(1, 64, dtype=torch.long)),
            loss_fn,
            num_microbatches=num_microbatches,
            device="cpu",
        )

    return simulate_long_samples(length_tokens, 64, losses.next_token, run)


def test_a_simulation_counts_the_states_of_each_chunk() -> None:
    config = {
        "model_type": "mamba2", "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4,
        "head_dim": 32, "state_size": 16, "n_groups": 1, "chunk_size": 16, "conv_kernel": 4,
    }  # fmt: skip
    few, many = (simulate_chunks(config, 63 * num_chunks + 1, num_chunks).peak_bytes for num_chunks in (4, 8))
    num_inputs = 4 * 32 + 2 * 16  # of a convolution: those of the heads, and B and C
    assert many - few == 4 * 2 * 4 * (num_inputs * 4 + 4 * 32 * 16)  # chunks, layers, bytes


@pytest.mark.parametrize(
    ("length_tokens", "num_microbatches", "why"),
    [(60, 1, "is not cut into chunks of 64"), (600, 1, "run simulates 1 microbatches")],
)
def test_a_simulation_of_too_few_chunks_is_refused(length_tokens: int, num_microbatches: int, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        simulate_chunks(LLAMA | {"max_position_embeddings": 4096}, length_tokens, num_microbatches)


def test_a_plan_of_samples_that_fit_has_no_chunks() -> None:
    simulator = simulator_of(60)
    assert simulator.sample.num_chunks == 1
    assert simulator.sample.uncut_tokens is None
    assert {choice.recompute for choice in simulator.grid.choices()} == {False}  # which long_samples excludes


def test_a_model_that_does_not_run_in_chunks_is_named_by_the_key(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mamba.toml"
    text = bench.recipe.read_text()
    start, end = text.index("[model.config]"), text.index("[data]")
    model = '[model.config]\nmodel_type = "mamba"\nvocab_size = 384\nhidden_size = 16\nnum_hidden_layers = 1\n\n'
    path.write_text(text[:start] + model + text[end:])
    assert commands.run(["train", str(path), *overrides(CUT)]) == 2
    assert "update.long_samples is given and " in capsys.readouterr().err
