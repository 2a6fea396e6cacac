"""Draw docs/assets/architecture.svg: the chapters of the library, their imports, and the steps of an update.

`python docs/architecture.py` writes the picture. Imports are read from the source, so a new one changes the picture.
"""

import ast
from functools import cache
from html import escape
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "assets" / "architecture.svg"

CHAPTERS = {  # in the order of imports: the middle of its box, and a caption
    "lazy": (600, "imports on first use"),
    "errors": (345, "errors, checks of numbers"),
    "torch_private": (110, "torch's private names"),
    "optim": (860, "bfloat16 that learns"),
    "planning": (345, "lengths in, plans out"),
    "inspection": (110, "facts of models, graphs"),
    "core": (345, "one call, one update"),
    "batching": (345, "padding, masks, rows"),
    "losses": (590, "totals and weights"),
    "wrappers": (345, "when each wrapper sums"),
    "guards": (110, "right or refused"),
    "loops": (590, "your own loop"),
    "pipeline": (690, "torch's schedules"),
    "autotune": (110, "the limit that fits"),
    "planners": (345, "other splits"),
    "accumulator": (345, "GradientAccumulator"),
    "learner": (305, "two methods"),
    "verification": (505, "verify, on your model"),
    "experts": (705, "router loss and bias"),
    "simulate": (900, "rank 0 of N, no GPU"),
    "integrations": (230, "loops of other libraries"),
}
STEPS = {  # the path of a batch: who takes each step
    "batch": "accumulator",
    "samples": "core",
    "plan": "planning",
    "agree": "core",
    "microbatches": "core",
    "loss": "losses",
    "backward": "core",
    "update": "core",
    "gradient": "wrappers",
}

WIDTH, TOP, ROW = 1010, 64, 94  # of the picture; above the first row; from one row to the next
BOX_WIDTH, BOX_HEIGHT = 190, 54
STEP_WIDTH, STEP_HEIGHT = 124, 22
STYLE = """
  svg { font-family: system-ui, sans-serif; color-scheme: light dark; }
  .back { fill: #ffffff; } .box { fill: #eef2f7; stroke: #7a8aa0; } .step { fill: #0b6b4f; }
  .name { fill: #16202c; font: 600 16px ui-monospace, monospace; } .caption { fill: #4a5768; font-size: 12.5px; }
  .taken { fill: #ffffff; font-size: 12.5px; } .head { fill: #4a5768; }
  .arrow { stroke: #4a5768; stroke-width: 1.4; fill: none; } .late { stroke-dasharray: 5 4; }
  @media (prefers-color-scheme: dark) {
    .back { fill: #14181f; } .box { fill: #222a35; stroke: #75859b; } .step { fill: #3fbf94; }
    .name { fill: #e8edf4; } .caption { fill: #aab6c6; } .taken { fill: #0d1512; } .head { fill: #aab6c6; }
    .arrow { stroke: #aab6c6; }
  }"""


class Box(NamedTuple):
    """A rectangle by its left upper corner."""

    x: float
    y: float
    width: float
    height: float

    def meets(self, other: "Box", gap: float) -> bool:
        """Tell if two boxes come closer than ``gap``."""
        across = self.x < other.x + other.width + gap and other.x < self.x + self.width + gap
        return across and self.y < other.y + other.height + gap and other.y < self.y + self.height + gap


class Arrow(NamedTuple):
    """A straight line from the top of a box to the bottom of one above it."""

    x1: float
    y1: float
    x2: float
    y2: float
    is_late: bool

    def meets(self, box: Box) -> bool:
        """Tell if the line runs through a box, or closer than 4 pixels to it."""
        points = (
            (self.x1 + (self.x2 - self.x1) * t / 200, self.y1 + (self.y2 - self.y1) * t / 200) for t in range(201)
        )
        near = Box(box.x - 4, box.y + 1, box.width + 8, box.height - 2)  # lines end at the edges of their own boxes
        return any(near.x < x < near.x + near.width and near.y < y < near.y + near.height for x, y in points)


@cache
def chapter_imports() -> dict[str, dict[str, bool]]:
    """Read the chapters that each chapter imports, and if every such import is inside a function."""
    package, order = ROOT / "megabatch", list(CHAPTERS)
    found: dict[str, dict[str, bool]] = {chapter: {} for chapter in CHAPTERS}
    for path in sorted(package.rglob("*.py")):
        chapter = path.relative_to(package).parts[0].removesuffix(".py")
        if chapter in ("train", "__init__", "__main__"):
            continue
        # The planners to name are arguments of the accumulator, with what they attach.
        if path.name in ("built_in.py", "beyond_limits.py"):
            chapter = "accumulator"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                package_name, _, rest = name.partition(".")
                other = rest.partition(".")[0]
                if package_name != "megabatch" or other not in CHAPTERS or other == chapter:
                    continue
                is_late = node not in tree.body
                if is_late and order.index(other) > order.index(chapter):  # what a batching or planner attaches
                    continue
                found[chapter][other] = found[chapter].get(other, True) and is_late
    return found


