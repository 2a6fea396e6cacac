"""A model is built as the recipe says, or refused in one line before anything is written."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import ByT5Tokenizer

from megabatch import MegabatchError
from megabatch.train.model.build import ParallelModel, build
from megabatch.train.model.wrap import Wrapper, choose_wrapper
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks
from tests.train.model_recipes import FAMILIES, LLAMA, recipe

ALONE = Ranks(0, 1, torch.device("cpu"))
SILENT = Console(enabled=False, loss_digits=4)
GPT2 = FAMILIES["gpt2"]
REFUSED = "transformers refuses model.config ({}); change it there"
AT_LEAST = "it must be at least 1: change it there"
OWNED = "is not the recipe's to set;"
TOKENS = torch.arange(24).view(2, 12)


def laid(model: dict[str, Any] | None = None, **keys: Any) -> ParallelModel:
    return build(recipe(model, **keys), ALONE, SILENT, None, None)


def refused(model: dict[str, Any], longest_tokens: int | None = None, tokenizer: Any = None) -> str:
    with pytest.raises(MegabatchError) as caught:
        build(recipe(model), ALONE, SILENT, longest_tokens, tokenizer)
    assert "\n" not in str(caught.value)
    return str(caught.value)


CASES: list[tuple[dict[str, Any], str, object, str]] = [
    (LLAMA, "pad_token_id", 9999, REFUSED.format("AssertionError: Padding_idx must be within num_embeddings")),
    (LLAMA, "hidden_act", "foo", REFUSED.format("KeyError: 'foo'")),
    (LLAMA, "num_key_value_heads", 3, "transformers refuses model.config (RuntimeError: The size of tensor a (2) "),
    (LLAMA, "num_hidden_layers", 0, f"model.config.num_hidden_layers is 0; {AT_LEAST}"),
    (LLAMA, "vocab_size", 0, f"model.config.vocab_size is 0; {AT_LEAST}"),
    (GPT2, "n_layer", 0, f"model.config.n_layer is 0; {AT_LEAST}"),
    (GPT2, "use_cache", True, f"model.config.use_cache {OWNED} the trainer sets it (false while it trains)"),
    (GPT2, "dtype", "float16", f"model.config.dtype {OWNED} set model.dtype"),
    (GPT2, "torch_dtype", "float16", f"model.config.torch_dtype {OWNED} set model.dtype"),
    (GPT2, "attn_implementation", "eager", f"model.config.attn_implementation {OWNED} set model.attention"),
    (GPT2, "n_layers", 3, "unknown key model.config.n_layers for model_type 'gpt2'; the nearest key is n_layer"),
    (GPT2, "model_type", "gtp2", "model.config.model_type is 'gtp2', which transformers does not know"),
    (GPT2, "model_type", 3, 'model.config has no model_type; add one, model_type = "llama" say'),
]


@pytest.mark.parametrize(("sizes", "key", "value", "line"), CASES)
def test_a_bad_config_gets_its_line(
    capfd: pytest.CaptureFixture[str], sizes: dict[str, Any], key: str, value: object, line: str
) -> None:
    assert refused({"config": {**sizes, key: value}}).startswith(line)
    assert capfd.readouterr() == ("", "")


def test_an_encoder_is_refused() -> None:
    sizes = {key: LLAMA[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    config = {**sizes, "model_type": "bert", "intermediate_size": 24}
    assert refused({"config": config}).startswith("the model of model.config is not causal: a token's output changes")
    assert laid({"config": {**config, "is_decoder": True}}).words
    other = {**sizes, "model_type": "t5"}
    del other["num_hidden_layers"], other["hidden_size"], other["num_attention_heads"]
    assert refused({"config": other}).startswith("model.config is not of a causal language model that transformers")


def test_transformers_is_silent_only_while_it_builds(capfd: pytest.CaptureFixture[str]) -> None:
    """A vocabulary without GPT-2's own end token is worth a warning there, and is what every recipe here has."""
    level = logging.getLogger("transformers").level
    model = laid(family="gpt2").base
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("transformers").level == level
    assert model.training
    assert all(each.grad is None for each in model.parameters())


def test_what_makes_it_another_model() -> None:
    made = laid(family="gpt2").identity
    assert made["parameters"]["transformer.wte.weight"] == ["float32", 385, 16]
    assert made["model_config"]["n_embd"] == 16
    assert "transformers_version" not in made["model_config"]
    assert made == laid(family="gpt2", seed=99).identity
    assert made != laid({"dtype": "bfloat16"}, family="gpt2").identity


def test_the_data_must_fit() -> None:
    assert refused({}, 65).startswith("a sample has 65 tokens and the model 64 positions; raise the positions in")
    assert build(recipe(), ALONE, SILENT, 64, ByT5Tokenizer()).words
    line = refused({"config": {**LLAMA, "vocab_size": 300}}, None, ByT5Tokenizer())
    assert line.startswith(
        "the tokenizer has 384 tokens and the model a vocabulary of 300; set model.config.vocab_size"
    )


