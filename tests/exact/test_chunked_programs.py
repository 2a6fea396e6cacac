"""Programs around samples in chunks: losses, wrappers of layers and modules of others, each exact or refused."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megabatch import GradientAccumulator, LossContractError, loss, losses
from megabatch.batching import InsideSamples
from megabatch.batching.inside_samples import inner_decoder
from tests.exact import padded
from tests.exact.test_inside_samples import BOUND, Sample, error, gradients, logits_of, texts, uncut

LENGTHS = (9, 8, 40, 33)
KINDS = ("llama", "gemma3_text", "qwen3_next", "bamba")  # keys and values, windows, and states beside them
WITH_STATE = KINDS[2:]


@pytest.fixture(autouse=True)
def _in_float64() -> Any:
    with padded._in_float64():
        yield


def make(kind: str) -> Any:
    own = {"attn_layer_indices": [1]} if kind == "bamba" else {}
    return padded.make(f"CausalLM {kind}", **own).train()


def samples_with(lengths: tuple[int, ...] = LENGTHS, **columns: Callable[[Tensor], Tensor]) -> list[Sample]:
    samples = texts(lengths)
    return [sample | {name: column(sample["input_ids"]) for name, column in columns.items()} for sample in samples]


def accumulator(model: nn.Module, limit: int = 8) -> GradientAccumulator:
    return GradientAccumulator(model, max_microbatch_tokens=limit, batching=InsideSamples())


def run(model: nn.Module, samples: Any, loss_fn: Any = losses.next_token, limit: int = 8) -> list[Tensor]:
    gradient = accumulator(model, limit)
    gradient.forward_backward(samples, loss_fn)
    gradient.finalize()
    return gradients(model)


def whole(model: nn.Module, samples: list[Sample], loss_fn: Any) -> list[Tensor]:
    """The gradient of a loss of one sample after the other, in plain torch."""
    model.zero_grad()
    parts = [loss_fn(model, {name: value[None] for name, value in sample.items()}) for sample in samples]
    terms = [part if isinstance(part, Mapping) else {"loss": part} for part in parts]
    quotients = [sum(each[name][0] for each in terms) / sum(each[name][1] for each in terms) for name in terms[0]]
    torch.stack(quotients).sum().backward()
    found = [gradient.clone() for gradient in gradients(model)]
    model.zero_grad()
    return found


# Losses.


def count(microbatch: Mapping[str, Tensor]) -> Any:
    return (microbatch["labels"][:, 1:] != -100).sum()


def sum_targets(logits: Tensor, microbatch: Mapping[str, Tensor]) -> Tensor:
    targets = microbatch["labels"][:, 1:]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


@loss(weigh=count)
def by_parts(model: Any, microbatch: Mapping[str, Tensor]) -> Any:
    """Calls the decoder and the head by themselves, as a fused cross entropy does."""
    hidden = inner_decoder(model)(input_ids=microbatch["input_ids"], use_cache=False)[0]
    return sum_targets(model.get_output_embeddings()(hidden), microbatch), count(microbatch)


@loss(weigh=count)
def of_embeddings(model: Any, microbatch: Mapping[str, Tensor]) -> Any:
    embedded = model.get_input_embeddings()(microbatch["input_ids"])
    return sum_targets(model(inputs_embeds=embedded, use_cache=False).logits, microbatch), count(microbatch)


@loss(weigh=count)
def of_hidden_states(model: Any, microbatch: Mapping[str, Tensor]) -> Any:
    """Adds a penalty on what a middle layer says of each token but the last."""
    output = model(microbatch["input_ids"], use_cache=False, output_hidden_states=True)
    penalty = output.hidden_states[1][:, :-1].square().mean(-1)[microbatch["labels"][:, 1:] != -100].sum()
    return sum_targets(output.logits, microbatch) + 0.1 * penalty, count(microbatch)


@loss(weigh=count)
def of_last_hidden_state(model: Any, microbatch: Mapping[str, Tensor]) -> Any:
    """Gives the head the last of the hidden states."""
    output = model(microbatch["input_ids"], use_cache=False, output_hidden_states=True)
    return sum_targets(model.get_output_embeddings()(output.hidden_states[-1]), microbatch), count(microbatch)


@loss(weigh=count)
def of_a_middle_layer(model: Any, microbatch: Mapping[str, Tensor]) -> Any:
    """Gives the head a hidden state that the last one of the output is not."""
    output = model(microbatch["input_ids"], use_cache=False, output_hidden_states=True)
    return sum_targets(model.get_output_embeddings()(output.hidden_states[1]), microbatch), count(microbatch)


@loss(weigh=count)
def shifted_inputs(model: Any, microbatch: Mapping[str, Tensor]) -> Any:
    """Gives the model all tokens but the last, which has no target."""
    logits = model(microbatch["input_ids"][:, :-1], use_cache=False).logits
    targets = microbatch["labels"][:, 1:].flatten()
    total = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=-100, reduction="sum")
    return total, count(microbatch)


def count_policy(microbatch: Mapping[str, Tensor]) -> dict[str, Any]:
    return {"policy": count(microbatch), "entropy": count(microbatch)}


@loss(weigh=count_policy)
def policy(model: Any, microbatch: Mapping[str, Tensor]) -> Any:
    """A clipped policy loss with the log-probabilities of an old policy, and an entropy, each with its divisor."""
    logprobs = model(microbatch["input_ids"], use_cache=False).logits[:, :-1].log_softmax(-1)
    is_target = microbatch["labels"][:, 1:] != -100
    chosen = logprobs.gather(-1, microbatch["input_ids"][:, 1:, None])[..., 0]
    ratio = (chosen - microbatch["old"][:, 1:]).exp()
    gain = torch.minimum(ratio, ratio.clamp(0.8, 1.2)) * microbatch["advantages"][:, 1:]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    weights = count_policy(microbatch)
    return {
        "policy": (-gain[is_target].sum(), weights["policy"]),
        "entropy": (-0.1 * entropy[is_target].sum(), weights["entropy"]),
    }


def count_weighted(microbatch: Mapping[str, Tensor]) -> Any:
    return microbatch["weights"][:, 1:].sum()


@loss(weigh=count_weighted)
def weighted(model: Any, microbatch: Mapping[str, Tensor]) -> Any:
    """Each token has a weight of its own, and some have none."""
    logits = model(microbatch["input_ids"], use_cache=False).logits[:, :-1]
    totals = F.cross_entropy(logits.transpose(1, 2), microbatch["input_ids"][:, 1:], reduction="none")
    return (totals * microbatch["weights"][:, 1:]).sum(), count_weighted(microbatch)


COLUMNS: dict[str, Callable[[Tensor], Tensor]] = {
    "old": lambda ids: -4 + ids.double() / 60,
    "advantages": lambda ids: (ids % 5).double() - 2,
    "weights": lambda ids: (ids % 4).double(),
}
LOSSES = {
    "by parts": by_parts, "of embeddings": of_embeddings, "of hidden states": of_hidden_states,
    "of the last hidden state": of_last_hidden_state, "of a middle layer": of_a_middle_layer, "weighted": weighted,
    "shifted inputs": shifted_inputs,
}  # fmt: skip
EXACT = [(name, kind) for name in LOSSES for kind in KINDS if name != "shifted inputs" or kind not in WITH_STATE]


@pytest.mark.parametrize(("name", "kind"), EXACT)
def test_a_loss_over_tokens_is_exact(name: str, kind: str) -> None:
    model, samples = make(kind), samples_with(**COLUMNS)
    expected = whole(model, samples, LOSSES[name])
    assert error(run(model, samples, LOSSES[name]), expected) < BOUND


@pytest.mark.parametrize("kind", KINDS)
def test_terms_with_divisors_of_their_own_are_exact(kind: str) -> None:
    model, samples = make(kind), samples_with(**COLUMNS)
    expected = whole(model, samples, policy)
    assert error(run(model, samples, policy), expected) < BOUND


@loss(weigh=lambda microbatch: (microbatch["labels"] != -100).sum())
def unshifted(model: Any, microbatch: Mapping[str, Tensor]) -> Any:
    logits, labels = model(microbatch["input_ids"]).logits, microbatch["labels"]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()


@loss(weigh=count)
def with_all_positions(model: Any, microbatch: Mapping[str, Tensor]) -> Any:
    """Counts next tokens and sums over all logits, those of the last token too."""
    logits = model(microbatch["input_ids"], use_cache=False).logits
    return sum_targets(logits, microbatch) + 0.01 * logits.logsumexp(-1).square().sum(), count(microbatch)


@loss(weigh=count)
def called_twice(model: Any, microbatch: Mapping[str, Tensor]) -> Any:
    first, second = (model(microbatch["input_ids"], use_cache=False).logits for _ in range(2))
    return sum_targets(first + second, microbatch), count(microbatch)


@loss(weigh=count)
def without_two(model: Any, microbatch: Mapping[str, Tensor]) -> Any:
    """Predicts the token after the next one."""
    logits, targets = model(microbatch["input_ids"][:, :-2], use_cache=False).logits, microbatch["labels"][:, 2:]
    return F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-100, reduction="sum"), count(microbatch)


REFUSED = {
    "unshifted": (unshifted, "count next-token targets under InsideSamples"),
    "all positions": (with_all_positions, "needs all tokens of a sample at once"),
    "called twice": (called_twice, "which the loss calls twice"),
    "shifted inputs": (shifted_inputs, "gives the model 8 tokens of a microbatch of 9"),
    "without two": (without_two, "gives the model 7 tokens of a microbatch of 9"),
}
OF_KEYS = REFUSED | {"called twice": (called_twice, "the backward of a chunk runs twice")}
del OF_KEYS["shifted inputs"]


@pytest.mark.parametrize(
    ("name", "kind"), [(name, "llama") for name in OF_KEYS] + [(name, kind) for name in REFUSED for kind in WITH_STATE]
)
def test_a_loss_that_chunks_would_change_is_refused(name: str, kind: str) -> None:
    loss_fn, why = (REFUSED if kind in WITH_STATE else OF_KEYS)[name]
    with pytest.raises(LossContractError, match=why) as raised:
        run(make(kind), texts(LENGTHS), loss_fn)
    assert "\n" not in str(raised.value)


# Samples.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(8,), (9,), (15,), (16, 15), (60, 1, 2)])
def test_samples_about_the_limit_are_exact(lengths: tuple[int, ...], kind: str) -> None:
    model = make(kind)
    expected = uncut(model, texts(lengths))
    assert error(run(model, texts(lengths)), expected) < BOUND


@pytest.mark.parametrize("kind", KINDS)
def test_samples_without_targets_change_nothing(kind: str) -> None:
    """A long sample has none, and another has one, which is its last token."""
    samples = texts((30, 31, 9))
    samples[0]["labels"][:] = -100
    samples[1]["labels"][:-1] = -100
    samples[1]["labels"][-1] = 7
    model = make(kind)
    expected = uncut(model, samples)
    assert error(run(model, samples), expected) < BOUND


def test_chunks_of_one_token_are_exact_or_refused() -> None:
    model = make("llama")
    expected = uncut(model, texts((9, 5)))
    assert error(run(model, texts((9, 5)), limit=2), expected) < BOUND
    for kind in WITH_STATE:
        with pytest.raises(LossContractError, match="raise max_microbatch_tokens to 3"):
            run(make(kind), texts((9, 5)), limit=2)


# Layers and modules of others.


def low_rank(model: Any) -> Any:
    import peft

    torch.manual_seed(1)
    names = [name.rpartition(".")[2] for name, part in inner_decoder(model).named_modules() if type(part) is nn.Linear]
    config = peft.LoraConfig(r=2, target_modules=sorted({*names}), init_lora_weights=False)
    return peft.get_peft_model(model, config).double()


def compiled_layers(model: Any) -> Any:
    for layer in inner_decoder(model).layers:
        layer.compile(backend="aot_eager")
    return model


def tied(model: Any) -> Any:
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    return model


def with_frozen_layer(model: Any) -> Any:
    model.get_input_embeddings().requires_grad_(False)
    inner_decoder(model).layers[0].requires_grad_(False)
    return model


def with_frozen_decoder(model: Any) -> Any:
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())  # which Gemma ties
    inner_decoder(model).requires_grad_(False)
    return model


CHANGES = {
    "lora": low_rank, "compiled layers": compiled_layers, "tied": tied, "a frozen layer": with_frozen_layer,
    "the head alone": with_frozen_decoder,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_is_exact(name: str, kind: str) -> None:
    model = CHANGES[name](make(kind))
    expected = uncut(model, texts(LENGTHS))
    assert any(bool(gradient.any()) for gradient in expected)
    assert error(run(model, texts(LENGTHS)), expected) < BOUND


def recomputing(forward: Any, *placed: Any, **named: Any) -> Any:
    return checkpoint(lambda *inputs: forward(*inputs, **named), *placed, use_reentrant=True)


@pytest.mark.parametrize("kind", ["llama", *WITH_STATE])
def test_layers_that_recompute_by_a_second_backward_are_refused(kind: str) -> None:
    model = make(kind)
    gradient = accumulator(model)
    for layer in inner_decoder(model).layers:
        layer.forward = functools.partial(recomputing, layer.forward)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):  # torch says so, in the trial of the loss
        gradient.forward_backward(texts(LENGTHS), losses.next_token)


@pytest.mark.parametrize("kind", WITH_STATE)
def test_recomputing_that_is_turned_on_after_the_trial_is_refused(kind: str) -> None:
    model = make(kind)
    gradient = accumulator(model)
    gradient.forward_backward(texts(LENGTHS), losses.next_token)
    gradient.finalize()
    for layer in inner_decoder(model).layers:
        layer.forward = functools.partial(recomputing, layer.forward)
    with pytest.raises(LossContractError, match="a state and recomputes activations; turn that off"):
        gradient.forward_backward(texts(LENGTHS), losses.next_token)


@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_evaluate_are_those_of_uncut_samples(kind: str) -> None:
    model = make(kind).eval()
    gradient = accumulator(model)
    samples = texts(LENGTHS)
    outputs = gradient.forward(samples, lambda model, microbatch: model(microbatch["input_ids"]).logits)
    value = float(gradient.evaluate(samples, losses.next_token)["loss"])
    logits = [logits_of(model, sample) for sample in samples]
    assert max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(outputs, logits, strict=True)) < BOUND
    totals = [
        sum_targets(each[None], {"labels": sample["labels"][None]})
        for each, sample in zip(logits, samples, strict=True)
    ]
    number = sum(int(count({"labels": sample["labels"][None]})) for sample in samples)
    assert value == pytest.approx(float(sum(totals)) / number, rel=BOUND)
