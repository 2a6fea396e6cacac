"""Input mutations of updates of several calls that `open` begins."""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from megabatch import JointLoss, LossContractError, MegabatchError, PlanError, loss, losses
from megabatch.batching.packed_row import OneRow
from megabatch.pipeline.run import Pipeline
from tests.exact.inputs import Sample, User, as_samples, mean_square, numbers, refused, regressor, right, squares
from tests.exact.wrappers import parameters_of, whole

FIRST, SECOND = numbers(), numbers(3)
Wrap = Callable[[nn.Module], nn.Module]


def sharded(model: nn.Module) -> nn.Module:
    """One block, and a root with parameters of its own, which a forward leaves gathered."""
    fully_shard(model[0])
    return fully_shard(model)


WRAPS: dict[str, Wrap] = {"plain": lambda model: model, "ddp": DistributedDataParallel, "fsdp2": sharded}


def two_calls(accumulator: Any, user: User, between: Callable[[], object] = lambda: None) -> None:
    accumulator.forward_backward(user.rows(FIRST), squares)
    between()
    accumulator.forward_backward(user.rows(SECOND), squares)


def num_rows(user: User) -> int:
    return 2 * len(user.part(range(8)))


@right(2, 3, **WRAPS)
def opened_and_left_and_opened_again(user: User, variant: Wrap) -> None:
    """An update that is dropped before its first call, after one call, and one that is whole, thrice."""
    reference = regressor()
    accumulator = user.accumulator(variant(copy.deepcopy(reference)), sync="last")
    accumulator.open(weights=3)
    accumulator.discard()
    accumulator.open(weights=num_rows(user))
    accumulator.forward_backward(user.rows(FIRST), squares)
    accumulator.discard()
    for _ in range(2):
        accumulator.open(weights=num_rows(user))
        two_calls(accumulator, user)
        accumulator.finalize()
    mean_square(reference, FIRST, SECOND)
    user.expect(accumulator.model, reference)
    accumulator.forward_backward(user.rows(FIRST), squares)  # which reduces as ever
    accumulator.finalize()
    reference.zero_grad()
    mean_square(reference, FIRST)
    user.expect(accumulator.model, reference)


@right(2, 3, **WRAPS)
def a_call_that_fails_on_every_rank_loses_the_update(user: User, variant: Wrap) -> None:
    reference = regressor()
    accumulator = user.accumulator(variant(copy.deepcopy(reference)), sync="last")

    def fails(model: nn.Module, batch: Sample) -> Any:
        model(batch["x"])
        raise ArithmeticError("a bad batch")

    accumulator.open(weights=num_rows(user))
    accumulator.forward_backward(user.rows(FIRST), squares)
    with contextlib.suppress(ArithmeticError):
        accumulator.forward_backward(user.rows(SECOND), fails)
    with contextlib.suppress(MegabatchError):
        accumulator.open(weights=num_rows(user))
        raise AssertionError("open() took up an update that was lost")
    accumulator.discard()
    accumulator.open(weights=num_rows(user))
    two_calls(accumulator, user)
    accumulator.finalize()
    mean_square(reference, FIRST, SECOND)
    user.expect(accumulator.model, reference)


@right(2, 3, **WRAPS)
def nothing_but_an_open_update(user: User, variant: Wrap) -> None:
    """Weights of 0, and no call: an update without weight, then one with."""
    reference = regressor()
    accumulator = user.accumulator(variant(copy.deepcopy(reference)), sync="last")
    for weights in (0, None, {"a": 0, "b": 0.0}):
        accumulator.open(weights)
        update = accumulator.finalize(max_norm=1.0)
        assert not update.finite
        assert update.problem() is None
        assert all(each.grad is None for each in accumulator.model.parameters())
    accumulator.open(torch.tensor(num_rows(user)))
    two_calls(accumulator, user)
    accumulator.finalize()
    mean_square(reference, FIRST, SECOND)
    user.expect(accumulator.model, reference)


