"""`megabatch.mean`: a loss that returns a mean, against plain torch in float64."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import megabatch
from megabatch import GradientAccumulator, LossContractError
from megabatch.pipeline.run import Pipeline
from megabatch.train.runtime.ranks import Ranks
from tests.exact import oracle
from tests.train.on_ranks import on_ranks

VOCABULARY, IGNORED = 11, -1


class Nano(nn.Module):
    """As nanoGPT's model: ``model(idx, targets)`` returns the logits and the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.double()

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.head(self.embedding(idx))
        flat = None if targets is None else targets.flatten()
        return logits, None if flat is None else F.cross_entropy(logits.flatten(0, 1), flat, ignore_index=IGNORED)


def batch(num_samples: int = 7) -> dict[str, Tensor]:
    """Rows with 0 to 5 targets; the first two and the last have none."""
    torch.manual_seed(2)
    x, y = torch.randint(VOCABULARY, (2, num_samples, 5))
    for row, num_targets in enumerate([0, 0, 5, 1, 3, 2, 0][:num_samples]):
        y[row, num_targets:] = IGNORED
    return {"x": x, "y": y, "values": torch.randn(num_samples, 5, VOCABULARY).double()}


def nano(model: Any, microbatch: Any) -> Any:
    return model(microbatch["x"], microbatch["y"])[1]


def outside(model: Any, microbatch: Any) -> Any:
    logits = model(microbatch["x"])[0]
    return F.cross_entropy(logits.transpose(1, 2), microbatch["y"], ignore_index=IGNORED)


def divides_by_zero(model: Any, microbatch: Any) -> Any:
    """A masked mean as many write it: 0 / 0 in the forward, and again in the backward, where there is no target."""
    mask = microbatch["y"] != IGNORED
    found = model(microbatch["x"])[0].logsumexp(-1)
    return (found * mask).sum() / mask.sum()


def masked(model: Any, microbatch: Any) -> Any:
    """The same without 0 / 0."""
    mask = microbatch["y"] != IGNORED
    found = model(microbatch["x"])[0].logsumexp(-1)
    return (found * mask).sum() / mask.sum().clamp(min=1)


def squares(model: Any, microbatch: Any) -> Any:
    return F.mse_loss(model(microbatch["x"])[0], microbatch["values"])


def count(microbatch: Any) -> Any:
    return (microbatch["y"] != IGNORED).sum()


def elements(microbatch: Any) -> Any:
    return microbatch["values"].numel()


WEIGHTS = torch.linspace(0.5, 2, VOCABULARY).double()


def weighted(model: Any, microbatch: Any) -> Any:
    return F.cross_entropy(model(microbatch["x"])[0].flatten(0, 1), microbatch["x"].flatten(), weight=WEIGHTS)


def sum_of_weights(microbatch: Any) -> Any:
    return WEIGHTS[microbatch["x"]].sum()


MEANS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "nanoGPT": (nano, count),
    "outside of the model": (outside, count),
    "masked": (masked, count),
    "squares": (squares, elements),
    "class weights": (weighted, sum_of_weights),
}


def plain_gradient(loss: Callable[..., Any], whole: dict[str, Tensor]) -> dict[str, Tensor | None]:
    model = Nano()
    loss(model, whole).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def gradient_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name.removeprefix("module."): parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("name", MEANS)
def test_the_gradient_is_that_of_the_mean_of_the_whole_update(name: str, size: int) -> None:
    loss, over = MEANS[name]
    model = Nano()
    gradient = GradientAccumulator(model, micro_batch_size=size)
    whole = batch()
    for part in ({key: rows[:4] for key, rows in whole.items()}, {key: rows[4:] for key, rows in whole.items()}):
        gradient.forward_backward(part, megabatch.mean(loss, over=over))
    update = gradient.finalize()
    assert oracle.whole_error(gradient_of(model), plain_gradient(loss, whole)) <= 1e-12
    assert float(update.loss) == pytest.approx(float(loss(Nano(), whole).detach()), rel=1e-12)
    assert float(update.weight) == pytest.approx(float(over(whole)))
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_a_mean_of_0_over_0_is_refused_and_spoils_nothing() -> None:
    gradient = GradientAccumulator(Nano(), micro_batch_size=1)
    with pytest.raises(LossContractError, match="where over counts 0"):
        gradient.forward_backward(batch(), megabatch.mean(divides_by_zero, over=count))
    loss = megabatch.mean(nano, over=count)
    model = Nano()
    loss(model, {key: rows[:2] for key, rows in batch().items()})  # without a backward
    gradient = GradientAccumulator(model, micro_batch_size=1)
    gradient.forward_backward(batch(), loss)
    gradient.finalize()
    assert oracle.whole_error(gradient_of(model), plain_gradient(nano, batch())) <= 1e-12


