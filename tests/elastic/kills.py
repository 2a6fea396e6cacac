"""A run is killed again and again, at updates and inside saves, one rank or all, and ends as one that never was.

`python -m tests.elastic.kills` does it a hundred times and writes kills.json. `python -m tests.elastic.kills same-bits`
does it twenty times on ever other ranks, with update.same_bits, and writes kills_same_bits.json.
"""

import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.train.conftest import NO_DROPOUT, RECIPE, some_pairs, states_of, timeless, write_pairs
from tests.train.processes import Run, overrides

RESULT = Path(__file__).with_name("kills.json")
SAME_BITS_RESULT = Path(__file__).with_name("kills_same_bits.json")
SAME_BITS = {"model__dtype": "float32", "update__same_bits": "proved", "update__max_norm": 0.3, "optim__ema_decay": 0.9}
OF_RANKS = ("num_microbatches", "slowest_over_mean")  # of a row: what follows from the number of ranks
NUM_UPDATES, SAVE_EVERY = 30, 3
SECONDS = 60.0  # for a place to be reached, and for ranks that have lost one to end
LAID: dict[int, str | None] = {1: None, 2: "ddp", 3: "fsdp2", 4: "fsdp2"}  # number of ranks → wrapper
SIZES = (4, 2, 3, 1)  # of a run that goes on with other ranks after each kill
LARGEST = 1e-10  # difference of weights in float64 where the number of ranks has changed


@dataclass(frozen=True)
class Kill:
    """The place of a kill and its rank: at the row of an update, or once the folder of an unfinished save is there."""

    step: int
    in_save: bool
    rank: int | None  # None: all of them
    seconds: float  # to wait in the save


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run's kills."""

    sizes: tuple[int, ...]
    kills: int
    inside_saves: int  # that have left an unfinished folder
    after_saves: int  # that were meant to, and came when it had its name already
    of_one_rank: int
    same_rows: bool
    difference: float  # of any element of weights and of the optimizer's state


class Runs:
    """Runs of one small model, in folders of a place."""

    def __init__(self, place: Path, given: dict[str, Any]) -> None:
        self.place, self._number, self._given = place, 0, given
        self.data = write_pairs(place / "data.jsonl", some_pairs())

    def start(self, folder: Path, size: int, *, dropout: bool) -> Run:
        """The run in the folder, from its beginning or gone on with."""
        self._number += 1
        recipe = self.place / f"{folder.name}.toml"
        recipe.write_text(RECIPE.format(data=self.data, folder=folder))
        values = {"run__max_epochs": 5, "run__save_every": SAVE_EVERY, "eval__every": 10, "run__resume": True}
        values |= {"parallel__wrapper": LAID[size], "run__tensorboard": False, "data__cache": self.place / "cache"}
        values |= ({} if dropout else NO_DROPOUT) | self._given
        return Run(["train", str(recipe), *overrides(values)], self.place / f"logs{self._number}", size)

    def finish(self, folder: Path, size: int, *, dropout: bool) -> None:
        """To its end, which must be good."""
        ends = self.start(folder, size, dropout=dropout).wait()
        assert all(end.status == 0 for end in ends), "\n".join(end.err for end in ends)

    def kill(self, folder: Path, size: int, kill: Kill, *, dropout: bool) -> bool:
        """Start or go on, and be killed; whether a save was left half-way. Ranks that lost one end by themselves."""
        run = self.start(folder, size, dropout=dropout)
        unfinished = folder / "checkpoints" / f"step-{kill.step}.tmp"
        said = self.place / f"logs{self._number}" / "rank0.out"

        def reached() -> bool:  # by this start, of which others may have left a folder
            return last_step(said) >= kill.step and (unfinished.exists() or not kill.in_save)

        deadline = time.monotonic() + SECONDS
        while not reached() and time.monotonic() < deadline and all(each.is_alive() for each in run.processes):
            time.sleep(0.0005)
        time.sleep(kill.seconds)
        for process in run.processes if kill.rank is None else [run.processes[kill.rank % size]]:
            process.kill()
        ends = run.wait(SECONDS)
        assert all(end.status != 0 for end in ends) or reached(), [end.err for end in ends]
        assert all("Traceback" not in end.err for end in ends), "\n".join(end.err for end in ends)
        assert kill.rank is None or [end.status for end in ends].count(-signal.SIGKILL) == 1, "others were stuck"
        return kill.in_save and unfinished.exists()

    def outcome(self, whole: Path, folder: Path, sizes: tuple[int, ...], kills: list[Kill], inside: int) -> Outcome:
        """The run's end beside that of the one that was never killed."""
        one, other = (states(each, self.place) for each in (whole, folder))
        assert one.keys() == other.keys()
        return Outcome(
            sizes, len(kills), inside, sum(kill.in_save for kill in kills) - inside,
            sum(kill.rank is not None for kill in kills), rows(whole) == rows(folder),
            max(float((one[name].double() - other[name].double()).abs().max()) for name in one if one[name].numel()),
        )  # fmt: skip


