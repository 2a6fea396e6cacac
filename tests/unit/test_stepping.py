"""The optimizer's step in the last backward: the same bits, less memory, and what cannot go together is refused."""

import copy
import weakref

import pytest
import torch
from torch import Tensor, nn

from megabatch import GradientAccumulator, Learner, MegabatchError, loss
from tests.exact.launch import of_ranks
from tests.exact.stepping import OPTIMIZERS, Trained, new_model
from tests.unit.failures.table import check_error
from tests.unit.small import unseen
from tests.unit.tower import moved, new_tower, parameters_of, rows, square, stepping

SHARDED = {
    2: ["fsdp2:every:adamw:float32", "fsdp2:last:fused:float64", "fsdp2:every:momentum:wide", "fsdp2:last:adamw:wide",
        "replicate:last:adamw:float32"],
    4: ["hsdp:replica_last:fused:wide"],
}  # fmt: skip
REFUSED = {"ddp": "DistributedDataParallel", "plain": "no wrapper and several ranks"}


@pytest.mark.parametrize("dtype", ["float64", "float32", "wide"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_same_bits_as_a_step_afterwards(optimizer: str, dtype: str) -> None:
    made = new_model(dtype)
    after, inside = (
        Trained(copy.deepcopy(made), optimizer, "auto", dtype == "wide", in_backward, rank=0)
        for in_backward in (False, True)
    )
    assert (after.is_free, inside.is_free) == (False, True)
    expected = after.tensors()
    assert expected.keys() == inside.tensors().keys()
    for name, found in inside.tensors().items():
        assert torch.equal(found, expected[name]), name


REFUSED_JOBS = [f"refused:{wrapper}" for wrapper in REFUSED]
sharded = of_ranks("tests.exact.stepping:run_job", {2: [*SHARDED[2], *REFUSED_JOBS], 4: SHARDED[4]})


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for names in SHARDED.values() for name in names])
def test_the_same_bits_where_parameters_are_sharded(sharded, name: str) -> None:
    for value in sharded(name):
        assert value == {"different": [], "moved": True, "free": [False, True]}


@pytest.mark.slow
@pytest.mark.parametrize(("wrapper", "seen"), REFUSED.items())
def test_a_model_without_the_whole_gradient_is_refused(sharded, wrapper: str, seen: str) -> None:
    for value in sharded(f"refused:{wrapper}"):
        check_error(value["said"], f"{seen} … step_in_backward()")


