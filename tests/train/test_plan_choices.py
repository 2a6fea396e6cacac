"""What a plan chooses from, and what it refuses: without a run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megabatch import MegabatchError
from megabatch.train.config import Config
from megabatch.train.config.byte_sizes import read_bytes, read_rate
from megabatch.train.plan.grid import Choice, build_grid
from megabatch.train.plan.request import read_request, split_arguments
from megabatch.train.plan.table import command_line, launcher_words, plan_recipe
from tests.train.test_plan import LLAMA


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "llama.toml"
    path.write_text(LLAMA)
    return path


def config(**update: Any) -> Config:
    return Config.model_validate({"model": {"config": {}}, "update": update, "run": {"folder": "unused"}})


@pytest.mark.parametrize(
    ("values", "sizes", "recomputes", "fuseds"),
    [
        ({"micro_batch_size": 3}, (1, 2, 3, 4, 6), (False, True), (True, False)),
        ({"max_microbatch_tokens": 9}, (1, 2, 4, 6), (False, True), (True, False)),
    ],
)
def test_a_grid_has_every_size_that_makes_sense(
    values: dict[str, int], sizes: tuple[int, ...], recomputes: tuple[bool, ...], fuseds: tuple[bool, ...]
) -> None:
    grid = build_grid(config(global_batch_size=12, **values), set(), "fsdp2", 2)
    assert (grid.micro_batch_sizes, grid.recomputes, grid.fuseds) == (sizes, recomputes, fuseds)
    choices = grid.choices()
    assert len(choices) == len(set(choices))
    assert {choice.num_microbatches for choice in choices if choice.micro_batch_size == 4} == {2}
    assert {choice.sync for choice in choices if choice.num_microbatches == 1} == {"every"}
    for number, choice in enumerate(choices):
        better = grid.better(choice)
        assert better is None or better in choices[:number]


def test_what_the_command_line_states_stays() -> None:
    stated = {"update.micro_batch_size", "update.sync", "model.activation_checkpointing"}
    grid = build_grid(config(global_batch_size=12, micro_batch_size=3, sync="last"), stated, "fsdp2", 2)
    assert {(each.micro_batch_size, each.sync, each.recompute) for each in grid.choices()} == {(3, "last", False)}


@pytest.mark.parametrize(("cap", "sizes"), [(899, (1, 2, 4)), (150, (1,)), (50, (1,))])
def test_a_cap_that_the_command_line_states_is_kept(cap: int, sizes: tuple[int, ...]) -> None:
    values = config(global_batch_size=12, max_microbatch_tokens=cap)
    grid = build_grid(values, {"update.max_microbatch_tokens"}, "fsdp2", 2, 150)
    assert grid.micro_batch_sizes == sizes
    assert build_grid(values, set(), "fsdp2", 2, 150).micro_batch_sizes == (1, 2, 4, 6)


def test_an_override_in_two_words_is_one() -> None:
    values, overrides, _ = split_arguments(
        ["--update.sync", "last", "--world", "4", "--json", "--optim.lr=1", "--data.streaming"]
    )
    assert (values, overrides) == ({"world": "4"}, ["--update.sync=last", "--optim.lr=1", "--data.streaming"])


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (1, "megabatch"),
        (4, "torchrun --nproc-per-node 4 -m megabatch"),
        (8, "torchrun --nproc-per-node 8 -m megabatch"),
        (12, "torchrun --nnodes 2 --nproc-per-node 6 --rdzv-backend c10d"),
        (
            16,
            "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --rdzv-id megabatch",
        ),
    ],
)
def test_the_command_starts_as_many_processes(world: int, words: str) -> None:
    found = launcher_words(read_request(["--world", str(world)]))
    assert " ".join(found).startswith(words)


def test_sizes_are_read_with_their_units() -> None:
    assert read_bytes("--memory", "80GiB") == 80 * 2**30
    assert read_bytes("--memory", "1.5 gb") == 1_500_000_000
    assert read_rate("--bandwidth", "235GB/s") == 235e9
    assert read_rate("--bandwidth", "400Gbit/s") == 50e9


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["--world", "0"], "--world is '0'; it must be a whole number of at least 1"),
        (["--world"], "--world has no value; write --world VALUE"),
        (["--world", "2.5"], "--world is '2.5'; it must be a whole number of at least 1"),
        (["--memory", "80 bananas"], "--memory is '80 bananas'; write a size with its unit, 80GiB say"),
        (["--memory", "0GiB"], "--memory is '0GiB'; write a size with its unit, 80GiB say"),
        (["--memory", "1GiB"], "--memory is 1,073,741,824 bytes, and the context of a a100-80g alone takes"),
        (["--bandwidth", "fast"], "--bandwidth is 'fast'; write bytes or bits per second with their unit, 235GB/s say"),
        (["--device", "abacus"], "the device 'abacus' is not known; name one of "),
        (["--length", "1"], "--length is '1'; it must be a whole number of at least 2"),
        (["--length", "512"], "a sample has 512 tokens and the model 256 positions; raise the positions"),
        (["--chart", "plan.txt"], "--chart is 'plan.txt'; name a .png, .svg or .pdf file in a folder that is there"),
        (["--update.batch_size=3"], "unknown key update.batch_size on the command line; here it is update.micro_batch"),
        (["extra"], "cannot read the argument 'extra'; write --section.key=value"),
        (["--world", "3", "--parallel.tp=2"], "parallel.tp is 2 and there are 3 processes; take a multiple of 2"),
        (
            ["--world", "2", "--parallel.wrapper=ddp", "--parallel.dp_shard=2"],
            'parallel.wrapper is "ddp", which shards nothing',
        ),
        (["--world", "2", "--parallel.cp=2"], "parallel.cp is 2, which the plan does not simulate; plan with"),
        (["--data.max_sample_tokens=none"], "data.path is 'nowhere.jsonl', and there is no such file"),
        (["--optim.name=LBFGS"], "optim.name is 'LBFGS', which cannot be used"),
        (["--optim.name=Adafactor"], "optim.name is 'Adafactor', whose step looks at numbers, and a plan has none"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(recipe: Path, given: Sequence[str], line: str) -> None:
    with pytest.raises(MegabatchError) as caught:
        plan_recipe(recipe, given)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_without_data_the_line_says_how_to_do_without(recipe: Path) -> None:
    with pytest.raises(MegabatchError, match=r"; or give --length N, the tokens of the longest sample"):
        plan_recipe(recipe, ["--data.max_sample_tokens=none"])


def test_a_choice_needs_as_much_as_one_with_less() -> None:
    small = Choice(1, 4, "every", reshard=True, recompute=True, fused=True)
    larger = [
        replace(small, micro_batch_size=2), replace(small, recompute=False), replace(small, fused=False),
        replace(small, reshard=False), replace(small, micro_batch_size=4, num_microbatches=1),
    ]  # fmt: skip
    assert all(each.needs_as_much_as(small) for each in larger)
    assert not any(small.needs_as_much_as(each) for each in larger)


def test_a_key_that_is_chosen_is_said_once() -> None:
    asked = read_request(["--world", "2", "--update.sync=last", "--optim.lr=0.1"])
    line = command_line({"update": {"sync": "every"}}, Path("a recipe.toml"), asked)
    assert line == ("torchrun --nproc-per-node 2 -m megabatch train 'a recipe.toml' --optim.lr=0.1 --update.sync=every")
