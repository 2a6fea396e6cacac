"""UpdateSampler: the samples of an update follow from (seed, epoch, position) alone."""

import itertools
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from megabatch import CostModel, PlanError, UpdateSampler
from megabatch.planning.sampler import Consumed

LENGTHS = [(7 * number) % 23 + 1 for number in range(20)]

ENDS = {  # tail, samples, global_batch_size -> sizes of the updates of three epochs
    ("step", 10, 4): [[4, 4, 2], [4, 4, 2], [4, 4, 2]],
    ("drop", 10, 4): [[4, 4], [4, 4], [4, 4]],
    ("carry", 10, 4): [[4, 4], [4, 4, 4], [4, 4]],
    ("step", 8, 4): [[4, 4], [4, 4], [4, 4]],
    ("drop", 8, 4): [[4, 4], [4, 4], [4, 4]],
    ("carry", 8, 4): [[4, 4], [4, 4], [4, 4]],
    ("step", 3, 7): [[3], [3], [3]],  # fewer samples than an update takes
    ("carry", 3, 7): [[7], [7], [7]],
    ("step", 1, 1): [[1], [1], [1]],
}

settings_of = st.fixed_dictionaries(
    {
        "global_batch_size": st.integers(1, 25),
        "tail": st.sampled_from(["step", "drop", "carry"]),
        "seed": st.integers(0, 9),
    }
).filter(lambda given: given["tail"] != "drop" or given["global_batch_size"] <= len(LENGTHS))


def test_what_was_measured_changes_how_later_updates_are_dealt_and_no_sample_of_theirs() -> None:
    def samplers() -> list[UpdateSampler]:
        return [UpdateSampler(LENGTHS, global_batch_size=10, dp_rank=rank, dp_degree=2) for rank in range(2)]

    alike, unlike = samplers(), samplers()
    for sampler in unlike:
        sampler.deal_by(cost=CostModel(8.0, 1.0, 0.0), max_microbatch_tokens=40, speeds=[1.0, 0.25])
    shares = [list(map(sorted, sampler)) for sampler in alike]
    changed = [list(map(sorted, sampler)) for sampler in unlike]
    assert changed != shares
    for update in range(2):
        assert sorted(changed[0][update] + changed[1][update]) == sorted(shares[0][update] + shares[1][update])
        tokens = [sum(LENGTHS[sample] for sample in share[update]) for share in changed]
        assert tokens[1] < 0.5 * tokens[0]
    assert [sampler.state_dict() for sampler in unlike] == [sampler.state_dict() for sampler in alike]
    for sampler in unlike:
        sampler.deal_by(speeds=[1.0, 1.0])
        even = UpdateSampler(
            LENGTHS, global_batch_size=10, dp_rank=sampler._dp_rank, dp_degree=2, cost=CostModel(8.0, 1.0, 0.0),
            max_microbatch_tokens=40,
        )  # fmt: skip
        even.load_state_dict(sampler.state_dict())
        assert list(sampler) == list(even)


def test_what_cannot_be_dealt_by_is_refused() -> None:
    single = UpdateSampler(LENGTHS, global_batch_size=10, dp_rank=0, dp_degree=2)
    with pytest.raises(PlanError, match="dealt single samples"):
        single.deal_by(speeds=[1.0, 0.5])
    with pytest.raises(PlanError, match="more than max_microbatch_tokens=5"):
        single.deal_by(max_microbatch_tokens=5)
    rows = UpdateSampler(LENGTHS, global_batch_size=10, dp_rank=0, dp_degree=2, micro_batch_size=4)
    with pytest.raises(PlanError, match="both of micro_batch_size"):
        rows.deal_by(max_microbatch_tokens=40)
    with pytest.raises(PlanError, match="speeds has 3 numbers for 2 ranks"):
        rows.deal_by(speeds=[1.0, 0.5, 1.0])
    with pytest.raises(PlanError, match="cost is 3"):
        rows.deal_by(cost=3)


def epochs(sampler: UpdateSampler, number: int) -> list[list[list[int]]]:
    return [list(sampler) for _ in range(number)]