def is_reached(chapter: str, other: str) -> bool:
    """Tell if a chapter imports another at its start, itself or through others."""
    above = [each for each, is_late in chapter_imports()[chapter].items() if not is_late]
    return other in above or any(is_reached(each, other) for each in above)


def shown_imports(chapter: str) -> dict[str, bool]:
    """Drop the imports that follow from the others."""
    found = chapter_imports()[chapter]
    early = [each for each, is_late in found.items() if not is_late]
    implied = {each for each in early if any(is_reached(other, each) for other in early)}
    return {each: found[each] for each in CHAPTERS if each in found and each not in implied}


def row_of(chapter: str) -> int:
    """Return 0 for a chapter without imports, else one more than the lowest that it imports."""
    return 1 + max((row_of(each) for each in chapter_imports()[chapter]), default=-1)


def box_of(chapter: str) -> Box:
    """Return where a chapter is drawn."""
    return Box(CHAPTERS[chapter][0] - BOX_WIDTH / 2, TOP + ROW * row_of(chapter), BOX_WIDTH, BOX_HEIGHT)


def arrow(chapter: str, other: str, *, is_late: bool) -> Arrow:
    """Return the line of an import: upright where the boxes stand above each other."""
    low, high = box_of(chapter), box_of(other)
    left, right = max(low.x, high.x) + 20, min(low.x, high.x) + BOX_WIDTH - 20
    if left <= right:
        x1 = x2 = (left + right) / 2
    elif low.x < high.x:
        x1, x2 = low.x + BOX_WIDTH - 20, high.x + 20
    else:
        x1, x2 = low.x + 2, high.x + BOX_WIDTH - 20
    return Arrow(x1, low.y, x2, high.y + BOX_HEIGHT, is_late)


def step_boxes() -> dict[str, Box]:
    """Return where the steps of an update are drawn: to the right of their chapter, in two rows."""
    found: dict[str, Box] = {}
    for chapter in CHAPTERS:
        box = box_of(chapter)
        for place, step in enumerate(step for step, taker in STEPS.items() if taker == chapter):
            x = box.x + BOX_WIDTH + 8 + place % 2 * (STEP_WIDTH + 6)
            found[step] = Box(x, box.y + 3 + place // 2 * (STEP_HEIGHT + 4), STEP_WIDTH, STEP_HEIGHT)
    return found


def draw() -> str:
    """Return the picture. Fails where boxes overlap, or an arrow runs through one."""
    boxes, steps = {chapter: box_of(chapter) for chapter in CHAPTERS}, step_boxes()
    arrows = [
        arrow(chapter, other, is_late=is_late)
        for chapter in CHAPTERS
        for other, is_late in shown_imports(chapter).items()
    ]
    solid = [*boxes.values(), *steps.values()]
    assert not [pair for pair in combinations(solid, 2) if pair[0].meets(pair[1], gap=2)], "boxes overlap"
    assert not [(line, box) for line in arrows for box in solid if line.meets(box)], "an arrow runs through a box"
    height = max(box.y for box in boxes.values()) + BOX_HEIGHT + 50
    path = "An update: " + " → ".join(f"{number} {step}" for number, step in enumerate(STEPS, 1))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img">',
        "<title>The chapters of megabatch, their imports, and the path of a batch</title>",
        f"<style>{STYLE}\n</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="head" d="M0 0 8 4 0 8z"/></marker></defs>',
        f'<rect class="back" width="{WIDTH}" height="{height}"/>',
        text(WIDTH / 2, 32, "caption", path, anchor="middle"),
    ]
    for each in arrows:
        kind = "arrow late" if each.is_late else "arrow"
        lines.append(
            f'<path class="{kind}" d="M{each.x1:g} {each.y1:g} {each.x2:g} {each.y2:g}" marker-end="url(#head)"/>'
        )
    for chapter, box in boxes.items():
        lines.append(rectangle("box", box, 6))
        lines.append(text(box.x + 12, box.y + 23, "name", chapter))
        lines.append(text(box.x + 12, box.y + 42, "caption", CHAPTERS[chapter][1]))
    for number, step in enumerate(STEPS, 1):
        lines.append(rectangle("step", steps[step], STEP_HEIGHT / 2))
        lines.append(text(steps[step].x + 11, steps[step].y + 15.5, "taken", f"{number} {step}"))
    legend = "Arrow: imports. Dashed: imports when it is used. An import that follows from others is left out."
    lines += [text(WIDTH / 2, height - 18, "caption", legend, anchor="middle"), "</svg>"]
    return "\n".join(lines) + "\n"


def rectangle(kind: str, box: Box, radius: float) -> str:
    """Return a rectangle with round corners."""
    place = f'x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}"'
    return f'<rect class="{kind}" {place} rx="{radius:g}"/>'


def text(x: float, y: float, kind: str, words: str, *, anchor: str = "start") -> str:
    """Return a line of text."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw(), encoding="utf-8")
