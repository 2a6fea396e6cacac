"""A run is killed and damaged again and again, and ends as one that never was.

Kills come at updates and inside saves, to one rank or all. Between a kill and the resume, checkpoints and the files
beside them are damaged: the token cache, metrics and other logs.

`python -m tests.elastic.kills` does it two hundred times and writes kills.json; a number of minutes after it bounds the
time. `python -m tests.elastic.kills same-bits` does it twenty times on ever other ranks, with update.same_bits, and
writes kills_same_bits.json. `python -m tests.elastic.kills ddp` does it twenty times each on three and on four ranks of
DDP, which add gradients in an order that depends on their buckets, and writes kills_ddp.json.
"""

import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import transformers

from megabatch.train.runtime.files import METRICS, row_of
from tests.elastic.damages import BESIDE, KINDS, damage_beside, step_to_expect, steps_of
from tests.train.conftest import RECIPE, some_pairs, states_of, timeless, write_pairs
from tests.train.processes import Run, overrides

RESULT = Path(__file__).with_name("kills.json")
SAME_BITS_RESULT = Path(__file__).with_name("kills_same_bits.json")
DDP_RESULT = Path(__file__).with_name("kills_ddp.json")
DDP, DDP_RUNS = {"parallel__wrapper": "ddp"}, ((3,), (4,), (3,), (4,))
SAME_BITS = {"model__dtype": "float32", "update__same_bits": "true", "update__max_norm": 0.3, "optim__ema_decay": 0.9}
OF_RANKS = ("num_microbatches", "slowest_over_mean")  # of a row: what follows from the number of ranks
NUM_UPDATES, SAVE_EVERY = 30, 2
SECONDS = 120.0  # for a place to be reached, and for ranks that have lost one to end
LAID: dict[int, str | None] = {1: None, 2: "ddp", 3: "fsdp2", 4: "fsdp2"}  # number of ranks → wrapper
SIZES = (4, 2, 3, 1)  # of a run that goes on with other ranks after each kill
LARGEST = 1e-10  # difference of weights in float64 where the number of ranks has changed
NUM_KILLS, KILLS_PER_RUN = 200, 10
RUNS = ((1,), (2,), (1,), (2, 3, 1), (2,), (3,), (1,), SIZES, (2,))  # the number of ranks of each start, in turn
CHECKPOINTS = "checkpoints"  # kind of a damage, beside those of `BESIDE`


@dataclass(frozen=True)
class Kill:
    """The place of a kill and its rank: at the row of an update, or once the folder of an unfinished save is there."""

    step: int
    in_save: bool
    rank: int | None  # None: all of them
    seconds: float  # to wait in the save


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run's kills and damages."""

    sizes: tuple[int, ...]
    kills: int
    inside_saves: int  # that have left an unfinished folder
    of_one_rank: int
    damages: dict[str, int]
    same_rows: bool
    difference: float  # of any element of weights and of the optimizer's state