@pytest.mark.parametrize("loss", [nano, masked])
def test_an_update_that_counts_nothing_has_no_gradient(loss: Callable[..., Any]) -> None:
    model = Nano()
    gradient = GradientAccumulator(model, micro_batch_size=1)
    sums = gradient.forward_backward({key: rows[:2] for key, rows in batch().items()}, megabatch.mean(loss, count))
    assert (float(sums["loss"].total), float(sums["loss"].weight)) == (0.0, 0.0)
    update = gradient.finalize()
    assert not update.finite
    assert set(gradient_of(model).values()) == {None}


def test_verify_takes_it_and_finds_a_wrong_count() -> None:
    assert megabatch.verify(Nano(), megabatch.mean(masked, over=count), batch()).ok
    wrong = megabatch.mean(masked, over=lambda microbatch: microbatch["y"].numel())
    assert not megabatch.verify(Nano(), wrong, batch()).ok


def test_a_cross_entropy_that_is_over_fewer_targets_is_refused_in_the_first_call() -> None:
    gradient = GradientAccumulator(Nano(), micro_batch_size=2)
    with pytest.raises(LossContractError, match=r"^weigh counted 10 from the data but the loss returned the weight 4 "):
        gradient.forward_backward(
            {key: rows[2:] for key, rows in batch().items()},
            megabatch.mean(nano, over=lambda microbatch: microbatch["y"].numel()),
        )


def test_it_can_be_pickled_and_copied() -> None:
    loss = megabatch.mean(nano, over=count)
    for again in (pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss)):
        total, weight = again(Nano(), batch())
        assert float(total.detach()) == pytest.approx(float(nano(Nano(), batch()).detach()) * weight)


def wrapped(kind: str, ranks: Ranks) -> nn.Module:
    model = Nano()
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        return fully_shard(model, mesh=mesh)
    stage = (model.embedding, model.head)[ranks.rank]
    sizes = [(8,), (VOCABULARY,)][ranks.rank]
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))

    def hidden(x: Tensor) -> Tensor:
        return torch.zeros(*x.shape, 8, dtype=torch.float64)

    def output(x: Tensor) -> Tensor:
        return torch.zeros(*x.shape, *sizes, dtype=torch.float64)

    return Pipeline([stage], mesh, schedule="1F1B", boundary=hidden, output=output)


def of_logits(model: Any, microbatch: Any) -> Any:
    """A stage of a pipeline returns logits alone."""
    found = model(microbatch["x"])
    logits = found[0] if isinstance(found, tuple) else found
    return F.cross_entropy(logits.flatten(0, 1), microbatch["y"].flatten(), ignore_index=IGNORED)


def masked_logits(model: Any, microbatch: Any) -> Any:
    return masked(lambda x: found if isinstance(found := model(x), tuple) else (found,), microbatch)


def on_two_ranks(ranks: Ranks) -> dict[str, float]:
    """Errors by wrapper and loss. Rank 1 has two samples, one of them without targets, and needs dummy microbatches."""
    errors = {}
    for kind in ("ddp", "fsdp2", "pipeline"):
        for loss in (of_logits, masked_logits):
            model = wrapped(kind, ranks)
            share = slice(0, 7) if kind == "pipeline" else (slice(0, 5), slice(5, 7))[ranks.rank]
            mine = [{key: rows[index] for key, rows in batch().items()} for index in range(7)[share]]
            gradient = GradientAccumulator(model, micro_batch_size=2 if kind == "pipeline" else 1)
            gradient.forward_backward(mine, megabatch.mean(loss, over=count))
            gradient.finalize()
            expected = plain_gradient(loss, batch())
            found = {}
            for name, parameter in model.named_parameters():
                full = parameter.grad.full_tensor() if kind == "fsdp2" else parameter.grad
                last = name.rpartition(".")[2]
                own = name.removeprefix("module.")
                found[("embedding.", "head.")[ranks.rank] + last if kind == "pipeline" else own] = full
            errors[f"{kind}, {loss.__name__}"] = oracle.whole_error(found, {name: expected[name] for name in found})
    dist.barrier()
    return errors


def test_it_is_exact_in_ddp_fsdp2_and_a_pipeline_with_dummy_microbatches(tmp_path: Path) -> None:
    for errors in on_ranks(2, tmp_path, on_two_ranks):
        assert len(errors) == 6
        assert max(errors.values()) <= 1e-12, errors
