"""Measure how the documentation reads: `python -m tests.readability [FILE ...]`.

Prints the README, the docs and the decisions beside the documentation of three libraries that people like to read.
Tables, code and lists of links are taken out; a list item or a paragraph is a piece of prose.
"""

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RELATIVE = {"what", "which", "that", "those", "it"}
YOU = {"you", "your", "yours", "yourself"}
ABBREVIATIONS = r"\b(e\.g|i\.e|vs|etc|cf|al)\."


class Score(NamedTuple):
    """Measures of how a text reads."""

    words: int
    mean: float  # words in a sentence
    p90: float
    you: float  # "you" and "your" in 100 words
    semicolons: float  # in 100 words
    relative: float  # what, which, that, those, it: in 100 words


OTHERS = {  # docs/ of each repository at this commit, measured by this script
    "equinox 9336d82": Score(5_160, 11.1, 21, 1.24, 0.25, 2.69),
    "accelerate 16cb6eb8": Score(32_942, 13.6, 26, 2.23, 0.15, 1.84),
    "torchtitan b5bcd76c6": Score(5_666, 14.6, 28, 0.97, 0.12, 1.85),
}


def prose(page: str) -> str:
    """Take out code, tables, comments, headings, pictures and link targets."""
    page = re.sub(r"^(```|~~~).*?^\1", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"<!--.*?-->|<[^>]+>", "", page, flags=re.DOTALL)
    page = re.sub(r"^(\||#|:::|    ).*$", "", page, flags=re.MULTILINE)
    page = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", page)
    page = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", page)
    return re.sub(r"`[^`\n]*`", "code", page).replace("*", "")


def sentences(text: str) -> list[list[str]]:
    """Split prose into sentences, and these into words."""
    found: list[list[str]] = []
    for piece in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", text):
        joined = re.sub(ABBREVIATIONS, r"\1", " ".join(piece.split()))
        for sentence in re.split(r"(?<=[.!?:])[\")]*\s+(?=[A-Z0-9\"(]|code)", joined):
            words = re.findall(r"[A-Za-z0-9_'.,-]*[A-Za-z0-9]", sentence)
            if words:
                found.append(words)
    return found


def score(pages: Iterable[str]) -> Score:
    """Measure pages together."""
    texts = [prose(page) for page in pages]
    split = [sentence for text in texts for sentence in sentences(text)]
    lengths = sorted(map(len, split))
    words = [word.lower() for sentence in split for word in sentence]
    each = 100 / len(words)
    return Score(
        len(words),
        sum(lengths) / len(lengths),
        lengths[int(0.9 * (len(lengths) - 1))],
        each * sum(word in YOU for word in words),
        each * sum(text.count(";") for text in texts),
        each * sum(word in RELATIVE for word in words),
    )


def line(name: str, found: Score) -> str:
    p90 = f"{found.p90:6.0f}" if found.p90 else "     -"
    words = f"{found.words:8,}" if found.words else "       -"
    return f"{name:34}{words}{found.mean:8.1f}{p90}{found.you:8.2f}{found.semicolons:8.2f}{found.relative:8.2f}"


def groups() -> dict[str, Sequence[Path]]:
    docs = ROOT / "docs"
    return {
        "README": [ROOT / "README.md"],
        "docs": sorted(docs.glob("*.md")),
        "decisions": sorted((docs / "decisions").glob("*.md")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.readability")
    parser.add_argument("files", nargs="*", type=Path, help="measure these, each in a line")
    asked = parser.parse_args()
    print(f"{'':34}{'words':>8}{'mean':>8}{'p90':>6}{'you':>8}{';':>8}{'which':>8}")
    named = {str(path): [path] for path in asked.files} or groups()
    for name, paths in named.items():
        print(line(name, score(path.read_text(encoding="utf-8") for path in paths)))
    for name, found in OTHERS.items():
        print(line(name, found))
    print("mean and p90: words in a sentence. In 100 words: you, semicolons, and which, what, that, those, it")


if __name__ == "__main__":
    main()