@right(2, 3, **WRAPS)
def samples_of_no_weight(user: User, variant: Wrap) -> None:
    accumulator = user.accumulator(variant(regressor()), sync="last")
    accumulator.open(weights=0)
    accumulator.forward_backward(user.rows(FIRST), lambda model, batch: (0 * squares(model, batch)[0], 0))
    assert not accumulator.finalize().finite
    assert all(each.grad is None for each in accumulator.model.parameters())
    reference = regressor()
    mean_square(reference, FIRST)
    accumulator.forward_backward(user.rows(FIRST), squares)
    accumulator.finalize()
    user.expect(accumulator.model, reference)


class Unused(nn.Module):
    """Two heads, of which a microbatch uses the one that its first label asks for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(3)).double()
        self.frozen = nn.Linear(4, 4).double().requires_grad_(False)

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.frozen(x))


def by_sign(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
    return F.mse_loss(model(batch["x"], int(batch["labels"][0] > 0)), batch["labels"], reduction="sum"), 1


@right(
    2, 3, ddp=DistributedDataParallel, plain=lambda model: model,
    finding=lambda model: DistributedDataParallel(model, find_unused_parameters=True), fsdp2=fully_shard,
)  # fmt: skip
def parameters_that_some_ranks_do_not_use(user: User, variant: Wrap) -> None:
    reference = Unused()
    accumulator = user.accumulator(variant(copy.deepcopy(reference)), micro_batch_size=1, sync="last")
    accumulator.open(weights=num_rows(user))
    for batch in (FIRST, SECOND):
        accumulator.forward_backward(user.rows(batch), by_sign)
    accumulator.finalize()
    total = sum(
        by_sign(reference, {k: v[None] for k, v in row.items()})[0] for b in (FIRST, SECOND) for row in as_samples(b)
    )
    (total / 16).backward()
    user.expect(accumulator.model, reference)


def wide(model: nn.Module) -> nn.Module:
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))


@right(2, 3, plain=WRAPS["plain"], ddp=DistributedDataParallel, fsdp2=wide)
def wider_gradients(user: User, variant: Wrap) -> None:
    """In bfloat16, added in float32: the same bits as without `open`, where sums over ranks have one order."""
    found: list[dict[str, Any]] = []
    for is_opened in (False, True):
        model = variant(regressor().bfloat16())
        accumulator = user.accumulator(model, sync="last", accumulate_dtype=torch.float32)
        if is_opened:
            accumulator.open(weights=num_rows(user))
        for batch in (FIRST, SECOND):
            rows = user.rows({key: value.bfloat16() for key, value in batch.items()})
            accumulator.forward_backward(rows, loss(weigh=lambda batch: len(batch["x"]))(squares))
        accumulator.finalize()
        gradients = {name: each.grad for name, each in parameters_of(model).items()}
        found.append(whole(model, gradients, {name: each.shape for name, each in regressor().named_parameters()}))
    for name, one in found[0].items():
        user.expect_equal({name: torch.zeros(())}, {name: torch.zeros(())})
        assert (found[1][name].double() - one.double()).norm() <= 2**-7 * one.double().norm(), name


class Checkpointed(nn.Module):
    """Computes its forward again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = regressor()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, x, use_reentrant=False)


@right(2, 3, plain=WRAPS["plain"], ddp=DistributedDataParallel, fsdp2=fully_shard)
def computed_again_in_the_backward(user: User, variant: Wrap) -> None:
    reference = Checkpointed()
    accumulator = user.accumulator(variant(copy.deepcopy(reference)), sync="last")
    accumulator.open(weights=num_rows(user))
    two_calls(accumulator, user)
    accumulator.finalize()
    mean_square(reference, FIRST, SECOND)
    user.expect(accumulator.model, reference)


@right(2, 3)
def buffers_of_ddp_are_those_of_rank_0_after_each_update(user: User) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).double().eval()
    reference = copy.deepcopy(model)
    accumulator = user.accumulator(DistributedDataParallel(model))
    accumulator.open(weights=num_rows(user))
    two_calls(accumulator, user, lambda: model[0].num_batches_tracked.add_(user.rank))
    accumulator.finalize()
    assert int(model[0].num_batches_tracked) == 0
    mean_square(reference, FIRST, SECOND)
    user.expect(accumulator.model, reference)


