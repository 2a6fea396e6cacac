"""The plain path knows few features, runs much of the files that it opens, and few lines. The numbers only improve."""

from tests.plain_path import count_lines_per_microbatch, trace_plain_update

MOST_FEATURE_TESTS = 2
LEAST_EXECUTED_SHARE = 0.5
MOST_LINES_PER_MICROBATCH = 341  # with Python 3.11


def test_the_plain_path_asks_for_no_more_features() -> None:
    tests = trace_plain_update().feature_tests()
    assert len(tests) <= MOST_FEATURE_TESTS, "a feature attaches and is not asked for: python -m tests.plain_path"


def test_the_plain_path_runs_more_of_what_it_opens() -> None:
    share = trace_plain_update().executed_share()
    assert share >= LEAST_EXECUTED_SHARE, f"{share:.3f}: python -m tests.plain_path"


def test_a_microbatch_runs_no_more_lines() -> None:
    assert count_lines_per_microbatch() <= MOST_LINES_PER_MICROBATCH, "python -m tests.plain_path"
