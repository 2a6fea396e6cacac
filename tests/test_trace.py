"""A reader's budget: files, functions and depth of a call. The numbers only go down."""

import pytest

from tests.exact.launch import launch, values
from tests.trace import trace_calls

BUDGETS = {  # files, functions, depth
    "plain": {"constructor": (12, 36, 6), "forward_backward": (12, 60, 8), "finalize": (8, 32, 7)},
    "ddp": {"constructor": (14, 54, 7), "forward_backward": (16, 84, 8), "finalize": (9, 33, 7)},
}


def check(found: dict[str, list[int]], budget: dict[str, tuple[int, int, int]]) -> None:
    assert found.keys() == budget.keys()
    over = {
        call: numbers
        for call, numbers in found.items()
        if any(a > b for a, b in zip(numbers, budget[call], strict=True))
    }
    assert not over, f"files, functions, depth: {over}; python -m tests.trace shows what is entered"


def test_a_call_on_a_plain_model_is_short() -> None:
    check(trace_calls("plain"), BUDGETS["plain"])


@pytest.mark.slow
def test_a_call_on_ddp_is_short(tmp_path) -> None:
    for found in values(launch(2, "tests.trace:trace_calls", ["ddp"], tmp_path)["ddp"]):
        check(found, BUDGETS["ddp"])
