"""The tables of docs/benchmarks.md that a result of a GPU fills, from the newest one."""

from pathlib import Path
from typing import Any

from benchmarks import result
from benchmarks.gpu.job import Row, read

PAGE = result.ROOT / "docs" / "benchmarks.md"
START, END = "<!-- gpu: python -m benchmarks.gpu --table -->\n", "<!-- end of gpu -->"
NO_RESULT = "No GPU number has been measured yet. [Measure a GPU](gpu.md) has the command.\n"


def newest() -> Path | None:
    """Return the newest result of a GPU."""
    return max(result.RESULTS.glob("gpu_*.jsonl"), default=None, key=lambda path: path.stem.rpartition("_")[2])


def write() -> None:
    """Write the tables between the two marks of the page."""
    before, _, rest = PAGE.read_text().partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + START + text() + END + after)


def text() -> str:
    """Return what stands between the marks."""
    path = newest()
    return NO_RESULT if path is None else render(path.name, read(path))


def render(name: str, rows: list[Row]) -> str:
    """Return the tables of a result: exactness, memory and speed."""
    made_with = rows[0]
    versions = ", ".join(f"{library} {made_with['versions'][library]}" for library in ("torch", "transformers"))
    failed = sum(row.get("ok") is False for row in rows)
    head = f"One {made_with['hardware']}, {versions} ([result](../benchmarks/results/{name})): {failed} rows failed.\n"
    tables = [_exactness(rows), _memory(rows), _speed(rows)]
    return "\n".join([head, *filter(None, tables)])


def rows_of(rows: list[Row], *sections: str) -> list[Row]:
    """Return the measured rows of sections."""
    return [row for row in rows if row["section"] in sections and row["name"] != "ended" and row.get("ok") is not None]


def _table(titles: list[str], lines: list[list[Any]]) -> str:
    """Return a table in Markdown, or nothing without lines."""
    if not lines:
        return ""
    cells = [titles, ["---"] * len(titles), *([_cell(value) for value in line] for line in lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _exactness(rows: list[Row]) -> str:
    lines = [[row["name"], row.get("worst", row.get("whole")), row.get("over_plain")] for row in rows_of(rows, "exact")]
    return _table(["gradient", "relative error", "over the uncut gradient's"], lines)


def _memory(rows: list[Row]) -> str:
    measured = [row for row in rows_of(rows, "memory") if "seconds" in row]
    keys = ("allocated_gib", "allocated_ratio", "reserved_ratio", "predicted_seconds_ratio")
    lines = [[row["name"], *(row.get(key) for key in keys)] for row in measured]
    titles = [
        "update of two microbatches",
        "allocated GiB",
        "predicted / allocated",
        "predicted / reserved",
        "predicted / seconds",
    ]
    return _table(titles, lines)


def speeds(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Return the contestants' numbers by model and data set."""
    return {
        row["name"]: {who: values for who, values in row.items() if isinstance(values, dict)}
        for row in rows_of(rows, "speed", "trainers")
        if "mean_tokens" in row
    }


def _speed(rows: list[Row]) -> str:
    lines = [
        [setting, who, f"{values['tokens_per_second']:,.0f}", values["mfu"], values["times_ours"]]
        for setting, contestants in speeds(rows).items()
        for who, values in contestants.items()
    ]
    return _table(["model and lengths", "loop", "tokens/s", "MFU", "time over megabatch's"], lines)
