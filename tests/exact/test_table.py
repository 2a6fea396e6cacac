"""The tables themselves: no cell can go missing, and the sample shows every pair."""

import hashlib

import pytest

from tests.exact import pairwise
from tests.exact.cases import CASES, SEVERAL_RANKS, updates
from tests.exact.cells import BOUNDS, KINDS, LOSSES, SYNCS, TABLES, WORLDS, WRAPPERS, Cell, sampled, valid

# A change to the tables changes these on purpose: the failing test prints them.
NUM_CELLS = 329
CELLS_SHA256 = "dd1f64ac0d80636c"


def digest(cells: tuple[Cell, ...]) -> str:
    return hashlib.sha256("\n".join(cell.name for cell in cells).encode()).hexdigest()[:16]


def test_no_cell_goes_missing() -> None:
    assert (len(sampled()), digest(sampled())) == (NUM_CELLS, CELLS_SHA256)
    assert len(set(sampled())) == len(sampled())


def test_the_axes_are_the_promise() -> None:
    assert WRAPPERS == ("plain", "ddp", "fsdp2")
    assert WORLDS == (1, 2, 3, 4)
    assert SYNCS == ("auto", "last", "every")
    assert [len(axis) for axis in (CASES, KINDS, LOSSES, BOUNDS)] == [25, 4, 7, 5]


@pytest.mark.parametrize("table", TABLES)
def test_every_pair_appears(table: str) -> None:
    axes = TABLES[table]
    rows = [cell.row for cell in sampled() if cell.evidence in axes["evidence"]]
    shown = set().union(*map(pairwise.pairs, rows))
    assert set(pairwise.all_pairs(axes, valid)) <= shown


def test_every_wrapper_meets_every_world_size_and_sync() -> None:
    found = {(cell.wrapper, cell.world, cell.sync) for cell in sampled() if cell.evidence == "odd"}
    assert len(found) == len(WRAPPERS) * len(WORLDS) * len(SYNCS)


@pytest.mark.parametrize(
    ("case", "world"), [(case, world) for case in CASES for world in WORLDS if world > 1 or case not in SEVERAL_RANKS]
)
def test_updates_of_the_bits_table_weigh_a_power_of_two(case: str, world: int) -> None:
    for update in updates(case, world, power_of_two=True):
        total = sum(targets for call in update for share in call for targets in share)
        assert total & (total - 1) == 0, total
        assert all(len(call) == world for call in update)


def test_the_odd_table_has_no_power_of_two() -> None:
    totals = [sum(targets for share in updates("C1", world, False)[0][0] for targets in share) for world in WORLDS]
    assert all(total & (total - 1) for total in totals), totals
