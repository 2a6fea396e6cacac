"""Published runs of others beside the plan: a table, and a result file.

python -m benchmarks.published              # all: ten minutes of two cores
python -m benchmarks.published kempner      # those of a source; the rows of others are those of the last file
"""

import json
import sys
from dataclasses import fields
from typing import Any

from rich.console import Console

from benchmarks import result
from benchmarks.published_runs import RUNS, SOURCES, Predicted, Published, as_dict, predict_all, summary, table_of


def last_rows() -> list[Predicted]:
    """Return the rows of the last result file whose settings are those of today."""
    *_, path = sorted(result.RESULTS.glob("published_cpu_*.json"))
    names = {field.name for field in fields(Predicted)} - {"run"}
    keys = {field.name for field in fields(Published)}
    found = [row for row in json.loads(path.read_text())["rows"] if row["run"].keys() == keys]
    rows = [Predicted(Published(**row["run"]), **{name: row[name] for name in names}) for row in found]
    return [row for row in rows if row.run in RUNS]


def main() -> None:
    """Simulate the runs, print table and summary, and write benchmarks/results/published_cpu_DATE.json."""
    wanted = sys.argv[1:] or [*SOURCES]
    kept = {row.run: row for row in last_rows() if row.run.source not in wanted}
    anew = [run for run in RUNS if run not in kept]
    found_by_run: dict[Published, Predicted] = kept | {row.run: row for row in predict_all(anew)}
    rows = [found_by_run[run] for run in RUNS]
    found: dict[str, Any] = {
        "claim": "memory and time of published runs, from their settings alone",
        **result.made_with(["transformers"]),
        "summary": summary(rows),
        "rows": [as_dict(row) for row in rows],
        "rows_of_an_earlier_file": sum(run in kept for run in RUNS),
        "sources": {name: vars(source) for name, source in SOURCES.items()},
    }
    Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table_of(rows))
    print("\n".join(summary(rows)))
    for source in SOURCES.values():
        print(f"{source.name}: {source.url} (assumed: {source.assumed})")
    print(result.write(result.dated("published"), found))


if __name__ == "__main__":
    main()
