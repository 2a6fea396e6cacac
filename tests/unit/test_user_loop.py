"""microbatch(): a loop that is not megabatch's, on one process; tests/exact/test_user_loop.py has the wrappers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megabatch import GradientAccumulator, MegabatchError
from tests.comm.counting import ParameterSized
from tests.unit import small

BATCH = small.samples([1, 3, 0, 4])  # 8 targets


def microbatches() -> Iterator[dict[str, Tensor]]:
    return ({name: value[None] for name, value in each.items()} for each in BATCH)


def run(gradient: GradientAccumulator, scaler: Any = None) -> None:
    for index, microbatch in enumerate(microbatches()):
        with gradient.microbatch(index, of=4, sum_over=small.count(microbatch)) as part:
            part.scale(small.squares(gradient.model, microbatch)[0], scaler).backward()


def scaled_by(factor: float, gradients: list[Tensor | None]) -> list[Tensor | None]:
    return [None if each is None else each * factor for each in gradients]


@pytest.fixture
def gradient() -> GradientAccumulator:
    return GradientAccumulator(small.model_of_integers())


def test_a_grad_scaler_beside_it(gradient) -> None:
    """The gradient stays multiplied until the scaler divides it, and is then that of the update."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = torch.optim.SGD(gradient.model.parameters(), lr=0.1)
    expected = small.expected(gradient.model, BATCH)
    run(gradient, scaler)
    update = gradient.finalize()
    assert update.finite
    assert float(update.loss) == 48.75
    assert small.same_bits(small.gradients(gradient.model), scaled_by(2.0**16, expected))
    scaler.unscale_(optimizer)
    assert small.same_bits(small.gradients(gradient.model), expected)
    scaler.step(optimizer), scaler.update()


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_finalize_clips_what_a_grad_scaler_multiplied(gradient, max_norm: float) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    model = gradient.model
    for parameter, each in zip(model.parameters(), small.expected(model, BATCH), strict=True):
        parameter.grad = each
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    expected = small.gradients(model)
    run(gradient, scaler)
    assert gradient.finalize(max_norm=max_norm).grad_norm == norm
    for found, each in zip(small.gradients(model), scaled_by(2.0**16, expected), strict=True):
        assert found is each is None or torch.allclose(found, each, rtol=1e-15, atol=0)


def test_an_infinite_gradient_is_left_to_the_scaler(gradient) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = torch.optim.SGD(gradient.model.parameters(), lr=0.1)
    before = [each.clone() for each in gradient.model.parameters()]
    with gradient.microbatch(0, of=1, sum_over=1) as part:
        part.scale(gradient.model.weight.sum() * 1e300 * 1e8, scaler).backward()
    update = gradient.finalize(max_norm=1.0)
    scaler.step(optimizer), scaler.update()
    assert not update.finite
    assert scaler.get_scale() == 2.0**15
    assert all(map(torch.equal, before, gradient.model.parameters()))


def test_one_microbatch_costs_what_pytorch_does() -> None:
    """No operation touches a tensor as large as a parameter that a loop without megabatch leaves alone."""
    model, data = nn.Linear(40, 30), torch.ones(5, 40)
    seen: list[list[str]] = []

    def plain() -> None:
        model.zero_grad()
        (model(data).square().sum() / 5).backward()

    gradient = GradientAccumulator(model)

    def ours() -> None:
        with gradient.microbatch(0, of=1, sum_over=5) as part:
            part.scale(model(data).square().sum()).backward()
        gradient.finalize()

    for work in (plain, ours):
        with ParameterSized(model.parameters()) as operations:
            work()
        seen.append(operations.seen)
    assert seen[0] == seen[1]


def test_an_update_without_weight_leaves_no_gradient(gradient) -> None:
    for index in range(2):
        with gradient.microbatch(index, of=2, sum_over=0) as part:
            part.scale(small.squares(gradient.model, next(microbatches()))[0]).backward()
    assert not gradient.finalize().finite
    assert small.gradients(gradient.model) == [None] * 3


