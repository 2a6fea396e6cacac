"""The tables of cells: what is run, with what it must agree, and how closely.

bits      integer data, float64, update weights that are powers of two: the same bits as the oracle
odd       the same with a weight that is not a power of two: 1e-15
float64   a GPT-2 or another small language model in float64: 1e-12 of every parameter's gradient
float32   the same in float32: the error is at most four times that of the uncut float32 gradient
refused   what cannot be: the error says why, in the words that are expected
"""

from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any

from tests.exact import pairwise
from tests.exact.cases import CASES, FEW_CASES, SEVERAL_CALLS, SEVERAL_RANKS, WITHOUT_WEIGHT
from tests.exact.wrappers import SYNCS as ALL_SYNCS
from tests.exact.wrappers import WRAPPERS, Wrapper

MAIN = ("plain", "ddp", "fsdp2")  # run with everything; the other wrappers with less
OTHERS = tuple(name for name in WRAPPERS if name not in MAIN)
HOLDING = (  # others that hold a reduction back, or that are built of such
    "ddp-find-unused", "ddp-static-graph", "ddp-bucket-view", "hsdp", "replicate", "several-ddp", "several-fsdp2",
    "fsdp2-tp-sp",
)  # fmt: skip
WORLDS = (1, 2, 3, 4)
ALL_WORLDS = (*WORLDS, 8)
SYNCS = ("auto", "last", "every")  # those of every wrapper
BOUNDS = ("one-sample", "two-samples", "three-samples", "all-samples", "tokens")
KINDS = ("mapping", "list", "images", "image-mapping")
LOSSES = ("weigh", "late", "mixed", "given", "terms", "metric", "metric-late")
WAYS = ("forward_backward", "open")
OPENED = ("told", "untold")  # updates that GradientAccumulator.open() begins, with the weights of all calls or without
CLIPS = ("no-clip", "loose", "tight")
PRECISIONS = ("float64", "float32")


