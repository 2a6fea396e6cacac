"""Every public name in use, as a program outside of the package writes it; pyright reads it, and it runs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import megabatch
from megabatch import (
    Audit,
    CostModel,
    Extension,
    GradientAccumulator,
    JointLoss,
    Learner,
    LossContractError,
    MegabatchError,
    Plan,
    PlanError,
    Planner,
    Term,
    Update,
    UpdateSampler,
    Verification,
    audit,
    losses,
    mean,
    plan,
    verify,
)

Microbatch = dict[str, Tensor]


@megabatch.loss(weigh=lambda microbatch: microbatch["labels"].numel())
def squared(model: nn.Module, microbatch: Microbatch) -> Term:
    error = model(microbatch["inputs"]) - microbatch["labels"]
    return Term(error.square().sum(), error.numel())


def mean_squared(model: nn.Module, microbatch: Microbatch) -> Tensor:
    return (model(microbatch["inputs"]) - microbatch["labels"]).square().mean()


def count(microbatch: Microbatch) -> int:
    return microbatch["labels"].numel()


def encode(model: nn.Module, microbatch: Microbatch) -> Tensor:  # [B, 3] -> [B, 2]
    return model(microbatch["inputs"])


def spread(rows: Tensor) -> tuple[Tensor, int]:  # [N, 2]
    return -(rows - rows.mean(dim=0)).square().sum(), len(rows)


class OneEach(Planner):
    def cut(self, lengths: Sequence[int], samples: Sequence[Any]) -> Sequence[Sequence[int]]:
        return [[row] for row in range(len(lengths))]


class Weights(Extension):
    """Keeps the weight of each update."""

    def __init__(self) -> None:
        self.weights: list[float] = []

    def after_finalize(self, gradient: Any, update: Update) -> None:
        self.weights.append(float(update.weight))


def lines() -> list[str]:
    """The `__all__` of each part."""
    model = nn.Linear(3, 2).double()
    batch: Microbatch = {"inputs": torch.randn(5, 3).double(), "labels": torch.randn(5, 2).double()}
    proof: Verification = verify(model, squared, batch)
    cuts: list[Plan] = plan([5, 3, 8], micro_batch_size=2, cost=CostModel(seconds_per_token=2.0))
    gradient = GradientAccumulator(model, micro_batch_size=2)
    learner = Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), gradient, max_norm=1.0)
    learner.forward_backward(batch, squared)
    update: Update = learner.optim_step()
    learner.forward_backward(batch, JointLoss(encode, spread))
    learner.optim_step()
    dealt = list(UpdateSampler([5, 3, 8], global_batch_size=2))
    gradient.forward_backward(batch, losses.mse)
    gradient.finalize()
    gradient.forward_backward(batch, mean(mean_squared, over=count))
    gradient.finalize()
    weights = Weights()
    single = GradientAccumulator(model, planner=OneEach(), extensions=[weights])
    single.forward_backward(batch, squared)
    single.finalize()
    assert weights.weights == [10.0]
    assert single.last_plan is not None
    assert single.last_plan.num_microbatches == 5
    assert len(audited(model, learner, batch).records) > 0
    return [f"{proof.ok} {cuts[0].num_microbatches} {float(update.loss):.3f} {len(dealt)}", megabatch.__version__]


def audited(model: nn.Module, learner: Learner, batch: Microbatch) -> Audit:
    with audit(model, updates=1) as found:
        learner.forward_backward(batch, squared)
        learner.optim_step()
    return found


def refusals() -> list[str]:
    """Errors of one family, each of its own."""
    found: list[str] = []
    try:
        plan([5], micro_batch_size=0)
    except PlanError as error:
        family: MegabatchError = error
        found.append(str(family))
    try:
        verify(nn.Linear(3, 2), lambda model, microbatch: 3, {"inputs": torch.randn(2, 3)})
    except LossContractError as error:
        found.append(str(error))
    return found


if __name__ == "__main__":
    print("\n".join([*lines(), *refusals()]))