def test_a_mean_over_nothing_adds_nothing() -> None:
    """Torch's cross-entropy is 0 / 0 there."""
    model, inputs = nn.Linear(2, 3).double(), torch.ones(4, 2).double()
    labels = [torch.tensor(each) for each in ([0, 1, -100, 2], [-100] * 4, [2, -100, -100, -100])]
    gradient = GradientAccumulator(model)
    for index, each in enumerate(labels):
        with gradient.microbatch(index, of=3, mean_over=(each != -100).sum()) as part:
            part.scale(cross_entropy(model(inputs), each)).backward()
    update = gradient.finalize()
    found = small.gradients(model)
    loss = cross_entropy(model(inputs.repeat(3, 1)), torch.cat(labels))
    expected = torch.autograd.grad(loss, list(model.parameters()))
    assert float(update.loss) == pytest.approx(loss.item(), rel=1e-15)
    assert all(torch.allclose(one, other, rtol=1e-14, atol=0) for one, other in zip(found, expected, strict=True))


def test_an_update_may_be_begun_again_after_discard(gradient) -> None:
    expected = small.expected(gradient.model, BATCH)
    with gradient.microbatch(0, of=4, sum_over=1) as part:
        part.scale(small.squares(gradient.model, next(microbatches()))[0]).backward()
    gradient.discard()
    run(gradient)
    gradient.finalize()
    assert small.same_bits(small.gradients(gradient.model), expected)


def test_discard_inside_of_a_microbatch_ends_the_update(gradient) -> None:
    with gradient.microbatch(0, of=2, sum_over=1):
        gradient.discard()
    with pytest.raises(MegabatchError, match="begin with microbatch 0"), gradient.microbatch(1, of=2, sum_over=1):
        pass


def test_an_error_in_the_first_body_is_forgotten(gradient) -> None:
    with pytest.raises(ZeroDivisionError), gradient.microbatch(0, of=4, sum_over=1):
        raise ZeroDivisionError
    run(gradient)
    assert gradient.finalize().finite


def test_a_nested_call_and_the_printed_update_name_what_is_known() -> None:
    gradient = GradientAccumulator(small.model_of_integers(), micro_batch_size=1)

    def nested(model: Any, microbatch: Any) -> Any:
        with pytest.raises(MegabatchError, match=r"^forward_backward\(\) or microbatch\(\) was called"):
            gradient.forward_backward(BATCH, small.squares)
        return small.squares(model, microbatch)

    gradient.forward_backward(BATCH[:1], nested)
    assert "1 samples, " in str(gradient.finalize())
    run(gradient)
    assert "over weight 8, 4 microbatches, finite" in str(gradient.finalize())


def test_calls_and_loops_take_turns(gradient) -> None:
    expected = small.expected(gradient.model, BATCH)
    for _ in range(2):
        run(gradient)
        gradient.finalize()
        assert small.same_bits(small.gradients(gradient.model), expected)
        gradient.forward_backward(BATCH, small.weighed)
        gradient.finalize()
        assert small.same_bits(small.gradients(gradient.model), expected)


def test_gradients_are_added_in_a_wider_dtype() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    gradient = GradientAccumulator(model, accumulate_dtype=torch.float32)
    for index in range(512):  # bfloat16 stops at 256
        with gradient.microbatch(index, of=512, update_weight=512) as part:
            part.scale(model(torch.ones(1, 1, dtype=torch.bfloat16)).sum()).backward()
    gradient.finalize()
    assert model.weight.grad.item() == 1.0


