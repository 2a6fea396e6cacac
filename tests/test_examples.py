"""Every example runs as it stands and does what it says; every recipe is valid, and trains on data of its kind."""

import json
import math
import os
import re
import subprocess
import sys
from ast import literal_eval
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import megabatch
from megabatch.train.config.recipe import load_config
from megabatch.train.report.data import read_run
from megabatch.train.runtime.plugins import load_file
from tests.train.processes import Finished, Run, overrides
from tests.train.tokenizers_for_tests import chat_tokenizer

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
RECIPES = ROOT / "recipes"
MAX_LINES, MAX_LINES_OF = 32, {"flow_digits.py": 120, "accelerated.py": 40, "module.py": 40}
MAX_LINES_OF |= {
    "dpo.py": 55,
    "elastic_torchft.py": 60,
    "grpo.py": 170,
    "classification.py": 41,
    "masked.py": 41,
    "seq2seq.py": 40,
    "nanogpt_loop.py": 63,
}
QUICK = [
    "batching", "experts", "extension", "images", "learner", "loop", "nanogpt_loop", "own_loss", "planner",
    "several_terms", "two_towers",
]  # fmt: skip
OF_RECIPES = ["classification", "dpo", "masked", "seq2seq"]  # run by tests/train/test_loss_recipes.py
ON_RANKS = ["ddp", "fsdp2"]
IN_OTHER_LOOPS = ["trainer", "accelerated", "module"]
SECONDS = 300  # for one example, on a machine that is busy with others


@cache
def printed(*arguments: str) -> str:
    """Run Python with these arguments in the repository's folder, without a failure or warning; return its output."""
    steady = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *arguments]
    ran = subprocess.run(command, cwd=ROOT, env=os.environ | steady, capture_output=True, text=True, timeout=SECONDS)
    return good(Finished(ran.returncode, ran.stdout, ran.stderr))


def good(end: Finished) -> str:
    assert end.status == 0, end.err
    assert "Warning" not in end.err, end.err
    return end.out


@cache
def example(name: str, ranks: int = 1) -> str:
    """Run an example in processes that are forked from one that has imported torch; return the output of rank 0."""
    with TemporaryDirectory() as logs:
        ends = Run([], Path(logs), ranks, EXAMPLES / f"{name}.py").wait(SECONDS)
    first, *_ = map(good, ends)
    return first


def numbers(text: str, before: str = "", after: str = "") -> list[float]:
    """The numbers between two texts, in their order."""
    return [float(found) for found in re.findall(rf"{before}(-?\d+\.?\d*){after}", text)]


def assert_falls(losses: list[float], by: float) -> None:
    assert len(losses) > 4
    assert losses[-1] < losses[0] - by


def test_every_example_is_short_and_run_by_a_test() -> None:
    files = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    named = [*QUICK, *ON_RANKS, *IN_OTHER_LOOPS, *OF_RECIPES, "policy", "grpo", "flow_digits", "elastic_torchft"]
    assert sorted(files) == sorted(f"{name}.py" for name in named)
    assert not {name: lines for name, lines in files.items() if lines > MAX_LINES_OF.get(name, MAX_LINES)}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_needs_no_private_name_and_says_how_it_is_run(path: Path) -> None:
    text = path.read_text()
    allowed = r"train import|integrations\.|batching import"
    private = rf"(?:from|import) megabatch\.(?!{allowed})\S+|megabatch\._|\b(?:learner|gradient)\._"
    assert not re.findall(private, text)
    command = text.split('"""')[1]
    assert f"examples/{path.name}" in command or "megabatch train recipes/" in command


@pytest.mark.full
def test_a_planner_puts_one_sample_of_each_source_in_a_microbatch() -> None:
    assert "12 microbatches" in example("planner")
    assert "((0, 12), (1, 13), (2, 14)" in example("planner")


def test_a_collate_function_decides_the_width() -> None:
    assert [width % 8 for width in numbers(example("batching").splitlines()[-1])] == [0, 0, 0, 0]


def test_an_extension_sees_the_gradient_of_each_microbatch() -> None:
    update, largest = example("extension").splitlines()
    gradients = literal_eval(largest)
    assert f"{len(gradients)} microbatches" in update
    assert min(gradients) > 0


def test_the_loop() -> None:
    losses, samples = numbers(example("loop"), "loss "), numbers(example("loop"), after=" samples")
    assert_falls(losses, by=2.0)
    assert len(losses) == 14
    assert samples == [16, 16, 16, 16, 16, 16, 4] * 2  # a short end of an epoch is stepped too
    assert len(set(numbers(example("loop"), after=" microbatches"))) > 1  # unequal microbatches


