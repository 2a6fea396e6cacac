"""An exported folder is the trained model, to the bit, or is not there."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer

from megabatch import GradientAccumulator, Learner, MegabatchError, losses
from megabatch.train.callbacks.ema import Average
from megabatch.train.checkpoints import tensor_files as checkpoint
from megabatch.train.checkpoints.export import export
from megabatch.train.checkpoints.exported_tokenizer import save_tokenizer
from megabatch.train.checkpoints.run_folder import recipe_text
from megabatch.train.config import Config, ModelConfig
from megabatch.train.model.architecture import architecture_of, load_tokenizer, silence
from megabatch.train.model.build import build
from megabatch.train.runtime.ranks import Ranks
from megabatch.train.trust import sealed
from tests.train.adapter_jobs import whole
from tests.train.contexts import ALONE, SILENT
from tests.train.model_recipes import recipe
from tests.train.on_ranks import on_ranks
from tests.train.test_checkpoint import reseal
from tests.train.tokenizers_for_tests import chat_tokenizer
from tests.unit.failures.table import line_of

TOKENS = torch.arange(24).view(2, 12)


def train(ranks: Ranks, config: Config, folder: Path, *, average: bool = False) -> dict[str, Tensor]:
    """Two updates, a checkpoint after each; the weights after the second, or their average."""
    parallel_model = build(config, ranks, SILENT, None, None)
    optimizer = torch.optim.AdamW(parallel_model.model.parameters(), lr=1e-2)
    learner = Learner(parallel_model.model, optimizer, GradientAccumulator(parallel_model.model, micro_batch_size=2))
    state: dict[str, Stateful] = {"learner": learner}
    mean = Average(parallel_model.base, 0.5)
    if average:
        state["average"] = mean
    if ranks.is_main:
        folder.mkdir(exist_ok=True)
        (folder / "config.toml").write_text(sealed(recipe_text(config)))
    ranks.barrier()
    for step in (1, 2):
        learner.forward_backward([{"input_ids": row, "labels": row} for row in TOKENS], losses.next_token)
        learner.optim_step()
        mean.update()
        checkpoint.save(folder, checkpoint.states_of(state), {"step": step}, ranks)
    weights = {name: whole(each) for name, each in parallel_model.base.state_dict().items()}
    return weights | {name: whole(each).to(weights[name].dtype) for name, each in mean.state_dict().items() if average}


def assert_exported(config: Config, weights: dict[str, Tensor], to: Path) -> None:
    """from_pretrained has the weights that were trained, and computes what the trained model does."""
    exported = AutoModelForCausalLM.from_pretrained(to).eval()
    found = exported.state_dict()
    assert found.keys() == weights.keys()
    assert [name for name in weights if not torch.equal(weights[name], found[name])] == []
    trained = build(config, ALONE, SILENT, None, None).base.eval()
    trained.load_state_dict(weights)
    assert torch.equal(exported(input_ids=TOKENS).logits, trained(input_ids=TOKENS).logits)
    assert exported.config.use_cache is True


@pytest.mark.parametrize(
    ("family", "keys"),
    [("tied llama", {}), ("gpt2", {"dtype": "bfloat16"}), ("mixtral", {}), ("llama", {"freeze": ["lm_head.*"]})],
)
def test_an_exported_model_is_the_trained_one(tmp_path: Path, family: str, keys: dict[str, Any]) -> None:
    config = recipe(keys, family=family)
    weights = train(ALONE, config, tmp_path / "run")
    said = export(tmp_path / "run", tmp_path / "out", step=None)
    assert said.startswith(
        f"wrote the weights of {tmp_path / 'run' / 'checkpoints' / 'step-2'} to {tmp_path / 'out'}: "
    )
    assert_exported(config, weights, tmp_path / "out")
    tokenizer = load_tokenizer(ModelConfig(name=str(tmp_path / "out")))
    assert isinstance(tokenizer, ByT5Tokenizer)
    assert tokenizer("ab")["input_ids"] == [100, 101, 1]


FAMILIES = [
    "llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt_neox", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "olmo2",
    "smollm3", "modernbert", "bert", "mixtral", "qwen3_moe", "deepseek_v3", "granite", "starcoder2", "cohere",
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokenizer_of_bytes_is_loaded_for_every_model_type(tmp_path: Path, family: str) -> None:
    trained = load_tokenizer(ModelConfig(config={"model_type": family}))
    with silence():
        AutoConfig.for_model(family).save_pretrained(tmp_path)
        assert save_tokenizer(trained, tmp_path) == ""
        loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("ab", "", "Grüße 🙂\n\t\x00 a  b", " x</s>y <extra_id_0><pad>"):
        ids = trained(text)["input_ids"]
        assert loaded(text)["input_ids"] == ids
        assert loaded.decode(ids) == trained.decode(ids)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert loaded.apply_chat_template(chat, tokenize=False) == trained.apply_chat_template(chat, tokenize=False)
    again = load_tokenizer(ModelConfig(name=str(tmp_path)))
    assert isinstance(again, ByT5Tokenizer)
    assert again.chat_template == trained.chat_template


def test_a_tokenizer_that_is_read_otherwise_is_a_warning(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen2").save_pretrained(tmp_path)

    base: Any = ByT5Tokenizer

    class Other(base):
        def __call__(self, text: Any, **options: Any) -> Any:
            return {"input_ids": [7]}

    assert save_tokenizer(Other(), tmp_path).startswith("AutoTokenizer reads other ids")


@pytest.mark.slow
def test_a_model_trained_in_shards_is_exported_without_its_ranks(tmp_path: Path) -> None:
    config = recipe(family="tied llama", wrapper="fsdp2")
    weights = on_ranks(2, tmp_path, train, config, tmp_path / "run")[0]
    export(tmp_path / "run", tmp_path / "out", step=None)
    assert_exported(recipe(family="tied llama"), weights, tmp_path / "out")


@pytest.mark.parametrize("keys", [{}, {"dtype": "bfloat16", "freeze": ["lm_head.*"]}])
def test_the_average_is_what_is_exported(tmp_path: Path, keys: dict[str, Any]) -> None:
    config = recipe(keys)
    averaged = train(ALONE, config, tmp_path / "run", average=True)
    assert "wrote the average of the weights of" in export(tmp_path / "run", tmp_path / "out", step=None)
    assert_exported(config, averaged, tmp_path / "out")


def test_a_pretrained_model_and_its_tokenizer_come_along(tmp_path: Path) -> None:
    start = chat_tokenizer(tmp_path / "start", generation_markers=True)
    architecture = architecture_of(recipe({"config": {**recipe().model.config, "vocab_size": 512}}).model)
    model = AutoModelForCausalLM.from_config(architecture)
    model.generation_config.max_new_tokens = 17
    model.save_pretrained(start)
    config = recipe({"name": str(start)})
    weights = train(ALONE, config, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out", step=None)
    assert_exported(config, weights, tmp_path / "out")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    one, other = (AutoTokenizer.from_pretrained(each) for each in (start, tmp_path / "out"))
    assert one.apply_chat_template(chat, tokenize=False) == other.apply_chat_template(chat, tokenize=False)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.max_new_tokens == 17


def refused(run_folder: Path, to: Path, step: int | None = None) -> str:
    before = sorted(to.parent.rglob("*"))
    line = line_of(export, run_folder, to, step=step)
    assert sorted(to.parent.rglob("*")) == before
    return line


def test_what_cannot_be_exported_gets_its_line_and_leaves_nothing(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    assert refused(run, out) == f"{run} is no folder; give the folder of a run, for example runs/stdlib"
    run.mkdir()
    assert refused(run, out).startswith(f"{run} has no config.toml, so it is no run of megabatch's; give the folder")
    train(ALONE, recipe(), run)
    line = f"{run}/checkpoints/step-7 is not there or not whole; this run has the steps 1, 2: choose with --step"
    assert refused(run, out, 7) == line
    (run / "config.toml").write_text((run / "config.toml").read_text().replace("vocab_size = 385", "vocab_size = 400"))
    line = f"{run}/checkpoints/step-2 has no model.embed_tokens.weight of shape [400, 16], which the run's config.toml"
    assert refused(run, out).startswith(line)
    (run / "config.toml").write_text((run / "config.toml").read_text().replace("vocab_size = 400", "vocab_size = 385"))
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert refused(run, out) == f"--to is {out}, which is not empty; name a folder that is new or empty"
    assert refused(run, out / "notes.txt").startswith(f"--to is {out / 'notes.txt'}, which is a file; name a folder")
    assert refused(run, out / "notes.txt" / "below").startswith(f"cannot write {out / 'notes.txt' / 'below'} (")
    (part,) = (run / "checkpoints" / "step-2").glob("*.distcp")
    part.write_bytes(part.read_bytes()[:100])
    damaged = f"{run}/checkpoints/step-2 is damaged (__0_0.distcp has 100 bytes of "
    assert refused(run, tmp_path / "new", 2).startswith(damaged)
    assert refused(run, tmp_path / "new", 2).endswith("; this run has the steps 1, 2: choose with --step")
    said = export(run, tmp_path / "new", step=None)
    assert said.startswith(f"warning: {damaged}")
    assert f"\nwrote the weights of {run}/checkpoints/step-1 to " in said
    (run / "checkpoints" / "best").write_text("step-2")
    assert "step-2, the best one, is damaged (" in export(run, tmp_path / "best", step=None)
    reseal(run / "checkpoints" / "step-2")
    assert refused(run, tmp_path / "newer").startswith(f"{run}/checkpoints/step-2 is damaged (")
    assert refused(run, tmp_path / "newer").endswith("); choose an earlier step with --step")
    (run / "checkpoints" / "step-1" / "meta.json").write_text("{}")
    (run / "checkpoints" / "step-2" / "meta.json").unlink()
    line = f"{run}/checkpoints has no whole checkpoint to resume from: step-2 (meta.json: it is not there), step-1 ("
    (run / "checkpoints" / "best").unlink()
    assert refused(run, tmp_path / "newer").startswith(line)
    shutil.rmtree(run / "checkpoints")
    assert refused(run, tmp_path / "newer").startswith(f"{run} has no checkpoint yet; export it when it has saved one")


def test_a_folder_is_exported_to_by_any_of_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(ALONE, recipe(), tmp_path / "run")
    (tmp_path / "here" / "empty").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "here" / "empty")
    monkeypatch.chdir(tmp_path / "here" / "empty")
    for here in (".", "", "../empty", str(tmp_path / "link")):
        assert refused(tmp_path / "run", Path(here)) == (
            f"--to is {Path(here)}, the folder that you are in; name a folder that is new, or another one"
        )
    monkeypatch.chdir(tmp_path / "here")
    assert refused(tmp_path / "run", Path()).startswith("--to is ., the folder that you are in; ")
    for there in ("..", "new/..", "/"):
        with pytest.raises(MegabatchError, match=r"^--to is .*; name a folder that is new"):
            export(tmp_path / "run", Path(there), step=None)
    for there, place in ((tmp_path / "link", tmp_path / "here" / "empty"), (Path("a/../b"), tmp_path / "here" / "b")):
        export(tmp_path / "run", there, step=None)
        assert (place / "model.safetensors").exists()
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["b", "empty"]


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_checkpoint_that_would_run_something_is_not_exported(tmp_path: Path) -> None:
    train(ALONE, recipe(), tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-2" / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    reseal(tmp_path / "run" / "checkpoints" / "step-2")
    line = refused(tmp_path / "run", tmp_path / "out")
    assert line.startswith(f"{tmp_path}/run/checkpoints/step-2 is damaged (UnpicklingError: .metadata names ")
    assert line.endswith(", which no checkpoint needs); choose an earlier step with --step")
    assert not (tmp_path / "ran").exists()


OWN = """
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

def linear():
    return nn.Linear(3, 3)

def llama():
    return LlamaForCausalLM(LlamaConfig(vocab_size=385, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2))
"""


def test_a_function_s_model_is_exported_if_it_can_be_saved(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    config = recipe({"function": f"{tmp_path}/own.py:llama"})
    weights = train(ALONE, config, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out", step=None)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(weights[name], exported[name]) for name in exported)
    assert not (tmp_path / "out" / "tokenizer_config.json").exists()
    text = (tmp_path / "run" / "config.toml").read_text().replace("own.py:llama", "own.py:linear")
    (tmp_path / "run" / "config.toml").write_text(sealed(text))
    assert "makes a Linear, which has no save_pretrained to export it with;" in refused(
        tmp_path / "run", tmp_path / "no"
    )
