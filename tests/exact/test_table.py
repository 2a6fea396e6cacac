"""The tables themselves: no cell can go missing, and the sample shows every pair."""

import hashlib

import pytest

from tests.exact import pairwise
from tests.exact.cases import CASES, SEVERAL_RANKS, updates
from tests.exact.cells import BOUNDS, KINDS, LOSSES, MAIN, SAMPLED, SYNCS, TABLES, WORLDS, Cell, sampled, valid
from tests.exact.wrappers import SYNCS as ALL_SYNCS
from tests.exact.wrappers import WRAPPERS

# A change to the tables changes these on purpose: the failing test prints them.
NUM_CELLS = 765
CELLS_SHA256 = "74d0bc4a2c054914"


def digest(cells: tuple[Cell, ...]) -> str:
    return hashlib.sha256("\n".join(cell.name for cell in cells).encode()).hexdigest()[:16]


def test_no_cell_goes_missing() -> None:
    assert (len(sampled()), digest(sampled())) == (NUM_CELLS, CELLS_SHA256)
    assert len(set(sampled())) == len(sampled())


def test_the_axes_are_the_promise() -> None:
    assert MAIN == ("plain", "ddp", "fsdp2")
    assert tuple(WRAPPERS)[3:] == (
        "ddp-find-unused", "ddp-static-graph", "ddp-bucket-view", "hsdp", "replicate",
        "fsdp1", "fsdp1-grad-op", "fsdp1-no-shard", "fsdp1-hybrid",
        "several", "several-ddp", "several-fsdp2", "several-half", "several-unlike",
        "tp", "tp-sp", "fsdp2-tp", "fsdp2-tp-sp", "replicate-tp", "hsdp-tp",
    )  # fmt: skip
    assert WORLDS == (1, 2, 3, 4)
    assert SYNCS == ("auto", "last", "every")
    assert (*SYNCS, "replica_last") == ALL_SYNCS
    assert [len(axis) for axis in (CASES, KINDS, LOSSES, BOUNDS)] == [26, 4, 7, 5]


@pytest.mark.parametrize("table", TABLES)
def test_every_pair_appears(table: str) -> None:
    axes = SAMPLED.get(table, TABLES[table])
    rows = [cell.row for cell in sampled() if cell.evidence in axes["evidence"]]
    shown = set().union(*map(pairwise.pairs, rows))
    assert set(pairwise.all_pairs(axes, valid)) <= shown


def test_every_wrapper_meets_every_world_size_and_sync_of_its_own() -> None:
    """A cell that cannot be is refused, and stands in the table as that; nothing is left out."""
    found = [(cell.wrapper, cell.world, cell.sync) for cell in sampled() if cell.evidence in ("odd", "refused")]
    assert sorted(found) == sorted((w, world, s) for w in WRAPPERS for world in WRAPPERS[w].worlds for s in ALL_SYNCS)


def test_three_axes_of_ranks_are_run_on_eight() -> None:
    assert {cell.wrapper for cell in sampled() if cell.world == 8} == {"hsdp-tp"}


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
