"""Public names and signatures, frozen: a caller that this breaks is a red test here, not a surprise there."""

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest

import megabatch
from megabatch import GradientAccumulator, Learner, Plan, Update, UpdateSampler, Verification, losses

NAMES = {
    "Audit", "CostModel", "Extension", "GradientAccumulator", "JointLoss", "Learner", "LossContractError",
    "MegabatchError", "Plan", "PlanError", "Planner", "Term", "Update", "UpdateSampler", "Verification", "audit",
    "loss", "losses", "mean", "plan", "verify",
}  # fmt: skip

SIGNATURES = {
    GradientAccumulator: "(model, *, micro_batch_size=None, max_microbatch_tokens=None, planner=None, "
    "collate=None, batching=None, length=None, sync='auto', mesh=None, accumulate_dtype=None, extensions=(), **moved)",
    GradientAccumulator.forward_backward: "(self, batch, loss_fn, *, plan=None)",
    GradientAccumulator.forward: "(self, batch, fn, *, plan=None, trim=True)",
    GradientAccumulator.evaluate: "(self, batch, loss_fn)",
    GradientAccumulator.tune: "(self, batch, loss_fn)",
    GradientAccumulator.reserve_for: "(self, optimizer)",
    GradientAccumulator.finalize: "(self, *, max_norm=None, weight=None)",
    GradientAccumulator.open: "(self, weights=None)",
    GradientAccumulator.plan: "(self, batch)",
    GradientAccumulator.state_dict: "(self)",
    GradientAccumulator.load_state_dict: "(self, state)",
    Learner: "(model, optimizer, gradient, *, scheduler=None, max_norm=None)",
    Learner.forward_backward: "(self, batch, loss_fn)",
    Learner.optim_step: "(self)",
    Learner.apply: "(self, update)",
    Learner.state_dict: "(self)",
    Learner.load_state_dict: "(self, state)",
    UpdateSampler: "(lengths, *, global_batch_size, seed=0, dp_rank=None, dp_degree=None, tail='step', cost=None, "
    "order=None, same_bits=False, micro_batch_size=None, max_microbatch_tokens=None, speeds=None)",
    UpdateSampler.state_dict: "(self, updates=None)",
    UpdateSampler.load_state_dict: "(self, state)",
    megabatch.plan: "(lengths, *, dp_degree=1, micro_batch_size=None, max_microbatch_tokens=None, cost=None)",
    megabatch.verify: "(model, loss_fn, batch, *, micro_batch_size=1, tolerance=1e-09, **options)",
    megabatch.audit: "(model=None, *, updates=3, write=None)",
    megabatch.Audit.error: "(self, mean='token')",
    megabatch.Audit.gather: "(self)",
    megabatch.Audit.page: "(self)",
    megabatch.loss: "(*, weigh, prepare=None)",
    megabatch.mean: "(loss_fn, over)",
    megabatch.Term: "(total, weight)",
    megabatch.JointLoss: "(encode, loss)",
    Plan.explain: "(self)",
    Update.problem: "(self)",
    losses.next_token: "(model, microbatch)",
    losses.classification: "(model, microbatch)",
    losses.mse: "(model, microbatch)",
    megabatch.CostModel: "(seconds_per_microbatch=0.0, seconds_per_token=1.0, seconds_per_pair=0.000244140625, "
    "bytes_fixed=0.0, bytes_per_token=0.0)",
}

FIELDS = {  # promised to callers; there may be more
    Update: {"loss", "terms", "weight", "finite", "grad_norm", "num_samples", "num_tokens", "num_microbatches"},
    Plan: {"microbatches", "lengths", "sync", "seconds", "peak_bytes"},
    Verification: {"ok", "worst", "errors", "causes"},
}
PROPERTIES = {Plan: {"num_microbatches", "padding", "num_tokens", "padded_tokens"}}


def without_annotations(function) -> str:
    signature = inspect.signature(function)
    parameters = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def test_the_program_of_the_wheel_uses_every_public_name() -> None:
    program = Path(__file__).parent / "packaging/every_name.py"
    used = {node.id for node in ast.walk(ast.parse(program.read_text())) if isinstance(node, ast.Name)}
    assert used | {"loss"} >= NAMES


def test_public_names():
    assert {name for name in dir(megabatch) if not name.startswith("_")} == NAMES == set(megabatch.__all__)
    assert [name for name in NAMES if inspect.ismodule(getattr(megabatch, name))] == ["losses"]


def test_modules_are_found_without_an_import_of_their_own_and_what_is_not_there_is_said():
    assert inspect.ismodule(megabatch.wrappers)
    with pytest.raises(AttributeError, match=r"^module 'megabatch' has no attribute 'verfy'$"):
        _ = megabatch.verfy
    with pytest.raises(ImportError, match="cannot import name 'verfy'"):
        exec("from megabatch import verfy")


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_signature(function):
    assert without_annotations(function) == SIGNATURES[function]


@pytest.mark.parametrize("record", FIELDS, ids=lambda record: record.__name__)
def test_fields_are_there_and_frozen(record):
    assert {field.name for field in dataclasses.fields(record)} >= FIELDS[record]
    assert all(isinstance(getattr(record, name), property) for name in PROPERTIES.get(record, ()))
    assert record.__dataclass_params__.frozen


def test_errors_are_value_errors_of_one_family():
    assert issubclass(megabatch.PlanError, megabatch.MegabatchError)
    assert issubclass(megabatch.LossContractError, megabatch.MegabatchError)
    assert issubclass(megabatch.PlanError, ValueError)
    assert issubclass(megabatch.LossContractError, ValueError)


def test_the_loss_decorator_keeps_the_function():
    def total(model, microbatch):
        return None

    assert megabatch.loss(weigh=len)(total) is total
