"""A mask is left out where that changes nothing, and only there: models of transformers, small, in float64."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from megabatch import GradientAccumulator, loss, losses
from megabatch.inspection.model_facts import is_causal
from megabatch.inspection.padding_masks import RIGHT_PADDED, note_padding, without_needless

SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
GPT = {
    "vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 1}
CAUSAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), GROUPED),
    **dict.fromkeys(("gpt_neox", "phi"), SIZES),
    "gemma": {**GROUPED, "head_dim": 8},
    "gpt2": {**GPT, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {**SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0},  # positions counted from the mask
}
LENGTHS = (3, 7, 5)


def model_of(family: str) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **CAUSAL[family], use_cache=False)
    return AutoModelForCausalLM.from_config(config).double()


def samples() -> list[dict[str, Tensor]]:
    """As tokenizers give them, with a mask of ones."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(1, 40, (length,), generator=generator) for length in LENGTHS]
    return [{"input_ids": each, "attention_mask": torch.ones_like(each), "labels": each} for each in texts]


def masks_seen(model: nn.Module) -> list[Any]:
    """The masks that forwards of the model are given from here on."""
    seen: list[Any] = []
    model.register_forward_pre_hook(lambda _, args, named: seen.append(named.get("attention_mask")), with_kwargs=True)
    return seen


def gradients(model: nn.Module, loss_fn: Callable[..., Any]) -> list[Tensor]:
    gradient = GradientAccumulator(model, micro_batch_size=3)
    gradient.forward_backward(samples(), loss_fn)
    gradient.finalize()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


@loss(weigh=losses.count_targets)
def masked(model: nn.Module, microbatch: Any) -> Any:
    """As one writes it by hand; this loss gets what its batch has."""
    assert microbatch.keys() == {"input_ids", "attention_mask", "labels"}
    logits = model(input_ids=microbatch["input_ids"], attention_mask=microbatch["attention_mask"]).logits[:, :-1]
    labels = microbatch["labels"][:, 1:]
    total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, losses.count_targets(microbatch)


@pytest.mark.parametrize("family", CAUSAL)
def test_without_its_mask_a_causal_model_has_the_same_gradient(family: str) -> None:
    model = model_of(family)
    seen = masks_seen(model)
    mine, expected = gradients(model, losses.next_token), gradients(model, masked)
    assert seen[0] is None
    assert seen[1] is not None
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-14)


def microbatch(mask: list[list[int]]) -> dict[str, Tensor]:
    ids = torch.arange(1, 1 + len(mask) * len(mask[0])).reshape(len(mask), -1)
    return {"input_ids": ids, "attention_mask": torch.tensor(mask), "labels": ids}


@pytest.mark.parametrize("mask", [[[0, 1, 1, 1]], [[1, 0, 1, 1]], [[1, 1, 1, 0], [0, 0, 1, 1]], [[1, 1, 0, 1]]])
def test_a_mask_that_hides_what_a_token_would_see_is_kept(mask: list[list[int]]) -> None:
    model, given = model_of("llama"), microbatch(mask)
    seen = masks_seen(model)
    losses.next_token(model, given)
    assert seen[0] is given["attention_mask"]


@pytest.mark.parametrize("kind", [torch.float64, torch.bool])
def test_a_mask_of_another_type(kind: torch.dtype) -> None:
    """One of numbers may weigh what it does not hide."""
    model, given = model_of("llama"), microbatch([[1, 1, 1, 0]])
    given["attention_mask"] = given["attention_mask"].to(kind)
    seen = masks_seen(model)
    losses.next_token(model, given)
    assert (seen[0] is None) == (kind is torch.bool)


def bert(**keys: Any) -> nn.Module:
    return BertLMHeadModel(BertConfig(**SIZES, **keys))


NOT_CAUSAL: dict[str, Callable[[], nn.Module]] = {
    "a model of one's own": lambda: nn.Linear(1, 1),
    "both ways": bert,
    "attention that does not say": lambda: AutoModelForCausalLM.from_config(
        AutoConfig.for_model("bloom", vocab_size=40, hidden_size=16, n_layer=1, n_head=2)
    ),
    "an encoder and a decoder": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
    ),
    "experts that may count tokens": lambda: AutoModelForCausalLM.from_config(
        AutoConfig.for_model("mixtral", **SIZES, num_key_value_heads=2, num_local_experts=2)
    ),
}


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_of_other_models_nothing_is_known(name: str) -> None:
    assert not is_causal(NOT_CAUSAL[name]())


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own, when its compiler is imported
def test_what_wraps_a_model_is_looked_through() -> None:
    model = model_of("llama")
    wrapped = nn.Module()
    wrapped.module = model  # as DDP does
    assert is_causal(wrapped)
    assert is_causal(torch.compile(model))


def test_a_mask_beside_positions_is_no_needless_one() -> None:
    """Without it transformers keeps documents apart where positions begin anew, and with it it does not look."""
    packed = microbatch([[1, 1, 1, 1]]) | {"position_ids": torch.tensor([[0, 1, 0, 1]])}
    model = model_of("llama")
    assert note_padding(packed) is packed
    assert "attention_mask" in without_needless(model, packed)
    inputs = {name: value for name, value in packed.items() if name != "labels"}
    with torch.no_grad():
        logits, apart = model(**inputs).logits, model(**{**inputs, "attention_mask": None}).logits
    assert not torch.allclose(logits, apart)
    targets = packed["labels"][0, 1:]
    expected = nn.functional.cross_entropy(logits[0, :-1], targets, reduction="sum")
    assert torch.allclose(losses.next_token(model, packed)[0], expected)


def test_what_is_on_a_device_was_seen_before_it_got_there() -> None:
    right, left = microbatch([[1, 1, 1, 0]]), microbatch([[0, 1, 1, 1]])
    assert note_padding(right)[RIGHT_PADDED]
    assert note_padding(left) is left
    model = model_of("llama")
    for each, is_needless in ((note_padding(right), True), (note_padding(left), False)):
        moved = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in each.items()}
        kept = without_needless(model, moved)
        assert kept.keys() == {"input_ids", "labels"} | (set() if is_needless else {"attention_mask"})


class Configured(nn.Module):
    """A model of the user's, whose config has names of transformers' for other things."""

    def __init__(self, config: object) -> None:
        super().__init__()
        self.config, self.summary_type, self.attention_type = config, "mean", "block_sparse"
        self.embedding = nn.Embedding(11, 1)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.embedding(input_ids).squeeze(-1)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "fnet"},
        torch.ones(2),
        SimpleNamespace(model_type=["own"], rope_parameters=[1.0, 2.0]),
        SimpleNamespace(rope_parameters=SimpleNamespace(theta=1.0)),
        SimpleNamespace(model_type="fnet", attention_type="block_sparse"),
    ],
    ids=["dict", "tensor", "lists", "object", "names of transformers"],
)
def test_a_config_that_is_not_of_transformers_says_nothing_of_padding(config: object) -> None:
    """Samples of unequal lengths are padded."""
    samples = [{"input_ids": torch.full((length,), length), "labels": torch.ones(length)} for length in (2, 5)]

    def total(model: nn.Module, microbatch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return (model(microbatch["input_ids"]) * microbatch["labels"].clamp(min=0)).sum(), 1

    model = Configured(config)
    gradient = GradientAccumulator(model, micro_batch_size=2)
    gradient.forward_backward(samples, total)
    gradient.finalize()
    assert model.embedding.weight.grad is not None
    assert model.embedding.weight.grad[[2, 5], 0].tolist() == [2.0, 5.0]
