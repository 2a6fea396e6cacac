"""MegabatchTrainer's every update is what plain torch gives for the same samples, alone and on two ranks."""

from itertools import chain

import numpy as np
import pytest
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from megabatch import PlanError
from megabatch.integrations.transformers import RankBatchSampler
from megabatch.planning.dealing import deal
from tests.exact.launch import of_ranks

WAYS = ["default", "capped", "cut", "cut compute_loss", "loss_fn", "compute_loss", "compute_loss_func"]
SETTINGS = ["grouped/float64", "dropped/float64", "checkpointed/float64", "smoothed/float64", "bf16/float32"]
EXACT = [*(f"{way}/float64" for way in WAYS), "default/float32", *SETTINGS]
ON_TWO = ["default/float64", "cut/float64", "fsdp2 cut/float64", "compute_loss/float64", "default/float32",
          "grouped/float64", "bf16/float32", "fsdp2/float64", "fsdp2 compute_loss/float64"]  # fmt: skip
PAIRS = [(1, job) for job in [*EXACT, "streamed/float64"]] + [(2, job) for job in ON_TWO]
OTHERS = ["resumed", "refused/sum", "refused/means", "spoilt"]
ON_SHARDS = ["refused fsdp2/sum", "refused fsdp2/means"]
WRAPPED = {1: "GPT2LMHeadModel", 2: "DistributedDataParallel", "fsdp2": "FSDPGPT2LMHeadModel"}
ALLOWED = {"smoothed/float64": 1e-6, "default/float32": 1e-5}  # Trainer's smoothing sums in float32


results = of_ranks(
    "tests.integrations.trainers:run_job",
    {
        world: [job for ranks, job in PAIRS if ranks == world] + OTHERS + (["refusals"] if world == 1 else ON_SHARDS)
        for world in (1, 2)
    },
)


@pytest.mark.full
@pytest.mark.parametrize(("world", "job"), PAIRS)
def test_every_update_is_exact_and_stepped_once(results, world, job):
    for found in results(job, world):
        allowed = [2 * own for own in found["own"]] if "bf16" in job else [ALLOWED.get(job, 1e-12)] * found["expected"]
        assert len(found["errors"]) == found["expected"] == (3 if "streamed" in job else {1: 4, 2: 2}[world])
        assert all(error <= each for error, each in zip(found["errors"], allowed, strict=True)), found
        assert max(found["losses"]) <= (1e-2 if "bf16" in job else 1e-6)  # Trainer adds them in float32
        assert found["steps"] == found["schedule"] == found["global_step"] == found["expected"]
        assert found["model"] == WRAPPED["fsdp2" if "fsdp2" in job else world]
        assert found["tokens"] == (found["expected_tokens"] if "grouped" in job else 0)


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_of_trainer_goes_on_to_the_same_weights(results, world):
    for found in results("resumed", world):
        assert found["in one go"] <= 1e-10
        assert found["resumed"] <= 1e-10
        assert found["steps"] == {1: 8, 2: 4}[world]


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "job"), [(1, "refused/sum"), (1, "refused/means"), (2, "refused/sum"), (2, "refused/means"),
                       *((2, job) for job in ON_SHARDS)]
)  # fmt: skip
def test_a_loss_that_is_no_mean_over_its_targets_is_refused(results, world, job):
    for found in results(job, world):
        assert found.startswith("LossContractError: the loss of 2 samples is no mean over their ")
        assert found.endswith("or say in count_targets() what it is a mean over")


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
def test_an_update_that_is_not_finite_is_not_stepped(results, world):
    for found in results("spoilt", world):
        assert found == {"stepped": [True, False, True, True][: {1: 4, 2: 2}[world]], "finite": True}


@pytest.mark.full
def test_every_setting_that_cannot_be_kept_is_refused_in_one_line(results):
    (said,) = results("refusals", 1)
    for name, line in said.items():
        assert line.startswith("PlanError: MegabatchTrainer cannot keep "), (name, line)
        assert "\n" not in line


def dealt(sampler, world, **settings):
    given = {"drop_last": False, "seed": 3} | settings
    return [RankBatchSampler(sampler(), 2, rank=rank, world=world, **given) for rank in range(world)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_sample_is_dealt_once_and_ranks_have_equally_many_batches(num_ranks):
    for drop_last in (False, True):
        ranks = dealt(lambda: RandomSampler(range(11)), num_ranks, drop_last=drop_last)
        batches = [list(rank) for rank in ranks]
        assert {len(each) for each in batches} == {len(rank) for rank in ranks} == {len(batches[0])}
        taken = sorted(sample for rank in batches for batch in rank for sample in batch)
        assert len(taken) == len(set(taken)) == (11 // (2 * num_ranks) * 2 * num_ranks if drop_last else 11)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_an_update_whose_lengths_are_known_is_dealt_by_length(num_ranks, drop_last):
    """The samples of each update are those that are dealt in turns, and ranks have less padding."""
    lengths = np.random.default_rng(0).integers(5, 100, 101)
    settings = {"drop_last": drop_last, "num_batches": 4}
    in_turns = shares_of(dealt(lambda: RandomSampler(lengths), num_ranks, **settings))
    settings["deal"] = lambda ids: deal(lengths[ids], num_ranks, max_rows=2)
    by_length = shares_of(dealt(lambda: RandomSampler(lengths), num_ranks, **settings))
    assert [samples_of(update) for update in by_length] == [samples_of(update) for update in in_turns]
    assert padding_of(by_length, lengths) < 0.8 * padding_of(in_turns, lengths)


def shares_of(samplers):
    """The samples of each rank by update, which has four batches."""
    ranks = [list(sampler) for sampler in samplers]
    assert len({len(batches) for batches in ranks}) == 1
    starts = range(0, len(ranks[0]), 4)
    return [[list(chain(*batches[start : start + 4])) for batches in ranks] for start in starts]


def samples_of(update):
    return sorted(chain(*update))


def padding_of(updates, lengths):
    """Padded tokens without a sample, two samples in a microbatch."""
    tokens = 0
    for share in chain(*updates):
        falling = sorted(lengths[share].tolist(), reverse=True)
        for start in range(0, len(falling), 2):
            tokens += sum(falling[start] - length for length in falling[start : start + 2])
    return tokens


def test_an_order_follows_from_seed_and_epoch():
    (batches,) = dealt(lambda: RandomSampler(range(11)), 1)
    first = list(batches)
    assert list(batches) == first
    batches.set_epoch(1)
    assert list(batches) != first


def test_an_order_that_may_differ_from_rank_to_rank_is_refused():
    with pytest.raises(PlanError, match=r"the order of samples is a DistributedSampler's, which may differ"):
        RankBatchSampler(DistributedSampler(range(4), 1, 0), 2, rank=0, world=1, drop_last=False, seed=0)
    assert list(dealt(lambda: SequentialSampler(range(3)), 1)[0]) == [[0, 1], [2]]