@dataclass(frozen=True)
class Cell:
    evidence: str  # bits, odd, float64, float32
    wrapper: str
    world: int
    sync: str
    case: str
    kind: str
    loss: str
    bound: str
    way: str
    clip: str

    @property
    def name(self) -> str:
        return ":".join(str(value) for value in asdict(self).values())

    @property
    def row(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def parse(cls, name: str) -> "Cell":
        values = dict(zip((each.name for each in fields(cls)), name.split(":"), strict=True))
        return cls(**values | {"world": int(values["world"])})

    @property
    def data_degree(self) -> int:
        """The number of ranks with different samples."""
        return WRAPPERS[self.wrapper].data_degree(self.world)

    @property
    def averages(self) -> bool:
        """A wrapper averages over three ranks more than once: DDP with each microbatch, or in each of several calls."""
        when = WRAPPERS[self.wrapper].averages
        several_times = self.sync == "every" or (self.case in SEVERAL_CALLS and self.way not in OPENED)
        return self.data_degree == 3 and (when == "always" or (when == "once" and several_times))

    @property
    def refusal(self) -> str:
        """The error that is expected; empty where none is."""
        return WRAPPERS[self.wrapper].refused.get(self.sync, "")

    @property
    def tolerance(self) -> float:
        """The largest error of a gradient; 0: the bits of the oracle's. float32: in units of its own error."""
        if self.evidence == "bits":
            return 1e-15 if self.averages else 0.0
        return {"odd": 1e-15, "float64": 1e-12, "float32": 4.0, "refused": 0.0}[self.evidence]

    @property
    def report_tolerance(self) -> float:
        """The largest error of a sum, a quotient or the norm against the oracle's."""
        return {"bits": 1e-15, "odd": 1e-15, "float64": 1e-12, "float32": 1e-5, "refused": 0.0}[self.evidence]


def valid(row: dict[str, Any]) -> bool:
    """Return True if a row can be said at all; of a row with only some axes, if its values can meet."""
    case, loss, way = row.get("case"), row.get("loss"), row.get("way")
    wrappers = [row["wrapper"]] if "wrapper" in row else WRAPPERS
    if not any(_can_be_wrapped(WRAPPERS[wrapper], row) for wrapper in wrappers):
        return False
    if loss == "terms-late" and way not in (None, "told"):  # nothing would say the weights
        return False
    if case in SEVERAL_CALLS and loss == "terms" and way != "told":  # each term would have a factor of its own
        return False
    if way == "told" and loss == "given":  # two divisors
        return False
    if way == "open" and loss not in (None, "weigh", "late", "given"):  # it takes one total and one weight
        return False
    if case in WITHOUT_WEIGHT and loss == "given":  # a divisor for an update without weight
        return False
    return row.get("clip") != "tight" or row.get("evidence") != "bits"  # clipping multiplies by a fraction


def _can_be_wrapped(wrapper: Wrapper, row: dict[str, Any]) -> bool:
    """It has the world size, and ranks enough for the case; what it refuses is evidence of that kind, and only that."""
    worlds = [world for world in wrapper.worlds if row.get("world", world) == world]
    least = 2 if row.get("case") in SEVERAL_RANKS else 1
    if not any(wrapper.data_degree(world) >= least for world in worlds):
        return False
    syncs = [sync for sync in ALL_SYNCS if row.get("sync", sync) == sync]
    return any((sync in wrapper.refused) == (row.get("evidence") == "refused") for sync in syncs)


def _axes(evidence: tuple[str, ...], **changed: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    axes: dict[str, tuple[Any, ...]] = {
        "evidence": evidence, "wrapper": MAIN, "world": WORLDS, "sync": SYNCS, "case": tuple(CASES),
        "kind": KINDS, "loss": LOSSES, "bound": BOUNDS, "way": WAYS, "clip": CLIPS,
    }  # fmt: skip
    return axes | changed


def _one(evidence: str, case: str, **changed: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    """One case, cut one way, with whatever is changed."""
    return _axes(
        (evidence,), case=(case,), kind=("list",), loss=("weigh",), bound=("two-samples",),
        way=("forward_backward",), clip=("no-clip",), **changed,
    )  # fmt: skip


def _opened(evidence: str, **changed: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    """Updates of one call, of two and of five, opened before."""
    cases = ("C1", "calls", "calls-empty-ranks", "calls-five")
    return _axes((evidence,), case=cases, kind=("list",), bound=("two-samples",), way=OPENED) | changed


OTHER: dict[str, tuple[Any, ...]] = {"wrapper": OTHERS, "world": ALL_WORLDS, "kind": KINDS[:2]}
TABLES: dict[str, dict[str, tuple[Any, ...]]] = {
    "bits": _axes(("bits",), clip=("no-clip", "loose")),
    "odd": _one("odd", "C1", wrapper=tuple(WRAPPERS), world=ALL_WORLDS, sync=ALL_SYNCS),
    "language": _axes(PRECISIONS, kind=KINDS[:2], loss=("library", "weigh", "late", "terms", "metric")),
    "other bits": _axes(("bits",), **OTHER, sync=ALL_SYNCS[1:], clip=("no-clip", "loose")),
    "other language": _axes(
        PRECISIONS, **OTHER, sync=ALL_SYNCS[1:], case=FEW_CASES,
        loss=("weigh", "late", "terms", "metric"),
    ),
    "opened": _opened(
        "bits", wrapper=(*MAIN, *HOLDING), sync=ALL_SYNCS[1:],
        loss=("weigh", "late", "terms", "terms-late"), clip=("no-clip",),
    ),
    "opened language": _opened(
        "float64", wrapper=(*MAIN, "hsdp"), sync=("last", "replica_last"), loss=("weigh", "late", "terms-late"),
        clip=("no-clip", "tight"),
    ),
    "refused": _one("refused", "C1", wrapper=tuple(WRAPPERS), world=ALL_WORLDS, sync=ALL_SYNCS),
}  # fmt: skip
WHOLE = ("odd", "refused")  # tables that are run whole wherever a table is run
PROMISED = {  # of the wrappers beside the main ones: each promise, and each form of loss, once
    "case": ("C1", "uneven-ranks", "empty-last-rank", "short-tail", "calls"),
    "loss": ("weigh", "late", "terms", "metric"),
}
SAMPLED = {name: TABLES[name] | PROMISED for name in ("other bits", "other language")}  # what is sampled of a table


@cache
def sampled() -> tuple[Cell, ...]:
    """Cells in which every pair of values of a table appears, and every cell of the small tables."""
    cells: list[Cell] = []
    for name, axes in TABLES.items():
        axes = SAMPLED.get(name, axes)
        found = pairwise.rows(axes, valid) if name in WHOLE else pairwise.sample(axes, valid, lambda row: row["world"])
        cells += [Cell(**row) for row in found]
    return tuple(sorted(cells, key=lambda cell: (cell.world, list(WRAPPERS).index(cell.wrapper), cell.name)))