def whole(number: int, **settings) -> list[list[list[int]]]:
    """Updates of ``number`` epochs, as one rank sees them: sample ids sorted."""
    return [[sorted(update) for update in epoch] for epoch in epochs(UpdateSampler(LENGTHS, **settings), number)]


@pytest.mark.parametrize(("tail", "num_samples", "size"), ENDS)
def test_ends_of_epochs(tail, num_samples, size):
    sampler = UpdateSampler([1] * num_samples, global_batch_size=size, tail=tail)
    sizes, said = [], []
    for _ in range(3):
        said.append(len(sampler))
        sizes.append([len(update) for update in sampler])
    assert sizes == ENDS[tail, num_samples, size]
    assert said == [len(epoch) for epoch in sizes]


@given(settings_of)
def test_every_sample_once_per_epoch(given_settings):
    tail, size = given_settings["tail"], given_settings["global_batch_size"]
    stream = [sample for epoch in whole(3, **given_settings) for update in epoch for sample in update]
    per_epoch = len(LENGTHS) // size * size if tail == "drop" else len(LENGTHS)
    for start in range(0, len(stream) - per_epoch + 1, per_epoch):
        own = stream[start : start + per_epoch]
        assert tail == "carry" or len(set(own)) == len(own)
    counts = [stream.count(sample) for sample in range(len(LENGTHS))]
    assert max(counts) - min(counts) <= {"step": 0, "carry": 1, "drop": 3}[tail]


@given(settings_of, st.integers(2, 5))
@settings(max_examples=40)
def test_shares_make_up_the_same_update_whatever_dp_degree(given_settings, dp_degree):
    samplers = [
        UpdateSampler(LENGTHS, dp_rank=rank, dp_degree=dp_degree, **given_settings) for rank in range(dp_degree)
    ]
    expected = whole(2, **given_settings)
    for epoch in expected:
        shares = list(zip(*map(list, samplers), strict=True))
        assert [sorted(sample for share in update for sample in share) for update in shares] == epoch
        for update in shares:
            assert max(map(len, update)) - min(map(len, update)) <= 1


@given(settings_of, st.integers(0, 6), st.integers(1, 5))
@settings(max_examples=60)
def test_a_resumed_stream_is_the_same_stream(given_settings, num_before, dp_degree):
    """Stopped after any update, gone on with on any number of ranks."""
    first = UpdateSampler(LENGTHS, **given_settings)
    stream = [sorted(update) for _ in range(8) for update in first]
    stopped = UpdateSampler(LENGTHS, **given_settings)
    before = []
    while len(before) < num_before:
        for update in stopped:
            before.append(sorted(update))
            if len(before) == num_before:
                break
    resumed = [UpdateSampler(LENGTHS, dp_rank=rank, dp_degree=dp_degree, **given_settings) for rank in range(dp_degree)]
    for each in resumed:
        each.load_state_dict(stopped.state_dict())
    said = len(resumed[0])
    shares = list(zip(*map(list, resumed), strict=True))
    after = [sorted(sample for share in update for sample in share) for update in shares]
    assert len(after) == said > 0
    assert stream[: num_before + len(after)] == before + after


@given(settings_of, st.integers(1, 25))
def test_a_state_goes_on_with_another_size(given_settings, size):
    """No epoch is without end, and none is skipped, when an update becomes larger or smaller."""
    first = UpdateSampler(LENGTHS, **given_settings)
    next(iter(first))
    tail = "step" if given_settings["tail"] == "drop" and size > len(LENGTHS) else given_settings["tail"]
    second = UpdateSampler(LENGTHS, **given_settings | {"global_batch_size": size, "tail": tail})
    second.load_state_dict(first.state_dict())
    said = len(second)
    updates = list(second)
    assert len(updates) == said
    assert list(second)  # the epoch after it


def test_seed_and_epoch_decide_the_order():
    orders = [
        [sample for update in epoch for sample in update]
        for seed in (0, 1)
        for epoch in epochs(UpdateSampler(LENGTHS, global_batch_size=1, seed=seed), 2)
    ]
    assert len({tuple(order) for order in orders}) == 4
    assert whole(2, global_batch_size=6, seed=5) == whole(2, global_batch_size=6, seed=5)


