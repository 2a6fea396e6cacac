"""verify: passes what is exact to 1e-9, and names what is not."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch import loss, losses, verify
from megabatch.planning import partition as plan_module

VOCABULARY = 40
TARGETS = [(7, 7), (4, 2), (9, 5), (3, 3)]  # tokens, and how many of the last of them have a label


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, **TOKENS))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, attention_dropout=0.1, **sizes, **TOKENS))


TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def text() -> list[dict[str, Tensor]]:
    """Samples of unequal lengths, all with a label at position 0 but the second and third."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for length, num_targets in TARGETS:
        tokens = torch.randint(VOCABULARY, (length,), generator=generator)
        labels = torch.where(torch.arange(length) < length - num_targets, -100, tokens)
        made.append({"input_ids": tokens, "labels": labels})
    return made


class CNN(nn.Module):
    """Two convolutions, a norm between them, and one output per class."""

    def __init__(self, norm: nn.Module) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(1, 4, 3), norm, nn.Conv2d(4, 4, 3)
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, image: Tensor) -> Tensor:
        features = self.second(torch.relu(self.norm(self.first(image))))  # [B, 4, 4, 4]
        return self.head(self.dropout(features.mean((2, 3))))


def images() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {"image": torch.randn(5, 1, 8, 8, generator=generator), "labels": torch.tensor([0, 1, 2, 0, 1])}


TOLERANCE = 1e-9
STEPS = 4


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


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
    assert str(verification).startswith("NOT exact: ")


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
    """A module that a loss looks at beforehand notes things for itself alone."""
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


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training):
    """Its numbers and its very tensors, its gradients, its hooks and what is drawn next."""
    model = CNN(nn.BatchNorm2d(4)).train(training)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    tensors = [(id(each), id(each.grad), each.data_ptr(), each._version) for each in model.parameters()]
    hooks = [len(hooks) for module in model.modules() for name, hooks in vars(module).items() if "hooks" in name]
    verify(model, losses.classification, images())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [(id(each), id(each.grad), each.data_ptr(), each._version) for each in model.parameters()] == tensors
    assert all(bool((each.grad == 1).all()) and each.dtype == torch.float32 for each in model.parameters())
    assert [
        len(hooks) for module in model.modules() for name, hooks in vars(module).items() if "hooks" in name
    ] == hooks
    assert all(module.training == training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


DRAWN = torch.Generator().manual_seed(3)
VECTORS = {"x": torch.randn(6, 4, generator=DRAWN), "labels": torch.randn(6, 1, generator=DRAWN)}
CLASSES = {"x": torch.randn(6, 4, generator=DRAWN), "labels": torch.arange(6) % 3}
CLASS_WEIGHT = torch.tensor([1.0, 2.0, 3.0])  # float32


def two_layers():
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))


class Squares(torch.autograd.Function):
    """A sum of squared errors with a backward of its own."""

    @staticmethod
    def forward(ctx, predictions, labels):
        ctx.save_for_backward(predictions, labels)
        return (predictions - labels).square().sum()

    @staticmethod
    def backward(ctx, grad_output):
        predictions, labels = ctx.saved_tensors
        return 2 * grad_output * (predictions - labels), None


class GradientInForward(Squares):
    """As chunked losses do that are written for a loop that never scales what they return."""

    @staticmethod
    def backward(ctx, grad_output):
        return Squares.backward(ctx, torch.ones_like(grad_output))


class HalfAGradient(Squares):
    """Scaled as it should be, of another number than it returned."""

    @staticmethod
    def backward(ctx, grad_output):
        return Squares.backward(ctx, grad_output / 2)


class Rounded(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, features):
        return (8 * features).round() / 8

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output


class Quantized(nn.Linear):
    def forward(self, features):
        return super().forward(Rounded.apply(features))


def by(squares, call=lambda model, x: model(x)):
    """A loss that is computed by such a function, of what ``call`` makes of the model."""
    return lambda model, batch: (squares.apply(call(model, batch["x"]), batch["labels"]), len(batch["x"]))


def layer_by_layer(model, x):
    for layer in model:
        x = layer(x)
    return x


def steps_itself(model, batch):
    total = (model(batch["x"]) - batch["labels"]).square().sum()
    total.backward(retain_graph=True)
    return total, len(batch["x"])


def with_a_teacher(model, batch):
    with torch.no_grad():
        targets = layer_by_layer(model, batch["x"]).tanh()
    return (layer_by_layer(model, batch["x"]) - targets).square().sum(), len(batch["x"])


