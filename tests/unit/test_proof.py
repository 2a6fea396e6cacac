"""verify: passes what is exact to 1e-9, and names what is not."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megabatch import loss, losses, verify
from tests.unit.language import CNN, gpt2, images, llama, text

TOLERANCE = 1e-9
STEPS = 4


def token_sums(model, microbatch):
    """Cross-entropies of the next tokens, [targets]."""
    logits = model(input_ids=microbatch["input_ids"]).logits[:, :-1].flatten(0, 1)
    each = F.cross_entropy(logits, microbatch["labels"][:, 1:].flatten(), reduction="none")
    return each[(microbatch["labels"][:, 1:] != -100).flatten()]


def on_tokens(make):
    """A loss of what ``make`` makes of the cross-entropies."""
    return lambda model, microbatch: make(token_sums(model, microbatch))


def all_labels(microbatch):
    return (microbatch["labels"] != -100).sum()


def counts_position_0(model, microbatch):
    return token_sums(model, microbatch).sum(), all_labels(microbatch)


@loss(weigh=all_labels)
def weighs_position_0(model, microbatch):
    return losses.next_token(model, microbatch)


def own_mean_over_steps(model, microbatch):
    return model(**microbatch).loss / STEPS, 1


def own_mean_times_count_over_steps(model, microbatch):
    count = (microbatch["labels"][:, 1:] != -100).sum()
    return model(**microbatch).loss * count / STEPS, count


def noisy(model, microbatch):
    each = token_sums(model, microbatch)
    return (each * torch.rand_like(each)).sum(), len(each)


@loss(weigh=lambda microbatch: {"loss": losses.count_targets(microbatch), "squares": len(microbatch["labels"])})
def two_terms(model, microbatch):
    each = token_sums(model, microbatch)
    return {"loss": (each.sum(), len(each)), "squares": ((each**2).sum(), len(microbatch["labels"]))}


def best_sample(model, microbatch):
    """A loss that couples the samples of a microbatch, without any module."""
    logits = model(microbatch["image"])
    return (logits.max(0).values - logits).sum(), len(logits)


class Largest(nn.Module):
    """Adds the largest over the samples."""

    def forward(self, features):
        return features + features.amax(0, keepdim=True)


class Bernoulli(nn.Module):
    """A dropout that nobody can know as one."""

    def forward(self, features):
        return features * torch.bernoulli(torch.full_like(features, 0.5))


EXACT = {  # model, loss, batch
    "GPT-2": (gpt2, losses.next_token, text),
    "Llama": (llama, losses.next_token, text),
    "GPT-2, two terms": (gpt2, two_terms, text),
    "GPT-2, the loss by hand": (gpt2, on_tokens(lambda each: (each.sum(), len(each))), text),
    "CNN with group norm": (lambda: CNN(nn.GroupNorm(2, 4)), losses.classification, images),
    "CNN with instance norm": (lambda: CNN(nn.InstanceNorm2d(4)), losses.classification, images),
    "CNN with batch norm, frozen": (lambda: CNN(nn.BatchNorm2d(4, momentum=0.0).eval()), losses.classification, images),
}  # fmt: skip

NO_COUNT = "the weight of 'loss' is no count"
NO_SUM = "the total of 'loss' is no sum"
NOT_EXACT = {  # model, loss, batch, how the first cause begins
    "a mean of means": (gpt2, on_tokens(lambda each: (each.mean(), 1)), text, NO_COUNT),
    "a mean with its count": (gpt2, on_tokens(lambda each: (each.mean(), len(each))), text, NO_SUM),
    "a mean over the steps": (gpt2, on_tokens(lambda each: (each.mean() / STEPS, 1)), text, NO_COUNT),
    "the model's own mean over the steps": (gpt2, own_mean_over_steps, text, NO_COUNT),
    "a sum over the steps": (
        gpt2, on_tokens(lambda each: (each.sum() / STEPS, len(each))), text,
        "the total of 'loss' over its weight is exactly 1/4 of the model's own mean loss",
    ),
    "a mean times its count over the steps": (
        llama, own_mean_times_count_over_steps, text,
        "the total of 'loss' over its weight is exactly 1/4 of the model's own mean loss",
    ),
    "batch norm": (
        lambda: CNN(nn.BatchNorm2d(4)), losses.classification, images,
        "module 'norm' (BatchNorm2d) mixes the samples of a microbatch",
    ),
    "a module with a max over samples": (
        lambda: CNN(Largest()), losses.classification, images,
        "module 'norm' (Largest) mixes the samples of a microbatch",
    ),
    "a loss with a max over samples": (lambda: CNN(nn.Identity()), best_sample, images, NO_SUM),
    "position 0, by weigh": (gpt2, weighs_position_0, text, "weigh counted "),
    "position 0, by the loss": (
        gpt2, counts_position_0, text, "the weight of 'loss' counts the labels at position 0",
    ),
    "position 0, by both": (
        gpt2, loss(weigh=all_labels)(lambda *given: counts_position_0(*given)), text,
        "the weight of 'loss' counts the labels at position 0",
    ),
    "a loss that draws": (gpt2, noisy, text, "the same batch gives another gradient the second time"),
    "a module that draws": (
        lambda: CNN(Bernoulli()), losses.classification, images,
        "the same batch gives another gradient the second time",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_passes(name, micro_batch_size):
    model, loss_fn, batch = EXACT[name]
    verification = verify(model(), loss_fn, batch(), micro_batch_size=micro_batch_size)
    assert verification.ok, str(verification)
    assert verification.causes == ()
    assert verification.worst == max(verification.errors.values()) <= TOLERANCE


@pytest.mark.parametrize("name", NOT_EXACT)
@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_catches(name, micro_batch_size):
    model, loss_fn, batch, beginning = NOT_EXACT[name]
    verification = verify(model(), loss_fn, batch(), micro_batch_size=micro_batch_size)
    assert not verification.ok
    assert verification.causes[0].startswith(beginning), verification.causes
    assert str(verification).startswith("NOT exact: worst relative error of a gradient")


def test_errors_are_by_parameter_and_relative():
    """A mean with its count: the cut gradient of n microbatches of one row is n times the uncut one's rows, here 5."""
    model = nn.Linear(4, 3)

    def mean(model, microbatch):
        return F.cross_entropy(model(microbatch["x"]), microbatch["labels"]), len(microbatch["x"])

    batch = {"x": torch.randn(5, 4), "labels": torch.tensor([0, 1, 2, 0, 1])}
    verification = verify(model, mean, batch)
    assert set(verification.errors) == {"weight", "bias"}
    assert verification.worst == pytest.approx(4.0)


