"""Every error that the library raises on purpose: one line that names what was seen and says what to change."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

import megabatch
from megabatch import Learner, MegabatchError
from megabatch.errors import OLDEST, require_version
from tests.exact import inputs
from tests.exact.launch import of_ranks
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
    removed,
    rows,
    same_bits,
    saved,
    sizes,
    two_ranks,
    user_loop,
    vocabulary,
    wrappers,
)
from tests.unit.failures.table import Failure, accumulator, check_error, check_ranks, linear, names

PACKAGE = Path(megabatch.__file__).parent
LIBRARY = sorted(
    each
    for each in PACKAGE.rglob("*.py")
    if each.relative_to(PACKAGE).parts[0] not in ("train", "simulate", "integrations", "__main__.py")
)
ELSEWHERE = {  # parts of errors that other tests provoke
    "is negative or NaN on": "tests/unit/test_update.py",
    "SameBits and the loss draws random numbers": "tests/unit/test_same_bits.py",
    "steps a shard to other bits than a whole": "tests/unit/test_same_bits.py",
    "failed when a copy was tried on small parameters and on": "tests/unit/test_same_bits.py",
    "SameBits and the ranks hold": "tests/unit/test_same_bits.py",
    "cannot keep low bits:": "tests/unit/test_low_bits.py",
    "has no bfloat16 parameter; leave": "tests/unit/test_low_bits.py",
    "state_dtype is ": "tests/unit/test_low_bits.py",
    "register it on LowBits": "tests/unit/test_low_bits.py",
    "writes to its parameter groups in a step; use": "tests/unit/test_low_bits.py",
    "so that it is not elementwise;": "tests/unit/test_low_bits.py",
    "InsideSamples": "tests/exact/test_inside_samples.py",
    "leave Shapes out": "tests/exact/test_shapes.py",
    " cut into chunks and ": "tests/exact/test_inside_samples.py",
    "is not cut into chunks of": "tests/train/test_long_samples.py",
    "run simulates ": "tests/train/test_long_samples.py",
    "which the loss calls twice; let": "tests/exact/test_chunked_programs.py",
    "tokens of a microbatch of ": "tests/exact/test_chunked_programs.py",
    "of which chunks are of one token": "tests/exact/test_chunked_programs.py",
    "does not go on from the state that it is given": "tests/exact/test_chunked_families.py",
    "recomputes activations; turn that off": "tests/exact/test_chunked_programs.py",
    "begin anew inside of the sample": "tests/exact/test_inside_samples.py",
    " needs all tokens of a sample at once": "tests/exact/test_inside_samples.py",
    "the loss needs all tokens of a sample": "tests/exact/test_inside_samples.py",
    "an attention_mask that hides tokens; give": "tests/exact/test_inside_samples.py",
    "cut into other chunks": "tests/exact/test_inside_samples.py",
    "which cannot be cut along them": "tests/exact/test_inside_samples.py",
    "is not of an audit": "tests/unit/test_audit.py",
    "is not known; give token, sample, sequence or any": "tests/unit/test_audit.py",
    "the loss is finite but the norm of the gradient": "test_what_came_out_wrong_moves_nothing",
    "a loss was multiplied after scale()": "tests/gpu/test_cuda.py",
    "the mesh has both axes 'cp' and 'pp'": "tests/exact/test_pipeline.py",
    "a JointLoss needs whole samples on every rank": "tests/exact/test_joint.py",
    "the loss of a JointLoss drew random numbers": "tests/exact/test_joint.py",
    "in the number or the wrapper of their stages": "tests/exact/test_pipeline.py",
    "ranks were given ": "tests/exact/test_pipeline.py",
    "were given microbatches that differ": "tests/exact/test_pipeline.py",
    "; mend that, and start again": "tests/exact/test_pipeline.py",
    'cost="measure" and ': "tests/unit/test_measured_cost.py",
    " does not work under torch ": "tests/test_torch_private.py",
    "collate, or prepare= of the loss, ": "tests/exact/test_inputs.py",
    "the function length= ": "tests/exact/test_inputs.py",
    "megabatch needs ": "tests/test_errors.py",
    "the loss uses a sharded parameter itself": "tests/exact/test_reductions.py",
    " is removed; ": "tests/test_imports.py",
    "cannot keep low bits of shards": "tests/train/test_optim.py",
    "next_token would drop the rest": "tests/unit/test_dropped_terms.py",
}
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
        removed,
        same_bits,
        saved,
        user_loop,
    )
    for name, failure in part.FAILURES.items()
}
IN_A_GROUP = (
    wrappers.FAILURES
    | pipeline.FAILURES
    | {
        name: failure
        for part in (context, experts, precision, auto, memory)
        for name, failure in part.IN_A_GROUP.items()
    }
)


told = of_ranks("tests.unit.failures.two_ranks:job", {2: two_ranks.JOBS, 3: two_ranks.ORDERS})
Told = dict[str, str]


@pytest.fixture(scope="module")
def alone() -> Told:
    """The error of each case, by its name; none is run twice."""
    return {name: text_of(failure) for name, failure in ALONE.items()}


@pytest.fixture(scope="module")
def in_a_group(group_of_one: None) -> Told:
    """The same of wrapped models."""
    return {name: text_of(failure) for name, failure in IN_A_GROUP.items()}


def text_of(failure: Failure) -> str:
    try:
        failure.provoke()
    except MegabatchError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def check(failure: Failure, told: str) -> None:
    kind, _, text = told.partition(": ")
    assert kind == failure.error.__name__, told
    check_error(text, failure.seen)


@pytest.mark.parametrize("name", ALONE)
def test_one_process(name, alone):
    check(ALONE[name], alone[name])


@pytest.mark.parametrize("name", IN_A_GROUP)
def test_wrapper(name, in_a_group):
    check(IN_A_GROUP[name], in_a_group[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", two_ranks.JOBS)
def test_two_ranks(name, told):
    check_ranks(told(name, 2), two_ranks.JOBS[name][1])


@pytest.mark.parametrize("name", two_ranks.ORDERS)
def test_three_ranks_in_another_order(name, told):
    check_ranks(told(name, 3), two_ranks.ORDERS[name][1][:1] * 3)


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
    assert names(str(update.problem()), text or "None")
    assert all(map(torch.equal, before, model.parameters()))
    assert (scheduler.get_last_lr(), len(optimizer.state)) == ([0.1], 0)


@cache
def patterns() -> list[str]:
    """The text of each error that the library makes, as a pattern: formatted values may be anything."""
    found: list[str] = []
    for call in (node for path in LIBRARY for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(call, ast.Call) and ERRORS & {each.id for each in ast.walk(call.func) if hasattr(each, "id")}:
            (text,) = call.args
            parts = text.values if isinstance(text, ast.JoinedStr) else [text]
            found.append("".join(re.escape(part.value) if isinstance(part, ast.Constant) else ".*" for part in parts))
    return found


@pytest.mark.slow
def test_every_error_is_provoked(alone, in_a_group, told):
    """Those that other files provoke are named here."""
    texts = [text.partition(": ")[2] for text in (*alone.values(), *in_a_group.values())]
    texts += [text.partition(": ")[2] for name in two_ranks.JOBS for text in told(name, 2)]
    fragments = [row.fragment for row in inputs.table().values() if row.refused is not None]
    missing = {
        pattern
        for pattern in patterns()
        if not any(re.escape(fragment) in pattern for fragment in (*fragments, *ELSEWHERE))
        and not any(re.fullmatch(pattern, text) for text in texts)
    }
    assert not missing


def test_a_removed_method_is_missing() -> None:
    assert not hasattr(accumulator(linear()), "backward")


def test_an_older_transformers_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_version("transformers")
    (tmp_path / "transformers-4.57.6.dist-info").mkdir()
    (tmp_path / "transformers-4.57.6.dist-info" / "METADATA").write_text("Name: transformers\nVersion: 4.57.6\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MegabatchError, match=r"^megabatch needs transformers>=5\.1 and 4\.57\.6 is installed"):
        require_version("transformers")


def test_the_oldest_versions_are_those_that_the_package_asks_for() -> None:
    asked = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f'"{package}>={version}"' in asked for package, version in OLDEST.items())


WITHOUT_ACCELERATE = """
import sys
sys.modules["accelerate"] = None
from megabatch import MegabatchError
try:
    import megabatch.integrations.transformers
except MegabatchError as error:
    print(error)
"""


def test_what_an_integration_lacks_is_said_in_one_line() -> None:
    said = subprocess.run([sys.executable, "-c", WITHOUT_ACCELERATE], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"megabatch\.integrations\.transformers needs accelerate, .*: pip install .*\n", said.stdout)
