"""The caching allocator: what it reserves, by sums done by hand."""

import pytest

from megabatch.simulate.allocator import Event, Reserved, reserved

MIB = 2**20


def played(*steps: str, limit: int | None = None, expandable: bool = False) -> Reserved:
    """Steps "name+MiB" allocate, on stream 1 with a "*", and "name-" frees; sizes and results in MiB."""
    trace: list[Event] = []
    for step in steps:
        name, sign, size = step[0], step[1], step[2:].rstrip("*")
        num_bytes = int(float(size) * MIB) if size else 0
        trace.append(Event(sign == "+", ord(name), num_bytes, int(step.endswith("*"))))
    found = reserved(trace, limit_bytes=None if limit is None else limit * MIB, expandable=expandable)
    return Reserved(found.peak_bytes // MIB, found.allocated_bytes // MIB, found.retries, found.fits)


def test_a_small_block_is_rounded_to_512_bytes_in_a_segment_of_two_mebibytes() -> None:
    assert reserved([Event(True, 1, 100, 0)]) == Reserved(2 * MIB, 512, 0, True)
    assert reserved([Event(True, 1, 513, 0)]).allocated_bytes == 1024


@pytest.mark.parametrize(
    ("steps", "peak", "why"),
    [
        (["a+1", "b+1"], 2, "two of 1 MiB share a small segment"),
        (["a+1", "b+1", "c+1"], 4, "the third needs another"),
        (["a+1", "b+3"], 22, "small and large ones are apart"),
        (["a+3", "b+3", "c+9"], 20, "below 10 MiB they share a segment of 20"),
        (["a+3", "b+9", "c+9"], 40, "what does not fit gets another"),
        (["a+11"], 12, "from 10 MiB on a segment of its own, rounded to 2 MiB"),
        (["a+30", "a-", "b+30"], 30, "what was freed is taken again"),
        (["a+30", "a-", "b+30*"], 60, "but not by another stream"),
        (["a+30", "a-", "b+12", "c+18"], 30, "a free block is split, and its rest is used"),
        (["a+40", "b+20", "a-", "b-", "c+18", "d+40"], 60, "the smallest that fits is taken"),
        (["a+6", "b+6", "c+8", "a-", "b-", "d+11"], 20, "neighbours that are free are one block"),
        (["a+6", "b+6", "c+8", "a-", "c-", "d+11"], 32, "those apart are not"),
        (["a+6", "b+6", "c+8", "b-", "a-", "d+11"], 20, "in whatever order they were freed"),
    ],
)
def test_what_is_reserved(steps: list[str], peak: int, why: str) -> None:
    assert played(*steps).peak_bytes == peak, why


def test_a_rest_of_a_mebibyte_stays_with_its_block() -> None:
    assert played("a+11").allocated_bytes == 12
    assert played("a+12", "a-", "b+10.5").allocated_bytes == 12
    assert played("a+13", "a-", "b+10.5").peak_bytes == 14


def test_with_a_limit_what_is_wholly_free_is_given_back_once() -> None:
    assert played("a+40", "a-", "b+60", limit=80) == Reserved(60, 60, 1, True)
    assert played("a+40", "a-", "b+60", limit=100) == Reserved(100, 60, 0, True)


def test_a_segment_of_which_a_part_is_used_cannot_be_given_back() -> None:
    assert played("a+40", "a-", "b+2", "c+60", limit=80) == Reserved(40, 40, 1, False)
    assert not played("a+6", "b+6", "a-", "c+60", limit=75).fits, "the second half is used"
    assert not played("a+6", "b+6", "b-", "c+60", limit=75).fits, "the first half is"


def test_a_block_that_is_larger_than_the_limit_never_fits() -> None:
    assert played("a+40", limit=30) == Reserved(0, 0, 1, False)


def test_an_expandable_segment_grows_by_pages() -> None:
    assert played("a+30", expandable=True).peak_bytes == 40
    assert played("a+30", "b+30", expandable=True).peak_bytes == 60
    assert played("a+1", "b+3", expandable=True).peak_bytes == 22


def test_an_expandable_segment_takes_what_is_free_before_its_end() -> None:
    steps = ["a+30", "b+30", "a-", "b-", "c+60"]
    assert (played(*steps).peak_bytes, played(*steps, expandable=True).peak_bytes) == (120, 60)
    assert played("a+40", "b+20", "b-", "c+60", expandable=True).peak_bytes == 100


def test_an_expandable_segment_gives_back_pages_inside_of_it() -> None:
    steps = ["a+40", "b+20", "a-", "c+60"]
    assert played(*steps, expandable=True) == Reserved(120, 80, 0, True)
    assert played(*steps, expandable=True, limit=80) == Reserved(80, 80, 1, True)
    # Then 20 MiB at the end are given back too, and the hole of 40 is mapped again.
    assert played(*steps, "c-", "d+40", "e+40", expandable=True, limit=100) == Reserved(100, 100, 2, True)


def test_a_hole_is_taken_with_what_is_free_before_it() -> None:
    """10 of a's 50 MiB lie on a page of x; 40 are given back, for c and once more for e, which fits there again."""
    steps = ["x+30", "a+50", "b+20", "a-", "c+60*", "c-", "e+50", "f+35"]
    assert played(*steps, expandable=True, limit=150) == Reserved(140, 135, 2, True)


def test_a_hole_that_cannot_be_mapped_is_no_block() -> None:
    assert not played("a+40", "b+20", "a-", "c+80", expandable=True, limit=80).fits
