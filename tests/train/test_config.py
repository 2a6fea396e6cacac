"""Every bad key and value of a recipe: the exact line that it gets."""

from pathlib import Path

import pytest

from megabatch import MegabatchError
from megabatch.train.config import Config
from megabatch.train.config.recipe import load_config

RECIPE = """
[model]
config = {model_type = "llama", hidden_size = 64}
[update]
global_batch_size = 8
micro_batch_size = 2
"""

DERIVED = "it is derived, never set: set update.global_batch_size and update.micro_batch_size"
OF_THE_COMMAND_LINE = {
    "--update.globl_batch_size=3": "unknown key update.globl_batch_size on the command line; the nearest key is "
    "update.global_batch_size",
    "--run.max_step=3": "unknown key run.max_step on the command line; the nearest key is run.max_steps",
    "--sync=last": "unknown key sync on the command line; the nearest key is update.sync",
    "--training.local_batch_size=3": "unknown key training.local_batch_size on the command line; "
    "here it is update.micro_batch_size",
    "--per_device_train_batch_size=3": "unknown key per_device_train_batch_size on the command line; "
    "here it is update.micro_batch_size",
    "--gradient_accumulation_steps=3": f"unknown key gradient_accumulation_steps on the command line; {DERIVED}",
    "--update.num_microbatches=3": f"unknown key update.num_microbatches on the command line; {DERIVED}",
    "--train_batch_size=3": "unknown key train_batch_size on the command line; here it is update.global_batch_size",
    "--optim.max_grad_norm=1": "unknown key optim.max_grad_norm on the command line; here it is update.max_norm",
    "--max_tokens_per_gpu=1": "unknown key max_tokens_per_gpu on the command line; here it is "
    "update.max_microbatch_tokens",
    "--update.global_batch_size=0": "update.global_batch_size is 0; it must be at least 1: "
    "change it on the command line",
    "--update.global_batch_size=-4": "update.global_batch_size is -4; it must be at least 1: "
    "change it on the command line",
    "--update.global_batch_size=many": "update.global_batch_size is 'many'; it must be a whole number: "
    "change it on the command line",
    "--update.global_batch_size=true": "update.global_batch_size is 'true'; it must be a whole number: "
    "change it on the command line",
    "--update.global_batch_size=2.5": "update.global_batch_size is '2.5'; it must be a whole number: "
    "change it on the command line",
    "--update.micro_batch_size=0": "update.micro_batch_size is 0; it must be at least 1: change it on the command line",
    "--update.micro_batch_size=-1": "update.micro_batch_size is -1; it must be at least 1: "
    "change it on the command line",
    "--update.micro_batch_size=few": "update.micro_batch_size is 'few'; it must be a whole number: "
    "change it on the command line",
    "--update.max_microbatch_tokens=0": "update.max_microbatch_tokens is 0; it must be at least 1: "
    "change it on the command line",
    "--update.sync=never": "update.sync is 'never'; it must be 'auto', 'last', 'every' or 'replica_last': "
    "change it on the command line",
    "--update.tail=keep": "update.tail is 'keep'; it must be 'step', 'drop' or 'carry': change it on the command line",
    "--update.max_norm=0": "update.max_norm is 0.0; it must be greater than 0: change it on the command line",
    "--parallel.wrapper=deepspeed": "parallel.wrapper is 'deepspeed'; it must be 'ddp', 'fsdp2' or 'replicate': "
    "change it on the command line",
    "--optim.lr=-1": "optim.lr is -1.0; it must be at least 0: change it on the command line",
    "--optim.lr=nan": "optim.lr is nan; it must be a finite number: change it on the command line",
    "--optim.betas=0.9": "optim.betas is '0.9'; it must be two numbers of at least 0 and below 1, 0.9,0.95 say: "
    "change it on the command line",
    "--optim.betas=0.9,2": "optim.betas is 2.0; it must be two numbers of at least 0 and below 1, 0.9,0.95 say: "
    "change it on the command line",
    "--run.seed=9223372036854775808": "run.seed is 9223372036854775808; it must be less than 9223372036854775808: "
    "change it on the command line",
    "--run.folder=": "run.folder is ''; it must name a folder: change it on the command line",
    "--model.name=gpt2 --model.function=a:b": "model.name and model.function set in {path}; give one of model.name "
    "(weights), model.config (fresh ones) and model.function (your own)",
    "--data.mixture=3": "data.mixture is '3' on the command line; write --data.mixture.key=value for its keys",
    "--data.mixture.code.weight=0": "data.mixture.code.weight is 0.0; it must be greater than 0: "
    "change it on the command line",
    "--data.mixture.code.wight=1": "unknown key data.mixture.code.wight on the command line; the nearest key is "
    "data.mixture.code.weight",
    "--run.profile_steps=3,x": "run.profile_steps is 'x'; it must be a whole number: change it on the command line",
    "--model_name_or_path=gpt2": "unknown key model_name_or_path on the command line; here it is model.name",
    "--data.train_file=x": "unknown key data.train_file on the command line; here it is data.path",
    "--model.config=3": "model.config is '3' on the command line; write --model.config.key=value for its keys",
    "--=3": "cannot read the argument '--=3'; write --section.key=value",
    "--model.dtype=int8": "model.dtype is 'int8'; it must be 'float32', 'float64' or 'bfloat16': "
    "change it on the command line",
    "--run.resume=maybe": "run.resume is 'maybe'; it must be a valid boolean: change it on the command line",
    "update.sync=last": "cannot read the argument 'update.sync=last'; write --section.key=value",
}
OF_A_FILE = {
    "global_batch_size = 8\nmemory = '80 bananas'\n": "update.memory is '80 bananas'; write a size with its unit, "
    "80GiB say",
    "global_batch_size = 8\nmicro_batch_size = 2\nmemory = '80GiB'\n": "update.memory is set and so is a bound; it is "
    'for update.max_microbatch_tokens = "auto": leave one out',
    "global_batch_size = 8\nmicro_batch_size = 2\nmax_microbatch_tokens = 64\n": "both update.micro_batch_size and "
    "update.max_microbatch_tokens are set in {path}; remove one of them",
    "micro_batch_size = 2\n": "update.global_batch_size is missing; set it in {path}, below [update]",
    'global_batch_size = "8"\nmicro_batch_size = 2\n': "update.global_batch_size is '8'; it must be a whole number: "
    "change it in {path}",
    "global_batch_size = true\nmicro_batch_size = 2\n": "update.global_batch_size is True; it must be a whole number: "
    "change it in {path}",
    "global_batch_size = 8.0\nmicro_batch_size = 2\n": "update.global_batch_size is 8.0; it must be a whole number: "
    "change it in {path}",
    "global_batch_size = 8\nlocal_batch_size = 2\n": "unknown key update.local_batch_size in {path}; "
    "here it is update.micro_batch_size",
    "global_batch_size = 8\n[training]\ngradient_accumulation_steps = 2\n": "unknown key "
    f"training.gradient_accumulation_steps in {{path}}; {DERIVED}",
    "global_batch_size = 8\n[optimizer]\nlr = 2\n": "unknown section [optimizer] in {path}; "
    "the nearest section is [optim]",
    "global_batch_size = 8\nmicro_batch_size = 2\n[data]\nmixture = 3\n": "data.mixture.NAME is 3 in {path}; "
    "it is a table: write [data.mixture.NAME]",
    "global_batch_size = 8\nmicro_batch_size = 2\n[data.mixture.code]\npth = 'a'\n": "unknown key "
    "data.mixture.code.pth in {path}; the nearest key is data.mixture.code.path",
    "global_batch_size = 8\nmicro_batch_size = 2\n[eval.sets.code]\nmax_samples = 0\n": "eval.sets.code.max_samples "
    "is 0; it must be at least 1: change it in {path}",
    "global_batch_size = 8\nmicro_batch_size = 2\n[data]\npath = 3\n": "data.path is 3; it must be a path, or a list "
    "of paths: change it in {path}",
    "global_batch_size = 8\nmicro_batch_size = 2\n[model]\nname = 'gpt2'\n": "{path} is not TOML: Cannot declare "
    "('model',) twice (at line 7, column 7); mend that line",
    "global_batch_size = 8\nmicro_batch_size = 2\n[loss]\nfunction = 'mine'\n": "loss.function is 'mine'; it must be "
    '"module:function" or "file.py:function": change it in {path}',
    "global_batch_size = \n": "{path} is not TOML: Invalid value (at line 5, column 21); mend that line",
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def load(recipe: Path, *arguments: str) -> Config:
    return load_config(recipe, list(arguments))


def line_of(recipe: Path, *arguments: str) -> str:
    with pytest.raises(MegabatchError) as caught:
        load(recipe, *arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("argument", "line"), OF_THE_COMMAND_LINE.items())
def test_a_bad_override_gets_its_line(recipe: Path, argument: str, line: str) -> None:
    assert line_of(recipe, *argument.split(" ")) == line.replace("{path}", str(recipe))


@pytest.mark.parametrize(("update", "line"), OF_A_FILE.items())
def test_a_bad_file_gets_its_line(recipe: Path, update: str, line: str) -> None:
    recipe.write_text(f'[model]\nconfig = {{model_type = "llama"}}\n\n[update]\n{update}')
    assert line_of(recipe) == line.format(path=recipe)


def test_a_number_beyond_python_gets_its_line(recipe: Path) -> None:
    digits = "9" * 5000
    assert line_of(recipe, f"--run.seed={digits}") == (
        f"run.seed is '{digits[:199]}...; it must be a whole number: change it on the command line"
    )
    recipe.write_text(f"[update]\nglobal_batch_size = {digits}\n")
    assert line_of(recipe) == (
        f"{recipe} has a number of thousands of digits, or is nested too deeply; write values that a key can have"
    )


def test_a_file_that_is_not_there_gets_its_line(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    assert line_of(missing) == f"no recipe {missing}; give the path of a TOML file, recipes/stdlib.toml say"
    assert line_of(tmp_path).startswith(f"cannot read {tmp_path} (")


def test_a_recipe_without_a_model_gets_its_line(recipe: Path) -> None:
    recipe.write_text("[update]\nglobal_batch_size = 8\nmicro_batch_size = 2\n")
    assert line_of(recipe) == (
        f"no model set in {recipe}; give one of model.name (weights), model.config (fresh ones) and "
        "model.function (your own)"
    )


def test_a_section_that_is_no_table_gets_its_line(recipe: Path) -> None:
    recipe.write_text("update = 3")
    line = f"update is 3 in {recipe}; it is a table: write [update] and keys below"
    assert line_of(recipe) == line


def test_both_bounds_on_the_command_line_contradict_each_other(recipe: Path) -> None:
    line = line_of(recipe, "--update.micro_batch_size=2", "--update.max_microbatch_tokens=64")
    assert line == (
        "both update.micro_batch_size and update.max_microbatch_tokens are set on the command line; remove one of them"
    )


def test_an_override_of_one_bound_replaces_the_other(recipe: Path) -> None:
    update = load(recipe, "--update.max_microbatch_tokens=64").update
    assert (update.micro_batch_size, update.max_microbatch_tokens) == (None, 64)


def test_without_a_bound_the_largest_is_asked_for(recipe: Path) -> None:
    assert load(recipe, "--update.micro_batch_size=None").update.max_microbatch_tokens == "auto"
    assert load(recipe, "--update.max_microbatch_tokens=auto").update.micro_batch_size is None


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["--update.global_batch_size=512"], 512),
        (["--update.global_batch_size", "512"], 512),
        (["--update.global-batch-size=512"], 512),
    ],
)
def test_an_override_is_written_in_any_of_the_usual_ways(recipe: Path, arguments: list[str], value: int) -> None:
    assert load(recipe, *arguments).update.global_batch_size == value


