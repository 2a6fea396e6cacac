"""Search: every choice of a subject as a row. The closed form leaves out what needs no run; fake runs decide."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from megabatch.train.config.byte_sizes import gib_text
from megabatch.train.plan.choices import Choice
from megabatch.train.plan.closed import Estimate, estimate
from megabatch.train.plan.rows import NO, RUN, YES, Row, derived_row, hopeless_row
from megabatch.train.plan.runs import AT_ONCE, runner
from megabatch.train.plan.subject import Subject

CERTAIN = 0.93  # of the closed form: what is above the limit by more than it errs is left out without a run


def search(subject: Subject, limit_bytes: int, advance: Callable[[int], None]) -> list[Row]:
    """Every choice, the best first. Raises `MegabatchError` for what cannot be simulated."""
    found, choices = Search(subject, limit_bytes), subject.grid.choices()
    with runner(subject, limit_bytes) as run:
        while len(found.rows) < len(choices):
            before = len(found.rows)
            wanted = found.judge(choices)
            found.rows.update(zip(wanted, run(wanted), strict=True))
            advance(len(found.rows) - before)
    return with_best_first(sorted(found.rows.values(), key=lambda row: row.cost))


def with_best_first(rows: Sequence[Row]) -> list[Row]:
    """The rows, the fastest first; or, of those that differ from it in sync alone and fit as well, what sends least:
    seconds count no message that is hidden behind the computation, and no link hides all of it. So a run chooses too.
    """
    fastest = rows[0]
    fit_as_well = [row for row in rows if (row.fits, row.by) == (fastest.fits, fastest.by)]
    alike = [row for row in fit_as_well if replace(row.choice, sync=fastest.choice.sync) == fastest.choice]
    best = min(alike, key=lambda row: row.sent_bytes)
    return [best, *(row for row in rows if row is not best)] if fastest.fits != NO else list(rows)


def best_of(rows: Sequence[Row]) -> Row | None:
    """The row to take: the fastest that fits, if only tightly; None where none does."""
    return next((row for row in rows if row.fits != NO), None)


class Search:
    """What is known of the choices; of one it may spare the run of another."""

    def __init__(self, subject: Subject, limit_bytes: int) -> None:
        self._subject, self._limit_bytes = subject, limit_bytes
        self.rows: dict[Choice, Row] = {}

    def judge(self, choices: Sequence[Choice]) -> list[Choice]:
        """Make the rows that need no run; the choices to be run next, which nothing that is not known may spare."""
        wanted: list[Choice] = []
        for choice in (choice for choice in choices if choice not in self.rows):
            guess = self._estimate(choice)
            row = self._hopeless(choice, guess) or self._derived(choice, guess)
            if row is not None:
                self.rows[choice] = row
            elif len(wanted) < AT_ONCE and all(each in self.rows for each in self._sparing(choice)):
                wanted.append(choice)
        return wanted

    def _sparing(self, choice: Choice) -> list[Choice]:
        """Choices from which this one may be derived."""
        grid = self._subject.grid
        better, kept = grid.better(choice), replace(choice, recompute=False)
        found = [] if better is None else [better]
        return [*found, kept] if choice.recompute and False in grid.recomputes else found

    def _hopeless(self, choice: Choice, guess: Estimate) -> Row | None:
        """Where the closed form, or what a run with less had in memory, is more than there is."""
        fixed = self._subject.sizes.head_bytes
        least = max([guess.peak_bytes * CERTAIN, *(least_bytes(choice, row, fixed) for row in self.rows.values())])
        if least <= self._limit_bytes:
            return None
        why = f"at least {gib_text(least)} alive at once, {gib_text(self._limit_bytes)} there"
        return hopeless_row(choice, guess, int(least), why, self._tokens(choice))

    def _derived(self, choice: Choice, guess: Estimate) -> Row | None:
        """Where another choice costs less and fits as well: no run would make this one the better."""
        better = self._subject.grid.better(choice)
        near = None if better is None else self.rows.get(better)
        if better is None and choice.recompute:  # a second forward, without need
            kept = self.rows.get(replace(choice, recompute=False))
            near = kept if kept is not None and kept.fits == YES else None
        if near is None:
            return None
        return derived_row(choice, guess, near, self._estimate(near.choice), self._limit_bytes)

    def _estimate(self, choice: Choice) -> Estimate:
        return estimate(choice, self._subject.sizes, self._subject.sample.length_tokens, self._subject.device)

    def _tokens(self, choice: Choice) -> int:
        return choice.micro_batch_size * self._subject.sample.length_tokens


def least_bytes(choice: Choice, row: Row, fixed_bytes: int = 0) -> int:
    """What a choice has alive at least, from the run of another that needs no more: that one's peak, with as many
    activations as the larger microbatch has. 0 where the run says nothing of it.

    ``fixed_bytes``: of the activations, at most, what any microbatch has.
    """
    if row.by != RUN or not choice.needs_as_much_as(row.choice):
        return 0
    gradients = row.at_peak.get("gradients", 0) + row.at_peak.get("unsharded gradients", 0)
    kept = gradients if choice.num_microbatches == 1 < row.choice.num_microbatches else 0  # from one to the next
    more = choice.micro_batch_size / row.choice.micro_batch_size - 1
    grows = CERTAIN * max(0, row.at_peak.get("activations", 0) - fixed_bytes)
    return int(row.peak_bytes - kept + more * grows)
