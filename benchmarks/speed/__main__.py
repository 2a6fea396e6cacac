"""Seconds, padding, memory and gradients of megabatch and its peers, on the same samples.

    python -m benchmarks.speed                          # all; says how long it will take
    python -m benchmarks.speed --quick                  # the headline: one process, six contestants, in minutes
    python -m benchmarks.speed --ranks 1 --repeats 3    # on one process, thrice, in turns
    python -m benchmarks.speed --only megabatch,hf_rebalance --data gsm8k --regimes launch
    python -m benchmarks.speed --table                  # the tables of docs/benchmarks.md, from the newest result

Each contestant runs in processes of its own, one after the other; repeats are interleaved, so that the machine's drift
falls on all. A run of parts writes nothing unless ``--out`` says where.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import result
from benchmarks.speed import data, table
from benchmarks.speed.agreement import disagreeing
from benchmarks.speed.contestants import CONTESTANTS, EVERYBODY
from benchmarks.speed.setting import MICRO_BATCH_SIZES, NUM_MEASURED, REGIMES, TINY, Setting

GSM8K = result.ROOT.parent / "shared" / "data" / "gsm8k_train.jsonl"
CLAIM = "the same update in less time and memory than its peers take at their best, with a gradient that is exact"
HEADLINE = ["megabatch", "hf_rebalance", "hf", "accelerate", "plain", "sorted"]
START_SECONDS, UPDATE_SECONDS = 9, 15  # about, of one core; only to say how long all will take
TIMEOUT_SECONDS = 900
NEAR = 1.15  # times the best CPU time of the first repeat: these sizes are run again
Pools = dict[tuple[str, str], dict[str, list[list[int]]]]  # regime and data set, then which samples


@dataclass
class Cell:
    """A contestant in a regime, on a data set and a number of ranks, with what each repeat found."""

    regime: str
    data: str
    ranks: int
    contestant: str
    setting: Setting
    samples: list[list[int]]
    made_with: list[dict[str, Any]] = field(default_factory=list)
    found: list[list[dict[str, Any]]] = field(default_factory=list)  # by repeat, then by rank

    def expected_seconds(self) -> float:
        """Return the seconds of a repeat, roughly."""
        return START_SECONDS + UPDATE_SECONDS / self.ranks * (3 if EVERYBODY[self.contestant].counts else 1)

    @property
    def real_tokens(self) -> int:
        """Of all measured updates."""
        return sum(self.setting.length(len(ids)) for ids in self.samples)

    def run(self) -> None:
        """Once more; the proof is made the first time."""
        made_with = result.made_with(EVERYBODY[self.contestant].libraries)
        job = {"contestant": self.contestant, "setting": asdict(self.setting), "samples": self.samples,
               "proof": not self.found, "sizes": self.near_best()}  # fmt: skip
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "job.json").write_text(json.dumps(job))
            start(folder, self.ranks)
            self.found.append([json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(self.ranks)])
        self.made_with.append(made_with)

    def near_best(self) -> list[int]:
        """Return the micro batch sizes that may be the best by the first repeat. Before it, all."""
        if not self.found or not EVERYBODY[self.contestant].counts:
            return [*MICRO_BATCH_SIZES]
        took = {size: self.cpu_seconds(size) for size in self.found[0][0]["sizes"]}
        return [int(size) for size, seconds in took.items() if seconds <= NEAR * min(took.values())]

    def cpu_seconds(self, size: str) -> float:
        """Return the CPU seconds of an update at a micro batch size, over all ranks: the median of its repeats."""
        found = [ranks for ranks in self.found if all(size in rank["sizes"] for rank in ranks)]
        return statistics.median(sum(mean(rank["sizes"][size], "cpu_seconds") for rank in ranks) for ranks in found)

    def row(self) -> dict[str, Any]:
        """Return the result at the best size: the slowest rank's time, the largest memory, all tokens."""
        who, proof = EVERYBODY[self.contestant], self.found[0][0]["proof"]
        sweep = {size: self.cpu_seconds(size) for size in self.found[0][0]["sizes"]}
        always = [size for size in sweep if all(size in rank["sizes"] for ranks in self.found for rank in ranks)]
        best = min(always, key=sweep.__getitem__)
        found = [[rank["sizes"][best] for rank in ranks] for ranks in self.found]
        updates = [each for ranks in found[:1] for rank in ranks for each in rank["updates"]]
        computed = sum(each["num_tokens"] for each in updates)
        repeats = [max(mean(rank, "seconds") for rank in ranks) for ranks in found]
        return {
            "regime": self.regime,
            "data": self.data,
            "ranks": self.ranks,
            "contestant": self.contestant,
            "same_samples": who.comparable,
            "weighs": who.weighs,
            "seconds_per_update": statistics.median(repeats),
            "repeats_seconds": repeats,
            "cpu_seconds": sweep[best],
            "repeats_cpu_seconds": [sum(mean(rank, "cpu_seconds") for rank in ranks) for ranks in found],
            "micro_batch_size": int(best) if who.counts else None,
            "sweep_cpu_seconds": sweep,
            "real_tokens": self.real_tokens / NUM_MEASURED,
            "computed_tokens": computed / NUM_MEASURED,
            "num_forwards": sum(each["num_forwards"] for each in updates) / NUM_MEASURED / self.ranks,
            "peak_bytes": statistics.median(max(rank["peak_bytes"] for rank in ranks) for ranks in found),
            "start_bytes": found[0][0]["start_bytes"],
            "weights": found[0][0]["weights"],
            "gradient_error": proof["gradient_error"],
            "weights_error": None if who.cut == "packs" else proof["weights_error"],
            "proof_weights": proof["weights"],
            "collectives": proof["collectives"],
            "load_before": [each["load_before"] for each in self.made_with],
            **{key: value for key, value in self.made_with[0].items() if key != "load_before"},
        }