class TimeFirst(nn.Module):
    """A recurrent model: samples in dim 1 of the inputs, [T, B]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn, self.head = nn.Embedding(8, 4), nn.RNN(4, 4), nn.Linear(4, 8)

    def forward(self, tokens: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        outputs, hidden = self.rnn(self.embedding(tokens), hidden)
        return self.head(outputs), hidden


def test_samples_in_another_dim_and_a_state_that_is_carried() -> None:
    """Stretches of time of a [T, B] batch, as word_language_model trains on them."""
    torch.manual_seed(0)
    model, tokens = TimeFirst().double(), torch.randint(0, 8, (11, 3))  # [T + 1, B]
    gradient = GradientAccumulator(model)
    cuts, hidden, sums = ((0, 4), (4, 6), (6, 10)), None, []
    for index, (start, end) in enumerate(cuts):
        inputs, targets = tokens[start:end], tokens[start + 1 : end + 1]
        with gradient.microbatch(index, of=len(cuts), mean_over=targets.numel()) as part:
            logits, hidden = model(inputs, hidden)
            hidden = hidden.detach()
            part.scale(cross_entropy(logits.flatten(0, 1), targets.flatten())).backward()
    gradient.finalize()
    found, hidden = small.gradients(model), None
    for start, end in cuts:
        logits, hidden = model(tokens[start:end], hidden)
        hidden = hidden.detach()
        sums.append(cross_entropy(logits.flatten(0, 1), tokens[start + 1 : end + 1].flatten(), reduction="sum"))
    expected = torch.autograd.grad(torch.stack(sums).sum() / 30, list(model.parameters()))
    assert all(torch.allclose(one, other, rtol=1e-13, atol=0) for one, other in zip(found, expected, strict=True))


class PackedRow(nn.Module):
    """Rows without a batch dim, [T], whose documents are told apart by positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions, self.head = nn.Embedding(8, 4), nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        embedded = self.tokens(tokens) + self.positions(positions)
        documents = (positions == 0).cumsum(0)
        mask = (documents[:, None] == documents) & (torch.arange(len(tokens))[:, None] >= torch.arange(len(tokens)))
        return self.head(torch.where(mask[..., None], embedded, 0.0).sum(1))


def test_a_row_without_a_batch_dim_and_its_positions() -> None:
    """As torchtitan has them: the targets of the update are counted before, and the loss divides itself."""
    torch.manual_seed(0)
    model = PackedRow().double()
    rows = [([3, 2], 0), ([4], 1), ([1, 5, 1], 2)]  # lengths of documents, and ignored targets
    data = []
    for lengths, ignored in rows:
        labels = torch.randint(0, 8, (sum(lengths),))
        labels[:ignored] = -100
        data.append((torch.randint(0, 8, labels.shape), torch.cat([*map(torch.arange, lengths)]), labels))
    num_targets = sum(int((labels != -100).sum()) for *_, labels in data)

    def loss_of(row: Any, divisor: float) -> Tensor:
        tokens, positions, labels = row
        return cross_entropy(model(tokens, positions), labels, reduction="sum") / divisor

    gradient = GradientAccumulator(model)
    for index, row in enumerate(data):
        with gradient.microbatch(index, of=len(data), update_weight=num_targets) as part:
            loss_of(row, part.divisor).backward()
    assert gradient.finalize(max_norm=1e9).finite
    found = small.gradients(model)
    alone = [
        part
        for row, (lengths, _) in zip(data, rows, strict=True)
        for part in zip(*(each.split(lengths) for each in row), strict=True)
    ]
    expected = torch.autograd.grad(sum(loss_of(part, num_targets) for part in alone), list(model.parameters()))
    assert all(torch.allclose(one, other, rtol=1e-13, atol=1e-17) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("said", [{"sum_over": 1}, {"divided": True}])
def test_a_repeated_sample_with_the_weight_0_counts_nothing(said: dict[str, Any], reduction: str) -> None:
    """As a rank gives it that has fewer microbatches, whatever its loss divides by."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 4).double(), torch.randn(2, 3).double(), torch.tensor([1, 2])
    cross_entropy(model(x), y, reduction="sum").backward()
    expected = small.gradients(model)
    gradient = GradientAccumulator(model)
    for index, told in enumerate((said, {**said, "sum_over": 0})):
        with gradient.microbatch(index, of=2, **told) as part:
            part.scale(cross_entropy(model(x), y, reduction=reduction if index else "sum")).backward()
    assert gradient.finalize().finite
    assert small.same_bits(small.gradients(model), expected)
