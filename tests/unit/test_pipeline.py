"""Pipelines on one rank: shapes, how many microbatches a schedule needs, what is refused, and exact gradients."""

import pytest
import torch
from torch import nn

from megabatch import GradientAccumulator, PlanError
from megabatch.pipeline.pad_to_shape import Inputs, crop_output, in_one_shape
from megabatch.pipeline.run import Pipeline
from megabatch.pipeline.stages import KEPT_SCHEDULES, SCHEDULES
from tests.unit.failures.wrappers import mesh
from tests.unit.small import expected, gradients, model_of_integers, same_bits, samples, weighed


@pytest.mark.parametrize(
    ("schedule", "ranks", "stages", "filled"),
    [
        ("GPipe", 4, 4, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("1F1B", 4, 4, [4, 4, 4, 4, 5, 6, 7, 8, 9]),
        ("Interleaved1F1B", 4, 8, [1, 2, 3, 4, 5, 6, 7, 8, 10]),  # n // 4 rounds of equal size
        ("Interleaved1F1B", 2, 4, [1, 2, 3, 4, 6, 6, 8, 8, 10]),
        ("LoopedBFS", 2, 4, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("InterleavedZeroBubble", 3, 6, [1, 2, 3, 4, 5, 6, 8, 8, 9]),
        ("ZBVZeroBubble", 2, 4, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("DualPipeV", 4, 8, [8, 8, 8, 8, 8, 8, 8, 8, 9]),
    ],
)
def test_a_schedule_is_given_as_many_microbatches_as_it_needs(schedule, ranks, stages, filled):
    assert [SCHEDULES[schedule].runnable(number, ranks, stages) for number in range(1, 10)] == filled


def inputs(*shape: int, mask: tuple[int, ...] | None = None) -> Inputs:
    return Inputs((torch.ones(shape),), {} if mask is None else {"mask": torch.ones(mask, dtype=torch.bool)})


def test_microbatches_are_filled_up_to_one_shape():
    """Rows are repeated, columns are zeros; both inputs grow alike."""
    small, large = in_one_shape([inputs(1, 2, mask=(1, 2)), inputs(3, 4, mask=(3, 4))])
    row = torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert torch.equal(small.args[0], row.expand(3, 4))
    assert torch.equal(small.kwargs["mask"], row.expand(3, 4).bool())
    assert torch.equal(large.args[0], torch.ones(3, 4))


def test_an_input_that_is_not_by_samples_is_not_filled_up():
    with pytest.raises(PlanError, match=r"the shapes \[\(2, 2\), \(4, 4\)\] in one call"):
        in_one_shape([inputs(1, 2, mask=(2, 2)), inputs(1, 4, mask=(4, 4))])


def test_an_output_is_cut_back_to_what_is_said_of_it():
    """Classes stay, though there are as many as columns."""
    whole, real = inputs(3, 4), inputs(2, 2)
    tokens, classes = torch.rand(3, 4), torch.rand(3, 4)

    def shape(x):
        return torch.empty(x.shape, device="meta"), torch.empty(len(x), 4, device="meta")

    cut = crop_output((tokens, classes), shape, whole, real)
    assert torch.equal(cut[0], tokens[:2, :2])
    assert torch.equal(cut[1], classes[:2])


def without_spare() -> nn.Module:
    model = model_of_integers()
    del model.spare
    return model


def pipeline_of(model: nn.Module, schedule: str) -> Pipeline:
    def output(x):
        return torch.empty(*x.shape[:2], 1, dtype=torch.float64, device="meta")

    return Pipeline([model], mesh("dp", "pp"), schedule=schedule, boundary=output, output=output)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"])
def test_one_stage_has_the_same_bits(schedule):
    """Also in a second call, and in an update after one that was left half-way."""
    model, batch = without_spare(), samples([3, 1, 0, 5, 2, 4, 1])
    gradient = GradientAccumulator(pipeline_of(model, schedule), micro_batch_size=2)
    with pytest.raises(TypeError):
        gradient.forward_backward(batch[2:], lambda model, microbatch: weighed(model, microbatch)["loss"])
    gradient.forward_backward(batch[:3], weighed)
    gradient.forward_backward(batch[3:], weighed)
    update = gradient.finalize()
    assert same_bits(gradients(model), expected(model, batch))
    assert (float(update.weight), update.num_samples) == (16, 7)


@pytest.mark.usefixtures("group_of_one")
def test_few_schedules_are_kept():
    model = pipeline_of(without_spare(), "GPipe")
    gradient = GradientAccumulator(model, micro_batch_size=1)
    for length in range(1, KEPT_SCHEDULES + 3):
        gradient.forward_backward(samples([length]), weighed)
    assert len(model._schedules) == KEPT_SCHEDULES
