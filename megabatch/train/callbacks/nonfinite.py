"""Skip updates whose loss or gradient is not finite."""

from megabatch import MegabatchError
from megabatch.autotune import ModuleSnapshot
from megabatch.train.context import Callback, RunContext
from megabatch.train.runtime.console import count
from megabatch.train.runtime.files import SKIPPED

# Skipped updates in a row.
MAX_IN_A_ROW = 10


class SkipNonfinite(Callback):
    """Leave out updates that are not finite, with "skip_update". Collective."""

    def __init__(self, context: RunContext) -> None:
        self._log = context.open_log(SKIPPED)
        # The modules before the update.
        self._kept: list[ModuleSnapshot] = []
        self._num_in_a_row = 0

    def before_update(self, context: RunContext) -> None:
        """Remember the buffers, which forwards change."""
        self._kept = [ModuleSnapshot(module) for module in context.model.base.modules()]

    def after_update(self, context: RunContext) -> None:
        """Put the buffers back if the update was not stepped, and write down its samples."""
        # An update with nothing to learn has no problem.
        problem = None if context.update is None or context.values["finite"] else context.update.problem()
        if problem is None:
            self._num_in_a_row = 0
            return
        reason = str(problem)
        for snapshot in self._kept:
            snapshot.put_back()
        by_rank = dict(context.ranks.gather((context.ranks.dp_rank, list(context.updates.names))))
        names = sorted(name for names in by_rank.values() for name in names)
        context.row["num_samples"], context.row["skipped_samples"] = 0, len(names)
        self._log.append({"step": context.step, "reason": reason, "samples": names})
        self._log.write()
        context.console.warn(f"update {context.step} was skipped: {reason}")
        self._num_in_a_row += 1
        if self._num_in_a_row == MAX_IN_A_ROW:
            raise MegabatchError(
                f"{MAX_IN_A_ROW} updates in a row were skipped, the last of them {context.step} ({reason}): it is not "
                "the samples but the weights; resume from an earlier checkpoint with a lower optim.lr"
            )

    def end(self, context: RunContext) -> None:
        """Say how much the whole run has left out."""
        rows = self._log.rows()
        if rows:
            samples = count(sum(len(row["samples"]) for row in rows), "sample")
            context.summary.append(
                f"{count(len(rows), 'update')} not finite and skipped: {samples} left out ({SKIPPED})"
            )