def rows(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in row if key not in OF_RANKS} for row in timeless(found)]


def last_step(said: Path) -> int:
    """The last update that this start of a run has said to have made."""
    lines = said.read_text().splitlines() if said.exists() else []
    steps = [int(line.split()[1]) for line in lines if line.startswith("update ") and "  loss " in line]
    return max(steps, default=0)


def states(folder: Path, place: Path) -> dict[str, Any]:
    return states_of(folder / "checkpoints" / f"step-{NUM_UPDATES}", place / "state.pt")


def drawn(draw: random.Random, num: int, size: int) -> Iterator[Kill]:
    """Kills at rising places: an update's row, or a save."""
    for place in sorted(draw.sample(range(1, NUM_UPDATES // SAVE_EVERY), num)):
        in_save = draw.random() < 0.6
        step = place * SAVE_EVERY + (0 if in_save else draw.randrange(1, SAVE_EVERY))
        rank = None if size == 1 or draw.random() < 0.5 else draw.randrange(size)
        yield Kill(step, in_save, rank, draw.choice([0, 0, 0.002, 0.005]) if in_save else draw.random() * 0.02)


def killed(runs: Runs, whole: Path, sizes: tuple[int, ...], num: int, seed: int) -> Outcome:
    """A run of so many kills; with several sizes, each start has the next one of them."""
    draw, dropout = random.Random(seed), len(sizes) == 1
    folder, inside = runs.place / f"run{'-'.join(map(str, sizes))}-{seed}", 0
    kills = list(drawn(draw, num, min(sizes)))
    for number, kill in enumerate(kills):
        inside += runs.kill(folder, sizes[number % len(sizes)], kill, dropout=dropout)
    runs.finish(folder, sizes[len(kills) % len(sizes)], dropout=dropout)
    outcome = runs.outcome(whole, folder, sizes, kills, inside)
    shutil.rmtree(folder)
    return outcome


def series(
    place: Path, num_runs: dict[tuple[int, ...], int], kills_per_run: int, given: dict[str, Any] | None = None
) -> list[Outcome]:
    """So many runs on each kind of ranks, every one beside the run on its ranks that was never killed."""
    runs, outcomes = Runs(place, given or {}), list[Outcome]()
    for sizes, number in num_runs.items():
        whole = place / f"whole{'-'.join(map(str, sizes))}"
        runs.finish(whole, sizes[-1], dropout=len(sizes) == 1)
        num = kills_per_run if len(sizes) == 1 else len(sizes) - 1
        for seed in range(number):
            outcomes.append(killed(runs, whole, sizes, num, seed))
            print(outcomes[-1], flush=True)
    return outcomes


def check(outcomes: list[Outcome]) -> None:
    """Bit for bit on the same ranks, and up to rounding on others."""
    for each in outcomes:
        assert each.difference <= (0 if len(each.sizes) == 1 else LARGEST), each
        assert each.same_rows or len(each.sizes) > 1, each


def check_same_bits(outcomes: list[Outcome]) -> None:
    """Bit for bit on any ranks."""
    assert all(each.difference == 0 and each.same_rows for each in outcomes), outcomes


def main_same_bits() -> None:
    with tempfile.TemporaryDirectory() as place:
        outcomes = series(Path(place), {SIZES: 3, (1, 4, 3, 2): 3, (3, 1, 2): 1}, 0, SAME_BITS)
    check_same_bits(outcomes)
    head = {"command": "python -m tests.elastic.kills same-bits", "torch": torch.__version__}
    result = {**head, "kills": sum(each.kills for each in outcomes), "runs": [asdict(each) for each in outcomes]}
    SAME_BITS_RESULT.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        outcomes = series(Path(place), {(1,): 6, (2,): 6, (3,): 6, SIZES: 4}, kills_per_run=5)
    check(outcomes)
    sums: Counter[str] = Counter()
    for each in outcomes:
        sums.update({key: getattr(each, key) for key in ("kills", "inside_saves", "after_saves", "of_one_rank")})
    changed = [each.difference for each in outcomes if len(each.sizes) > 1]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "python": sys.version.split()[0]}
    result = {
        "command": "python -m tests.elastic.kills", **versions, **sums,
        "bit_equal_runs": sum(each.difference == 0 and each.same_rows for each in outcomes if len(each.sizes) == 1),
        "largest_difference_on_other_ranks": max(changed),
        "runs": [asdict(each) for each in outcomes],
    }  # fmt: skip
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main_same_bits() if sys.argv[1:] == ["same-bits"] else main()
