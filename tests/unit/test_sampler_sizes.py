"""UpdateSampler with a function that gives the size of each update: beside a list of all epochs' samples."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch import UpdateSampler
from megabatch.planning.sampler import Consumed
from tests.unit.test_sampler import LENGTHS

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