@pytest.mark.full
def test_the_loop_is_run_by_its_name() -> None:
    assert printed("examples/loop.py") == example("loop")


TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"


@pytest.mark.full
@pytest.mark.parametrize("name", ON_RANKS)
def test_the_loop_on_two_ranks_has_the_losses_of_one(name: str) -> None:
    """One of them as its docstring says, and the other on ranks that are told what torchrun tells."""
    on_two = printed(*TORCHRUN, f"examples/{name}.py") if name == "ddp" else example(name, ranks=2)
    assert numbers(on_two, after=" samples on 2 ranks") == [16, 16, 16, 16, 16, 16, 4]
    expected = numbers(example("loop"), "loss ")[:7]
    assert numbers(on_two, "loss ") == pytest.approx(expected, abs=2e-3)  # float32, printed with three digits


@pytest.mark.full
@pytest.mark.parametrize("name", IN_OTHER_LOOPS)
def test_a_loop_of_another_library_learns(name: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, f"examples/{name}.py"]  # which warn of other things, each in its own way
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert ran.returncode == 0, ran.stderr
    losses = numbers(ran.stdout, r"(?:'loss': '|loss )")
    assert_falls(losses, by=0.8)


@pytest.mark.full
def test_a_loss_of_your_own() -> None:
    assert example("own_loss").startswith("exact: worst relative error of a gradient")
    assert_falls(numbers(example("own_loss"), "loss "), by=1.5)


@pytest.mark.full
def test_the_loop_of_nanogpt() -> None:
    assert_falls(numbers(example("nanogpt_loop"), "loss "), by=2.0)
    assert len(set(numbers(example("nanogpt_loop"), after=" targets"))) > 20  # unequal updates


@pytest.mark.full
def test_several_terms() -> None:
    rows = [json.loads(line.replace("'", '"')) for line in example("several_terms").splitlines()]
    assert all(row.keys() == {"text", "code", "right"} for row in rows)
    assert_falls([row["text"] for row in rows], by=0.8)
    assert all(abs(16 * row["right"] - round(16 * row["right"])) < 0.01 for row in rows)  # a share of 16 samples
    assert all(0 <= row["right"] <= 1 for row in rows)


@pytest.mark.full
def test_a_learner_that_was_saved_goes_on_as_if_never_stopped() -> None:
    steps, losses = numbers(example("learner"), "update "), numbers(example("learner"), "loss ")
    assert steps == [0, 1, 2, 3, 4, 5, 3, 4, 5]
    assert losses[3:6] == losses[6:]
    assert_falls(losses[:6], by=0.8)


@pytest.mark.full
def test_images() -> None:
    assert numbers(example("images"), after="% of held-out")[-1] > 60
    assert numbers(example("images"), "loss ")[-1] < 1.0


@pytest.mark.full
def test_docstrings_find_their_code() -> None:
    losses = numbers(example("two_towers"), "loss ")
    assert len(losses) == 20
    assert losses[0] == pytest.approx(math.log(256), abs=1.0)  # among all 256 samples of the update, not 32
    assert_falls(losses, by=1.5)


@pytest.mark.full
def test_a_policy_learns_from_rewards() -> None:
    right = numbers(example("policy"), after="% right")
    assert len(right) == 200
    assert sum(right[:5]) / 5 < 15
    assert sum(right[-20:]) / 20 > 60
    rollouts = numbers(example("policy"), after=" rollouts")
    assert all(num % 512 == 0 for num in rollouts)
    assert len(set(rollouts)) > 1  # more than one call in some updates


@pytest.mark.full
def test_groups_of_answers_are_compared(tmp_path: Path) -> None:
    told = printed("examples/grpo.py", "token-mean", str(tmp_path / "grpo"))
    right = numbers(told, after="% right")
    assert len(right) == 120
    assert sum(right[-5:]) > sum(right[:5]) + 5 * 25
    assert {int(number) for number in numbers(told, after=" calls")} == {1, 2, 3}
    rewards = read_run(tmp_path / "grpo")["updates"]["reward"]
    assert rewards == pytest.approx([each / 100 for each in right], abs=1e-3)
    printed("-m", "megabatch", "report", str(tmp_path / "grpo"))
    assert "mean reward of rollouts" in (tmp_path / "grpo" / "report.html").read_text()


