"""Every bad key and value of a recipe: one line that names it and says what to write."""

from pathlib import Path

import pytest

from megabatch.train.config import Config
from megabatch.train.config.keys import REMOVED_KEYS
from megabatch.train.config.recipe import load_config
from tests.unit.failures.table import check_error, line_of

RECIPE = """
[model]
config = {model_type = "llama", hidden_size = 64}
[update]
global_batch_size = 8
micro_batch_size = 2
"""

OF_THE_COMMAND_LINE = {  # arguments -> what the error names
    "--update.globl_batch_size=3": "unknown key update.globl_batch_size … nearest key is update.global_batch_size",
    "--run.max_step=3": "unknown key run.max_step … run.max_steps",
    "--sync=last": "unknown key sync … update.sync",
    "--training.local_batch_size=3": "training.local_batch_size … update.micro_batch_size",
    "--per_device_train_batch_size=3": "per_device_train_batch_size … update.micro_batch_size",
    "--gradient_accumulation_steps=3": "gradient_accumulation_steps … derived, never set … update.micro_batch_size",
    "--update.num_microbatches=3": "update.num_microbatches … derived, never set",
    "--train_batch_size=3": "train_batch_size … update.global_batch_size",
    "--optim.max_grad_norm=1": "optim.max_grad_norm … update.max_norm",
    "--max_tokens_per_gpu=1": "max_tokens_per_gpu … update.max_microbatch_tokens",
    "--model_name_or_path=gpt2": "model_name_or_path … model.name",
    "--data.train_file=x": "data.train_file … data.path",
    "--data.mixture.code.wight=1": "data.mixture.code.wight … data.mixture.code.weight",
    "--update.global_batch_size=0": "update.global_batch_size is 0; it must be at least 1 … command line",
    "--update.global_batch_size=many": "update.global_batch_size is 'many'; it must be a whole number",
    "--update.global_batch_size=true": "update.global_batch_size is True; it must be a whole number",
    "--update.global_batch_size=2.5": "update.global_batch_size is 2.5; it must be a whole number",
    "--update.micro_batch_size=-1": "update.micro_batch_size is -1; it must be at least 1",
    "--update.max_microbatch_tokens=0": "update.max_microbatch_tokens is 0; it must be at least 1",
    "--update.sync=never": (
        "update.sync is 'never'; it must be 'auto', 'last', 'every', 'gather_once' or 'replica_last'"
    ),
    "--update.tail=keep": "update.tail is 'keep'; it must be 'step', 'drop' or 'carry'",
    "--update.max_norm=0": "update.max_norm is 0; it must be greater than 0",
    "--parallel.wrapper=deepspeed": "parallel.wrapper is 'deepspeed'; it must be 'ddp', 'fsdp2' or 'replicate'",
    "--optim.lr=-1": "optim.lr is -1; it must be at least 0",
    "--optim.lr=nan": "optim.lr is nan; it must be a finite number",
    "--optim.betas=0.9": "optim.betas is 0.9; it must be two numbers",
    "--optim.betas=0.9,2": "optim.betas is '0.9,2'; it must be two numbers",
    "--run.seed=9223372036854775808": "run.seed is … it must be less than 9223372036854775808",
    "--run.folder=": "run.folder is ''; it must name a folder",
    "--run.profile_steps=3,x": "run.profile_steps is 'x'; it must be a whole number",
    "--run.resume=maybe": "run.resume is 'maybe'; it must be true or false",
    "--model.dtype=int8": "model.dtype is 'int8'; it must be 'float32', 'float64' or 'bfloat16'",
    "--tracking.trackers=wanb": "tracking.trackers is 'wanb'; it must be 'wandb', 'mlflow' or 'trackio': change it on",
    "--data.mixture.code.weight=0": "data.mixture.code.weight is 0; it must be greater than 0",
    "--model.name=gpt2 --model.function=a:b": "model.name and model.function set in {path}; give one of",
    "--data.mixture=3": "data.mixture is '3' … write --data.mixture.key=value",
    "--model.config=3": "model.config is '3' … write --model.config.key=value",
    "--=3": "'--=3'; write --section.key=value",
    "update.sync=last": "'update.sync=last'; write --section.key=value",
    "--update.micro_batch_size=2 --update.max_microbatch_tokens=64": "both update.micro_batch_size … on the command",
    # keys that do not go together
    "--model.function=a:b --model.attention=sdpa": "model.function … model.attention is 'sdpa', which a model of your",
    "--model.function=a:b --parallel.cp=2": "model.function … parallel.cp is 2, and the attention … leave one of them",
    "--model.lora.r=4 --parallel.tp=2": "model.lora is set and parallel.tp is 2, whose sharding plans … leave one of",
    "--model.compute_dtype=bfloat16 --model.dtype=float64": "model.compute_dtype … 'float64', which autocast … leave",
    "--model.compile --parallel.pp=2": "model.compile is true and parallel.pp is 2, which are not tested … leave one",
    "--update.one_row --loss.function=a:b": "update.one_row is true and loss.function … one by one; leave one of them",
    "--eval.function=a:b --parallel.pp=2": "eval.function is 'a:b' and parallel.pp is 2, where no rank … leave one of",
    "--advice.every=2 --parallel.tp=2": "advice.every is 2 and parallel.tp is 2, whose ranks hold parts … leave one of",
    "--advice.every=2 --model.dtype=bfloat16": "advice.every is 2 and model.dtype is 'bfloat16' … leave one",
    "--data.look_ahead=1 --data.num_workers=2": "data.look_ahead is 1 and data.num_workers is 2 … leave one of them",
    "--optim.name=Muon --parallel.tp=2": "optim.name is 'Muon' and parallel.tp is 2, which cuts the matrices that",
    "--optim.adamw_lr=0.1": "optim.adamw_lr is 0.1, which has no effect without optim.name = Muon; set that, or leave",
    "--parallel.pp=2 --parallel.tp=2 --parallel.loss_parallel": "loss_parallel is true and parallel.pp is 2 … leave",
    "--parallel.wrapper=ddp --parallel.tp=2": "parallel.tp is 2 and parallel.wrapper is 'ddp' … \"fsdp2\" can; leave",
    "--parallel.cpu_offload": "cpu_offload is true, which has no effect without parallel.wrapper = fsdp2; set that, or",
    "--parallel.cpu_offload --parallel.wrapper=fsdp2 --parallel.tp=2": "parallel.tp is 2, which are not tested … leave",
    "--parallel.wrapper=fsdp2 --optim.name=Muon": "'Muon' and parallel.wrapper is 'fsdp2', which cuts the matrices",
    "--parallel.schedule=GPipe": "'GPipe', which has no effect without parallel.pp; set that, or leave parallel.sched",
    "--parallel.loss_parallel": "true, which has no effect without parallel.tp; set that, or leave parallel.loss_par",
    **{
        f"--parallel.ep=2 {other}": f"parallel.ep is 2 and {seen} … leave one of them out"
        for other, seen in {
            "--parallel.cp=2": "parallel.cp is 2, whose ranks share samples",
            "--parallel.tp=2": "parallel.tp is 2, whose ranks share samples",
            "--parallel.pp=2": "parallel.pp is 2, whose ranks share samples",
            "--parallel.wrapper=ddp": "parallel.wrapper is 'ddp', and experts go with fsdp2",
            "--parallel.wrapper=replicate": "parallel.wrapper is 'replicate', and experts go with fsdp2",
            "--model.function=a:b": "model.function is 'a:b', and the experts of a model of your own",
            "--update.same_bits=true": "update.same_bits is true, where an expert adds the tokens of several ranks",
            "--update.max_microbatch_tokens=64 --update.long_samples=cut": "update.long_samples is 'cut', whose ranks",
            "--update.balance=measured": "update.balance is 'measured', whose ranks wait",
            "--run.check_hardware_every=2": "run.check_hardware_every is 2, which are not tested together",
            "--advice.every=2": "advice.every is 2, which are not tested together",
            "--model.lora.r=4": "model.lora is set, which are not tested together",
            "--model.compile": "model.compile is true, which are not tested together",
            "--parallel.cpu_offload --parallel.wrapper=fsdp2": "parallel.cpu_offload is true, which are not tested",
        }.items()
    },
    **{
        f"--parallel.replicas=torchft {other}": f"parallel.replicas is 'torchft' and {seen} … leave one of them out"
        for other, seen in {
            "--parallel.tp=2": "parallel.tp is 2, whose ranks share samples",
            "--parallel.cp=2": "parallel.cp is 2, whose ranks share samples",
            "--parallel.pp=2": "parallel.pp is 2, whose ranks share samples",
            "--parallel.ep=2": "parallel.ep is 2, whose ranks share samples",
            "--parallel.wrapper=ddp": "parallel.wrapper is 'ddp', which sums over ranks by itself",
            "--parallel.wrapper=replicate": "parallel.wrapper is 'replicate', which sums over ranks by itself",
            "--parallel.dp_replicate=2": "parallel.dp_replicate is 2, and each copy of the model is a replica",
            "--update.max_microbatch_tokens=auto": "update.max_microbatch_tokens is 'auto', which each replica would",
            "--update.cost=measure": "update.cost is 'measure', which is measured on one replica",
            "--update.balance=measured": "update.balance is 'measured', which is measured on one replica",
            "--update.on_nonfinite=skip_update": "update.on_nonfinite is 'skip_update', which needs all samples",
            "--advice.every=2": "advice.every is 2, which needs all samples of an update",
            "--run.check_hardware_every=2": "run.check_hardware_every is 2, which knows the ranks of one replica",
            "--run.stuck_after=9": "run.stuck_after is 9.0, which knows the ranks of one replica",
            "--data.streaming": "data.streaming is true, whose samples have no numbers",
            "--data.num_workers=1": "data.num_workers is 1, which reads the samples of one replica ahead",
            "--data.look_ahead=1": "data.look_ahead is 1, which reads the samples of one replica ahead",
            "--run.profile_steps=[2]": "run.profile_steps is [2], and each replica would write there",
            '--tracking.trackers=["wandb"]': "tracking.trackers is ['wandb'], and each replica would write there",
            "--update.one_row": "update.one_row is true, which is not tested with it",
            "--update.max_microbatch_tokens=64 --update.long_samples=cut": "update.long_samples is 'cut', which is not",
            "--model.experts.bias_rate=0.1": "model.experts is set, which is not tested with it",
            "--model.compile": "model.compile is true, which is not tested with it",
            "--model.compile --update.shapes=2": "update.shapes is 2, which is not tested with it",
            "--parallel.cpu_offload --parallel.wrapper=fsdp2": "parallel.cpu_offload is true, which is not tested",
            "--model.lora.r=4 --model.quantize=nf4": "model.quantize is 'nf4', which is not tested with it",
        }.items()
    },
    **{
        f"--update.micro_batch_size=2 --update.same_bits=true {other}": f"update.same_bits is true and {seen} … leave"
        for other, seen in {
            "--parallel.tp=2": "parallel.tp is 2, which cuts sums of the model",
            "--parallel.cp=2": "parallel.cp is 2, which cuts sums of the model",
            "--parallel.pp=2": "parallel.pp is 2, which cuts sums of the model",
            "--update.one_row": "update.one_row is true, whose rows",
            "--model.dtype=float64": "model.dtype is 'float64', whose sums float64 rounds",
            "--run.check_hardware_every=2": "run.check_hardware_every is 2, which makes gradients in another cut",
            "--model.compute_dtype=bfloat16": "model.compute_dtype is 'bfloat16', to which FSDP2 casts",
            "--run.device=cpu --optim.options.fused=true": "optim.options.fused is true, whose bits",
        }.items()
    },
    **{
        f"--update.micro_batch_size=2 --update.cost=measure {other}": f"update.cost is 'measure' and {seen} … leave"
        for other, seen in {
            "--update.same_bits=true": "update.same_bits is true, by which bits would follow the clock",
            "--update.one_row": "update.one_row is true, which packs samples by their tokens alone",
            "--parallel.tp=2": "parallel.tp is 2, whose ranks must split",
            "--parallel.pp=2": "parallel.pp is 2, whose ranks must split",
            "--parallel.cp=2": "parallel.cp is 2, whose ranks must split",
        }.items()
    },
    **{
        f"--update.micro_batch_size=2 --update.balance=measured {other}": f"update.balance is 'measured' and {seen}"
        for other, seen in {
            "--update.same_bits=true": "update.same_bits is true, by which bits would follow the clock",
            "--update.one_row": "update.one_row is true, whose rows are dealt one by one",
            "--parallel.cp=2": "parallel.cp is 2, where ranks wait within a microbatch",
        }.items()
    },
    "--update.balance=yes": "update.balance is 'yes'; it must be",
    "--update.max_microbatch_tokens=auto --update.cost=measure": "'measure' and … 'auto', which measures … leave",
    "--update.cost=guess": "update.cost is 'guess'; it must be 'measure'",
    **{
        f"--model.compile --update.shapes=4 {other}": f"update.shapes is 4 and {seen} … leave"
        for other, seen in {
            "--update.micro_batch_size=2 --update.same_bits=true": "update.same_bits is true, whose microbatches",
            "--run.check_hardware_every=2": "run.check_hardware_every is 2, which makes gradients in another cut",
            "--advice.every=2": "advice.every is 2, which makes an update in several calls",
            "--parallel.cp=2": "parallel.cp is 2, whose ranks must split their samples alike",
            "--loss.function=a:b": "loss.function is 'a:b', of which it is not known",
        }.items()
    },
    **{
        f"--update.max_microbatch_tokens=64 --update.long_samples=cut {other}": f"'cut' and {seen} … leave"
        for other, seen in {
            "--update.one_row": "update.one_row is true, whose samples lie in one row",
            "--update.same_bits=true": "update.same_bits is true, which chunks do not go with",
            "--parallel.tp=2": "parallel.tp is 2, whose ranks share samples",
            "--model.compile": "model.compile is true, which does not go with a cache",
            "--model.activation_checkpointing=true": "model.activation_checkpointing is",
            "--data.look_ahead=1": "data.look_ahead is 1, whose samples are not there to be cut",
            "--run.check_hardware_every=2": "run.check_hardware_every is 2, which makes gradients in another cut",
        }.items()
    },
    "--update.max_microbatch_tokens=auto --update.long_samples=cut": "'cut' and … 'auto', and the tokens of a chunk",
    "--update.micro_batch_size=2 --update.long_samples=cut": "'cut' and update.micro_batch_size is 2, and chunks have",
    "--update.shapes=4": "update.shapes is 4, which has no effect without model.compile; set that, or leave",
    "--update.max_microbatch_tokens=auto --update.same_bits=true": "true and … 'auto', which … leave",
    "--update.same_bits=proved": "update.same_bits is 'proved'; it must be",
    "--model.quantize=nf4": "model.quantize is 'nf4', which has no effect without model.lora; set that, or leave model",
    "--model.options.size=5": "model.options is set, which has no effect without model.function; set that, or leave",
    "--update.accumulate_dtype=float32": "'float32', which has no effect without model.dtype = bfloat16; set that, or",
}
OF_A_FILE = {  # what stands below [update] -> what the error names
    "global_batch_size = 8\nmemory = '80 bananas'\n": "update.memory is '80 bananas'; write a size",
    "global_batch_size = 8\nmicro_batch_size = 2\nmemory = '80GiB'\n": "'80GiB', which has no effect without update.m",
    "global_batch_size = 8\nmicro_batch_size = 2\nmax_microbatch_tokens = 64\n": "both update.micro_batch_size",
    "micro_batch_size = 2\n": "update.global_batch_size is missing; set it in {path}, below [update]",
    'global_batch_size = "8"\nmicro_batch_size = 2\n': "update.global_batch_size is '8'; … change it in {path}",
    "global_batch_size = true\nmicro_batch_size = 2\n": "update.global_batch_size is True; it must be a whole number",
    "global_batch_size = 8.0\nmicro_batch_size = 2\n": "update.global_batch_size is 8.0; it must be a whole number",
    "global_batch_size = 8\nlocal_batch_size = 2\n": "update.local_batch_size in {path} … update.micro_batch_size",
    "global_batch_size = 8\n[training]\ngradient_accumulation_steps = 2\n": "{path} … derived, never set",
    "global_batch_size = 8\n[optimizer]\nlr = 2\n": "unknown section [optimizer] in {path} … [optim]",
    "global_batch_size = 8\nmicro_batch_size = 2\n[data]\nmixture = 3\n": "write [data.mixture.NAME]",
    "global_batch_size = 8\nmicro_batch_size = 2\n[data.mixture.code]\npth = 'a'\n": "data.mixture.code.path",
    "global_batch_size = 8\nmicro_batch_size = 2\n[eval.sets.code]\nmax_samples = 0\n": "code.max_samples is 0",
    "global_batch_size = 8\nmicro_batch_size = 2\n[data]\npath = 3\n": "data.path is 3; it must be a path, or a list",
    "global_batch_size = 8\nmicro_batch_size = 2\n[model]\nname = 'gpt2'\n": "{path} is not TOML … line 7 … mend",
    "global_batch_size = 8\nmicro_batch_size = 2\n[loss]\nfunction = 'mine'\n": 'loss.function is … "module:function"',
    "global_batch_size = \n": "{path} is not TOML … line 5, column 21 … mend",
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def load(recipe: Path, *arguments: str) -> Config:
    return load_config(recipe, list(arguments))


def refusal(recipe: Path, *arguments: str) -> str:
    return line_of(load, recipe, *arguments)


@pytest.mark.parametrize(("argument", "seen"), OF_THE_COMMAND_LINE.items())
def test_a_bad_override_gets_its_line(recipe: Path, argument: str, seen: str) -> None:
    check_error(refusal(recipe, *argument.split(" ")), seen.replace("{path}", str(recipe)))


@pytest.mark.parametrize(("update", "seen"), OF_A_FILE.items())
def test_a_bad_file_gets_its_line(recipe: Path, update: str, seen: str) -> None:
    recipe.write_text(f'[model]\nconfig = {{model_type = "llama"}}\n\n[update]\n{update}')
    check_error(refusal(recipe), seen.replace("{path}", str(recipe)))


def test_a_number_beyond_python_gets_its_line(recipe: Path) -> None:
    digits = "9" * 5000
    check_error(refusal(recipe, f"--run.seed={digits}"), f"run.seed is '{digits[:199]}...; it must be a whole number")


def test_a_file_that_is_not_there_gets_its_line(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    assert refusal(missing) == f"no recipe {missing}; give the path of a TOML file, or of a run's folder"
    assert refusal(tmp_path).startswith(f"cannot read {tmp_path} (")


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("[update]\nglobal_batch_size = 8\nmicro_batch_size = 2\n", "no model set in {path}; give one of model.name"),
        ("update = 3", "update is 3 in {path}; it is a table: write [update]"),
        (f"[update]\nglobal_batch_size = {'9' * 5000}\n", "{path} has a number of thousands of digits … write"),
    ],
)
def test_a_file_that_is_no_recipe_gets_its_line(recipe: Path, text: str, seen: str) -> None:
    recipe.write_text(text)
    check_error(refusal(recipe), seen.replace("{path}", str(recipe)))


