"""A thousand damaged checkpoints: `python -m tests.elastic.damage` writes damage.json beside this file.

A real run of three checkpoints, plain and in FSDP2 on two ranks. Each is damaged in one of twenty ways, drawn from a
seed, and gone on from, in processes that live long. It must come to the newest checkpoint of which no byte has changed,
to the bit, or to one line where there is none.
"""

import itertools
import json
import tempfile
from pathlib import Path

import torch

from tests.elastic.damages import KINDS
from tests.elastic.trials import REFUSED, Trial, counts_of, trials
from tests.train.on_ranks import on_ranks

RESULT = Path(__file__).with_name("damage.json")
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "plain": (1, []),
    "fsdp2 on 2 ranks": (2, ["--parallel.wrapper=fsdp2"]),
}
NUM_DAMAGES = 520  # of each layout
AT_ONCE = 130  # for one start of the processes


def kinds_of(number: int, first: int = 0) -> list[str]:
    """So many kinds of damage, each as often as any other."""
    return list(itertools.islice(itertools.cycle(KINDS), first, first + number))


def is_sound(counts: dict[str, dict[str, int]]) -> bool:
    """Return True if a damage had no other outcome than it must have."""
    return all(
        outcome == REFUSED or outcome.endswith(", exactly") for outcomes in counts.values() for outcome in outcomes
    )


def of_layout(layout: str) -> list[list[Trial]]:
    """The outcome of every damage, as every rank saw it."""
    num_ranks, overrides = LAYOUTS[layout]
    found: list[list[Trial]] = [[] for _ in range(num_ranks)]
    for first in range(0, NUM_DAMAGES, AT_ONCE):
        with tempfile.TemporaryDirectory() as name:
            arguments = (Path(name), overrides, kinds_of(AT_ONCE, first), 1000 + first)
            seen = on_ranks(num_ranks, Path(name), trials, *arguments)
        for rank in range(num_ranks):
            found[rank] += seen[rank]
        print(f"{layout}: {first + AT_ONCE} of {NUM_DAMAGES}", flush=True)
    return found


def main() -> None:
    """Write the result, and fail where it is not sound."""
    counts = {layout: counts_of(of_layout(layout)) for layout in LAYOUTS}
    head = {"command": "python -m tests.elastic.damage", "torch": torch.__version__}
    number = NUM_DAMAGES * len(LAYOUTS)
    RESULT.write_text(json.dumps({**head, "num_damages": number, "counts": counts}, indent=1) + "\n")
    assert all(is_sound(each) for each in counts.values()), counts


if __name__ == "__main__":
    main()
