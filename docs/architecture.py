"""Draw docs/assets/architecture.svg: the chapters of the library by floor, and the steps of an update.

`python docs/architecture.py` writes the picture. It fails if the source has an import that the floors do not allow.
"""

import ast
from html import escape
from math import ceil
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "assets" / "architecture.svg"

FLOORS = {  # from the bottom of the imports: what a floor is, and its chapters with a caption
    "Foundation: knows nothing of an update": {
        "lazy": "imports on first use",
        "errors": "errors in one line",
        "torch_private": "torch's private names",
        "planning": "lengths in, plans out",
        "inspection": "facts of a model",
    },
    "Core: one call, one update": {"core": "names no feature"},
    "Beside the core: each imports the core and the foundation, and none imports another": {
        "optim": "bfloat16 that learns",
        "batching": "padding, rows, chunks",
        "losses": "totals and weights",
        "wrappers": "DDP, FSDP1, FSDP2",
        "guards": "right or refused",
        "loops": "microbatch(), forward()",
        "pipeline": "torch's schedules",
        "autotune": "the limit that fits",
    },
    "Composition: arguments become objects": {
        "planners": "planners to choose from",
        "gradient_accumulator": "GradientAccumulator",
        "learner": "two methods",
    },
    "Applications: import what they need, and none imports another": {
        "verification": "verify and audit",
        "experts": "router loss and bias",
        "simulate": "rank 0 of N, no GPU",
        "integrations": "other libraries' loops",
    },
}
CHAPTERS = {chapter: caption for chapters in FLOORS.values() for chapter, caption in chapters.items()}
STEPS = ("batch", "samples", "plan", "agree", "microbatch", "loss", "backward", "update", "gradient")
FOUNDATION, CORE, BESIDE, *_, APPLICATIONS = FLOORS.values()

WIDTH, MARGIN, GAP = 1010, 20, 12
TITLE_HEIGHT, BOX_HEIGHT, STEP_HEIGHT = 30, 54, 24
MOST_IN_ROW = 5  # chapters
STYLE = """
  svg { font-family: system-ui, sans-serif; color-scheme: light dark; }
  .back { fill: #ffffff; } .floor { fill: #f6f8fb; stroke: #c9d2de; } .box { fill: #e3e9f2; stroke: #7a8aa0; }
  .step { fill: #0b6b4f; } .title { fill: #4a5768; font-size: 13.5px; }
  .name { fill: #16202c; font: 600 15px ui-monospace, monospace; } .caption { fill: #4a5768; font-size: 12.5px; }
  .taken { fill: #ffffff; font-size: 12.5px; }
  @media (prefers-color-scheme: dark) {
    .back { fill: #14181f; } .floor { fill: #1a2028; stroke: #3a4656; } .box { fill: #2a3442; stroke: #75859b; }
    .step { fill: #3fbf94; } .title { fill: #aab6c6; }
    .name { fill: #e8edf4; } .caption { fill: #aab6c6; } .taken { fill: #0d1512; }
  }"""


def chapter_imports() -> dict[str, set[str]]:
    """Read the chapters that each chapter imports, also inside of functions."""
    package = ROOT / "megabatch"
    imports: dict[str, set[str]] = {chapter: set() for chapter in CHAPTERS}
    for path in sorted(package.rglob("*.py")):
        chapter = path.relative_to(package).parts[0].removesuffix(".py")
        if chapter not in imports or path.name == "__init__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("megabatch."):
                imports[chapter].update(f"{node.module}.{alias.name}".split(".")[1] for alias in node.names)
    return {chapter: names & CHAPTERS.keys() - {chapter} for chapter, names in imports.items()}


def check_floors() -> None:
    """Raise `AssertionError` for an import that goes up, or to a neighbour beside the core."""
    floor_of = {chapter: number for number, chapters in enumerate(FLOORS.values()) for chapter in chapters}
    for chapter, imports in chapter_imports().items():
        higher = {name for name in imports if floor_of[name] > floor_of[chapter]}
        assert not higher, f"{chapter} imports {higher}, which stand above it"
        for floor in (BESIDE, APPLICATIONS):
            assert chapter not in floor or not imports & floor.keys(), f"{chapter} imports its neighbour"


def draw() -> str:
    """Return the picture. Fails where an import breaks the rule of its floor."""
    check_floors()
    top = MARGIN
    lines: list[str] = []
    for title, chapters in reversed(FLOORS.items()):
        in_row = ceil(len(chapters) / ceil(len(chapters) / MOST_IN_ROW))
        rows = [list(chapters)[start : start + in_row] for start in range(0, len(chapters), in_row)]
        has_steps = chapters is CORE
        height = TITLE_HEIGHT + len(rows) * (BOX_HEIGHT + GAP) + has_steps * (STEP_HEIGHT + GAP)
        lines.append(rectangle("floor", MARGIN, top, WIDTH - 2 * MARGIN, height, 8))
        lines.append(text(MARGIN + GAP, top + 20, "title", title))
        box_top = top + TITLE_HEIGHT
        for row in rows:
            width = (WIDTH - 2 * MARGIN - GAP) / len(row) - GAP
            for place, chapter in enumerate(row):
                left = MARGIN + GAP + place * (width + GAP)
                lines.append(rectangle("box", left, box_top, width, BOX_HEIGHT, 6))
                lines.append(text(left + 12, box_top + 23, "name", chapter))
                lines.append(text(left + 12, box_top + 42, "caption", chapters[chapter]))
            box_top += BOX_HEIGHT + GAP
        if has_steps:
            lines += draw_steps(box_top)
        top += height + GAP
    legend = "A floor imports those below it. Numbers: the path of a batch through forward_backward and finalize."
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 30}" width="{WIDTH}" '
        f'height="{top + 30}" role="img">',
        "<title>The chapters of megabatch by floor, and the path of a batch</title>",
        f"<style>{STYLE}\n</style>",
        f'<rect class="back" width="{WIDTH}" height="{top + 30}"/>',
    ]
    return "\n".join([*head, *lines, text(WIDTH / 2, top + 14, "caption", legend, anchor="middle"), "</svg>"]) + "\n"


def draw_steps(top: float) -> list[str]:
    """Return the steps of an update in one row."""
    width = (WIDTH - 2 * MARGIN - 2 * GAP + 6) / len(STEPS) - 6
    lines: list[str] = []
    for number, step in enumerate(STEPS, 1):
        left = MARGIN + GAP + (number - 1) * (width + 6)
        lines.append(rectangle("step", left, top, width, STEP_HEIGHT, STEP_HEIGHT / 2))
        lines.append(text(left + width / 2, top + 16.5, "taken", f"{number} {step}", anchor="middle"))
    return lines


def rectangle(kind: str, left: float, top: float, width: float, height: float, radius: float) -> str:
    """Return a rectangle with round corners."""
    place = f'x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}"'
    return f'<rect class="{kind}" {place} rx="{radius:g}"/>'


def text(x: float, y: float, kind: str, words: str, *, anchor: str = "start") -> str:
    """Return a line of text."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw(), encoding="utf-8")
