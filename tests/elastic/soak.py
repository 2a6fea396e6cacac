"""A soak: ten thousand small updates of the trainer in one process, and what has grown by then; writes soak.json.

python -m tests.elastic.soak
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from tests.elastic.measured import run, summary

RESULT = Path(__file__).with_suffix(".json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=10_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = run(Path(folder), arguments.updates, every=max(1, arguments.updates // 100))
    found = summary(rows)
    RESULT.write_text(json.dumps({**found, "rows": rows}, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