@pytest.mark.parametrize("key", REMOVED_KEYS)
def test_a_removed_key_says_what_to_do_instead(recipe: Path, key: str) -> None:
    section, _, name = key.partition(".")
    update = "global_batch_size = 8\nmicro_batch_size = 2\n"
    model = '[model]\nconfig = {model_type = "llama"}\n\n'
    recipe.write_text(f"{model}[update]\n{update}\n[{section}]\n{name} = true\n")
    check_error(refusal(recipe), f"unknown key {key} in {recipe}; {REMOVED_KEYS[key]}")


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
    words = load(recipe, "--data.text_field=true", "--run.folder=none", "--eval.watch=None").model_dump()
    assert (words["data"]["text_field"], words["run"]["folder"], words["eval"]["watch"]) == ("true", "none", None)
    optim = load(
        recipe, "--optim.ema_decay=.5", "--optim.lr=1", "--optim.betas=.9,.99", "--optim.options.eps=1e-9"
    ).optim
    assert (optim.ema_decay, optim.lr, optim.betas, optim.options) == (0.5, 1.0, (0.9, 0.99), {"eps": 1e-9})
    assert load(recipe, "--optim.ema_decay=none").optim.ema_decay is None
    assert load(recipe, "--run.seed=007").run.seed == 7
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
    own = 'function = "a:b"\noptions = {n = 1}'
    recipe.write_text(RECIPE.replace('config = {model_type = "llama", hidden_size = 64}', own))
    assert load(recipe).model.options == {"n": 1}
    config = load(recipe, "--model.name=gpt2")
    assert (config.model.name, config.model.function, config.model.options) == ("gpt2", None, {})


def test_a_run_is_named_after_its_recipe(recipe: Path) -> None:
    assert load(recipe).run.folder == "runs/recipe"
