"""A model is built as the recipe says, or refused in one line before anything is written."""

import ctypes
import itertools
import logging
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from megabatch.errors import MegabatchError
from megabatch.train.config.contradictions import check_config
from megabatch.train.model.architecture import architecture_of, check_tied
from megabatch.train.model.build import ATTENTIONS, ParallelModel, build, choose_source, is_deterministic_attention, lay
from megabatch.train.model.weights import plan_units, saved_weights
from megabatch.train.parallel.wrap import blocks_of
from megabatch.train.runtime.ranks import Ranks
from tests.train.adapter_jobs import whole
from tests.train.contexts import ALONE, SILENT
from tests.train.model_recipes import FAMILIES, LLAMA, recipe
from tests.train.on_ranks import on_ranks
from tests.unit.failures.table import line_of

GPT2 = FAMILIES["gpt2"]
REFUSED = "transformers refuses model.config ({}); change it there"
AT_LEAST = "it must be at least 1: change it there"
OWNED = "is not the recipe's to set;"
TOKENS = torch.arange(24).view(2, 12)


def parallel_model(model: dict[str, Any] | None = None, **keys: Any) -> ParallelModel:
    return build(recipe(model, **keys), ALONE, SILENT, None, None)


def refused(model: dict[str, Any], longest_tokens: int | None = None, tokenizer: Any = None) -> str:
    return line_of(lambda: build(recipe(model), ALONE, SILENT, longest_tokens, tokenizer))


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


@pytest.mark.parametrize(
    ("sizes", "key", "value"),
    [
        ({**LLAMA, "model_type": "qwen3_moe", "num_experts": 4}, "head_dim", 16),  # its layers read it, undeclared
        ({**LLAMA, "model_type": "mixtral"}, "num_experts", 3),  # an alias
        (LLAMA, "rope_theta", 5e5),  # the name of older versions
    ],
)
def test_a_key_that_the_family_takes_undeclared_is_taken(sizes: dict[str, Any], key: str, value: object) -> None:
    plain, given = (architecture_of(recipe({"config": each}).model) for each in (sizes, {**sizes, key: value}))
    assert vars(given) != vars(plain)
    assert refused({"config": {**sizes, f"{key}s": value}}).startswith(f"unknown key model.config.{key}s")