class Watched(torch.optim.SGD):
    """Counts the bytes of the gradients that are alive when it steps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.gradients: list[weakref.ref[Tensor]] = []
        self.num_bytes: list[int] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(unseen(lambda each: self.note(each)))

    def note(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.gradients.append(weakref.ref(parameter.grad))

    def step(self, closure=None) -> None:
        found = [each() for each in self.gradients]
        self.num_bytes.append(sum(each.nbytes for each in found if each is not None))
        super().step()


def test_few_gradients_are_alive_at_once() -> None:
    most = {}
    for in_backward in (False, True):
        model = new_tower()
        optimizer = Watched(model)
        gradient = GradientAccumulator(model, micro_batch_size=8)
        if in_backward:
            gradient.step_in_backward(optimizer)
        gradient.forward_backward(rows(8), square)
        gradient.finalize()
        optimizer.step()
        most[in_backward] = max(optimizer.num_bytes)
    whole = sum(parameter.nbytes for parameter in new_tower().layers.parameters())
    layer = sum(parameter.nbytes for parameter in new_tower().rare.parameters())
    assert most[False] == whole
    assert most[True] <= layer < whole / 4


def test_a_parameter_that_the_last_microbatch_does_not_use_is_stepped_too() -> None:
    batch = rows(6)
    batch["x"][0, 0] = -50.0
    models = [new_tower(), new_tower()]
    used = []

    @loss(weigh=lambda microbatch: len(microbatch["x"]))
    def only_first(model, microbatch):
        first = bool((microbatch["x"][:, 0] == -50.0).any())
        used.append(first)
        hidden = model.layers[0](microbatch["x"])
        return (model.rare(hidden) if first else hidden).square().sum(), float(len(microbatch["x"]))

    for model, in_backward in zip(models, (False, True), strict=True):
        optimizer = torch.optim.AdamW(model.parameters())
        gradient = GradientAccumulator(model, micro_batch_size=2)
        if in_backward:
            gradient.step_in_backward(optimizer)
        learner = Learner(model, optimizer, gradient)
        learner.forward_backward(batch, only_first)
        assert in_backward == all(parameter.grad is None for parameter in model.parameters())
        learner.optim_step()
    assert used == [True, False, False] * 2
    for after, inside in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(after, inside)


def test_an_update_without_weight_moves_nothing() -> None:
    model = new_tower()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    gradient, before = stepping(model, optimizer), parameters_of(model)

    @loss(weigh=lambda microbatch: 0)
    def nothing(model, microbatch):
        return model(microbatch["x"]).sum() * 0.0, 0.0

    gradient.forward_backward(rows(4), nothing)
    assert not gradient.finalize().finite
    gradient.forward_backward(rows(0), square)
    assert not gradient.finalize().finite
    assert not moved(model, before)
    gradient.forward_backward(rows(4), square)
    assert gradient.finalize().finite
    assert moved(model, before)


def test_a_loss_that_raises_in_the_last_microbatch_moves_nothing() -> None:
    model = new_tower()
    gradient, before = stepping(model, torch.optim.SGD(model.parameters(), lr=0.1)), parameters_of(model)
    calls = []

    @loss(weigh=lambda microbatch: len(microbatch["x"]))
    def fails(model, microbatch):
        calls.append(square(model, microbatch))
        if len(calls) == 3:
            raise InterruptedError
        return calls[-1]

    with pytest.raises(InterruptedError):
        gradient.forward_backward(rows(6), fails)
    assert not moved(model, before)
    gradient.forward_backward(rows(6), square)
    gradient.finalize()
    assert moved(model, before)


def test_a_weight_that_differs_in_the_last_microbatch_moves_nothing_on_one_rank() -> None:
    model = new_tower()
    gradient, before = stepping(model, torch.optim.SGD(model.parameters(), lr=0.1)), parameters_of(model)

    calls = []

    @loss(weigh=lambda microbatch: len(microbatch["x"]))
    def differs(model, microbatch):
        total, weight = square(model, microbatch)
        calls.append(weight)
        return total, weight + (len(calls) == 3)

    with pytest.raises(MegabatchError, match="weigh counted 2 from the data but the loss returned the weight 3"):
        gradient.forward_backward(rows(6), differs)
    assert not moved(model, before)


def test_a_loss_that_is_not_finite_is_reported_though_parameters_have_moved() -> None:
    model = new_tower()
    gradient, before = stepping(model, torch.optim.SGD(model.parameters(), lr=0.1)), parameters_of(model)
    batch = rows(4)
    batch["x"][0] = float("nan")
    gradient.forward_backward(batch, square)
    update = gradient.finalize()
    assert not update.finite
    assert str(update.problem()) == "the loss is not finite on data rank 0 of 1"
    assert moved(model, before)


def test_a_backward_that_fails_between_two_parameters_says_so() -> None:
    model = new_tower()
    gradient = stepping(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=4)

    def fail(_: Tensor) -> None:
        raise InterruptedError("out of memory")

    model.layers[0].weight.register_hook(unseen(fail))
    with pytest.raises(MegabatchError) as raised:
        gradient.forward_backward({"x": rows(4)["x"].abs()}, square)
    text = str(raised.value)
    assert text.startswith("the last backward failed after the optimizer had stepped ")
    assert text.endswith(
        "of 14 parameters, so the model is between two updates; go back to a checkpoint "
        "(InterruptedError: out of memory)"
    )
