"""Gradients added in float32 for parameters in bfloat16: exact sums, rounded once; float16 is refused."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megabatch import GradientAccumulator, PlanError, loss
from tests.exact.launch import of_ranks
from tests.exact.precision import CASES, SUMMED, SYNCS, WORLDS, Counter, gradients, language_error, new_model
from tests.tiers import some
from tests.unit.small import unseen

UNDERFLOW = "dividing the loss by the update's weight before backward underflows in float16; use bfloat16"


def jobs() -> list[str]:
    """Every wrapper under every policy, and every case on a few of them."""
    names = [f"{wrapper}:{sync}:one-call:float32" for wrapper in WORLDS for sync in SYNCS.get(wrapper, ("auto",))]
    names += [f"{wrapper}:auto:{case}:float32" for wrapper in ("plain", *SUMMED) for case in CASES[1:4]]
    names += ["fsdp2:auto:late-weights:float32", "fsdp2:last:abandoned:float32"]
    names += [f"{wrapper}:auto:unused:float32" for wrapper in SUMMED]
    return names


ROUNDED = ["plain:auto:one-call:None", "ddp:auto:one-call:None", "fsdp2:every:one-call:None"]


results = of_ranks(
    "tests.exact.precision:run_job",
    {
        world: [name for name in [*jobs(), *ROUNDED] if WORLDS[name.split(":")[0]] == world]
        for world in sorted(set(WORLDS.values()))
    },
)


@pytest.mark.slow
@pytest.mark.parametrize("name", some(jobs(), 3))
def test_the_sum_is_exact_and_rounded_once(results, name: str) -> None:
    for value in results(name):
        assert not value["different"]
        assert value["norm"] < 1e-6, "the norm is that of the float32 gradient"
        assert value["clipped"] < 2**-7
        assert value["dtypes"] == ["torch.bfloat16"]
        assert set(value["widths"]) <= {"torch.float32"}
        assert all(value["steps"]), "AdamW does not take the gradients"


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUNDED)
def test_without_it_the_sum_is_rounded_again_and_again(results, name: str) -> None:
    assert all(value["different"] for value in results(name))


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", [128, 512])
def test_as_near_to_the_truth_as_the_uncut_run(num_microbatches: int) -> None:
    wide, uncut = language_error(num_microbatches, torch.float32)
    assert wide <= 2 * uncut


@pytest.mark.slow
def test_without_it_the_error_is_a_multiple() -> None:
    narrow, uncut = language_error(128, None)
    assert narrow > 2 * uncut


def run_update(model: nn.Module, dtype: torch.dtype | None, max_norm: float | None = None) -> None:
    @loss(weigh=lambda microbatch: len(microbatch["x"]))
    def total(model, microbatch):
        return model(microbatch["x"].to(next(model.parameters()).dtype)).sum(), len(microbatch["x"])

    gradient = GradientAccumulator(model, micro_batch_size=2, accumulate_dtype=dtype)
    gradient.forward_backward({"x": torch.ones(6, 4)}, total)
    gradient.finalize(max_norm=max_norm)


class Operations(TorchDispatchMode):
    """The operations that torch was asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_parameters_own_dtype_costs_nothing(dtype: torch.dtype) -> None:
    counted = []
    for asked in (None, dtype):
        with Operations() as operations:
            run_update(new_model(dtype), asked, max_norm=1.0)
        counted.append(operations.names)
    assert counted[0] == counted[1]


def test_each_gradient_is_widened_once_and_rounded_once() -> None:
    with Operations() as narrow:
        run_update(new_model(torch.bfloat16), None)
    with Operations() as wide:
        run_update(new_model(torch.bfloat16), torch.float32)
    name = "aten._to_copy.default"
    extra = wide.names.count(name) - narrow.names.count(name)
    assert extra == 2 * len(list(Counter().parameters()))


def test_no_gradient_in_bfloat16_waits_for_the_end_of_the_backward() -> None:
    model, narrow = new_model(torch.bfloat16), []

    def look(_: torch.Tensor) -> None:
        narrow.append(sum(each.grad is not None and each.grad.dtype == torch.bfloat16 for each in model.parameters()))

    def total(model, microbatch):
        if not narrow:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(unseen(look))
        return model(microbatch["x"].bfloat16()).sum(), 1.0

    gradient = GradientAccumulator(model, micro_batch_size=1, accumulate_dtype=torch.float32)
    gradient.forward_backward({"x": torch.ones(2, 4)}, total)
    assert len(narrow) > len(list(model.parameters()))
    assert set(narrow) == {0}


def test_parameters_of_two_dtypes() -> None:
    model = new_model(torch.bfloat16)
    model.extra.float()
    expected = new_model(torch.float64)

    def total(model, microbatch):
        x = microbatch["x"]
        wide = model.extra(x.to(model.extra.weight.dtype)).sum()
        return model(x.to(model.head.weight.dtype), extra=False).to(wide.dtype).sum() + wide, float(len(x))

    batch = {"x": torch.randint(0, 4, (256, 4), generator=torch.Generator().manual_seed(1))}
    (total(expected, batch)[0] / 256).backward()
    gradient = GradientAccumulator(model, micro_batch_size=1, accumulate_dtype=torch.float32)
    gradient.forward_backward(batch, total)
    gradient.finalize()
    for name, found in gradients(model).items():
        assert torch.equal(found, gradients(expected)[name].to(found.dtype)), name


def test_a_model_that_is_made_float32_afterwards_has_gradients_in_float32() -> None:
    model = new_model(torch.bfloat16)
    run_update(model, torch.float32)
    model.zero_grad()
    model.float()
    model(torch.ones(2, 4)).sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


def test_the_total_keeps_its_dtype() -> None:
    seen = []

    def total(model, microbatch):
        seen.append(model(microbatch["x"].bfloat16()).sum())
        return seen[-1], 1.0

    gradient = GradientAccumulator(new_model(torch.bfloat16), micro_batch_size=1, accumulate_dtype=torch.float32)
    gradient.forward_backward({"x": torch.ones(2, 4)}, total)
    assert {each.dtype for each in seen} == {torch.bfloat16}


def test_autocast_to_float16_is_refused_while_an_update_runs_and_only_then() -> None:
    model = new_model(torch.float32)

    def total(model, microbatch):
        with torch.autocast("cpu", dtype=torch.float16):
            return model(microbatch["x"]).float().sum(), 1.0

    gradient = GradientAccumulator(model, micro_batch_size=1)
    with pytest.raises(PlanError) as raised:
        gradient.forward_backward({"x": torch.ones(2, 4)}, total)
    assert str(raised.value) == f"what torch.autocast computes in is torch.float16; {UNDERFLOW}"
    total(model, {"x": torch.ones(2, 4)})


def test_in_float16_gradients_of_a_large_update_are_lost() -> None:
    """The reason for the refusals: the gradient of one rare token among a million."""
    weight = torch.ones((), dtype=torch.float16, requires_grad=True)
    (weight * 0.01 / 1e6).float().backward()
    assert weight.grad == 0
