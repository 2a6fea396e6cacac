"""Random recipes are read, planned and run: each works, or ends with one line; writes fuzz.json.

python -m tests.elastic.fuzz
"""

import argparse
import contextlib
import io
import json
import random
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megabatch import MegabatchError, plan
from megabatch.train.cli import commands as cli
from megabatch.train.config import Config
from megabatch.train.config.contradictions import check_config
from megabatch.train.config.parallel_layout import layout_of
from megabatch.train.config.recipe import load_config
from megabatch.train.data.updates import count_updates
from megabatch.train.model.optimizer import decay_steps_of, lr_factor
from tests.elastic.recipes import Recipe, recipes, runnable

RESULT = Path(__file__).with_suffix(".json")
NUM_TEXTS = 40


class Outcomes:
    """Counts of the outcomes of recipes, and each bug with its recipe."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.lines: Counter[str] = Counter()  # the ends of those that refuse
        self.bugs: list[str] = []

    def of(self, what: str, recipe: Any, work: Callable[[], Any]) -> Any:
        """Return the result of the work; None if it ends with a line, or in a bug."""
        try:
            found = work()
        except MegabatchError as error:
            self.counts[f"{what}: refused"] += 1
            self.lines[what + ": " + " ".join(str(error).split()[-8:])] += 1
            if len(str(error).splitlines()) != 1 or not str(error).isprintable():
                self._bug(what, recipe, f"not one line: {str(error)!r}")
            return None
        except Exception:
            self._bug(what, recipe, traceback.format_exc(limit=-3))
            return None
        self.counts[f"{what}: works"] += 1
        return found

    def _bug(self, what: str, recipe: Any, text: str) -> None:
        self.counts[f"{what}: bugs"] += 1
        self.bugs.append(f"{what} {recipe!r}\n{text}")


def each_of(strategy: st.SearchStrategy[Any], number: int, work: Callable[[Any], None]) -> None:
    """Do the work for so many examples, the same ones every time."""

    @settings(
        max_examples=number,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def every(example: Any) -> None:
        work(example)

    every()


def read(folder: Path, outcomes: Outcomes, recipe: tuple[Recipe, list[str]]) -> None:
    """Read a recipe with its overrides, and plan updates of it as far as needs no data."""
    tables, overrides = recipe
    path = folder / "recipe.toml"
    try:
        path.write_text(tomli_w.dumps(tables), encoding="utf-8")
    except UnicodeEncodeError:  # no file can hold it
        outcomes.counts["read: not TOML"] += 1
        return
    config = outcomes.of("read", recipe, lambda: load_config(path, overrides))
    if config is not None:
        outcomes.of("plan", recipe, lambda: planned(config))


def planned(config: Config) -> None:
    """Derive what a recipe alone decides: its layout, number of updates, learning rates and the cut of an update."""
    check_config(config)
    layout_of(config.parallel, 1)
    num_updates = count_updates(config, 100)
    decay_steps = decay_steps_of(config, num_updates)
    assert all(0 <= lr_factor(step, config.optim, decay_steps) <= 1 for step in (0, 1, 5, 1000))
    draw, bound = random.Random(0), config.update.max_microbatch_tokens
    longest = min(60, bound) if isinstance(bound, int) else 60
    lengths = [draw.randint(1, longest) for _ in range(min(config.update.global_batch_size, 64))]
    (found,) = plan(
        lengths, micro_batch_size=config.update.micro_batch_size,
        max_microbatch_tokens=bound if isinstance(bound, int) else None if config.update.micro_batch_size else 64,
    )  # fmt: skip
    assert sorted(index for each in found.microbatches for index in each) == list(range(len(lengths)))


def write_data(folder: Path) -> None:
    """The files that recipes which are run name."""
    texts = [f"{number} " + "ab" * (number % 9) for number in range(NUM_TEXTS)]
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "good.jsonl").write_text("\n".join(lines))
    (folder / "broken.jsonl").write_text("\n".join([*lines[:9], "{oops", *lines[9:]]))
    (folder / "pairs.csv").write_text("prompt,response\n" + "".join(f"p{text},{text}\n" for text in texts))
    (folder / "a.txt").write_text("\n".join(texts))


def trained(folder: Path, outcomes: Outcomes, recipe: Recipe) -> None:
    """Run a recipe for two updates."""
    with tempfile.TemporaryDirectory(dir=folder) as here:
        run = {"folder": f"{here}/run", "max_steps": 2, "tensorboard": False, "device": "cpu"}
        data = {"path": str(folder / recipe["data"]["path"]), "cache": str(folder / "cache")}
        whole = {**recipe, "run": recipe["run"] | run, "data": recipe["data"] | data}
        config = {key: value for key, value in whole["model"]["config"].items() if value is not None}
        whole["model"] = whole["model"] | {"config": config}
        path = Path(here) / "recipe.toml"
        path.write_text(tomli_w.dumps(whole))
        outcomes.of("run", recipe, lambda: ended(["train", str(path)]))


def ended(arguments: list[str]) -> None:
    """A command that ends with status 0; its line is raised where that is 2."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.run(arguments)
    if status == 2:
        raise MegabatchError(err.getvalue().removesuffix("\n"))
    assert status == 0, (status, err.getvalue())


def fuzz(num_read: int, num_run: int) -> Outcomes:
    """Read so many recipes, run so many others."""
    outcomes = Outcomes()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        each_of(recipes(), num_read, lambda recipe: read(folder, outcomes, recipe))
        each_of(runnable(), num_run, lambda recipe: trained(folder, outcomes, recipe))
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--read", type=int, default=10_000)
    parser.add_argument("--run", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    outcomes = fuzz(arguments.read, arguments.run)
    RESULT.write_text(json.dumps({**dict(sorted(outcomes.counts.items())), "bugs": outcomes.bugs}, indent=1) + "\n")
    print("\n\n".join(outcomes.bugs[:30]))
    print(outcomes.lines.most_common(12))
    print(dict(outcomes.counts))


if __name__ == "__main__":
    main()
