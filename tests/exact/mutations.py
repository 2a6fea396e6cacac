"""Planted bugs: one exact text of one file replaced, and the wrappers whose cells must then fail."""

from dataclasses import dataclass
from typing import ClassVar

from tests.exact.cases import SEVERAL_RANKS
from tests.exact.cells import MAIN
from tests.exact.wrappers import WRAPPERS

WORLD = 2


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    text: str  # occurs once in the file
    planted: str
    wrappers: tuple[str, ...] = MAIN  # cells of these fail, and none of the other main wrappers'
    known: ClassVar[list["Mutation"]] = []  # of all tables that were imported

    def __post_init__(self) -> None:
        self.known.append(self)

    @property
    def cells(self) -> list[str]:
        """Those of the main wrappers, and of the others that must fail."""
        return [cell for wrapper in dict.fromkeys((*MAIN, *self.wrappers)) for cell in cells(wrapper)]


def cells(wrapper: str) -> list[str]:
    alone = WRAPPERS[wrapper].data_degree(WORLD) == 1
    return [f"bits:{wrapper}:{WORLD}:auto:{case}:list:{loss}:{bound}:forward_backward:no-clip"
            for case, loss, bound in CASES if not (alone and case in SEVERAL_RANKS)]  # fmt: skip


CASES = (
    ("uneven-ranks", "weigh", "one-sample"), ("uneven-ranks", "late", "one-sample"), ("calls", "weigh", "one-sample"),
    ("short-tail", "late", "one-sample"), ("C4c", "weigh", "one-sample"),
    ("C-R", "late", "tokens"),  # ranks with fewer microbatches cut theirs again
)  # fmt: skip
MUTATIONS = (
    Mutation("drop the rank factor", "wrappers/ddp.py",
             "else float(self.ranks.num_weighing)", "else 1.0", ("ddp",)),
    Mutation("let DDP average", "wrappers/ddp.py",
             "summing(self.ddp) if self._sums else contextlib", "contextlib", ("ddp",)),
    Mutation("let DDP sum again what it has summed", "wrappers/ddp.py",
             "begins_update = all(parameter.grad is None for parameter in self.parameters)",
             "begins_update = True", ("ddp",)),
    Mutation("let FSDP1 average", "wrappers/fsdp1.py",
             "summing_flat(self._states if self._is_sharded else [])", "contextlib.nullcontext()", ("fsdp1",)),
    Mutation("let FSDP average", "wrappers/fsdp2.py",
             "module.set_gradient_divide_factor(1.0)", "pass", ("fsdp2", "hsdp", "replicate")),
    Mutation("never reduce over replicas", "wrappers/fsdp2.py",
             '!= "last", last or policy == "every"', '!= "last", policy == "every"', ("hsdp",)),
    Mutation("reduce the first model alone", "wrappers/multi_model.py",
             "        for wrapper in self.wrappers:\n            wrapper.finish_update()",
             "        for wrapper in self.wrappers[:1]:\n            wrapper.finish_update()", ("several",)),
    Mutation("forget to sum a plain model's gradients", "wrappers/rank_sums.py",
             "dist.all_reduce(flat, group=group, async_op=True)",
             "dist.all_reduce(flat.clone(), group=group, async_op=True)", ("plain",)),
    Mutation("treat tp as a data axis", "inspection/mesh_axes.py",
             'DATA_AXES = ("dp", "dp_replicate", "dp_shard")', 'DATA_AXES = ("dp", "dp_replicate", "dp_shard", "tp")',
             ("tp", "tp-sp")),
    Mutation("leave a gradient of sequence parallel a part of a sum", "wrappers/rank_sums.py",
             "if is_dtensor(gradient) and any(", "if False and any(", ("tp-sp",)),
    Mutation("lose a microbatch that is cut again", "planners/fill_up.py",
             "microbatches=tuple(cut))", "microbatches=tuple(cut[:-1] or cut))"),
    Mutation("forget to reduce the weight over ranks", "core/agreement.py",
             "        weights=weights,\n", "        weights=prepared.weight_sums,\n"),
    Mutation("forget to reduce the late weight over ranks", "core/update.py",
             "reports[:, HEAD_SIZE:end].sum(0)", 'self._report(names, "")[HEAD_SIZE:end]'),
    Mutation("differentiate a dummy microbatch", "core/update.py",
             "        if step.is_dummy:\n            factors", "        if False:\n            factors"),
    Mutation("count a dummy microbatch", "core/update.py",
             "        if step.is_dummy:\n            nothing", "        if False:\n            nothing"),
    Mutation("skip one microbatch", "core/update.py",
             "        if step.is_dummy:\n            factors",
             "        if step.is_dummy or step.index == 1:\n            factors"),
    Mutation("divide every call by its own weight", "core/divisors.py",
             "        if not self._calls:\n", "        if True:\n"),
    Mutation("forget the missing factor", "core/divisors.py",
             "factor = divisor / known if known else 0.0", "factor = 1.0 if known else 0.0"),
    Mutation("keep the gradients of the update before", "core/accumulator.py",
             "        drop_gradients(self.wrapper.parameters)\n        self._wide.begin()\n",
             "        self._wide.begin()\n"),
    Mutation("leave zeros after an update without weight", "core/accumulator.py",
             "            drop_gradients(parameters)\n            self.wrapper.discard()",
             "            self.wrapper.discard()"),
)  # fmt: skip
