"""Draw the figures of README and docs from committed results: `python -m benchmarks.figures`, or `make figures`.

Each figure is an SVG for light pages and one for dark pages, in docs/assets. It names the results that it was drawn
from, with their hashes; tests/test_figures.py fails where a result is newer than its figure. The screenshots of a run's
page are made by `python -m benchmarks.screenshot RUN`.
"""

import hashlib
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from benchmarks import result
from benchmarks.gpu import table
from benchmarks.gpu.job import read

ASSETS = result.ROOT / "docs" / "assets"
THEMES = {
    "light": {"back": "#ffffff", "text": "#1f2328", "faint": "#59636e", "line": "#d1d9e0", "ours": "#0b7a58",
              "bad": "#cf4b32", "other": "#8b98a9", "pale": "#dfe4ea"},
    "dark": {"back": "#0d1117", "text": "#f0f6fc", "faint": "#a3adb8", "line": "#3d444d", "ours": "#3fbf94",
             "bad": "#f2795f", "other": "#7d8a9b", "pale": "#2f3741"},
}  # fmt: skip
FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
WIDTH, EDGE = 640, 12
ROW = 34  # from one bar to the next
EXACT = 1e-9
NAMES = {
    "plain": "plain loop",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "hf": "Trainer",
    "megabatch": "megabatch",
}
SPEED_NAMES = {
    "megabatch": "megabatch",
    "sorted": "loop, sorted by length",
    "hf_rebalance": "Trainer, batch_rebalance",
    "hf": "Trainer",
    "accelerate": "Accelerate",
    "plain": "plain loop",
}
REGIMES = {"launch": "launch-bound", "compute": "compute-bound"}


class Canvas:
    """Shapes of one figure, in the colors of one theme."""

    def __init__(self, theme: str, height: int, title: str, sources: Sequence[Path]) -> None:
        self.colors, self.height, self.title, self.sources = THEMES[theme], height, title, sources
        self.shapes: list[str] = []

    def text(self, x: float, y: float, words: str, color: str = "text", size: int = 16, **more: Any) -> None:
        extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
        place = f'x="{x:g}" y="{y:g}" font-size="{size}" fill="{self.colors[color]}"'
        self.shapes.append(f"<text {place}{extra}>{escape(words)}</text>")

    def bar(self, x: float, y: float, width: float, height: float, color: str) -> None:
        place = f'x="{x:g}" y="{y:g}" width="{max(width, 2):.1f}" height="{height:g}"'
        self.shapes.append(f'<rect {place} rx="2" fill="{self.colors[color]}"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.shapes.append(f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{self.colors["line"]}"/>')

    def svg(self) -> str:
        made_from = "".join(f"\n{path.name} sha256:{digest(path)}" for path in self.sources)
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-EDGE} 0 {WIDTH + 2 * EDGE} {self.height}" '
            f'width="{WIDTH + 2 * EDGE}" '
            f'height="{self.height}" role="img" font-family="{FONT}">',
            f"<title>{escape(self.title)}</title>",
            f"<metadata>made by python -m benchmarks.figures from{made_from}</metadata>",
            f'<rect x="{-EDGE}" width="{WIDTH + 2 * EDGE}" height="{self.height}" fill="{self.colors["back"]}"/>',
            *self.shapes,
            "</svg>\n",
        ])  # fmt: skip


class Figure(NamedTuple):
    """A figure's file name and the results that it is drawn from."""

    name: str
    sources: tuple[str, ...]  # patterns in benchmarks/results; the newest file of each


FIGURES = (
    Figure("gradient_error", ("gradient_error_*.json",)),
    Figure("speed", ("speed_cpu_*.json",) if table.newest() is None else ("gpu_*.jsonl",)),
)


def newest(pattern: str) -> Path:
    """Return the newest result; its name ends with its date."""
    return max(result.RESULTS.glob(pattern), key=lambda path: path.stem.rpartition("_")[2])


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def draw(figure: Figure, theme: str) -> str:
    """Return the SVG of a figure."""
    paths = [newest(each) for each in figure.sources]
    if paths[0].suffix == ".jsonl":
        return gpu_speed(theme, paths, read(paths[0]))
    found = [json.loads(path.read_text()) for path in paths]
    return {"gradient_error": gradient_error, "speed": speed}[figure.name](theme, paths, *found)