def test_the_tolerance_is_the_callers():
    model, loss_fn, batch = EXACT["GPT-2"]
    strict = verify(model(), loss_fn, batch(), tolerance=0.0)
    assert strict.ok == (strict.worst == 0.0)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training):
    model = CNN(nn.BatchNorm2d(4)).train(training)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    verify(model, losses.classification, images())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.dtype == torch.float32 for parameter in model.parameters())
    assert model.training == training
    assert torch.equal(torch.get_rng_state(), state)


def test_labels_that_cannot_be_ignored_are_left_alone():
    """Classes of positions, by a loss that knows no -100."""

    def one_hot(model, microbatch):
        labels = microbatch["labels"]
        return -(model(microbatch["x"]).log_softmax(-1) * F.one_hot(labels, 3)).sum(), labels.numel()

    batch = {"x": torch.randn(4, 5, 2), "labels": torch.arange(20).reshape(4, 5) % 3}
    assert verify(nn.Linear(2, 3), one_hot, batch).ok


def test_not_a_number_is_not_exact():
    def logarithm(model, microbatch):
        return (-1 - model(microbatch["image"]) ** 2).log().sum(), len(microbatch["image"])

    verification = verify(CNN(nn.Identity()), logarithm, images())
    assert not verification.ok
    assert verification.causes[0].startswith("the loss or its gradient is not finite")


VACUOUS = {  # model, loss
    "no target": (CNN(nn.Identity()), lambda model, microbatch: (model(microbatch["image"]).sum() * 0, 0)),
    "nothing to differentiate": (
        CNN(nn.Identity()), lambda model, microbatch: (model(microbatch["image"]).sum().detach(), 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VACUOUS)
def test_nothing_to_compare_is_no_proof(name):
    verification = verify(*VACUOUS[name], images())
    assert not verification.ok
    assert verification.causes[0].startswith("there is nothing to compare")


def test_said_in_words():
    verification = verify(gpt2(), losses.next_token, text())
    assert re.fullmatch(r"exact: worst relative error of a gradient \d\.\de-\d\d", str(verification))


def test_a_module_that_cannot_do_without_other_samples_is_named():
    """Batch norm over one value a channel raises: torch's own message, and the module that raised it."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    batch = {"x": torch.randn(6, 3), "labels": torch.arange(6) % 2}
    verification = verify(model, losses.classification, batch)
    assert not verification.ok
    assert verification.causes[0].startswith(
        "module '1' (BatchNorm1d) runs on the batch whole and fails on a microbatch"
    )
    in_pairs = verify(model, losses.classification, batch, micro_batch_size=2)
    assert in_pairs.causes[0].startswith("module '1' (BatchNorm1d) mixes the samples of a microbatch")


class Own(nn.Module):
    """A language model of one's own: no config, and no other arguments than it names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, input_ids, attention_mask=None, labels=None):
        return self.head(self.embedding(input_ids) * attention_mask[..., None])


class Centred(Own):
    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = self.embedding(input_ids)
        return self.head(hidden - hidden.mean(0))


@pytest.mark.parametrize("make", [Own, Centred])
def test_batches_with_a_mask(make):
    """Which a loss looks at beforehand: what it notes is for itself alone."""
    samples = [{**each, "attention_mask": torch.ones_like(each["input_ids"])} for each in text()]
    verification = verify(make(), losses.next_token, samples)
    assert verification.ok == (make is Own), str(verification)
    if not verification.ok:
        assert verification.causes[0].startswith("module 'head' (Linear) mixes the samples of a microbatch")


def test_a_loss_that_cannot_do_without_other_samples_is_named():
    """It raises after the model has run, so that no module is at fault."""

    def in_pairs(model, batch):
        scores = model(batch["x"]).reshape(-1, 2)  # raises for one sample
        return (scores[:, 0] - scores[:, 1]).abs().max(), 1

    verification = verify(nn.Linear(3, 1), in_pairs, {"x": torch.randn(6, 3)})
    assert verification.causes[0].startswith("the loss runs on the batch whole and fails on a microbatch of it")
    verification = verify(nn.Sequential(nn.Linear(3, 1)), in_pairs, {"x": torch.randn(6, 3)}, micro_batch_size=2)
    assert not verification.ok
    assert "is no sum" in " ".join(verification.causes)
