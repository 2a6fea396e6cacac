"""The data cases: which samples each rank brings to each call of each update.

A case is written as numbers of targets: updates > calls > ranks > samples. `updates(case, world)` says them and
`samples(...)` makes the tensors. C0 to C-R are the cases that other trainers were measured on.
"""

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

Share = list[int]  # targets per sample of one rank
Call = list[Share]  # by rank
Update = list[Call]
Sample = dict[str, Tensor]


def _all(share: Share, world: int) -> Update:
    return [[list(share) for _ in range(world)]]


def _last(share: Share, other: Share, world: int) -> Update:
    return [[*[list(share) for _ in range(world - 1)], list(other)]]


def _lognormal(world: int) -> list[Update]:
    numbers = random.Random(5)

    def draw(size: int) -> Share:
        return [min(40, max(1, round(numbers.lognormvariate(1.5, 1.0)))) for _ in range(size)]

    return [[[draw(size) for _ in range(world)]] for size in (6, 6, 2)]


CASES: dict[str, Callable[[int], list[Update]]] = {
    "C0": lambda world: [_all([5] * 6, world)],
    "C1": lambda world: [_all([30, 30, 3, 2, 11, 11, 1, 1], world)],
    "C2": lambda world: [[[[20] * 6, *[[2] * 6] * (world - 1)]]],
    "C3": lambda world: [_all([4] * size, world) for size in (6, 6, 3)],
    "C4a": lambda world: [_all([5, 5, 5, 0, 0, 0, 7, 3], world)],
    "C4b": lambda world: [_last([6, 2, 3], [0, 0, 0], world)],
    "C4c": lambda world: [_all([3, 5, 2], world), _all([0, 0, 0], world), _all([4, 1], world)],
    "C5": lambda world: [_all([11] * 4, world)],
    "C5u": lambda world: [_all([39, 5, 19, 2], world)],
    "C-R": _lognormal,
    "uneven-ranks": lambda world: [[[[3 + rank] * (2 * rank + 1) for rank in range(world)]]],
    "empty-last-rank": lambda world: [_last([6, 2, 9], [], world)],
    "empty-first-rank": lambda world: [[[[], *[[4, 1, 7]] * (world - 1)]], _all([3, 8], world)],
    "only-last-rank": lambda world: [[[*[[]] * (world - 1), [5, 2, 9]]]],
    "fewer-than-ranks": lambda world: [[[[7] if rank == 1 else [] for rank in range(world)]]],
    "short-tail": lambda world: [_all([5, 2, 9], world), [[[3], *[[]] * (world - 1)]]],
    "empty-update": lambda world: [_all([5, 2], world), _all([], world), _all([1, 4], world)],
    "calls": lambda world: [[*_all([9, 2, 4], world), *_all([1, 6], world)]],
    "calls-none-first": lambda world: [[*_all([0, 0], world), *_all([1, 6, 2], world), *_all([5], world)]],
    "calls-none-between": lambda world: [[*_all([8, 1], world), *_all([0], world), *_all([2, 3, 7], world)]],
    "calls-empty-ranks": lambda world: [[[[], *[[4, 2]] * (world - 1)], *_last([3, 9, 1], [], world)]],
    "calls-five": lambda world: [
        [*_all([2, 1], world), *_all([3], world), *_all([1, 1, 2], world), *_all([0, 4], world), *_all([5], world)]
    ],
    "calls-updates": lambda world: [[*_all([2, 3], world), *_all([7], world)] for _ in range(2)],
    "updates": lambda world: [_all([1, 9, 4], world), _all([8], world), _all([2, 2, 30, 1], world)],
    "one-microbatch": lambda world: [_all([6], world)],
    "one-sample": lambda world: [[[[6], *[[]] * (world - 1)]]],
}
SEVERAL_RANKS = {
    "C2", "C4b", "uneven-ranks", "empty-last-rank", "empty-first-rank", "only-last-rank", "fewer-than-ranks",
    "calls-empty-ranks", "one-sample",
}  # fmt: skip
SEVERAL_CALLS = {name for name in CASES if name.startswith("calls")}
FEW_CASES = ("C1", "C4c", "C-R", "uneven-ranks", "empty-last-rank", "short-tail", "calls", "calls-none-between")
WITHOUT_WEIGHT = {"C4c", "empty-update"}  # one of their updates has nothing to divide by
POSITION_0 = {"C5", "C5u"}  # the first label of a row is a target that the causal shift never uses


def updates(case: str, world: int, power_of_two: bool) -> list[Update]:
    """The numbers of targets; with `power_of_two`, some samples get more, so that every update's sum is one."""
    found = CASES[case](world)
    return [_filled(update) for update in found] if power_of_two else found


def _filled(update: Update) -> Update:
    """Calls with targets have a power of two of them, then three times as many, then as many as all before."""
    goal = 2 ** math.ceil(math.log2(max([2, *map(_targets, update)])))
    filled: Update = []
    for call in update:
        filled.append(_raised(call, goal) if _targets(call) else call)
        so_far = sum(map(_targets, filled))
        goal = 3 * so_far if so_far == goal else max(goal, so_far)
    return filled


def _targets(call: Call) -> int:
    return sum(map(sum, call))


def _raised(call: Call, goal: int) -> Call:
    """More targets for the longest samples, one by one, so that what was uneven stays so."""
    call = [list(share) for share in call]
    longest = max(max(share, default=0) for share in call)
    chosen = [(rank, i) for rank, share in enumerate(call) for i, n in enumerate(share) if n == longest]
    for step in range(goal - _targets(call)):
        rank, index = chosen[step % len(chosen)]
        call[rank][index] += 1
    return call


def samples(call: Call, kind: str, case: str, seed: int) -> list[list[Sample]]:
    """The samples of every rank: half of the call's targets, those that come first, are marked as positive."""
    generator = torch.Generator().manual_seed(seed)
    make = _image if kind == "image" else _text
    left = _targets(call) // 2
    made: list[list[Sample]] = []
    for share in call:
        made.append([])
        for targets in share:
            positive = min(left, targets)
            left -= positive
            made[-1].append(make(targets, positive, case in POSITION_0, generator))
    return made


def _text(targets: int, positive: int, position_0: bool, generator: torch.Generator) -> Sample:
    """Token ids, and integer labels: above zero for the first `positive` targets, below for the rest."""
    prompt = 1 if position_0 else int(torch.randint(1, 4, (), generator=generator))
    labels = torch.randint(1, 4, (prompt + targets,), generator=generator)
    labels[prompt + positive :] *= -1
    if not position_0:
        labels[:prompt] = -100
    return {"input_ids": torch.randint(0, 96, labels.shape, generator=generator), "labels": labels}


def _image(targets: int, positive: int, _: bool, generator: torch.Generator) -> Sample:
    """An image of small integers whose weight is the number of targets."""
    image = torch.randint(-2, 3, (1, 4, 4), generator=generator).double()
    label = torch.randint(-3, 4, (), generator=generator)
    return {"image": image, "label": label, "weight": torch.tensor(targets), "positive": torch.tensor(positive)}


def as_language(sample: Sample) -> Sample:
    """The same sample for a language model: labels are token ids."""
    labels = sample["labels"]
    return sample | {"labels": torch.where(labels == -100, labels, sample["input_ids"])}