def test_overrides_have_the_types_of_their_keys(recipe: Path) -> None:
    config = load(
        recipe, "--run.resume", "--optim.betas=0.8,0.99", "--update.max_norm=None", "--run.folder=a=b",
        "--model.config.hidden_size=32", "--optim.lr=1e-4",
    )  # fmt: skip
    assert config.run.resume is True
    assert config.optim.betas == (0.8, 0.99)
    assert config.update.max_norm is None
    assert config.run.folder == "a=b"
    assert config.model.config == {"model_type": "llama", "hidden_size": 32}
    assert config.optim.lr == 1e-4
    assert load(recipe, "--run.resume=true").run.resume is True
    assert load(recipe, "--run.resume=false").run.resume is False


def test_tables_within_tables_have_their_keys(recipe: Path) -> None:
    """Names of sources are free; options take any key, whose value is read as TOML reads it."""
    config = load(
        recipe, "--data.mixture.the-code.path=x", "--eval.sets.a.path=[\"x\", \"y\"]", "--optim.options.momentum=0.9",
        "--model.freeze=a.*,b", "--run.profile_steps=3,4", "--data.mixture.the-code.weight=2",
    )  # fmt: skip
    assert config.data.mixture["the-code"].path == "x"
    assert config.data.mixture["the-code"].weight == 2.0
    assert config.eval.sets["a"].path == ["x", "y"]
    assert config.optim.options == {"momentum": 0.9}
    assert config.model.freeze == ["a.*", "b"]
    assert config.run.profile_steps == [3, 4]


def test_an_override_of_one_alternative_replaces_the_others(recipe: Path) -> None:
    recipe.write_text(f'{RECIPE}[data]\nfunction = "a:b"\n')
    config = load(recipe, "--model.name=gpt2", "--data.path=x.jsonl")
    assert (config.model.name, config.model.config) == ("gpt2", None)
    assert (config.data.path, config.data.function) == ("x.jsonl", None)


def test_a_run_is_named_after_its_recipe(recipe: Path) -> None:
    assert load(recipe).run.folder == "runs/recipe"