def test_shares_are_balanced_by_the_cost_that_is_given():
    lengths = [6, 5, 5, 1]
    squared = CostModel(seconds_per_token=0, seconds_per_pair=1)

    def loads(cost):
        shares = [
            UpdateSampler(lengths, global_batch_size=4, dp_rank=rank, dp_degree=2, cost=cost).share([0, 1, 2, 3])
            for rank in (0, 1)
        ]
        return [sum(lengths[sample] ** 2 for sample in share) for share in shares]

    assert loads(squared) == [37, 50]


def test_a_loader_with_empty_shares():
    """Two samples over three ranks: the third rank's share is an empty list, and not left out."""
    samplers = [UpdateSampler([1, 1], global_batch_size=2, dp_rank=rank, dp_degree=3) for rank in range(3)]
    batches = [list(DataLoader(["a", "b"], batch_sampler=sampler, collate_fn=list)) for sampler in samplers]
    assert [len(batch) for batch in batches] == [1, 1, 1]
    assert sorted(len(batch[0]) for batch in batches) == [0, 1, 1]


def some_order(epoch: int) -> list[int]:
    """13 ids of 20, some of them twice, others in every second epoch."""
    return [(3 * number + epoch) % 20 for number in range(10)] + [19, 19, 2 + epoch % 2]


def in_order(number: int, **settings) -> list[list[list[int]]]:
    return epochs(UpdateSampler(LENGTHS, order=some_order, **settings), number)


def test_an_order_of_ones_own_decides_what_an_epoch_is():
    stream = [sample for epoch in in_order(3, global_batch_size=4) for update in epoch for sample in update]
    assert stream == [*some_order(0), *some_order(1), *some_order(2)]
    assert [len(update) for update in in_order(1, global_batch_size=4)[0]] == [4, 4, 4, 1]
    carried = [update for epoch in in_order(3, global_batch_size=4, tail="carry") for update in epoch]
    assert [sample for update in carried for sample in update] == stream[:36]
    assert [len(epoch) for epoch in in_order(2, global_batch_size=4, tail="drop")] == [3, 3]


@given(st.sampled_from(["step", "drop", "carry"]), st.integers(1, 13), st.integers(1, 4), st.integers(0, 5))
@settings(max_examples=40)
def test_an_order_of_ones_own_is_shared_and_resumed(tail, size, dp_degree, num_before):
    first = UpdateSampler(LENGTHS, order=some_order, global_batch_size=size, tail=tail)
    stream = [update for _ in range(8) for update in first]
    state = {"samples": 0, "num_samples": 13, "seed": 0}
    stopped = UpdateSampler(LENGTHS, order=some_order, global_batch_size=size, tail=tail)
    for _, _ in zip(range(num_before), iter(stopped), strict=False):
        state = stopped.state_dict()
    ranks = [
        UpdateSampler(LENGTHS, order=some_order, global_batch_size=size, tail=tail, dp_rank=rank, dp_degree=dp_degree)
        for rank in range(dp_degree)
    ]
    for each in ranks:
        each.load_state_dict(state)
    shares = list(zip(*map(list, ranks), strict=True))
    after = [sorted(sample for share in update for sample in share) for update in shares]
    done = min(
        num_before, len(epochs(UpdateSampler(LENGTHS, order=some_order, global_batch_size=size, tail=tail), 1)[0])
    )
    assert after
    assert after == [sorted(update) for update in stream[done : done + len(after)]]


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple], ids=["array", "tensor", "tuple"])
@pytest.mark.parametrize("cost", [None, CostModel(seconds_per_pair=1.0)], ids=["length", "cost"])
def test_lengths_may_come_as_an_array(kind, cost):
    settings = {"global_batch_size": 6, "dp_rank": 1, "dp_degree": 3, "cost": cost}
    assert list(UpdateSampler(kind(LENGTHS), **settings)) == list(UpdateSampler(LENGTHS, **settings))