@right(2, 3, **WRAPS)
def a_loss_that_takes_the_divisor(user: User, variant: Wrap) -> None:
    """Told beforehand, it needs no weigh."""
    reference = regressor()
    accumulator = user.accumulator(variant(copy.deepcopy(reference)), sync="last")

    def divided(model: nn.Module, batch: Sample, divisor: float) -> tuple[Tensor, int]:
        total, weight = squares(model, batch)
        return total / divisor, weight

    accumulator.open(weights=num_rows(user))
    for batch in (FIRST, SECOND):
        accumulator.forward_backward(user.rows(batch), divided)
    accumulator.finalize()
    mean_square(reference, FIRST, SECOND)
    user.expect(accumulator.model, reference)


@right(2, 3, **WRAPS)
def a_term_in_each_call(user: User, variant: Wrap) -> None:
    """One term in the first call, another in the second: each with a divisor of its own."""
    reference = regressor()
    accumulator = user.accumulator(variant(copy.deepcopy(reference)), sync="last")
    accumulator.open(weights={"error": num_rows(user) / 2, "size": num_rows(user)})
    accumulator.forward_backward(user.rows(FIRST), lambda model, batch: {"error": squares(model, batch)})
    accumulator.forward_backward(
        user.rows(SECOND), lambda model, batch: {"size": (model(batch["x"]).square().sum(), 2 * len(batch["x"]))}
    )
    accumulator.finalize()
    mean_square(reference, FIRST)
    (reference(SECOND["x"]).square().sum() / 16).backward()
    user.expect(accumulator.model, reference)


def spread(outputs: Tensor) -> tuple[Tensor, int]:
    """A loss of all samples of a call."""
    return (outputs - outputs.mean(0)).square().sum(), len(outputs)


@right(2, 3, **WRAPS)
def coupled_samples_in_opened_calls(user: User, variant: Wrap) -> None:
    """Each call couples its own samples, over all ranks; the divisor is that of both, with a term of its own beside."""
    reference = regressor()
    accumulator = user.accumulator(variant(copy.deepcopy(reference)), sync="last")
    accumulator.open(weights={"spread": num_rows(user), "error": num_rows(user) / 2})
    joint = JointLoss(lambda model, batch: model(batch["x"]), lambda outputs: {"spread": spread(outputs)})
    accumulator.forward_backward(user.rows(FIRST), joint)
    accumulator.forward_backward(user.rows(SECOND), joint)
    accumulator.forward_backward(user.rows(FIRST), lambda model, batch: {"error": squares(model, batch)})
    accumulator.finalize()
    for batch in (FIRST, SECOND):
        (spread(reference(batch["x"]))[0] / 16).backward()
    mean_square(reference, FIRST)
    user.expect(accumulator.model, reference)


@refused(LossContractError, "give every sample that was counted", 1, 2, 3)
def coupled_samples_told_twice(user: User) -> None:
    accumulator = user.accumulator(regressor())
    accumulator.open(weights=2 * num_rows(user))
    accumulator.forward_backward(user.rows(FIRST), JointLoss(lambda model, batch: model(batch["x"]), spread))
    accumulator.finalize()


@refused(LossContractError, "give every sample that was counted", 1, 2, 3, half=1, too_many=3)
def a_sum_that_is_another(user: User, variant: int) -> None:
    """Half of what was told is left out, or given once more."""
    accumulator = user.accumulator(regressor())
    accumulator.open(weights=num_rows(user))
    for batch in (FIRST, SECOND, SECOND)[:variant]:
        accumulator.forward_backward(user.rows(batch), squares)
    accumulator.finalize()


@refused(LossContractError, "give every sample that was counted", 2, 3, ddp=DistributedDataParallel, fsdp2=sharded)
def calls_that_never_come(user: User, variant: Wrap) -> None:
    accumulator = user.accumulator(variant(regressor()), sync="last")
    accumulator.open(weights=num_rows(user))
    accumulator.finalize()


@refused(LossContractError, "give every sample that was counted", 2, 3)
def a_sum_over_ranks_told_on_each(user: User) -> None:
    accumulator = user.accumulator(regressor())
    accumulator.open(weights=16)
    two_calls(accumulator, user)
    accumulator.finalize()