class Runs:
    """Runs of one small model, with dropout, in folders of a place."""

    def __init__(self, place: Path, given: dict[str, Any]) -> None:
        self.place, self._number, self._given = place, 0, given
        self.data = write_pairs(place / "data.jsonl", some_pairs())

    def start(self, folder: Path, size: int) -> Run:
        """The run in the folder, from its beginning or gone on with."""
        self._number += 1
        recipe = self.place / f"{folder.name}.toml"
        recipe.write_text(RECIPE.format(data=self.data, folder=folder))
        values = {"run__max_epochs": 5, "run__save_every": SAVE_EVERY, "eval__every": 10, "run__resume": True}
        values |= {"parallel__wrapper": LAID[size], "run__tensorboard": False, "data__cache": self.place / "cache"}
        return Run(["train", str(recipe), *overrides(values | self._given)], self.logs, size)

    @property
    def logs(self) -> Path:
        """The folder of what the last start said."""
        return self.place / f"logs{self._number}"

    def finish(self, folder: Path, size: int) -> None:
        """To its end, which must be good."""
        ends = self.start(folder, size).wait()
        assert all(end.status == 0 for end in ends), "\n".join(end.out + end.err for end in ends)

    def kill(self, folder: Path, size: int, kill: Kill) -> bool:
        """Start or go on, and be killed; whether a save was left half-way. Ranks that lost one end by themselves."""
        run = self.start(folder, size)
        unfinished, said = folder / "checkpoints" / f"step-{kill.step}.tmp", self.logs / "rank0.out"

        def reached() -> bool:  # by this start, of which others may have left a folder
            return (unfinished.exists() or not kill.in_save) and last_step(said) >= kill.step

        deadline = time.monotonic() + SECONDS
        while not reached() and time.monotonic() < deadline and all(each.is_alive() for each in run.processes):
            time.sleep(0.001)
        time.sleep(kill.seconds)
        for process in run.processes if kill.rank is None else [run.processes[kill.rank % size]]:
            process.kill()
        ends = run.wait(SECONDS)
        text = "\n".join(end.err for end in ends)
        assert last_step(said) >= kill.step, text
        assert "Traceback" not in text, text
        assert kill.rank is None or [end.status for end in ends].count(-signal.SIGKILL) == 1, "others were stuck"
        return kill.in_save and unfinished.exists()

    def resumed_from(self) -> int:
        """The step that the last start resumed from; 0: it began."""
        found = re.search(r"^resumed from \S+/step-([0-9]+)$", (self.logs / "rank0.out").read_text(), re.MULTILINE)
        return int(found[1]) if found else 0


class Damager:
    """Damages a run between its starts, and knows what is left of it."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self._folder, self._draw, self._pristine = folder, draw, folder.with_name(f"{folder.name}-pristine")
        self.expected, self.lost = 0, set[int]()  # step to resume from, and those whose rows may be gone
        self.counts: Counter[str] = Counter()

    def damage(self) -> None:
        """Damage some of the run's files, but not all of its checkpoints."""
        checkpoints = self._folder / "checkpoints"
        for step in steps_of(checkpoints):
            if step > self.expected:  # it was written since
                shutil.rmtree(self._pristine / f"step-{step}", ignore_errors=True)
                shutil.copytree(checkpoints / f"step-{step}", self._pristine / f"step-{step}")
        found = step_to_expect(checkpoints, self._pristine)
        for kind in self._draw.sample([CHECKPOINTS, *BESIDE], self._draw.randint(1, 3)):
            self.counts[kind] += 1
            if kind != CHECKPOINTS:
                before = lines_of(self._folder / METRICS)
                damage_beside(kind, self._folder.parent, self._folder.name, self._draw)
                after = lines_of(self._folder / METRICS)
                self.lost |= {row["step"] for line in (before - after) + (after - before) if (row := row_of(line))}
            elif len(steps_of(checkpoints)) > 1:
                found = self._damage_checkpoints(checkpoints)
        self.expected = found or 0

    def _damage_checkpoints(self, checkpoints: Path) -> int:
        """Damage them so that one stays; the newest."""
        kept = checkpoints.with_name("kept")
        shutil.copytree(checkpoints, kept)
        while True:
            try:
                KINDS[self._draw.choice(list(KINDS))](checkpoints, self._draw)
                found = step_to_expect(checkpoints, self._pristine)
            except (OSError, LookupError, ValueError):  # a damage of what is damaged already
                found = None
            if found is not None:
                shutil.rmtree(kept)
                return found
            shutil.rmtree(checkpoints)
            shutil.copytree(kept, checkpoints)


def lines_of(path: Path) -> Counter[bytes]:
    return Counter(path.read_bytes().splitlines() if path.exists() else [])


def rows(folder: Path, name: str, lost: set[int]) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{key: row[key] for key in row if key not in OF_RANKS} for row in timeless(found) if row["step"] not in lost]


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


