"""The tables of cells: what is run, with what it must agree, and how closely.

bits      integer data, float64, update weights that are powers of two: the same bits as the oracle
odd       the same with a weight that is not a power of two: 1e-15
float64   a GPT-2 in float64: 1e-12 of every parameter's gradient
float32   a GPT-2 in float32: the error is at most four times that of the uncut float32 gradient
"""

from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any

from tests.exact import pairwise
from tests.exact.cases import CASES, SEVERAL_CALLS, SEVERAL_RANKS, WITHOUT_WEIGHT

WRAPPERS = ("plain", "ddp", "fsdp2")
WORLDS = (1, 2, 3, 4)
SYNCS = ("auto", "last", "every")
BOUNDS = ("one-sample", "two-samples", "three-samples", "all-samples", "tokens")
KINDS = ("mapping", "list", "images", "image-mapping")
LOSSES = ("weigh", "late", "mixed", "given", "terms", "metric", "metric-late")
WAYS = ("forward_backward", "open")
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
    def averages(self) -> bool:
        """DDP averages more than once, over three ranks: at every microbatch, or once in each of several calls."""
        several_times = self.sync == "every" or self.case in SEVERAL_CALLS
        return self.wrapper == "ddp" and self.world == 3 and several_times

    @property
    def tolerance(self) -> float:
        """How far a gradient may be from the oracle's; 0 means the same bits. float32: in units of its own error."""
        if self.evidence == "bits":
            return 1e-15 if self.averages else 0.0
        return {"odd": 1e-15, "float64": 1e-12, "float32": 4.0}[self.evidence]

    @property
    def report_tolerance(self) -> float:
        """How far a sum, a quotient or the norm may be from the oracle's."""
        return {"bits": 1e-15, "odd": 1e-15, "float64": 1e-12, "float32": 1e-5}[self.evidence]


def valid(row: dict[str, Any]) -> bool:
    """Whether a row can be run; every rule is between two axes, so a row with only two of them can be asked for."""
    case, loss, way = row.get("case"), row.get("loss"), row.get("way")
    if case in SEVERAL_RANKS and row.get("world") == 1:
        return False
    if case in SEVERAL_CALLS and loss == "terms":  # each term would have a factor of its own
        return False
    if way == "open" and loss not in (None, "weigh", "late", "given"):  # it takes one total and one weight
        return False
    if case in WITHOUT_WEIGHT and loss == "given":  # a divisor for an update without weight
        return False
    return row.get("clip") != "tight" or row.get("evidence") != "bits"  # clipping multiplies by a fraction


def _axes(evidence: tuple[str, ...], **changed: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    axes: dict[str, tuple[Any, ...]] = {
        "evidence": evidence, "wrapper": WRAPPERS, "world": WORLDS, "sync": SYNCS, "case": tuple(CASES),
        "kind": KINDS, "loss": LOSSES, "bound": BOUNDS, "way": WAYS, "clip": CLIPS,
    }  # fmt: skip
    return axes | changed


TABLES: dict[str, dict[str, tuple[Any, ...]]] = {
    "bits": _axes(("bits",), clip=("no-clip", "loose")),
    "odd": _axes(
        ("odd",), case=("C1",), kind=("list",), loss=("weigh",), bound=("two-samples",),
        way=("forward_backward",), clip=("no-clip",),
    ),
    "language": _axes(PRECISIONS, kind=KINDS[:2], loss=("library", "weigh", "late", "terms", "metric")),
}  # fmt: skip


@cache
def sampled() -> tuple[Cell, ...]:
    """Cells in which every pair of values of a table appears, and every cell of the small table."""
    cells: list[Cell] = []
    for name, axes in TABLES.items():
        found = pairwise.rows(axes, valid) if name == "odd" else pairwise.sample(axes, valid)
        cells += [Cell(**row) for row in found]
    return tuple(sorted(cells, key=lambda cell: (cell.world, WRAPPERS.index(cell.wrapper), cell.name)))
