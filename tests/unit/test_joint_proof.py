"""verify of a JointLoss: an encode of each sample by itself passes, and one that depends on the cut is named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch import JointLoss, LossContractError, verify

Batch = dict[str, Tensor]
WIDTH, SIZE, VOCABULARY = 4, 6, 20


def pairs() -> Batch:
    query, document = torch.randn(2, SIZE, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return {"query": query, "document": document}


class Largest(nn.Module):
    """Adds the largest over the samples."""

    def forward(self, features: Tensor) -> Tensor:
        return features + features.amax(0, keepdim=True)


class Towers(nn.Module):
    """Two encoders, a module inside of one of them, and a temperature."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.query, self.document = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.inner = nn.Identity() if inner is None else inner
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, query: Tensor, document: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.inner(self.query(query)), self.document(document), self.temperature.expand(len(query))


def encode(model: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return model(batch["query"], batch["document"])


def contrast(queries: Tensor, documents: Tensor, temperature: Tensor) -> tuple[Tensor, int]:
    scores = queries @ documents.T * temperature.mean().exp()  # [N, N]
    return F.cross_entropy(scores, torch.arange(len(scores)), reduction="sum"), len(scores)


JOINT = JointLoss(encode, contrast)
AS_MAPPING = JointLoss(
    lambda model, batch: dict(zip(("queries", "documents", "temperature"), encode(model, batch), strict=True)),
    lambda rows: {"contrast": contrast(**rows), "size": (rows["queries"].square().sum(), len(rows["queries"]))},
)


class Encoder(nn.Module):
    """Tokens to vectors, with a mean over all positions if there is no mask."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, WIDTH)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = self.embedding(tokens)
        mask = torch.ones_like(tokens) if mask is None else mask
        return self.head((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def texts() -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    tokens = [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in (3, 7, 4, 7)]
    return [{"tokens": each, "mask": torch.ones_like(each)} for each in tokens]


def similar(rows: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)).flip(0), reduction="sum"), len(rows)


@pytest.mark.parametrize("joint", [JOINT, AS_MAPPING])
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_passes(joint: JointLoss, micro_batch_size: int) -> None:
    verification = verify(Towers(), joint, pairs(), micro_batch_size=micro_batch_size)
    assert verification.ok, str(verification)
    assert verification.worst <= 1e-13


def test_dropout_is_off() -> None:
    assert verify(Towers(nn.Dropout(0.5)), JOINT, pairs()).ok


@pytest.mark.parametrize(
    "inner", [lambda: nn.BatchNorm1d(WIDTH), Largest, lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False)]
)
def test_names_a_module_that_mixes(inner: Callable[[], nn.Module]) -> None:
    module = inner()
    verification = verify(Towers(module), JOINT, pairs(), micro_batch_size=2)
    assert not verification.ok
    assert any(
        cause.startswith(f"module 'inner' ({type(module).__name__}) mixes the samples of a microbatch")
        for cause in verification.causes
    ), verification.causes


def test_frozen_batch_norm_passes() -> None:
    assert verify(Towers(nn.BatchNorm1d(WIDTH).eval()), JOINT, pairs()).ok


def test_names_a_module_that_cannot_do_without_other_samples() -> None:
    verification = verify(Towers(nn.BatchNorm1d(WIDTH)), JOINT, pairs())
    assert verification.causes[0].startswith("module 'inner' (BatchNorm1d) runs on the batch whole and fails on a")


def test_names_padding_without_a_mask() -> None:
    unmasked = JointLoss(lambda model, batch: model(batch["tokens"]), similar)
    masked = JointLoss(lambda model, batch: model(batch["tokens"], batch["mask"]), similar)
    assert verify(Encoder(), masked, texts()).ok
    verification = verify(Encoder(), unmasked, texts())
    assert not verification.ok
    assert verification.causes[0].startswith("padding changes the representation of a sample: one of length 3")


def test_names_an_encode_that_couples_samples_itself() -> None:
    """Outside of any module."""
    joint = JointLoss(lambda model, batch: (lambda rows: rows - rows.mean(0))(encode(model, batch)[0]), similar)
    verification = verify(Towers(), joint, pairs())
    assert not verification.ok
    assert verification.causes[0].startswith("encode gives sample 0 another representation alone")


def test_names_an_encode_whose_gradient_alone_depends_on_the_cut() -> None:
    """Equal representations, and a gradient scaled by the number of samples."""

    def scaled(model: Any, batch: Batch) -> Tensor:
        rows = encode(model, batch)[0]
        return rows.detach() + (rows - rows.detach()) / len(rows)

    verification = verify(Towers(), JointLoss(scaled, similar), pairs())
    assert not verification.ok
    assert verification.causes == ("the gradients differ, and neither the modules nor the representations show why",)


REFUSED = {  # joint loss, what its cause names
    "a parameter in the loss": (lambda model: JointLoss(
        lambda model, batch: encode(model, batch)[:2],
        lambda queries, documents: contrast(queries, documents, model.temperature.expand(1)),
    ), "reaches a trainable parameter of shape () by itself"),
    "random numbers": (lambda _: JointLoss(
        encode, lambda *rows: (contrast(*rows)[0] * torch.rand(()), len(rows[0]))
    ), "another gradient the second time"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_a_cause(name: str) -> None:
    make, cause = REFUSED[name]
    model = Towers()
    verification = verify(model, make(model), pairs())
    assert not verification.ok
    assert any(cause in each for each in verification.causes), verification.causes


UNUSABLE: dict[str, Callable[[Any, Batch], Any]] = {
    "nothing": lambda model, batch: (),
    "a number": lambda model, batch: 1.0,
    "a scalar": lambda model, batch: encode(model, batch)[0].sum(),
    "other rows": lambda model, batch: encode(model, batch)[0][:1],
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_an_unusable_encode_is_refused(name: str) -> None:
    with pytest.raises(LossContractError, match="encode returned"):
        verify(Towers(), JointLoss(UNUSABLE[name], similar), pairs())


def test_the_model_is_left_as_it_was() -> None:
    model = Towers(nn.BatchNorm1d(WIDTH))
    before = {name: each.clone() for name, each in model.state_dict().items()}
    verify(model, JOINT, pairs(), micro_batch_size=2)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