@refused(LossContractError, "one for each, by its name", 1, 2, number=16, other={"b": 16})
def a_term_that_was_not_told(user: User, variant: Any) -> None:
    accumulator = user.accumulator(regressor())
    accumulator.open(weights=variant)
    for name in ("a", "c"):
        accumulator.forward_backward(user.rows(FIRST), lambda model, batch, name=name: {name: squares(model, batch)})


@refused(LossContractError, "but the differentiable terms are", 1, 2)
def a_weigh_of_other_terms(user: User) -> None:
    accumulator = user.accumulator(regressor())
    accumulator.open(weights={"a": num_rows(user)})
    counted = loss(weigh=lambda batch: {"b": len(batch["x"])})
    accumulator.forward_backward(user.rows(FIRST), counted(lambda model, batch: {"a": squares(model, batch)}))


@refused(LossContractError, "tell the weight of each before the first", 1, 2)
def several_terms_in_calls_that_were_not_opened(user: User) -> None:
    accumulator = user.accumulator(regressor())
    accumulator.open()
    counted = loss(weigh=lambda batch: {"a": len(batch["x"]), "b": len(batch["x"])})
    terms = counted(lambda model, batch: dict.fromkeys(("a", "b"), squares(model, batch)))
    for batch in (FIRST, SECOND):
        accumulator.forward_backward(user.rows(batch), terms)


@refused(LossContractError, "must be finite and not negative", 1, 2, 3, negative=-1.0, nan=float("nan"))
def a_weight_that_is_none(user: User, variant: Any) -> None:
    user.accumulator(regressor()).open(weights=variant if user.rank == 0 else 1.0)


@refused(PlanError, "or leave weights out", 1, 2, none={}, many={str(number): 1 for number in range(9)})
def too_few_or_many_weights(user: User, variant: Any) -> None:
    user.accumulator(regressor()).open(weights=variant)


@refused(PlanError, "name the same everywhere and in one order", 2, 3)
def other_terms_on_one_rank(user: User) -> None:
    user.accumulator(regressor()).open(weights={"a": 1} if user.rank else {"b": 1})


@refused(MegabatchError, "open() was called in an open update", 1, 2)
def opened_twice(user: User) -> None:
    accumulator = user.accumulator(regressor())
    accumulator.open()
    accumulator.open()


@refused(MegabatchError, "open() was called in an open update", 2, 3)
def opened_twice_on_one_rank(user: User) -> None:
    accumulator = user.accumulator(regressor())
    if user.rank == 0:
        accumulator.begin(accumulator._new_update(accumulator.wrapper))  # as a call on this rank alone does
    accumulator.open()


@refused(PlanError, "open() was told the weight before", 1, 2)
def two_divisors(user: User) -> None:
    accumulator = user.accumulator(regressor())
    accumulator.open(weights=num_rows(user))
    two_calls(accumulator, user)
    accumulator.finalize(weight=3.0)


@refused(MegabatchError, "finalize() it before", 1, 2)
def a_loop_of_ones_own(user: User) -> None:
    accumulator = user.accumulator(regressor())
    accumulator.open()
    with accumulator.microbatch(0, of=1, sum_over=1):
        pass


@refused(MegabatchError, "a checkpoint is between two updates", 2)
def saved_while_it_is_open(user: User) -> None:
    accumulator = user.accumulator(sharded(regressor()), sync="last")
    accumulator.open()
    accumulator.forward_backward(user.rows(FIRST), losses.mse)
    accumulator.state_dict()


# Forwards without a backward, and the same cut twice.


def texts(seed: int = 0) -> list[Sample]:
    """Eight samples of 1 to 8 tokens, in no order."""
    drawn = torch.Generator().manual_seed(seed)
    return [{"x": torch.randn(1 + (5 * row + 3) % 8, 4, generator=drawn).double()} for row in range(8)]


def scores(model: nn.Module, batch: Sample) -> dict[str, Tensor]:
    """A number per token, one per token but the last, and one per sample."""
    outputs = model(batch["x"])[..., 0]
    return {"token": outputs, "next": outputs[:, :-1], "sample": outputs.sum(1)}


