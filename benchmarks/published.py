"""Published runs of others beside the plan: what `megabatch plan --published` prints, written as a result file."""

from benchmarks import result
from megabatch.train.plan.published import SOURCES, as_dict, predict_all, summary


def main() -> None:
    """Simulate every run, print the summary and write benchmarks/results/published_cpu_DATE.json."""
    rows = list(predict_all())
    print("\n".join(summary(rows)))
    found = {
        "claim": "memory and time of published runs, from their settings alone",
        **result.made_with(["transformers"]),
        "summary": summary(rows),
        "rows": [as_dict(row) for row in rows],
        "sources": {name: vars(source) for name, source in SOURCES.items()},
    }
    print(result.write(result.dated("published"), found))


if __name__ == "__main__":
    main()
