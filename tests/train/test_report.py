"""The report: it has what was measured, whatever that is."""

import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from megabatch import plan
from megabatch.train.report.picture import draw_cut, draw_losses, draw_report, running_mean

PLAN = plan([5, 6, 20], max_microbatch_tokens=24)[0]


def update(step: int, **more: Any) -> dict[str, Any]:
    row = {"step": step, "loss": 3.0, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_second": 9.0, "memory_gib": 1.0}
    return row | more


def evaluations(step: int, *names: str) -> list[dict[str, Any]]:
    return [{"step": step, "set": name, "eval_loss": 2.0 + number} for number, name in enumerate(names)]


def draw(folder: Path, rows: list[dict[str, Any]], **options: Any) -> np.ndarray:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw_report(folder, PLAN, "a run", **options)
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "report.png"]
    return imread(folder / "report.png")


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [update(1, loss=None, grad_norm=None, lr=0.0)],
        [*evaluations(0, "held-out"), update(1)],
        [
            {"step": 0, "set": "own", "eval_words": 3.0},
            {"step": 0, "set": "empty", "eval_loss": None},
            {"step": 0, "set": "wild", "eval_loss": float("nan")},
            update(1, loss=float("inf")),
        ],
        [update(step, loss=-float(step), samples_per_second=3.0) for step in range(1, 300)],
    ],
)
def test_a_picture_comes_of_any_rows(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    picture = draw(tmp_path, rows)
    assert picture.shape[:2] == (1560, 1300)
    assert picture[..., :3].std() > 0.03  # not blank


def test_a_dollar_in_a_name_is_a_dollar(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluations(1, "$a^$b", "$x")))
    draw_report(tmp_path, PLAN, "runs/$a^$b", of_tokens=False)
    assert (tmp_path / "report.png").exists()


def lines_of(updates: list[dict[str, Any]], sets: list[dict[str, Any]]) -> tuple[list[str], Any]:
    axes = Figure().subplots()
    draw_losses(axes, updates, sets, "loss per sample")
    assert axes.get_title(loc=matplotlib.rcParams["axes.titlelocation"]) == "loss per sample"
    return [text.get_text() for text in axes.get_legend().get_texts()], axes


def test_every_set_has_its_line_its_colour_and_its_last_loss() -> None:
    names = [f"set {number}" for number in range(9)]
    labels, axes = lines_of([update(step) for step in range(1, 5)], evaluations(2, *names) + evaluations(4, *names))
    assert labels == ["update", *(f"set {number}: {2 + number}.000" for number in range(9))]
    looks = {(line.get_color(), line.get_linestyle()) for line in axes.lines}
    assert len(looks) == 10
    assert [list(line.get_xdata()) for line in axes.lines] == [[1, 2, 3, 4], *[[2, 4]] * 9]


def test_many_updates_have_a_running_mean() -> None:
    labels, axes = lines_of([update(step, loss=float(step % 2)) for step in range(1, 601)], [])
    assert labels == ["update", "update, running mean"]
    assert list(axes.lines[1].get_ydata()[100:]) == pytest.approx([0.5] * 500)


def test_the_running_mean_takes_in_what_came_before() -> None:
    assert running_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


def heights(unit: str) -> list[float]:
    axes = Figure().subplots()
    draw_cut(axes, PLAN, unit)
    return [bar.get_height() for bar in axes.patches]


def test_the_cut_shows_real_tokens_and_padding_or_samples() -> None:
    assert sorted(heights("tokens")) == [0.0, 1.0, 11.0, 20.0]
    assert sorted(heights("samples")) == [0.0, 0.0, 1.0, 2.0]