def test_the_wrapper_follows_from_ranks_and_parameters() -> None:
    with torch.device("meta"):
        small, large = nn.Linear(10, 10), nn.Linear(50_000, 20_000)
    assert choose_wrapper(None, 1, large).name == "plain"
    assert choose_wrapper(None, 2, small).name == "ddp"
    assert choose_wrapper(None, 2, large).name == "fsdp2"
    assert choose_wrapper("fsdp2", 2, small) == Wrapper("fsdp2", "asked for")


# Folders and the hub


# A function of the user's own

OWN = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

def linear(size=3):
    return nn.Linear(size, size)

def text(size=3):
    return "no module"

def llama(**keys):
    return LlamaForCausalLM(LlamaConfig(**keys))
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def test_a_function_makes_any_module(own: str) -> None:
    one, same, other = (laid({"function": f"{own}:linear", "options": {"size": 5}}, seed=seed) for seed in (1, 1, 2))
    assert isinstance(one.base, nn.Linear)
    assert one.identity == {"parameters": {"weight": ["float32", 5, 5], "bias": ["float32", 5]}}
    assert torch.equal(one.base.weight, same.base.weight)
    assert not torch.equal(one.base.weight, other.base.weight)
    assert laid({"function": f"{own}:linear", "dtype": "float64"}).identity["parameters"]["weight"][0] == "float64"


def test_a_function_that_makes_none_gets_its_line(own: str) -> None:
    line = refused({"function": f"{own}:linear", "options": {"sise": 5}})
    assert line.startswith(f"model.function '{own}:linear' raised TypeError: ")
    assert "unexpected keyword argument 'sise' (" in line
    assert line.endswith("); mend it, or model.options")
    assert refused({"function": f"{own}:text"}).endswith("returns a str; expected a torch module: return one")
    assert "model.function chooses its own" in refused({"function": f"{own}:linear", "attention": "sdpa"})
    assert refused({"options": {"size": 5}}).startswith("model.options is set and goes to model.function only")
    line = refused({"function": f"{own}:linear", "activation_checkpointing": True})
    assert line.startswith("model.activation_checkpointing is set and a Linear has no gradient_checkpointing_enable;")


# What is done to a model before it is wrapped


def gradients(made: ParallelModel) -> dict[str, torch.Tensor]:
    made.model(input_ids=TOKENS).logits.logsumexp(-1).sum().backward()
    return {name: each.grad for name, each in made.base.named_parameters() if each.grad is not None}


def num_saved(made: ParallelModel) -> int:
    """Bytes that a forward keeps for its backward, outside the parameters."""
    own = {each.untyped_storage().data_ptr() for each in made.base.parameters()}
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            sizes[id(tensor)] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made.model(input_ids=TOKENS)
    return sum(sizes.values())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_recomputed_activations_change_no_gradient(family: str) -> None:
    no_dropout = {key: 0.0 for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop") if family == "gpt2"}
    config = {**FAMILIES[family], **no_dropout}
    plain, recomputed = (laid({"config": config, "activation_checkpointing": on}) for on in (False, True))
    assert num_saved(recomputed) < 0.5 * num_saved(plain)
    one, other = gradients(plain), gradients(recomputed)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert "activations are recomputed in backward, layer by layer" in recomputed.words


def test_frozen_parameters_get_no_gradient() -> None:
    made = laid({"freeze": ["*.embed_tokens.*", "model.layers.0.*"], "activation_checkpointing": True})
    frozen = [name for name, each in made.base.named_parameters() if not each.requires_grad]
    assert frozen[0] == "model.embed_tokens.weight"
    assert len(frozen) == 10
    assert not gradients(made).keys() & set(frozen)
    assert made.words[1].startswith("frozen: 8,")


def test_a_tied_parameter_is_frozen_by_any_of_its_names() -> None:
    made = laid({"freeze": ["lm_head.*"]}, family="tied llama")
    assert not made.base.model.embed_tokens.weight.requires_grad


def test_a_bad_freeze_gets_its_line() -> None:
    line = "model.freeze has 'lm_heads.*', which matches no parameter; the nearest name is lm_head.weight"
    assert refused({"freeze": ["lm_heads.*"]}) == line
    assert refused({"freeze": ["*"]}) == "model.freeze matches every parameter; leave some to be trained"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_attention_backend_is_the_one_asked_for(attention: str) -> None:
    assert laid({"attention": attention}).base.config._attn_implementation == attention


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention", "spda", "someone/kernel"])
def test_an_attention_backend_that_cannot_train_here_gets_its_line(attention: str) -> None:
    line = f"model.attention is {attention!r}, which cannot train on this machine's cpu; take one of sdpa, eager, or"
    assert refused({"attention": attention}).startswith(line)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own use
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers_compute_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    plain, compiled = laid({}), laid({"compile": True})
    assert "compiled: 2 layers" in compiled.words
    one, other = gradients(plain), gradients(compiled)
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-5)
