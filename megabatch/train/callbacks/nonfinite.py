"""Skip updates whose loss or gradient is not finite, or make them again without the samples at fault."""

from collections.abc import Sequence

from megabatch import MegabatchError, Update
from megabatch.autotune import ModuleSnapshot
from megabatch.train.callbacks.nonfinite_search import Asked, Item, problem_of, rest_of
from megabatch.train.context import Callback, RunContext, read_values
from megabatch.train.runtime.console import count

FILE_NAME = "skipped.jsonl"
MAX_IN_A_ROW = 10  # skipped updates


class SkipNonfinite(Callback):
    """Mend updates as update.on_nonfinite says: "skip_update" or "skip_microbatch". Collective."""

    def __init__(self, context: RunContext) -> None:
        self._searches = context.config.update.on_nonfinite == "skip_microbatch"
        self._log = context.open_log(FILE_NAME)
        self._kept: list[ModuleSnapshot] = []  # the modules before the update
        self._num_in_a_row = 0

    def before_update(self, context: RunContext) -> None:
        """Remember the buffers, which forwards change."""
        self._kept = [ModuleSnapshot(module) for module in context.model.base.modules()]

    def after_update(self, context: RunContext) -> None:
        """Look at the update, and replace it by one without the samples at fault."""
        update, reason = context.update, None
        if update is not None and not context.values["finite"]:
            reason = problem_of(update)
        if update is None or reason is None:
            self._num_in_a_row = 0
            return
        step, plan, asked = context.step, context.plan, Asked(context.batch, context.ranks)
        mended = self._without_culprits(context, update, asked) if self._searches else None
        if mended is None:
            self._put_back()
            context.plan = plan  # not of the search
            context.learner.step, context.row["num_samples"] = step, 0
            left_out = asked.items
        else:
            context.update, left_out = mended
            context.values = read_values(context.update)
        context.row["skipped_samples"] = len(left_out)
        names = asked.names(context.updates.names, left_out)
        self._tell(context, reason, names, is_whole=mended is None)

    def end(self, context: RunContext) -> None:
        """Say how much the whole run has left out."""
        rows = self._log.rows()
        if rows:
            samples, num_whole = sum(len(row["samples"]) for row in rows), sum(row["is_whole"] for row in rows)
            text = f"{count(len(rows), 'update')} not finite, {num_whole} skipped whole: "
            context.summary.append(f"{text}{count(samples, 'sample')} left out ({FILE_NAME})")

    def _without_culprits(self, context: RunContext, update: Update, asked: Asked) -> tuple[Update, list[Item]] | None:
        """Return the update of the other samples, and those left out; None if no other samples make one."""
        learner, before = context.learner, context.step - 1

        def accumulate(items: Sequence[Item]) -> None:
            self._put_back()
            learner.step = before
            context.num_calls = 0
            context.forward_backward(asked.part(items))

        def is_bad(items: Sequence[Item]) -> bool:
            accumulate(items)
            return problem_of(learner.gradient.finalize(max_norm=learner.max_norm)) is not None

        def again(items: Sequence[Item]) -> Update:
            accumulate(items)
            return learner.optim_step()

        rest = rest_of(update, asked, is_bad, again)
        return None if rest is None else (rest.update, rest.left_out)

    def _put_back(self) -> None:
        for each in self._kept:
            each.put_back()

    def _tell(self, context: RunContext, reason: str, names: list[str], *, is_whole: bool) -> None:
        """Write down what was left out, and say it. Raises where too many updates were skipped in a row."""
        step = context.step
        self._log.append({"step": step, "reason": reason, "is_whole": is_whole, "samples": names})
        self._log.write()
        first = f"{names[0]}{', ...' if len(names) > 1 else ''}"
        what = "skipped" if is_whole else f"made without {len(names)} of its samples ({first})"
        context.console.warn(f"update {step} was {what}: {reason}")
        self._num_in_a_row = self._num_in_a_row + 1 if is_whole else 0
        if self._num_in_a_row == MAX_IN_A_ROW:
            raise MegabatchError(
                f"{MAX_IN_A_ROW} updates in a row were skipped, the last of them {step} ({reason}): it is not "
                "the samples but the weights; go on from an earlier checkpoint with a lower optim.lr"
            )