def disturbed(runs: Runs, whole: Path, sizes: tuple[int, ...], num: int, seed: int) -> Outcome:
    """A run of so many kills and damages beside one without; with several sizes, each start has the next of them."""
    draw, folder, inside = random.Random(seed), runs.place / f"run{'-'.join(map(str, sizes))}-{seed}", 0
    kills, damager, starts = list(drawn(draw, num, min(sizes))), Damager(folder, draw), cycle(sizes)
    for kill in kills:
        inside += runs.kill(folder, next(starts), kill)
        assert runs.resumed_from() == damager.expected
        damager.damage()
    runs.finish(folder, next(starts))
    assert runs.resumed_from() == damager.expected
    one, other = (states(each, runs.place) for each in (whole, folder))
    assert one.keys() == other.keys()
    outcome = Outcome(
        sizes, len(kills), inside, sum(kill.rank is not None for kill in kills), dict(damager.counts),
        rows(whole, METRICS, damager.lost) == rows(folder, METRICS, damager.lost),
        max(float((one[name].double() - other[name].double()).abs().max()) for name in one if one[name].numel()),
    )  # fmt: skip
    shutil.rmtree(folder)
    return outcome


def series(
    place: Path, plan: Iterable[tuple[int, ...]], kills_per_run: int | None, given: dict[str, Any] | None = None,
    until: float = float("inf"),
) -> list[Outcome]:  # fmt: skip
    """A disturbed run of each kind of ranks, beside one on its last ranks; none begins after a time of the clock."""
    runs, outcomes = Runs(place, given or {}), list[Outcome]()
    for seed, sizes in enumerate(plan):
        if time.time() > until:
            break
        whole = place / f"whole{sizes[-1]}"
        if not whole.exists():
            runs.finish(whole, sizes[-1])
        outcomes.append(disturbed(runs, whole, sizes, kills_per_run or len(sizes) - 1, seed))
        print(time.strftime("%H:%M:%S"), outcomes[-1], flush=True)
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
        outcomes = series(Path(place), [*[SIZES] * 3, *[(1, 4, 3, 2)] * 3, (3, 1, 2)], None, SAME_BITS)
    check_same_bits(outcomes)
    head = {"command": "python -m tests.elastic.kills same-bits", "torch": torch.__version__}
    result = {**head, "kills": sum(each.kills for each in outcomes), "runs": [asdict(each) for each in outcomes]}
    SAME_BITS_RESULT.write_text(json.dumps(result, indent=1) + "\n")


def main_ddp() -> None:
    with tempfile.TemporaryDirectory() as place:
        outcomes = series(Path(place), DDP_RUNS, KILLS_PER_RUN, DDP)
    check(outcomes)
    head = {"command": "python -m tests.elastic.kills ddp", "torch": torch.__version__}
    result = {**head, "kills": sum(each.kills for each in outcomes), "runs": [asdict(each) for each in outcomes]}
    DDP_RESULT.write_text(json.dumps(result, indent=1) + "\n")


def main(until: float) -> None:
    with tempfile.TemporaryDirectory() as place:
        plan = [sizes for _, sizes in zip(range(NUM_KILLS // KILLS_PER_RUN), cycle(RUNS), strict=False)]
        outcomes = series(Path(place), plan, KILLS_PER_RUN, until=until)
    check(outcomes)
    sums: Counter[str] = Counter()
    damages: Counter[str] = Counter()
    for each in outcomes:
        sums.update({key: getattr(each, key) for key in ("kills", "inside_saves", "of_one_rank")})
        damages.update(each.damages)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "python": sys.version.split()[0]}
    result = {
        "command": "python -m tests.elastic.kills", **versions, **sums, "damages": damages,
        "bit_equal_runs": sum(each.difference == 0 and each.same_rows for each in outcomes if len(each.sizes) == 1),
        "largest_difference_on_other_ranks": max(each.difference for each in outcomes if len(each.sizes) > 1),
        "runs": [asdict(each) for each in outcomes],
    }  # fmt: skip
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["same-bits"]:
        main_same_bits()
    elif sys.argv[1:] == ["ddp"]:
        main_ddp()
    else:
        main(time.time() + 60 * float((sys.argv[1:] or ["inf"])[0]))  # the minutes within which runs may begin