def check_scores(user: User, found: list[Any], model: nn.Module) -> None:
    """Each sample alone gives its scores; padding adds the model's output of zeros."""
    for sample, given in zip(user.part(texts()), found, strict=True):
        alone = scores(model, {"x": sample["x"][None]})
        for name in ("token", "next"):
            assert given[name].shape == alone[name][0].shape, name
            user.expect_equal({name: given[name]}, {name: alone[name][0]})
        assert given["sample"].shape == ()
    user.error = max(user.error, 0.0)  # a rank without samples


@right(1)
def outputs_of_samples(user: User) -> None:
    outputs_of_samples_on_ranks(user, WRAPS["plain"])


@right(2, 3, **WRAPS)
def outputs_of_samples_on_ranks(user: User, variant: Wrap) -> None:
    """Also on a rank without samples, and with a cut in which no microbatch has the samples in order."""
    reference = regressor()
    accumulator = user.accumulator(variant(copy.deepcopy(reference)), max_microbatch_tokens=12)
    found = accumulator.forward(user.part(texts()), scores)
    check_scores(user, found, reference)
    again = accumulator.forward(user.part(texts()), scores, plan=accumulator.last_plan, trim=False)
    for one, other in zip(found, again, strict=True):
        assert torch.equal(one["token"], other["token"][: len(one["token"])])


@right(2, 3, **WRAPS)
def forwards_in_an_open_update(user: User, variant: Wrap) -> None:
    """Forward and evaluate before, between and after the calls of an update, and beside a step of an optimizer."""
    reference = regressor()
    model = variant(copy.deepcopy(reference))
    accumulator = user.accumulator(model, sync="last")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]

    def look() -> None:
        state = torch.get_rng_state()
        accumulator.forward(user.rows(FIRST), lambda model, batch: F.dropout(model(batch["x"])), trim=False)
        found = accumulator.evaluate(user.rows(FIRST), lambda model, batch: {"mse": squares(model, batch)})
        with torch.no_grad():
            expected = F.mse_loss(reference(FIRST["x"]), FIRST["labels"])
        user.expect_equal({"mse": found["mse"]}, {"mse": expected})
        assert torch.equal(state, torch.get_rng_state())

    for weights in (num_rows(user), None):
        look()
        accumulator.open(weights)
        look()
        two_calls(accumulator, user, look)
        look()
        accumulator.finalize()
        reference.zero_grad()
        mean_square(reference, FIRST, SECOND)
        look()
        user.expect(model, reference)
        for optimizer in optimizers:
            optimizer.step()
        look()


@right(2, 3, **WRAPS)
def evaluated_by_counts_that_differ(user: User, variant: Wrap) -> None:
    """Quotients of sums, of two terms: ranks and microbatches have other weights."""
    reference = regressor()
    accumulator = user.accumulator(variant(copy.deepcopy(reference)), max_microbatch_tokens=12)

    def terms(model: nn.Module, batch: Sample) -> Any:
        is_token = batch["x"].abs().sum(-1) > 0
        outputs = model(batch["x"])[..., 0]
        return {"of tokens": (outputs[is_token].sum(), is_token.sum()), "of none": (outputs.sum(), 0)}

    found = accumulator.evaluate(user.part(texts()), terms)
    expected = torch.cat([reference(each["x"])[:, 0] for each in texts()]).mean()
    user.expect_equal({"mean": found["of tokens"]}, {"mean": expected.detach()})
    assert float(accumulator.evaluate([], squares).get("loss", 0.0)) == 0.0
    assert not torch.isfinite(found["of none"])


@right(1, 2, 3)
def the_same_cut_twice(user: User) -> None:
    """Microbatches of a plan that is given again are the same, whatever the limit is by then."""
    model, seen = regressor(), []
    reference = copy.deepcopy(model)

    def looks(model: nn.Module, batch: Sample) -> Tensor:
        seen.append(batch["x"].clone())
        return model(batch["x"])

    accumulator = user.accumulator(model, max_microbatch_tokens=12)
    accumulator.forward(user.part(texts()), looks)
    first, plan = list(seen), accumulator.last_plan
    seen.clear()
    accumulator = user.accumulator(model, micro_batch_size=1)
    accumulator.forward_backward(
        user.part(texts()), lambda model, batch: (looks(model, batch).square().sum(), len(batch["x"])), plan=plan
    )
    assert len(first) == len(seen)
    assert all(map(torch.equal, first, seen))
    seen.clear()
    accumulator.discard()
    padded = {"x": nn.utils.rnn.pad_sequence([each["x"] for each in texts()], batch_first=True)}
    accumulator.forward_backward(
        user.rows(padded), lambda model, batch: (looks(model, batch).square().sum(), len(batch["x"]))
    )
    accumulator.finalize()
    (reference(padded["x"]).square().sum() / 8).backward()
    user.expect(model, reference)


