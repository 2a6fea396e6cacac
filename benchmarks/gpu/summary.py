"""The rows of a result as text: failures first, then the numbers."""

from typing import Any

LEFT_OUT = ("section", "name", "ok", "seconds_taken", "log", "repeats_seconds", "by_cut", "places", "said")
WIDTH = 240


def summarize(rows: list[dict[str, Any]]) -> str:
    """Return one line for each failure, then one for each other row."""
    measured = [row for row in rows if row["section"] != "all"]
    failed = [row for row in measured if row.get("ok") is False]
    passed = [row for row in measured if row.get("ok") is True]
    skipped = [row for row in measured if "left_out" in row and row["name"] == "ended"]
    lines = [f"FAILED  {_line(row)}" for row in failed]
    lines += [f"ok      {_line(row)}" for row in passed]
    lines += [f"left out  {row['section']}: {row['left_out']}" for row in skipped]
    return "\n".join([*lines, f"{len(passed)} ok, {len(failed)} failed"])


def _line(row: dict[str, Any]) -> str:
    values = "  ".join(
        f"{key} {_text(value)}" for key, value in row.items() if key not in LEFT_OUT and value is not None
    )
    return f"{row['section']}: {row['name']}  {values}"[:WIDTH]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_text(each)}" for key, each in value.items() if key not in LEFT_OUT) + "}"
    return str(value)
