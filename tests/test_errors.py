"""Every error that the library raises on purpose: one line, as written here, through the public API."""

import ast
import re
from pathlib import Path

import pytest
import torch

import megabatch
from megabatch import Learner
from tests.exact import inputs
from tests.exact.launch import launch
from tests.unit.failures import (
    auto,
    batches,
    context,
    contract,
    experts,
    foreign,
    joint,
    loop,
    memory,
    numbers,
    padded,
    pipeline,
    precision,
    rows,
    saved,
    sizes,
    two_ranks,
    vocabulary,
    wrappers,
)
from tests.unit.failures.table import Failure, accumulator, linear

PACKAGE = Path(megabatch.__file__).parent
LIBRARY = sorted(
    each
    for each in PACKAGE.rglob("*.py")
    if each.relative_to(PACKAGE).parts[0] not in ("train", "simulate", "integrations", "__main__.py")
)
ERRORS = {"MegabatchError", "PlanError", "LossContractError"}
ALONE = {
    name: failure
    for part in (
        sizes,
        batches,
        contract,
        loop,
        context,
        joint,
        experts,
        foreign,
        precision,
        auto,
        memory,
        padded,
        vocabulary,
        rows,
        saved,
    )
    for name, failure in part.FAILURES.items()
}
IN_A_GROUP = (
    wrappers.FAILURES
    | pipeline.FAILURES
    | {
        name: failure
        for part in (context, experts, precision, auto, memory, saved)
        for name, failure in part.IN_A_GROUP.items()
    }
)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each of two ranks was told, by job; one spawn for all."""
    return launch(2, "tests.unit.failures.two_ranks:job", two_ranks.JOBS, tmp_path_factory.mktemp("two_ranks"))


@pytest.fixture(scope="module")
def told_to_three(tmp_path_factory):
    """The same of each of three ranks, for jobs in which the order of collectives differs."""
    return launch(3, "tests.unit.failures.two_ranks:job", two_ranks.ORDERS, tmp_path_factory.mktemp("three_ranks"))


def check(failure: Failure) -> None:
    with pytest.raises(failure.error) as raised:
        failure.provoke()
    assert str(raised.value) == failure.text
    assert type(raised.value) is failure.error
    assert len(failure.text.splitlines()) == 1


@pytest.mark.parametrize("name", ALONE)
def test_one_process(name):
    check(ALONE[name])


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("name", IN_A_GROUP)
def test_wrapper(name):
    check(IN_A_GROUP[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", two_ranks.JOBS)
def test_two_ranks(name, told):
    _, expected = two_ranks.JOBS[name]
    assert [result.get("value", result.get("error")) for result in told[name]] == expected


@pytest.mark.parametrize("name", two_ranks.ORDERS)
def test_three_ranks_in_another_order(name, told_to_three):
    _, (expected, _) = two_ranks.ORDERS[name]
    assert [result.get("value", result.get("error")) for result in told_to_three[name]] == [expected] * 3


@pytest.mark.parametrize("name", numbers.PROBLEMS)
def test_what_came_out_wrong_moves_nothing(name):
    batch, loss_fn, text = numbers.PROBLEMS[name]
    model = linear()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    learner = Learner(model, optimizer, accumulator(model), scheduler=scheduler, max_norm=1.0)
    learner.forward_backward(batch, loss_fn)
    update = learner.optim_step()
    assert not update.finite
    assert (text and str(update.problem())) == (None if update.problem() is None else text)
    assert all(map(torch.equal, before, model.parameters()))
    assert (scheduler.get_last_lr(), len(optimizer.state)) == ([0.1], 0)


def raised_in_the_library() -> list[list[str]]:
    """The fixed parts of the text of every error that the library makes: what it formats in may be anything."""
    found: list[list[str]] = []
    for call in (node for path in LIBRARY for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(call, ast.Call) and ERRORS & {each.id for each in ast.walk(call.func) if hasattr(each, "id")}:
            (text,) = call.args
            parts = text.values if isinstance(text, ast.JoinedStr) else [text]
            found.append([part.value if isinstance(part, ast.Constant) else "" for part in parts])
    return found


def snapshots() -> list[str]:
    alone = [failure.text for failure in (ALONE | IN_A_GROUP).values()]
    jobs = [*two_ranks.JOBS.values(), *pipeline.JOBS.values(), *joint.JOBS.values()]
    told_to_ranks = [text.partition(": ")[2] for _, texts in jobs for text in texts]
    problems = [text for _, _, text in numbers.PROBLEMS.values() if text]
    return [*alone, *told_to_ranks, *memory.LEAVING.values(), *problems]


def fragments() -> list[str]:
    """What the table of input mutations asks for in an error; each of its rows raises one."""
    return [row.fragment for row in inputs.table().values() if row.refused is not None]


@pytest.mark.parametrize("parts", raised_in_the_library(), ids=lambda parts: "...".join(parts)[:80])
def test_every_error_is_provoked(parts):
    pattern = "".join(re.escape(part) or ".*" for part in parts)
    is_in_the_table = any(fragment in part for fragment in fragments() for part in parts)
    assert is_in_the_table or any(re.fullmatch(pattern, text) for text in snapshots()), pattern