def policy_gradient(model, batch):
    """Its value is the same everywhere, and its gradient is meant."""
    found = model(batch["x"])
    return ((found - found.detach()).exp() * batch["labels"]).sum(), len(batch["x"])


def zeros():
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def with_a_kink(model, batch):
    found = model(batch["x"])
    return (found.relu() + found).sum(), len(found)


BACKWARD = "the backward of the loss does not give the gradient of what it returns"


def detaches_and_halves(model, batch):
    found = model(batch["x"])
    return HalfAGradient.apply(found, batch["labels"]) + (found - found.detach()).sum(), len(found)


@pytest.mark.parametrize(
    "loss_fn",
    [detaches_and_halves, by(GradientInForward), by(HalfAGradient), by(HalfAGradient, layer_by_layer), steps_itself],
    ids=[
        "another scale, and detaches",
        "ignores grad_output",
        "another scale",
        "another scale, by its layers",
        "its own backward",
    ],
)
def test_a_gradient_that_is_not_that_of_the_loss(loss_fn):
    verification = verify(two_layers(), loss_fn, VECTORS)
    assert not verification.ok
    assert any(
        cause.startswith((BACKWARD, "gradients changed while", "the backward of")) for cause in verification.causes
    )


def with_a_metric(model, batch):
    """A loss that detaches its input."""
    error = (model(batch["x"]) - batch["labels"]).square().sum()
    return {"loss": (error, len(batch["x"])), "twice": (error.detach() * 2, 1)}