def gradient_error(theme: str, paths: list[Path], found: dict[str, Any]) -> str:
    """Draw a column of bars for each number of microbatches."""
    rows = {(row["loop"], row["accumulation"]): row["median_error"] for row in found["rows"]}
    counts = sorted({number for _, number in rows})
    most = max(rows.values())
    left, top, gap = 118, 92, 18
    column = (WIDTH - left) / len(counts)
    title = "Gradient error by the number of microbatches in an update"
    canvas = Canvas(theme, top + ROW * len(NAMES) + 42, title, paths)
    canvas.text(0, 22, "Same 64 samples, same weights: error of the gradient", size=19, font_weight=600)
    canvas.text(0, 44, f"GSM8K answers, small Llama after {found['updates_before']} updates, float64, one process",
                "faint", 14)  # fmt: skip
    for place, number in enumerate(counts):
        x = left + place * column
        canvas.text(x, top - 14, f"{number} microbatch{'es' * (number > 1)}", "faint", 15)
        canvas.line(x, top - 4, x, top + ROW * len(NAMES) - 6)
        for line, name in enumerate(NAMES):
            y, error = top + line * ROW, rows[name, number]
            is_exact, ours = error < EXACT, name == "megabatch"
            width = (column - gap - 62) * error / most
            canvas.bar(x, y, width, 20, "ours" if is_exact else "bad")
            words = "exact" if is_exact else f"{error:.1%}"
            canvas.text(x + max(width, 2) + 7, y + 16, words, "ours" if is_exact else "text", 15,
                        font_weight=600 if ours or not is_exact else 400)  # fmt: skip
    for line, name in enumerate(NAMES):
        canvas.text(0, top + line * ROW + 16, NAMES[name], size=16, font_weight=600 if name == "megabatch" else 400)
    canvas.text(
        0, canvas.height - 12, "|g - g_uncut| / |g_uncut|, median of 3 updates. exact: below 1e-13.", "faint", 14
    )
    return canvas.svg()


def speed(theme: str, paths: list[Path], found: dict[str, Any]) -> str:
    """Draw a bar for each loop and regime: CPU seconds over megabatch's, the mean and the range over the data sets."""
    rows = {(row["regime"], row["data"], row["contestant"]): row["cpu_seconds"]
            for row in found["rows"] if row["ranks"] == 1}  # fmt: skip
    data = sorted({name for _, name, _ in rows})
    ratios = {
        (regime, name): [rows[regime, each, name] / rows[regime, each, "megabatch"] for each in data]
        for regime in REGIMES
        for name in SPEED_NAMES
    }
    most, left, top, gap = max(map(geometric_mean, ratios.values())), 208, 92, 22
    column = (WIDTH - left) / len(REGIMES)
    title = "CPU time of an update of 64 samples, megabatch = 1"
    canvas = Canvas(theme, top + ROW * len(SPEED_NAMES) + 66, title, paths)
    canvas.text(0, 22, title, size=19, font_weight=600)
    canvas.text(0, 44, f"each loop at its best micro batch size of 1 to 32; one core ({machine(found)})", "faint", 14)
    for place, (regime, words) in enumerate(REGIMES.items()):
        x = left + place * column
        canvas.text(x, top - 14, words, "faint", 15)
        canvas.line(x, top - 4, x, top + ROW * len(SPEED_NAMES) - 6)
        for line, name in enumerate(SPEED_NAMES):
            y, values, ours = top + line * ROW, ratios[regime, name], name == "megabatch"
            width = (column - gap - 84) * geometric_mean(values) / most
            canvas.bar(x, y, width, 20, "ours" if ours else "other")
            told = "1" if ours else f"{min(values):.2f} to {max(values):.2f}"
            canvas.text(x + width + 7, y + 16, told, size=14, font_weight=600 if ours else 400)
    for line, (name, words) in enumerate(SPEED_NAMES.items()):
        canvas.text(0, top + line * ROW + 16, words, size=15, font_weight=600 if name == "megabatch" else 400)
    y = canvas.height - 34
    canvas.text(0, y, f"Range over {len(data)} data sets; the bar is the geometric mean. Same samples in each update.",
                "faint", 14)  # fmt: skip
    canvas.text(0, y + 22, "Launch-bound: 40 layers of hidden size 8, so that a launch costs about a sample.",
                "faint", 14)  # fmt: skip
    return canvas.svg()


def gpu_speed(theme: str, paths: list[Path], rows: list[dict[str, Any]]) -> str:
    """Draw a bar of tokens a second for each loop, by model and lengths, from a result of a GPU."""
    settings = table.speeds(rows)
    lines = [(setting, who, values) for setting, loops in settings.items() for who, values in loops.items()]
    most = max(values["tokens_per_second"] for _, _, values in lines)
    left, top = 250, 80
    title = f"Tokens a second, {rows[0]['hardware']}"
    height = top + ROW * len(lines) + 26 * len(settings) + 20
    canvas = Canvas(theme, height, title, paths)
    canvas.text(0, 22, title, size=19, font_weight=600)
    canvas.text(0, 44, "each loop at its best micro batch size, bfloat16, sdpa; updates of 64 samples", "faint", 14)
    y = top
    for setting, loops in settings.items():
        canvas.text(0, y, setting, "faint", 15)
        y += 26
        for who, values in loops.items():
            ours = "mega" in who.lower()
            weight = 600 if ours else 400
            width = (WIDTH - left - 130) * values["tokens_per_second"] / most
            canvas.text(0, y, who, size=15, font_weight=weight)
            canvas.bar(left, y - 16, width, 20, "ours" if ours else "other")
            canvas.text(left + width + 7, y, f"{values['tokens_per_second']:,.0f}", size=14, font_weight=weight)
            y += ROW
    return canvas.svg()


def machine(found: dict[str, Any]) -> str:
    return found["rows"][0]["machine"].partition(", ")[2]


def main() -> None:
    for figure in FIGURES:
        for theme in THEMES:
            path = ASSETS / f"{figure.name}-{theme}.svg"
            path.write_text(draw(figure, theme))
            print(path.relative_to(result.ROOT))


if __name__ == "__main__":
    main()