@refused(PlanError, "in their order", 1, 2, 3, fewer=slice(1), other=slice(None, None, -1))
def a_plan_of_another_batch(user: User, variant: slice) -> None:
    accumulator = user.accumulator(regressor())
    plan = accumulator.plan(texts()[variant])
    accumulator.forward(texts(), scores, plan=plan)


@refused(PlanError, "plan has not every sample once", 1, 2)
def a_plan_made_by_hand(user: User) -> None:
    accumulator = user.accumulator(regressor())
    plan = replace(accumulator.plan(texts()), microbatches=((0, 1), (1, 2)))
    accumulator.forward_backward(texts(), lambda model, batch: (model(batch["x"]).sum(), 1), plan=plan)


@refused(PlanError, "and these are not; make another", 1, 2)
def a_plan_of_samples_in_one_row(user: User) -> None:
    accumulator = user.accumulator(regressor())
    accumulator.forward(texts(), scores, plan=replace(accumulator.plan(texts()), padded=False))


@refused(PlanError, "give what plan() returned", 1, 2)
def a_plan_that_is_none(user: User) -> None:
    user.accumulator(regressor()).forward(texts(), scores, plan=[[0, 1]])


@refused(
    PlanError, "with samples in dim 0", 1, 2,
    scalar=lambda model, batch: model(batch["x"]).sum(), other=lambda model, batch: model(batch["x"])[:1],
    text=lambda model, batch: "none",
)  # fmt: skip
def outputs_without_samples(user: User, variant: Callable[..., Any]) -> None:
    user.accumulator(regressor()).forward(numbers(), variant)


@refused(PlanError, "give trim=False if dim 1 is another", 1, 2)
def outputs_that_are_not_of_tokens(user: User) -> None:
    """Embeddings of three numbers, in a batch whose longest sample has eight tokens."""
    user.accumulator(regressor()).forward(texts(), lambda model, batch: model(batch["x"]).sum(1).expand(-1, 3))


@refused(MegabatchError, "call it before the first or after the last", 1, 2, 3)
def a_forward_in_a_loop(user: User) -> None:
    accumulator = user.accumulator(regressor())
    with accumulator.microbatch(0, of=1, sum_over=1):
        accumulator.forward(numbers(), scores)


@refused(PlanError, "this couples them, or takes the divisor", 1, 2)
def an_evaluation_of_coupled_samples(user: User) -> None:
    user.accumulator(regressor()).evaluate(numbers(), JointLoss(lambda model, batch: model(batch["x"]), torch.sum))


@refused(PlanError, "use an accumulator without", 1, 2)
def outputs_of_samples_in_one_row(user: User) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    accumulator = user.accumulator(LlamaForCausalLM(config), batching=OneRow(), max_microbatch_tokens=8)
    accumulator.forward([{"input_ids": torch.ones(3).long()}], scores)


@refused(PlanError, "use megabatch.pipeline.evaluate", 2)
def a_forward_through_a_pipeline(user: User) -> None:
    def shape(tensor: Tensor) -> Tensor:
        return torch.empty(len(tensor), 3)

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    user.accumulator(Pipeline([nn.Linear(3, 3)], mesh, boundary=shape, output=shape)).evaluate(numbers(), squares)


@refused(PlanError, "a bad sample", 2, 3)
def a_forward_that_fails_on_one_rank(user: User) -> None:
    def collate(samples: list[Any]) -> Any:
        raise PlanError("a bad sample")

    user.accumulator(regressor(), length=lambda _: 1 if user.rank else collate([])).forward(
        as_samples(numbers()), scores
    )
