"""Code of Trainer users gives the gradient of the uncut update, or is refused in one line."""

import pytest
import torch

from megabatch.integrations import mean_loss
from megabatch.integrations.mean_loss import count_labels
from tests.exact.launch import of_ranks
from tests.integrations.users import CASES

NO_MEAN = "LossContractError: the loss of "
NO_COUNT = "LossContractError: weigh counted "  # the sum of the weights, by which torch divided
REFUSED = {  # how each begins
    "class weights": NO_MEAN,
    "class weights, alone": NO_MEAN,
    "class weights, sorted": NO_MEAN,
    "class weights, collated": NO_COUNT,
    "length weights": NO_MEAN,
    "pairwise": NO_MEAN,
    "noisy weights": NO_MEAN,
    "numpy rows": NO_MEAN,
    "unseeded": "LossContractError: compute_loss gives two gradients for one sample and one seed",
    "nan alone": "LossContractError: the gradient of compute_loss is not finite for a sample with 1 targets, and is",
    "count": "LossContractError: count_targets() counts 1 in ",
    "tensors": "PlanError: get_train_dataloader() gives a list of Tensors",
    "reads inputs": "PlanError: training_step reads inputs['input_ids']",
    "replaces inputs": "PlanError: Users.training_step hands on other inputs",
    "flat, crossing": "LossContractError: the data collator lays ",
    "flat, crossing, own": NO_MEAN,
    "own step": "PlanError: Users.training_step does not call MegabatchTrainer's",
}
EITHER = {"max_length", "max_length, own"}
ALLOWED = {"smoothed": 1e-6}  # Trainer's smoothing sums in float32
ON_TWO = [
    "classes", "floats", "pads", "flat", "collated", "masking, default", "context", "noisy", "drawn collator",
    "class weights", "class weights, collated", "pairwise", "reads inputs",
    "flat, crossing",
]  # fmt: skip
PAIRS = [(1, job) for job in CASES] + [(2, job) for job in ON_TWO]


results = of_ranks(
    "tests.integrations.users:run_job",
    {
        world: [job for ranks, job in PAIRS if ranks == world] + ["traces"] + ["others"] * (world == 1)
        for world in (1, 2)
    },
)


@pytest.mark.full
@pytest.mark.parametrize(("world", "job"), PAIRS)
def test_an_update_is_exact_or_refused_in_one_line(results, world, job):
    for found in results(job, world):
        if job in REFUSED or (job in EITHER and "refused" in found):
            assert found.get("refused", "nothing").startswith(REFUSED.get(job, "LossContractError: ")), found
            assert "\n" not in found["refused"]
        else:
            assert "refused" not in found, found
            assert len(found["errors"]) == found["updates"]
            assert found["dropped"] == (job == "nan")  # a model that has diverged trains on, as Trainer's would
            assert max(found["errors"]) <= ALLOWED.get(job, 1e-12), found


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
def test_the_trial_leaves_no_metrics_logs_or_draws_and_asks_as_often_on_a_rank_without_samples(results, world):
    for found in results("traces", world):
        num = 2 if world == 1 else 1  # microbatches; a dummy microbatch leaves no metrics either
        counted = found.pop("train"), found.pop("calls"), found.pop("logged")
        assert counted in [(num, num, num), (0, 0, 0)]
        assert found == {"eval": [], "seen": num, "drawn": False, "log": False, "updates": 1}


@pytest.mark.full
def test_settings_are_refused_where_training_begins_and_the_loader_knows_its_sizes(results):
    (found,) = results("others", 1)
    assert found["evaluated"] > 0
    assert found["refused"].startswith("PlanError: MegabatchTrainer cannot keep accelerator_config.split_batches")
    assert found["loader"] == [2, 12]


@pytest.mark.full
def test_random_numbers_are_named_where_a_mean_cannot_be_told(results):
    for job in ("noisy weights", "numpy rows"):
        for found in results(job, 1):
            assert "as far as its random numbers let it be told" in found["refused"]
            assert found["refused"].endswith("or check_loss=False if it is one")


def test_samples_are_chosen_evenly_by_length():
    chosen = mean_loss.choose_samples([[0] * length for length in (5, 1, 9, 3)], len)
    assert [len(each) for each in chosen] == [1, 3, 5, 9]
    chosen = mean_loss.choose_samples([[0] * length for length in range(100)], len)
    assert (len(chosen), len(chosen[0]), len(chosen[-1])) == (8, 0, 99)
    assert mean_loss.choose_samples([], len) == []


@pytest.mark.parametrize(("num_samples", "size"), [(1, 8), (2, 1), (5, 2), (8, 2), (8, 3), (8, 8)])
def test_groups_hold_each_sample_beside_different_ones(num_samples, size):
    groups = mean_loss.make_groups(num_samples, size)
    assert all(2 <= len(group) <= max(2, size) for group in groups)
    for sample in range(num_samples if num_samples > 3 else 0):
        assert any(sample in group for group in groups)
    assert bool(groups) == (num_samples > 1)


@pytest.mark.parametrize(
    "draw",
    [
        lambda rows: torch.randn(rows, 40),
        lambda rows: torch.rand(1) + torch.randint(9, (rows, 3)),
        lambda rows: torch.empty(rows, 20).normal_(),
        lambda rows: torch.bernoulli(torch.full((rows, 7), 0.5)) + torch.rand_like(torch.zeros(rows, 7)),
    ],
)
def test_each_row_draws_what_it_would_draw_alone(draw):
    torch.manual_seed(5)
    (alone,) = draw(1)
    torch.manual_seed(5)
    with mean_loss._RowwiseRandom(3, torch.device("cpu")):
        together = draw(3)
    assert all(torch.equal(row, alone) for row in together)


def test_labels_are_counted_by_kind():
    labels = torch.tensor([[1, -100, 2], [-100, 3, -100]])
    assert count_labels({"labels": labels}, shifted=False) == 3
    assert count_labels({"labels": labels}, shifted=True) == 2
    assert count_labels({"labels": labels[:, 0]}, shifted=True) == 1
    assert count_labels({"labels": torch.tensor([0.5, -100.0])}, shifted=False) == 2
    assert count_labels({"labels": torch.tensor([[0.5, -100.0]])}, shifted=False) == 1
    assert count_labels({"x": torch.zeros(4, 2)}, shifted=True) == 4
    assert count_labels([torch.zeros(4, 2)], shifted=True) == 4
