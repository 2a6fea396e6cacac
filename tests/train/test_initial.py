"""One initialization for every wrapper and number of ranks, to the bit, and never a whole model on a sharded rank."""

import ctypes
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from megabatch.train.model.architecture import architecture_of, outline
from megabatch.train.model.build import ParallelModel, build, choose_source, lay
from megabatch.train.model.weights import plan_units
from megabatch.train.model.wrap import blocks_of
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks
from tests.train.model_recipes import FAMILIES, LLAMA, recipe
from tests.train.on_ranks import on_ranks

ALONE = Ranks(0, 1, torch.device("cpu"))
SILENT = Console(enabled=False, loss_digits=4)
M_MMAP_THRESHOLD = -3  # of glibc's mallopt
TOKENS = torch.arange(24).view(2, 12)
MIDDLE = {  # 42 million parameters of 168 MB
    **LLAMA, "vocab_size": 2000, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 12,
    "num_attention_heads": 8, "num_key_value_heads": 8,
}  # fmt: skip


def laid(ranks: Ranks, model: dict[str, Any] | None = None, **keys: Any) -> ParallelModel:
    return build(recipe(model, **keys), ranks, SILENT, 10, None)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def described(made: ParallelModel) -> dict[str, Any]:
    """All that must not depend on where a model lies: its weights and buffers, what it computes, what is tied."""
    with torch.no_grad():
        logits = made.model.eval()(input_ids=TOKENS).logits
    parameters = {name: whole(each) for name, each in made.base.named_parameters()}
    buffers = {name: whole(each) for name, each in made.base.named_buffers()}
    return {"tensors": parameters | buffers, "logits": logits, "words": made.words, "identity": made.identity}


def described_families(ranks: Ranks, *wrappers: str | None) -> list[dict[str, Any]]:
    return [described(laid(ranks, family=family, wrapper=each)) for each in wrappers for family in FAMILIES]


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
    one, same, other = (described(laid(ALONE, family=family, seed=seed))["tensors"] for seed in (1, 1, 2))
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
    ours = laid(ALONE, {"config": config}).base
    theirs = AutoModelForCausalLM.from_config(architecture_of(recipe({"config": config}).model), dtype=torch.float32)
    named = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
    for name, tensor in (*ours.named_parameters(), *ours.named_buffers()):
        if named[name].std() == 0 or name in dict(ours.named_buffers()):
            assert torch.equal(tensor, named[name]), name
        else:
            torch.testing.assert_close(tensor.std(), named[name].std(), rtol=0.1, atol=0)
            assert tensor.mean().abs() < 5 * tensor.std() / tensor.numel() ** 0.5, name


def test_residual_projections_of_gpt2_are_scaled_by_depth() -> None:
    model = laid(ALONE, {"config": {**FAMILIES["gpt2"], "n_embd": 64, "n_layer": 8}}).base
    assert isinstance(model, GPT2LMHeadModel)
    scaled, plain = (model.transformer.h[3].mlp.c_proj.weight.std(), model.transformer.h[3].mlp.c_fc.weight.std())
    assert float((scaled / plain).detach()) == pytest.approx(1 / 16**0.5, rel=0.05)


def test_tied_embeddings_stay_one_parameter() -> None:
    model = laid(ALONE, family="tied llama").base
    assert isinstance(model, LlamaForCausalLM)
    assert model.lm_head.weight is model.model.embed_tokens.weight


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
    return {name: described(laid(ranks, {"name": name}, wrapper=wrapper)) for name in names}


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
    laid(ranks, family="llama", wrapper=wrapper)  # what is loaded once is loaded
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


def test_an_outline_has_no_memory() -> None:
    config = recipe().model
    assert all(tensor.is_meta for tensor in outline(config, architecture_of(config)).state_dict().values())