def test_an_encoder_is_refused() -> None:
    sizes = {key: LLAMA[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    config = {**sizes, "model_type": "bert", "intermediate_size": 24}
    assert refused({"config": config}).startswith("the model of model.config is not causal: a token's output changes")
    assert parallel_model({"config": {**config, "is_decoder": True}}).words
    other = {**sizes, "model_type": "t5"}
    del other["num_hidden_layers"], other["hidden_size"], other["num_attention_heads"]
    assert refused({"config": other}).startswith("model.config is not of a causal language model that transformers")


def test_transformers_is_silent_only_while_it_builds(capfd: pytest.CaptureFixture[str]) -> None:
    """A vocabulary without GPT-2's own end token is worth a warning there, and is what every recipe here has."""
    level = logging.getLogger("transformers").level
    model = parallel_model(family="gpt2").base
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("transformers").level == level
    assert model.training
    assert all(each.grad is None for each in model.parameters())


def test_what_makes_it_another_model() -> None:
    made = parallel_model(family="gpt2").identity
    assert made["parameters"]["transformer.wte.weight"] == ["float32", 385, 16]
    assert made["model_config"]["n_embd"] == 16
    assert "transformers_version" not in made["model_config"]
    assert made == parallel_model(family="gpt2", seed=99).identity
    assert made != parallel_model({"dtype": "bfloat16"}, family="gpt2").identity


def test_the_data_must_fit() -> None:
    assert refused({}, 65).startswith("a sample has 65 tokens and the model 64 positions; raise the positions in")
    assert build(recipe(), ALONE, SILENT, 64, ByT5Tokenizer()).words
    line = refused({"config": {**LLAMA, "vocab_size": 300}}, None, ByT5Tokenizer())
    assert line.startswith(
        "the tokenizer has 384 tokens and the model a vocabulary of 300; set model.config.vocab_size"
    )


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
    one, same, other = (
        parallel_model({"function": f"{own}:linear", "options": {"size": 5}}, seed=seed) for seed in (1, 1, 2)
    )
    assert isinstance(one.base, nn.Linear)
    assert one.identity == {"parameters": {"weight": ["float32", 5, 5], "bias": ["float32", 5]}}
    assert torch.equal(one.base.weight, same.base.weight)
    assert not torch.equal(one.base.weight, other.base.weight)
    assert (
        parallel_model({"function": f"{own}:linear", "dtype": "float64"}).identity["parameters"]["weight"][0]
        == "float64"
    )


def test_a_function_that_makes_none_gets_its_line(own: str) -> None:
    line = refused({"function": f"{own}:linear", "options": {"sise": 5}})
    assert line.startswith(f"model.function '{own}:linear' raised TypeError: ")
    assert "unexpected keyword argument 'sise' (" in line
    assert line.endswith("); mend it, or model.options")
    assert refused({"function": f"{own}:text"}).endswith("returns a str; expected a torch module: return one")
    line = refused({"function": f"{own}:linear", "activation_checkpointing": True})
    assert line.startswith("model.activation_checkpointing is set and a Linear has no gradient_checkpointing_enable;")


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


@pytest.mark.parametrize("recompute", [True, "selective"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_recomputed_activations_change_no_gradient(family: str, recompute: bool | str) -> None:
    no_dropout = {key: 0.0 for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop") if family == "gpt2"}
    config = {**FAMILIES[family], **no_dropout}
    plain, recomputed = (
        parallel_model({"config": config, "activation_checkpointing": on}) for on in (False, recompute)
    )
    assert num_saved(recomputed) < 0.5 * num_saved(plain)
    one, other = gradients(plain), gradients(recomputed)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(each.startswith("activations are recomputed in backward, layer by layer") for each in recomputed.words)


def test_dropout_beside_kept_matrix_products_is_drawn_again() -> None:
    found = []
    for recompute in (False, "selective"):
        made = parallel_model({"config": GPT2, "activation_checkpointing": recompute, "keyed_dropout": False})
        torch.manual_seed(3)
        found.append(gradients(made))
    one, other = found
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_attention_is_kept_unless_it_draws_numbers() -> None:
    for operation, index in ATTENTIONS.items():
        assert operation._schema.arguments[index].name == "dropout_p"
        assert is_deterministic_attention(operation, [None] * 3, {})
        assert not is_deterministic_attention(operation, [None] * index + [0.1], {})
        assert not is_deterministic_attention(operation, [None] * 3, {"dropout_p": 0.1})
    assert not is_deterministic_attention(torch.ops.aten.mul.Tensor, [], {})


@pytest.mark.parametrize(("section", "key"), [("model", {"compile": True}), ("parallel", {"pp": 2})])
def test_selective_recomputing_is_refused_where_it_is_not_tested(section: str, key: dict[str, Any]) -> None:
    config = recipe({"activation_checkpointing": "selective"})
    changed = config.model_copy(update={section: getattr(config, section).model_copy(update=key)})
    line = line_of(lambda: check_config(changed))
    assert line.startswith(f"model.activation_checkpointing is 'selective' and {section}.{next(iter(key))} is ")


def test_frozen_parameters_get_no_gradient() -> None:
    made = parallel_model({"freeze": ["*.embed_tokens.*", "model.layers.0.*"], "activation_checkpointing": True})
    frozen = [name for name, each in made.base.named_parameters() if not each.requires_grad]
    assert frozen[0] == "model.embed_tokens.weight"
    assert len(frozen) == 10
    assert not gradients(made).keys() & set(frozen)
    assert made.words[1].startswith("frozen: 8,")


def test_a_model_whose_tied_weights_are_apart_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(architecture_of(recipe(family="tied llama").model))
    check_tied(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(MegabatchError, match=r"lm_head\.weight apart from model\.embed_tokens\.weight"):
        check_tied(model)


def test_a_tied_parameter_is_frozen_by_any_of_its_names() -> None:
    made = parallel_model({"freeze": ["lm_head.*"]}, family="tied llama")
    assert not made.base.model.embed_tokens.weight.requires_grad


def test_a_bad_freeze_gets_its_line() -> None:
    line = "model.freeze has 'lm_heads.*', which matches no parameter; the nearest name is lm_head.weight"
    assert refused({"freeze": ["lm_heads.*"]}) == line
    assert refused({"freeze": ["*"]}) == "model.freeze matches every parameter; leave some to be trained"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_attention_backend_is_the_one_asked_for(attention: str) -> None:
    assert parallel_model({"attention": attention}).base.config._attn_implementation == attention


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
    plain, compiled = parallel_model({}), parallel_model({"compile": True})
    assert "compiled: 2 layers" in compiled.words
    one, other = gradients(plain), gradients(compiled)
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-5)


def test_a_folder_is_loaded_as_transformers_does(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(architecture_of(recipe(family="qwen2").model)).save_pretrained(tmp_path)
    made = parallel_model({"name": str(tmp_path)})
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(made.base(input_ids=TOKENS).logits, reference(input_ids=TOKENS).logits)
    num_parameters = sum(each.numel() for each in made.base.parameters())
    assert made.words[0] == f"{num_parameters:,} parameters: Qwen2ForCausalLM, weights of {tmp_path}"
    assert made.base.config.use_cache is False


def test_weights_that_a_folder_lacks_are_named(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(architecture_of(recipe().model))
    model.model.save_pretrained(tmp_path)
    one, same = (parallel_model({"name": str(tmp_path)}) for _ in range(2))
    assert "1 of its tensors is not there and fresh: lm_head.weight" in one.words[0]
    assert torch.equal(one.base(input_ids=TOKENS).logits, same.base(input_ids=TOKENS).logits)


def test_a_folder_that_is_no_model_gets_its_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seen = f"model.name is {str(tmp_path)!r}, a folder without "
    assert refused({"name": str(tmp_path)}).startswith(f"{seen}config.json (it is empty); name a folder that")
    (tmp_path / "notes.txt").write_text("")
    assert refused({"name": str(tmp_path)}).startswith(f"{seen}config.json (it has notes.txt); name a folder that")
    architecture_of(recipe().model).save_pretrained(tmp_path)
    expected = f"{seen}weights, model.safetensors say (it has config.json, notes.txt); name one that has them"
    assert refused({"name": str(tmp_path)}).startswith(expected)
    (tmp_path / "model.safetensors").write_text("nonsense")
    expected = f"cannot read the weights of model.name = {str(tmp_path)!r} (SafetensorError: "
    assert refused({"name": str(tmp_path)}).startswith(expected)
    (tmp_path / "config.json").write_text("{")
    assert refused({"name": str(tmp_path)}).startswith(f"cannot read the config of model.name = {str(tmp_path)!r} (")
    (tmp_path / "checkpoints").mkdir()
    assert f"a run of megabatch's; begin with its weights by --run.init_from={tmp_path}" in refused(
        {"name": str(tmp_path)}
    )
    assert refused({"name": "./nowhere"}).startswith("model.name is './nowhere' and there is no such folder;")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model.safetensors", "a shard"])
def test_weights_that_are_read_by_the_shard_get_their_line(tmp_path: Path, name: str) -> None:
    model = AutoModelForCausalLM.from_config(architecture_of(recipe().model))
    model.save_pretrained(tmp_path, max_shard_size="20KB" if name != "model.safetensors" else "1GB")
    saved = saved_weights(str(tmp_path))
    assert saved is not None
    assert saved.fits(model)
    if name == "a shard":
        path = sorted(tmp_path.glob("model-*.safetensors"))[1]
        path.unlink()
        line = f"model.name is '{tmp_path}', whose model.safetensors.index.json lists {path.name}, which is not there;"
    else:
        path = tmp_path / name
        path.write_text("{}")
        line = f"cannot read {'' if name.endswith('json') else 'the weights in '}{path} ("
    said = line_of(lambda: saved_weights(str(tmp_path)))
    assert said.startswith(line)
    assert said.endswith("; copy or download it again")


def test_weights_that_are_not_finite_get_their_line(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(architecture_of(recipe().model))
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    model.save_pretrained(tmp_path)
    line = (
        f"the model of model.name = {str(tmp_path)!r} gives logits that are not finite; choose weights that are whole"
    )
    assert refused({"name": str(tmp_path)}) == line


def test_the_hub_out_of_reach_gets_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert refused({"name": "nobody/nothing"}).startswith(
        "cannot read the config of model.name = 'nobody/nothing' (OSE"
    )


def crossing(family: str, attention: str) -> bool:
    """By gradients: whether logits of second documents depend on the first ones' embeddings, in any of two rows."""
    base = parallel_model({"attention": attention, "config": FAMILIES[family]}).base.eval()
    inputs = base.get_input_embeddings()(TOKENS).detach().requires_grad_()
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]).expand(2, -1)
    base(inputs_embeds=inputs, position_ids=positions).logits[:, 5:].logsumexp(-1).sum().backward()
    assert inputs.grad is not None
    return bool(inputs.grad[:, :5].any())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "gpt_neox"])
def test_packed_documents_are_isolated(family: str, attention: str) -> None:
    words = parallel_model({"attention": attention}, family=family, data={"pack_tokens": 32}).words
    assert words[-1] == f"documents are isolated by their position_ids ({attention})"
    assert not crossing(family, attention)


def test_documents_that_see_each_other_are_spoken_of() -> None:
    config = {"model_type": "opt", "vocab_size": 385, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 24}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
    warnings = parallel_model({"config": config}, data={"pack_tokens": 32}).warnings
    assert warnings[-1].startswith(
        "attention crosses documents: those of a packed row see each other (sdpa); set model.att"
    )
    assert not any("documents" in line for line in parallel_model({"config": config}).warnings)


M_MMAP_THRESHOLD = -3  # of glibc's mallopt
MIDDLE = {  # 42 million parameters of 168 MB
    **LLAMA, "vocab_size": 2000, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 12,
    "num_attention_heads": 8, "num_key_value_heads": 8,
}  # fmt: skip


def laid_on(ranks: Ranks, model: dict[str, Any] | None = None, **keys: Any) -> ParallelModel:
    return build(recipe(model, **keys), ranks, SILENT, 10, None)


def described(made: ParallelModel) -> dict[str, Any]:
    """All that must not depend on where a model lies: its weights and buffers, what it computes, what is tied."""
    with torch.no_grad():
        logits = made.model.eval()(input_ids=TOKENS).logits
    parameters = {name: whole(each) for name, each in made.base.named_parameters()}
    buffers = {name: whole(each) for name, each in made.base.named_buffers()}
    return {"tensors": parameters | buffers, "logits": logits, "words": made.words, "identity": made.identity}


def described_families(ranks: Ranks, *wrappers: str | None) -> list[dict[str, Any]]:
    return [described(laid_on(ranks, family=family, wrapper=each)) for each in wrappers for family in FAMILIES]


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["tensors"].keys() == other["tensors"].keys()
    assert [name for name in one["tensors"] if not torch.equal(one["tensors"][name], other["tensors"][name])] == []
    torch.testing.assert_close(one["logits"], other["logits"], rtol=1e-5, atol=1e-6)
    assert one["identity"] == other["identity"]


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "wrappers"), [(2, ("ddp", "fsdp2")), (3, ("fsdp2",))])
def test_fresh_weights_are_those_of_the_plain_model(tmp_path: Path, num_ranks: int, wrappers: tuple[str, ...]) -> None:
    """Three ranks do not divide a vocabulary of 385, nor the sizes of the layers."""
    plain = described_families(ALONE, None)
    for found in on_ranks(num_ranks, tmp_path, described_families, *wrappers):
        for expected, each in zip(plain * len(wrappers), found, strict=True):
            assert_same(expected, each)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_follow_from_the_seed(family: str) -> None:
    state = torch.random.get_rng_state()
    one, same, other = (described(laid_on(ALONE, family=family, seed=seed))["tensors"] for seed in (1, 1, 2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(one[name], same[name]) for name in one)
    matrices = [name for name in one if one[name].ndim > 1]
    assert matrices
    assert not any(torch.equal(one[name], other[name]) for name in matrices)
    assert not any(torch.equal(one[a], one[b]) for a, b in itertools.combinations(matrices, 2))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_distributed_as_transformers_own(family: str) -> None:
    """Each tensor's mean and spread, at sizes at which they are sharp; constants and buffers to the bit."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "n_embd": 64}
    config = {key: sizes.get(key, value) for key, value in FAMILIES[family].items()}
    ours = laid_on(ALONE, {"config": config}).base
    theirs = AutoModelForCausalLM.from_config(architecture_of(recipe({"config": config}).model), dtype=torch.float32)
    named = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
    for name, tensor in (*ours.named_parameters(), *ours.named_buffers()):
        if named[name].std() == 0 or name in dict(ours.named_buffers()):
            assert torch.equal(tensor, named[name]), name
        else:
            torch.testing.assert_close(tensor.std(), named[name].std(), rtol=0.1, atol=0)
            assert tensor.mean().abs() < 5 * tensor.std() / tensor.numel() ** 0.5, name


class OddLlama(LlamaForCausalLM):
    """Has a tensor that its constructor alone fills."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.temperature = nn.Parameter(torch.full((3,), 0.5))


class ReachingLlama(LlamaForCausalLM):
    """Has rules by which the model scales what its layers hold."""

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            self.model.layers[0].mlp.up_proj.weight.mul_(0.5)


def planned(kind: type[LlamaForCausalLM]) -> list[str] | None:
    keys = {key: value for key, value in LLAMA.items() if key != "model_type"}
    with torch.device("meta"):
        model = kind(LlamaConfig(**keys))
    units = plan_units(model, blocks_of(model))
    return None if units is None else [unit.name for unit in units]


def test_what_the_rules_do_not_say_is_seen_before_there_is_memory() -> None:
    expected = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"]
    assert planned(LlamaForCausalLM) == expected
    assert planned(OddLlama) is None
    assert planned(ReachingLlama) == [""]


def saved(folder: Path, family: str) -> Path:
    """A folder with a small pretrained model; in two files, so that there is an index."""
    model = AutoModelForCausalLM.from_config(architecture_of(recipe(family=family).model))
    model.save_pretrained(folder / family, max_shard_size="40KB")
    return folder / family


def described_saved(ranks: Ranks, names: list[str], wrapper: str | None) -> dict[str, Any]:
    return {name: described(laid_on(ranks, {"name": name}, wrapper=wrapper)) for name in names}


@pytest.mark.slow
def test_each_rank_reads_its_shard_of_saved_weights(tmp_path: Path) -> None:
    names = [str(saved(tmp_path, family)) for family in ("llama", "tied llama", "gpt2")]
    plain = described_saved(ALONE, names, None)
    for found in on_ranks(3, tmp_path, described_saved, names, "fsdp2"):
        for name in names:
            assert_same(plain[name], found[name])
            assert found[name]["words"][0].endswith(f"weights of {name}, each rank reads its shard")
            reference = AutoModelForCausalLM.from_pretrained(name).eval()
            torch.testing.assert_close(found[name]["logits"], reference(input_ids=TOKENS).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_saved_weights_under_other_names_are_read_whole_and_it_is_said(tmp_path: Path) -> None:
    """A base model's folder names its tensors without the head's prefix."""
    model = AutoModelForCausalLM.from_config(architecture_of(recipe(family="tied llama").model))
    model.model.save_pretrained(tmp_path / "base")
    (name,) = names = [str(tmp_path / "base")]
    plain = described_saved(ALONE, names, None)
    for found in on_ranks(2, tmp_path, described_saved, names, "fsdp2"):
        assert_same(plain[name], found[name])
        assert "read whole on every rank" in found[name]["words"][0]


def growth(ranks: Ranks, wrapper: str | None) -> float:
    """By how much the process's high-water mark rises while a model gets its weights, in parts of the whole model."""
    config = recipe({"config": MIDDLE}, wrapper=wrapper)
    laid_on(ranks, family="llama", wrapper=wrapper)  # what is loaded once is loaded
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)  # what is freed is given back, and not kept for later
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_bytes("VmRSS")
    source, chosen = choose_source(config, ranks, None, None)
    lay(source, config, chosen, ranks, stages=None)
    num_bytes = sum(each.numel() * each.element_size() for each in source.model.parameters())
    return (memory_bytes("VmHWM") - before) / num_bytes


def memory_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


@pytest.mark.slow
def test_a_sharded_rank_never_holds_the_model_whole(tmp_path: Path) -> None:
    (plain,) = on_ranks(1, tmp_path, growth, None)
    assert plain > 0.95  # the measure sees a whole model
    for sharded in on_ranks(2, tmp_path, growth, "fsdp2"):
        assert 0.45 < sharded < 0.70  # half of it, a block of 13 MB, and some play
