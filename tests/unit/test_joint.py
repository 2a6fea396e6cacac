"""JointLoss on one process: every form of representations, calls and terms; and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megabatch import GradientAccumulator, JointLoss, LossContractError
from megabatch.batching.deferred import Deferred
from megabatch.inspection import random_state
from megabatch.losses.coupled_loss import keep_encoding
from tests.exact import oracle

WIDTH, SIZE = 4, 7


class Towers(nn.Module):
    """Two encoders and a temperature."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.query, self.document = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, query: Tensor, document: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, documents = self.dropout(torch.tanh(self.query(query))), self.document(document)
        return queries, documents, self.temperature.expand(len(queries))


def towers(dropout: float = 0.0) -> Towers:
    torch.manual_seed(0)
    return Towers(dropout).double()


def rows(size: int = SIZE, seed: int = 1) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    query, document = torch.randn(2, size, WIDTH, generator=numbers, dtype=torch.float64)
    return {"query": query, "document": document}


def encode(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return model(batch["query"], batch["document"])


def contrast(queries: Tensor, documents: Tensor, temperature: Tensor) -> tuple[Tensor, int]:
    """InfoNCE both ways."""
    scores = queries @ documents.T * temperature.mean().exp()  # [N, N]
    place = torch.arange(len(scores))
    both = [F.cross_entropy(each, place, reduction="sum") for each in (scores, scores.T)]
    return torch.stack(both).sum() / 2, len(scores)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def run(joint: JointLoss, *batches: Any, model: nn.Module | None = None, **settings: Any) -> dict[str, Tensor | None]:
    """The gradient of an update of some calls."""
    model = towers() if model is None else model
    gradient = GradientAccumulator(model, **({"micro_batch_size": 2} | settings))
    for batch in batches:
        gradient.forward_backward(batch, joint)
    gradient.finalize()
    return gradients(model)


def uncut(make: Callable[[nn.Module], tuple[Tensor, Any]], model: nn.Module | None = None) -> dict[str, Tensor | None]:
    """The gradient of a total over its weight, in one graph."""
    model = towers() if model is None else model
    total, weight = make(model)
    (total / weight).backward()
    return gradients(model)


def assert_equal(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    error, parameter = oracle.worst_error(found, expected)
    assert error <= 1e-14, f"{parameter}: {error:.1e}"


EXPECTED = uncut(lambda model: contrast(*encode(model, rows())))
FORMS = {  # encode, and the loss that fits
    "a tuple": (encode, contrast),
    "a list": (lambda *given: list(encode(*given)), lambda every: contrast(*every)),
    "a mapping": (
        lambda *given: dict(zip("qdt", encode(*given), strict=True)),
        lambda every: contrast(every["q"], every["d"], every["t"]),
    ),
    "a tensor": (
        lambda *given: torch.cat([each.reshape(len(each), -1) for each in encode(*given)], dim=1),
        lambda every: contrast(every[:, :WIDTH], every[:, WIDTH:-1], every[:, -1]),
    ),
    "with numbers of samples": (
        lambda model, batch: (*encode(model, batch), batch["query"][:, 0] > 0),
        lambda *every: contrast(*every[:3]) if every[3].dtype == torch.bool else None,
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 3, SIZE])
def test_any_form_and_any_cut(form: str, size: int) -> None:
    assert_equal(run(JointLoss(*FORMS[form]), rows(), micro_batch_size=size), EXPECTED)


def test_a_batch_loaded_while_it_runs() -> None:
    samples = [{name: each[row] for name, each in rows().items()} for row in range(SIZE)]
    batch = Deferred(samples.__getitem__, [WIDTH] * SIZE)
    assert_equal(run(JointLoss(encode, contrast), batch), EXPECTED)


def test_beside_a_plain_loss_in_one_update() -> None:
    def plain(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        queries, _, _ = encode(model, batch)
        return queries.square().sum(), len(queries)

    model = towers()
    gradient = GradientAccumulator(model, micro_batch_size=2)
    gradient.forward_backward(rows(5), JointLoss(encode, contrast))
    gradient.forward_backward(rows(3, seed=2), plain)
    gradient.finalize()
    both = [lambda model: contrast(*encode(model, rows(5))), lambda model: plain(model, rows(3, seed=2))]
    expected = uncut(lambda model: (sum(each(model)[0] for each in both), 8))
    assert_equal(gradients(model), expected)


def test_an_encode_that_writes_to_its_microbatch_leaves_the_batch_alone() -> None:
    model, batch = towers(), rows()
    before = {name: tensor.clone() for name, tensor in batch.items()}

    def encode_scaled(model: nn.Module, microbatch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        microbatch["query"].mul_(0.5)
        return encode(model, microbatch)

    gradient = GradientAccumulator(model, micro_batch_size=3)
    gradient.forward_backward(batch, JointLoss(encode_scaled, contrast))
    gradient.finalize()
    assert all(torch.equal(batch[name], tensor) for name, tensor in before.items())


def test_what_does_not_learn_is_left_alone() -> None:
    frozen = towers()
    frozen.document.requires_grad_(False)
    found = run(JointLoss(encode, contrast), rows(), model=frozen)
    assert found["document.weight"] is None
    assert_equal({name: found[name] for name in ("query.weight", "temperature")},
                 {name: EXPECTED[name] for name in ("query.weight", "temperature")})  # fmt: skip


def test_the_given_divisor_and_the_norm() -> None:
    model = towers()
    gradient = GradientAccumulator(model, micro_batch_size=2)
    gradient.forward_backward(rows(), JointLoss(encode, contrast))
    update = gradient.finalize(weight=2.0, max_norm=1e9)
    expected = uncut(lambda model: (contrast(*encode(model, rows()))[0], 2.0))
    assert_equal(gradients(model), expected)
    norm = torch.linalg.vector_norm(torch.stack([each.norm() for each in expected.values()]))
    assert float(update.grad_norm) == pytest.approx(float(norm), rel=1e-14)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_dropout_is_that_of_one_pass(checkpointed: bool) -> None:
    """The gradient is that of the first forwards in one graph, and the generator stands where they left it."""

    def again(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return checkpoint(encode, model, batch, use_reentrant=False)

    model, reference = towers(dropout=0.5), towers(dropout=0.5)
    torch.manual_seed(5)
    parts = [encode(reference, {name: each[at : at + 2] for name, each in rows().items()}) for at in range(0, SIZE, 2)]
    after = torch.rand(3)
    total, weight = contrast(*(torch.cat(each) for each in zip(*parts, strict=True)))
    (total / weight).backward()
    torch.manual_seed(5)
    assert_equal(run(JointLoss(again if checkpointed else encode, contrast), rows(), model=model), gradients(reference))
    assert torch.equal(torch.rand(3), after)


def test_a_replay_leaves_the_generator_where_it_was_also_where_it_fails() -> None:
    state = random_state.note(torch.device("cpu"))
    torch.rand(7)
    there = random_state.note(torch.device("cpu"))
    assert not there.same_as(state)
    with pytest.raises(RuntimeError), random_state.replay(state):
        torch.rand(3).view(2)
    assert random_state.note(torch.device("cpu")).same_as(there)


def test_autocast_around_the_whole_loop_keeps_gradients() -> None:
    """Casts of weights made without a graph must not be used in the second forward."""
    inside, outside = Towers(), Towers()
    outside.load_state_dict(inside.state_dict())
    batch = {name: each.float() for name, each in rows().items()}

    def cast(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            return encode(model, batch)

    def loss(queries: Tensor, documents: Tensor, temperature: Tensor) -> tuple[Tensor, int]:
        with torch.autocast("cpu", enabled=False):
            return contrast(queries.float(), documents.float(), temperature)

    expected = run(JointLoss(cast, loss), batch, model=inside)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(JointLoss(encode, loss), batch, model=outside)
    assert all(each is not None for each in found.values())
    assert oracle.whole_error(found, expected) < 0.01  # bfloat16 has three digits


def test_representations_keep_their_dtype() -> None:
    kinds: list[torch.dtype] = []

    def half(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        queries = encode(model, batch)[0].bfloat16()
        if queries.requires_grad:
            queries.register_hook(lambda gradient: kinds.append(gradient.dtype))
        return queries

    run(JointLoss(half, lambda queries: (queries.float().square().sum(), len(queries))), rows())
    assert kinds == [torch.bfloat16] * 4


def test_one_microbatch_of_activations_at_a_time() -> None:
    """Tensors that autograd saves in encode are gone before the next microbatch is encoded."""
    alive, most = [0], [0]

    class Saved:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor
            alive[0] += tensor.numel()
            most[0] = max(most[0], alive[0])

        def __del__(self) -> None:
            alive[0] -= self.tensor.numel()

    def counted(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            return encode(model, batch)

    peaks: list[int] = []
    for size in (2, 4, 32):
        most[0] = 0
        run(JointLoss(counted, contrast), rows(size), micro_batch_size=2)
        peaks.append(most[0])
    assert peaks[0] == peaks[1] == peaks[2] > 0
    assert alive == [0]


def test_a_kept_representation_keeps_nothing_else() -> None:
    hidden = torch.zeros(2, 1000, WIDTH)
    kept = keep_encoding((hidden[:, 0], hidden[:, -1]), random_state.note(hidden.device))
    assert [each.untyped_storage().nbytes() for each in kept.leaves] == [2 * WIDTH * 4] * 2


def test_no_samples_at_all() -> None:
    model = towers()
    gradient = GradientAccumulator(model, micro_batch_size=2)
    assert gradient.forward_backward([], JointLoss(encode, contrast)) == {}
    assert not gradient.finalize().finite


@pytest.mark.parametrize("name", ["an encode that changes", "a parameter in the loss", "rows that differ"])
def test_what_fails_leaves_nothing_for_the_next_update(name: str) -> None:
    model = towers()
    gradient = GradientAccumulator(model, micro_batch_size=2)
    with pytest.raises(LossContractError):
        gradient.forward_backward(rows(), SPOILED[name](model))
    gradient.forward_backward(rows(), JointLoss(encode, contrast))
    gradient.finalize()
    assert_equal(gradients(model), EXPECTED)


def _changing(model: nn.Module) -> JointLoss:
    numbers = iter(range(1, 100))
    return JointLoss(lambda model, batch: encode(model, batch)[0] * next(numbers), lambda all: (all.sum(), 1))


SPOILED: dict[str, Callable[[Any], JointLoss]] = {
    "an encode that changes": _changing,
    "a parameter in the loss": lambda model: JointLoss(encode, lambda q, d, t: (q.sum() * model.temperature, 1)),
    "rows that differ": lambda model: JointLoss(lambda *given: encode(*given)[0][:1], contrast),
}