def test_the_flow_is_exact_under_any_cut() -> None:
    flow = load_file(EXAMPLES / "flow_digits.py")
    train = flow.data(num_draws=2)["train"]
    batch = [train[index] for index in (0, 1, 2, 1500, 1501)]
    assert torch.equal(batch[0]["image"], batch[3]["image"])
    assert not torch.equal(batch[0]["noise"], batch[3]["noise"])
    assert all(torch.equal(train[7][name], value) for name, value in train[7].items())  # belongs to the sample
    torch.manual_seed(0)
    model = flow.Velocity(width=16, num_layers=1, num_heads=2)
    assert megabatch.verify(model, flow.loss, batch).ok


def test_the_distance_of_pictures_is_that_of_their_distributions() -> None:
    flow = load_file(EXAMPLES / "flow_digits.py")
    some = torch.randn(500, 64, generator=torch.Generator().manual_seed(0)).double().numpy()
    assert flow.distance(some, some) == pytest.approx(0, abs=1e-6)
    assert flow.distance(some, some + 2) == pytest.approx(4 * 64)
    assert flow.distance(some, 3 * some - 2 * some.mean(0)) == pytest.approx(4 * some.var(0, ddof=1).sum())


@pytest.mark.full
def test_the_flow_learns_to_draw_digits(tmp_path: Path) -> None:
    small = {
        "run.folder": tmp_path / "run", "run.max_steps": 240, "eval.every": 240, "update.global_batch_size": 64,
        "update.micro_batch_size": 32, "model.options.width": 48, "model.options.num_layers": 2, "optim.lr": 4e-3,
    }  # fmt: skip
    recipe = str(RECIPES / "flow-digits.toml")
    good(Run(["train", recipe, *overrides(small)], tmp_path / "logs", ranks=1).wait(SECONDS)[0])
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (noise, drawn) = [row for row in rows if "eval_recognized" in row]
    assert noise["eval_recognized"] < 0.2
    assert drawn["eval_recognized"] > 0.4
    assert drawn["eval_distance"] < noise["eval_distance"] / 2
    pictures = [(tmp_path / "run" / f"samples-{step}.png").read_bytes() for step in (0, 240)]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert pictures[0] != pictures[1]


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_a_recipe_is_valid_and_says_what_it_is(path: Path) -> None:
    config = load_config(path, [])
    assert config.run.folder == f"runs/{path.stem}"
    first, *others = path.read_text().splitlines()
    assert first.startswith("# ")
    assert any(f"train recipes/{path.name}" in line for line in others)
    sources = [config.data, *config.data.mixture.values(), *config.eval.sets.values()]
    assert any(source.path or source.source for source in sources) or config.data.function
    needs_file = any(source.path is not None for source in sources)
    assert ("needs a file" in first) == needs_file  # the others run as they stand


FILES = {  # the rows that a recipe's first comment speaks of
    "gsm8k": ({"question": "What is 2 + {}?", "answer": "2 + {} = 7"}, "data.path"),
    "gsm8k-lora": ({"question": "What is 2 + {}?", "answer": "2 + {} = 7"}, "data.path"),
    "chat": (
        {"messages": [{"role": "user", "content": "Say {}."}, {"role": "assistant", "content": "Here: {}."}]},
        "data.path",
    ),
    "pretrain": ({"text": "A document of number {}, and a little more of it."}, "data.path"),
    "mixture": ({"prompt": "Say {}.", "response": "Here: {}."}, "data.mixture.own.path"),
    "stdlib-files": ({"text": "A document of number {}, which is longer than a microbatch. " * 40}, "data.path"),
}
SMALL = {"run.max_steps": 2, "update.global_batch_size": 8, "eval.num_samples": 4}


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights, and a tokenizer that has a chat template."""
    folder = chat_tokenizer(tmp_path_factory.mktemp("model"), generation_markers=True)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=512, **shape)).save_pretrained(folder)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("name", FILES)
def test_a_recipe_trains_on_the_file_that_it_asks_for(name: str, tmp_path: Path, chat_model: Path) -> None:
    row, key = FILES[name]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row).replace("{}", str(number)) + "\n" for number in range(80)))
    values = SMALL | {key: file, "run.folder": tmp_path / "run", "data.cache": tmp_path / "cache"}
    if name in ("chat", "gsm8k-lora"):
        values["model.name"] = chat_model
    if name == "pretrain":
        values |= {"data.pack_tokens": 128, "model.config.hidden_size": 64, "model.config.num_hidden_layers": 2}
    if name == "mixture":
        values |= {"eval.sets.own.path": file, "data.mixture.functions.max_samples": 40}
    (end,) = Run(["train", str(RECIPES / f"{name}.toml"), *overrides(values)], tmp_path / "logs", ranks=1).wait()
    assert end.status == 0, end.err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    assert all(row["eval_loss"] > 0 for row in rows if "eval_loss" in row)
