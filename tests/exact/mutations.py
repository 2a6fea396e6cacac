"""Planted bugs: one exact text of one file replaced, and the wrappers whose cells must then fail."""

from dataclasses import dataclass

ALL = ("plain", "ddp", "fsdp2")


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    text: str  # occurs once in the file
    planted: str
    wrappers: tuple[str, ...] = ALL  # cells of these fail, and no others


MUTATIONS = (
    Mutation("drop the rank factor", "sync.py",
             "self.loss_factor = float(self.ranks.degree)", "self.loss_factor = 1.0", ("ddp",)),
    Mutation("let FSDP average", "sync.py",
             "module.set_gradient_divide_factor(1.0)", "pass", ("fsdp2",)),
    Mutation("forget to sum a plain model's gradients", "sync.py",
             "dist.all_reduce(parameter.grad, group=group, async_op=True)",
             "dist.all_reduce(parameter.grad.clone(), group=group, async_op=True)", ("plain",)),
    Mutation("forget to reduce the weight over ranks", "run.py",
             "dict(zip(names, map(sum, weights), strict=False))", "share.weight_sums()"),
    Mutation("forget to reduce the late weight over ranks", "update.py",
             "rows[:, 4 : 4 + 2 * len(names)].sum(0)", 'self._report(names, "")[4 : 4 + 2 * len(names)]'),
    Mutation("differentiate a stand-in", "update.py",
             "share = 0.0 if turn.is_stand_in else self._loss_factor", "share = self._loss_factor"),
    Mutation("count a stand-in", "update.py",
             "        if turn.is_stand_in:\n            nothing", "        if False:\n            nothing"),
    Mutation("skip one microbatch", "update.py",
             "share = 0.0 if turn.is_stand_in else self._loss_factor",
             "share = 0.0 if turn.is_stand_in or turn.index == 1 else self._loss_factor"),
    Mutation("divide every call by its own weight", "update.py",
             "        if self._num_calls == 1:\n            self._divisors",
             "        if True:\n            self._divisors"),
    Mutation("forget the missing factor", "update.py",
             "factor = divisor / known if known else 0.0", "factor = 1.0 if known else 0.0"),
    Mutation("keep the gradients of the update before", "accumulator.py",
             "            gradient.drop(self._reducer.parameters)\n            self._open", "            self._open"),
    Mutation("leave zeros after an update without weight", "accumulator.py",
             "            gradient.drop(parameters)\n", ""),
)  # fmt: skip
CASES = (
    ("uneven-ranks", "weigh"), ("uneven-ranks", "late"), ("calls", "weigh"), ("short-tail", "late"), ("C4c", "weigh"),
)  # fmt: skip
CELLS = [f"bits:{wrapper}:2:auto:{case}:list:{loss}:one-sample:forward_backward:no-clip"
         for wrapper in ALL for case, loss in CASES]  # fmt: skip