MEANT = {
    "a metric": (two_layers, with_a_metric),
    "a right function": (two_layers, by(Squares)),
    "by its layers": (two_layers, by(Squares, layer_by_layer)),
    "a policy gradient": (two_layers, policy_gradient),
    "a teacher that is the model": (two_layers, with_a_teacher),
    "a straight-through estimator": (lambda: nn.Sequential(nn.Linear(4, 3), Quantized(3, 1)), losses.mse),
    "a kink where it stands": (zeros, with_a_kink),
    "hidden in a list of models": (
        lambda: list(two_layers()), lambda models, batch: losses.mse(nn.Sequential(*models), batch),
    ),
    "inputs that carry a gradient": (
        two_layers, lambda model, batch: losses.mse(model, {**batch, "x": batch["x"].requires_grad_()}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MEANT)
def test_what_is_meant_is_not_blamed(name):
    model, loss_fn = MEANT[name]
    verification = verify(model(), loss_fn, VECTORS)
    assert verification.ok, str(verification)


def old_weight_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is a newer one
        model = nn.utils.weight_norm(nn.Linear(4, 1))
    model(VECTORS["x"])  # its weight is no leaf any more
    return model


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 1, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(self.weight.dtype) @ self.weight).abs()


def weighted(model, batch):
    total = F.cross_entropy(model(batch["x"]), batch["labels"], weight=CLASS_WEIGHT, reduction="sum")
    return total, CLASS_WEIGHT[batch["labels"]].sum()


def checkpointed():
    model = llama()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is called otherwise in later versions
        model.gradient_checkpointing_enable()
    return model


RUNS = {  # models and losses that a float64 copy has to be made for with care
    "old weight_norm": (old_weight_norm, losses.mse, VECTORS),
    "complex numbers": (Complex, losses.mse, VECTORS),
    "a class weight in float32": (lambda: nn.Linear(4, 3), weighted, CLASSES),
    "dropout inside of an LSTM": (
        lambda: nn.LSTM(2, 3, num_layers=2, dropout=0.5, batch_first=True),
        lambda model, batch: (model(batch["x"].reshape(-1, 2, 2))[0].square().sum(), len(batch["x"])), VECTORS,
    ),
    "dropout inside of attention": (
        lambda: nn.MultiheadAttention(2, 1, dropout=0.5, batch_first=True),
        lambda model, batch: (model(*[batch["x"].reshape(-1, 2, 2)] * 3)[0].square().sum(), len(batch["x"])), VECTORS,
    ),
    "bfloat16": (lambda: nn.Linear(4, 1).bfloat16(), losses.mse, VECTORS),
    "checkpoints": (checkpointed, losses.next_token, text()),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_it_runs(name):
    model, loss_fn, batch = RUNS[name]
    verification = verify(model(), loss_fn, batch)
    assert verification.ok, str(verification)


def test_a_module_whose_state_moves_is_named():
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
    verification = verify(model, losses.classification, CLASSES)
    assert "the state of module 'parametrizations.weight.0' (_SpectralNorm: '_u', '_v') moves" in verification.causes[0]


def clamped():
    model = nn.Linear(4, 1)
    model.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return model


def outside(model, batch):
    return losses.mse(lambda x: OUTSIDE(model(x)), batch)


@loss(weigh=lambda batch: {"loss": len(batch["x"]), "penalty": 0})
def unweighed_penalty(model, batch):
    found = model(batch["x"])
    return {"loss": ((found - batch["labels"]).square().sum(), len(found)), "penalty": (found.pow(4).sum(), 0)}


OUTSIDE = nn.Linear(1, 1)
REFUSED = {  # model, loss, batch, options, part of a cause
    "a hook on a parameter": (clamped, losses.mse, VECTORS, {}, "hook"),
    "a head outside of the model": (lambda: nn.Linear(4, 1), outside, VECTORS, {}, "not the model's"),
    "a term without weight": (lambda: nn.Linear(4, 1), unweighed_penalty, VECTORS, {}, "'penalty'"),
    "nothing to train": (lambda: nn.Linear(4, 1).requires_grad_(False), losses.mse, VECTORS, {}, "no parameter"),
    "an option that is refused": (lambda: nn.Linear(4, 1), losses.mse, VECTORS, {"sync": "replica_last"}, "for HSDP"),
    "a cap below the longest": (llama, losses.next_token, text(), {"max_microbatch_tokens": 8}, "more than max_"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_accumulator_refuses_is_a_cause(name):
    model, loss_fn, batch, options, part = REFUSED[name]
    verification = verify(model(), loss_fn, batch, **options)
    assert not verification.ok
    assert any(part in cause for cause in verification.causes), verification.causes
    assert OUTSIDE.weight.grad is None


def test_a_router_loss_that_is_left_out():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(
        vocab_size=40, num_key_value_heads=2, num_local_experts=4, output_router_logits=True, **sizes
    )
    verification = verify(MixtralForCausalLM(config), losses.next_token, text())
    assert not verification.ok
    assert "router" in verification.causes[0]


class LastToken(nn.Module):
    """Looks for the last token that is not its padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 8), nn.Linear(8, 3)

    def forward(self, input_ids):
        last = (input_ids != 63).cumsum(1).argmax(1)
        return self.head(self.embedding(input_ids)[torch.arange(len(input_ids)), last])


class Average(LastToken):
    def forward(self, input_ids):
        return self.head(self.embedding(input_ids).mean(1))


@pytest.mark.parametrize("model", [LastToken, Average])
def test_padding_that_counts_is_named(model):
    samples = [{"input_ids": torch.arange(1, length), "labels": torch.tensor(length % 3)} for length in (4, 7, 9)]
    verification = verify(model(), losses.classification, samples)
    assert verification.causes[0].startswith(
        "padding changes the loss of a sample: one of length 3 has another when it is padded to 8 ('input_ids' with 0)"
    )


def padded_with_63(samples):
    longest = max(len(each["input_ids"]) for each in samples)
    rows = [F.pad(each["input_ids"], (0, longest - len(each["input_ids"])), value=63) for each in samples]
    return {"input_ids": torch.stack(rows), "labels": torch.stack([each["labels"] for each in samples])}


def test_options_are_the_accumulators():
    samples = [{"input_ids": torch.arange(1, length), "labels": torch.tensor(length % 3)} for length in (4, 7, 9)]
    assert verify(LastToken(), losses.classification, samples, collate=padded_with_63).ok
    assert verify(LastToken(), losses.classification, samples, collate=padded_with_63, max_microbatch_tokens=16).ok
    assert verify(nn.Linear(4, 1).bfloat16(), losses.mse, VECTORS, accumulate_dtype=torch.float32).ok
    with pytest.raises(TypeError, match="colate"):
        verify(LastToken(), losses.classification, samples, colate=padded_with_63)


PLANTED = {  # in the library, of one process: where, what stands there, what is planted, how it is seen
    "a gradient that is not scaled": ("megabatch.core.accumulator.scale_gradients", lambda parameters, factor: None),
    "microbatches that are dropped": (
        "megabatch.core.samples.plan_share",
        lambda *given, plan=plan_module.plan_share: replace(made := plan(*given), microbatches=made.microbatches[:1]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_of_the_library_is_seen(name, monkeypatch):
    """It is the accumulator that is verified: with none of these faults the same call is exact."""

    def late(model, batch):  # its weight is known when all is done
        return (model(batch["x"]) - batch["labels"]).square().sum(), len(batch["x"])

    assert verify(two_layers(), late, VECTORS).ok
    monkeypatch.setattr(*PLANTED[name])
    assert not verify(two_layers(), late, VECTORS).ok
