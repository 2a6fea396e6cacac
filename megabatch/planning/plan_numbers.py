"""Numbers that follow from the cut of a plan: tokens, padding, and the limits that it keeps."""

from collections.abc import Mapping, Sequence

from megabatch.errors import MicrobatchLimit


class PlanNumbers:
    """The numbers of a `Plan`, whose fields these are."""

    microbatches: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    steps: tuple[int, ...]
    padded: bool
    shared: tuple[int, ...]
    shapes: Mapping[tuple[int, ...], tuple[int, int]]

    @property
    def num_microbatches(self) -> int:
        """Number of forward and backward passes of this rank, also known as gradient accumulation steps."""
        return len(self.microbatches)

    @property
    def num_tokens(self) -> int:
        """Real tokens, without padding."""
        return sum(self.lengths)

    @property
    def padded_tokens(self) -> int:
        """Tokens that the model processes, with padding. Dummy microbatches do not count."""
        return sum(self.microbatch_tokens)

    @property
    def microbatch_tokens(self) -> list[int]:
        """Tokens that the model processes in each microbatch, with padding. Dummy microbatches count 0."""
        if not self.steps:
            return [self.tokens_of(rows) if rows else 0 for rows in self.microbatches]
        tokens: list[int] = []
        for number in self.steps:
            cut = self.microbatches[len(tokens) : len(tokens) + number]
            longest = max((self.lengths[row] for rows in cut for row in rows), default=0)
            tokens += [max(map(len, cut)) * longest if rows else 0 for rows in cut]
        return tokens

    @property
    def padding(self) -> float:
        """Fraction of the processed tokens that are padding, in [0, 1)."""
        return 1 - (self.num_tokens - sum(self.shared)) / self.padded_tokens if self.num_tokens else 0.0

    def tokens_of(self, rows: Sequence[int]) -> int:
        """Return the tokens of samples that share a microbatch, with padding."""
        lengths = self.row_lengths(rows) if self.shared or self.shapes else self.lengths_of(rows)
        return len(lengths) * max(lengths, default=0) if self.padded else sum(lengths)

    def firsts_of(self, rows: Sequence[int]) -> list[int]:
        """Return the sample that begins the row of each of the samples that share a microbatch."""
        firsts: list[int] = []
        for row in rows:
            firsts.append(firsts[-1] if firsts and self.shared and self.shared[row] else row)
        return firsts

    def row_lengths(self, rows: Sequence[int]) -> list[int]:
        """Return the tokens of each row of a microbatch, where samples that share a prefix have one row."""
        if (shape := self.shapes.get(tuple(rows))) is not None:
            lengths = self.lengths_of(rows)
            return [shape[1]] * shape[0] if self.padded else [*lengths, shape[1] - sum(lengths)]
        firsts = self.firsts_of(rows)
        lengths = dict.fromkeys(firsts, 0)
        for row, first in zip(rows, firsts, strict=True):
            lengths[first] += self.lengths[row] - (self.shared[row] if row != first else 0)
        return list(lengths.values())

    def lengths_of(self, rows: Sequence[int]) -> list[int]:
        """Return the tokens of each of some samples, without padding."""
        return [self.lengths[row] for row in rows]

    def bound_of(self, parts: Sequence[Sequence[int]]) -> MicrobatchLimit:
        """Return the smallest limit that admits every one of ``parts``."""
        return MicrobatchLimit(max(map(len, parts)), max(map(self.tokens_of, parts)))

    def halved(self, rows: Sequence[int]) -> MicrobatchLimit | None:
        """Return the limit that halves a microbatch; None for a single sample."""
        num_rows, tokens = self.shapes.get(tuple(rows), (1, 0))
        if num_rows > 1:  # a row without a sample takes as much memory as any
            return MicrobatchLimit(num_rows // 2, num_rows // 2 * tokens)
        return self.bound_of(split_in_halves(tuple(rows))) if len(rows) > 1 else None


def split_in_halves(rows: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Split the samples of a microbatch into two parts; a single sample stays one part."""
    middle = (len(rows) + 1) // 2
    return [half for half in (rows[:middle], rows[middle:]) if half]