def mean(rank: dict[str, Any], key: str) -> float:
    return statistics.mean(update[key] for update in rank["updates"])


def start(folder: Path, ranks: int) -> None:
    """The contestant's processes, to their end; torchrun starts several."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, *torchrun, "-m", "benchmarks.speed.contest", str(folder)], cwd=result.ROOT,
        env=os.environ | quiet, capture_output=True, text=True, timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"a contestant failed; its log ends:\n{(done.stdout + done.stderr)[-4000:]}")


def pools(asked: argparse.Namespace, regimes: dict[str, Setting]) -> Pools:
    """Return the samples of each regime and data set, by which contestants take them."""
    found: Pools = {}
    for name in asked.data:
        everything = data.pool(name, REGIMES["compute"].max_microbatch_tokens, asked.gsm8k, quick=asked.tiny)
        for regime, setting in regimes.items():
            drawn, grouped = data.drawn(everything, setting), data.grouped(everything, setting)
            found[regime, name] = {"drawn": drawn, "grouped": grouped}
    return found


def cells(asked: argparse.Namespace, regimes: dict[str, Setting], samples: Pools) -> Iterator[Cell]:
    for ranks in asked.ranks:
        for (regime, name), kinds in samples.items():
            for contestant in asked.only:
                yield Cell(regime, name, ranks, contestant, regimes[regime], kinds[EVERYBODY[contestant].samples])


def left_out(asked: argparse.Namespace) -> dict[str, str]:
    """What is not there, and why; it is taken out of what was asked for."""
    reasons = {name: f"{', '.join(missing)} not installed" for name in asked.only
               if (missing := EVERYBODY[name].missing())}  # fmt: skip
    asked.only = [name for name in asked.only if name not in reasons]
    if "gsm8k" in asked.data and not asked.gsm8k.exists():
        asked.data.remove("gsm8k")
        reasons["gsm8k"] = "no file of it; give one with --gsm8k"
    for name, reason in reasons.items():
        print(f"left out: {name}: {reason}")
    return reasons


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", type=partial(names, EVERYBODY), default=list(CONTESTANTS))
    parser.add_argument("--data", type=partial(names, data.NAMES), default=list(data.NAMES))
    parser.add_argument("--ranks", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2])
    parser.add_argument("--gsm8k", type=Path, default=GSM8K, help="a JSON object a line: question, answer")
    parser.add_argument("--regimes", type=partial(names, REGIMES), default=list(REGIMES))
    parser.add_argument("--quick", action="store_true", help="the headline: one process and six contestants")
    parser.add_argument("--tiny", action="store_true", help="to see that it works; its times say nothing")
    parser.add_argument("--out", type=Path, help="where the result is written")
    parser.add_argument(
        "--table", action="store_true", help="only write the table of docs/benchmarks.md, from the newest result"
    )
    return parser.parse_args()


def names(known: dict[str, Any], text: str) -> list[str]:
    """Those that a comma parts."""
    given = text.split(",")
    for name in given:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return given


def main() -> None:
    asked = arguments()
    if asked.table:
        return table.write()
    if asked.quick:
        asked.only, asked.ranks = list(HEADLINE), [1]
    regimes = {name: (TINY if asked.tiny else REGIMES)[name] for name in asked.regimes}
    whole = (asked.quick or asked.only == list(CONTESTANTS)) and asked.data == list(data.NAMES) and not asked.tiny
    path = asked.out or (result.dated("speed") if whole else None)
    reasons = left_out(asked)
    everything = list(cells(asked, regimes, pools(asked, regimes)))
    minutes = (asked.repeats + 1) / 2 * sum(cell.expected_seconds() for cell in everything) / 60
    print(
        f"{len(everything)} cells, {asked.repeats} times each: some {minutes:.0f} minutes on an idle machine",
        flush=True,
    )
    for repeat in range(asked.repeats):
        for cell in everything[:: -1 if repeat % 2 else 1]:
            cell.run()
            print(table.line(cell.row()), flush=True)
        if path:
            rows = [each.row() for each in everything]
            settings = {name: asdict(each) for name, each in regimes.items()}
            result.write(path, {"claim": CLAIM, "settings": settings, "rows": rows, "left_out": reasons})
    print(path or "nothing written: a part of it, and no --out")
    wrong = disagreeing(each.row() for each in everything)
    return sys.exit("\n".join(wrong)) if wrong else None


if __name__ == "__main__":
    main()