@pytest.mark.parametrize("kind", [np.array, list], ids=["array", "list"])
@pytest.mark.parametrize("wrong", [[3, -1, 2], [3, 1.5, 2]], ids=["negative", "half"])
def test_a_length_that_is_no_count_is_named_among_many(kind, wrong):
    lengths = kind([4] * 1000 + wrong)
    first = 0 if kind is np.array and 1.5 in wrong else 1001  # an array with a half in it holds no whole numbers
    with pytest.raises(PlanError, match=rf"^the length of sample {first} is .* must be a whole number of at least 0$"):
        UpdateSampler(lengths, global_batch_size=4)


def test_a_sample_takes_ten_bytes():
    """Two for a length below 65,536, eight for its place in the epoch; ten million samples are 100 MB a rank."""
    lengths = (np.arange(100_000) % 4096).tolist()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        sampler = UpdateSampler(lengths, global_batch_size=64, dp_rank=0, dp_degree=8)
        next(iter(sampler))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 10 * len(lengths) <= after - before < 11 * len(lengths)


schedules = st.tuples(
    st.sampled_from(["updates", "samples", "tokens"]),
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 25)), max_size=3, unique_by=lambda pair: pair[0]),
    st.integers(1, 25),
)


class Scheduled:
    """Sizes by what came before."""

    def __init__(self, unit: str, points: list[tuple[int, int]], first: int) -> None:
        self.unit, self.points = unit, [(0, first), *sorted(points)]

    def __call__(self, seen: Consumed) -> int:
        return next(size for point, size in reversed(self.points) if getattr(seen, self.unit) >= point)


def walked(schedule: Scheduled, tail: str, num_epochs: int) -> list[list[int]]:
    """The ids of each update by a list of all epochs, one sample after another; no sampler is asked."""
    updates: list[list[int]] = []
    update, seen = [], [0, 0, 0]
    for epoch in range(num_epochs):
        for sample in np.random.default_rng([0, epoch]).permutation(len(LENGTHS)).tolist():
            update.append(sample)
            if len(update) == schedule(Consumed(*seen)):
                updates.append(update)
                seen = [seen[0] + 1, seen[1] + len(update), seen[2] + sum(LENGTHS[each] for each in update)]
                update = []
        if tail == "step" and update:
            updates.append(update)
            seen = [seen[0] + 1, seen[1] + len(update), seen[2] + sum(LENGTHS[each] for each in update)]
        update = update if tail == "carry" else []
    return updates


@given(schedules, st.sampled_from(["step", "drop", "carry"]), st.integers(0, 9), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_a_function_gives_the_size_of_each_update(given_schedule, tail, num_before, dp_degree):
    """Whole, and stopped after any update and gone on with on any number of ranks."""
    schedule = Scheduled(*given_schedule)
    if tail == "drop" and max(size for _, size in schedule.points) > len(LENGTHS):
        return
    expected = walked(schedule, tail, 6)
    first = UpdateSampler(LENGTHS, global_batch_size=schedule, tail=tail)
    assert list(first.sizes(6)) == [len(update) for update in expected]
    found, states, lengths = [], [first.state_dict()], []
    while len(found) < len(expected):
        lengths.append(len(first))
        for update in first:
            found.append(update)
            states.append(first.state_dict())
    assert sum(lengths) == len(found)
    assert found[: len(expected)] == expected
    done = min(num_before, len(expected) - 1)
    ranks = [
        UpdateSampler(LENGTHS, global_batch_size=schedule, tail=tail, dp_rank=rank, dp_degree=dp_degree)
        for rank in range(dp_degree)
    ]
    for each in ranks:
        each.load_state_dict(states[done])
    shares = [update for _ in range(2) for update in zip(*map(list, ranks), strict=True)]
    after = [sorted(sample for share in update for sample in share) for update in shares]
    rest = [sorted(update) for update in expected[done:]]
    assert after[: len(rest)] == rest[: len(after)]
    assert len(after) > 0


def test_a_state_of_a_function_goes_on_with_a_number():
    first = UpdateSampler(LENGTHS, global_batch_size=lambda seen: 3 + seen.updates)
    updates = iter(first)
    assert [len(next(updates)) for _ in range(3)] == [3, 4, 5]
    assert first.state_dict()["seen"] == [3, 12, sum(LENGTHS[sample] for update in walked_by(3) for sample in update)]
    second = UpdateSampler(LENGTHS, global_batch_size=4)
    second.load_state_dict(first.state_dict())
    assert [len(update) for update in second] == [4, 4]


def walked_by(number: int) -> list[list[int]]:
    sampler = UpdateSampler(LENGTHS, global_batch_size=lambda seen: 3 + seen.updates)
    return [update for update, _ in zip(sampler, range(number), strict=False)]


def test_a_state_with_workers_is_what_was_trained():
    """Workers read ahead of the training: without the number of updates the state is refused, and with it exact."""
    sampler = UpdateSampler(LENGTHS, global_batch_size=3)
    trained: list[int] = []
    loader = DataLoader(range(len(LENGTHS)), batch_sampler=sampler, collate_fn=list, num_workers=2)
    for step, batch in enumerate(loader, 1):
        trained += batch
        if step == 2:
            break
    with pytest.raises(PlanError, match="updates="):
        sampler.state_dict()
    with pytest.raises(PlanError, match="updates="):
        next(iter(sampler))  # the samples that were read ahead would be lost
    state = sampler.state_dict(updates=2)
    for resumed in (UpdateSampler(LENGTHS, global_batch_size=3), sampler):
        resumed.load_state_dict(state)
        assert sorted(trained + [sample for update in resumed for sample in update]) == list(range(len(LENGTHS)))


def test_an_epoch_of_workers_that_has_ended_goes_on_with_the_next():
    sampler = UpdateSampler(LENGTHS, global_batch_size=8)
    loader = DataLoader(range(len(LENGTHS)), batch_sampler=sampler, collate_fn=list, num_workers=1)
    trained = [batch for _ in range(2) for batch in loader]
    assert [sorted(batch) for batch in trained] == [
        update for epoch in whole(2, global_batch_size=8) for update in epoch
    ]
    assert sampler.state_dict(updates=6)["samples"] == 2 * len(LENGTHS)


@given(settings_of, st.booleans(), st.integers(0, 9), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=60)
def test_a_state_of_any_update_is_that_of_its_moment(given_settings, is_told, num_trained, num_ahead, dp_degree):
    """Read ahead, of an epoch or two, and resumed twice: the states are those of a sampler that is not read ahead."""
    if is_told:
        given_settings = given_settings | {"global_batch_size": lambda seen: 2 + seen.updates % 3}
    slow, ahead = UpdateSampler(LENGTHS, **given_settings), UpdateSampler(LENGTHS, **given_settings)

    def handed_out(sampler: UpdateSampler, number: int) -> None:
        while number:
            for _ in sampler:
                number -= 1
                if not number:
                    break

    for trained in (num_trained, num_trained + 1):
        handed_out(slow, trained)
        handed_out(ahead, trained + num_ahead)
        state = ahead.state_dict(updates=slow.state_dict()["updates"])
        expected = [sorted(update) for update in slow]
        shares = [
            UpdateSampler(LENGTHS, **given_settings, dp_rank=rank, dp_degree=dp_degree) for rank in range(dp_degree)
        ]
        for each in (*shares, slow, ahead):
            each.load_state_dict(state)
        resumed = [sorted(itertools.chain(*parts)) for parts in zip(*map(list, shares), strict=True)]
        assert resumed == expected or not expected


@pytest.mark.parametrize("updates", [-1, 4, 2.0, True])
def test_a_number_of_updates_that_cannot_be(updates):
    sampler = UpdateSampler(LENGTHS, global_batch_size=3)
    for _ in zip(range(3), sampler, strict=False):
        pass
    with pytest.raises(PlanError, match="updates"):
        sampler.state_dict(updates=updates)
    sampler.load_state_dict(sampler.state_dict(updates=2))
    with pytest.raises(PlanError, match="updates"):
        sampler.state_dict(updates=1)
