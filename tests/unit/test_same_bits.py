"""same_bits: the cut that does not depend on ranks, sums whose order does not matter, and what ranks refuse."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megabatch import CostModel, GradientAccumulator, UpdateSampler, loss
from megabatch.core.gradients import total_norm
from megabatch.planners import SameBits, Tokens
from megabatch.planners.same_bits import parts_of
from megabatch.planning.balancing import fill
from megabatch.wrappers.exact_gradients import exact_norm
from tests.exact.launch import of_ranks
from tests.exact.same_bits import samples_of

POLICY = MixedPrecisionPolicy(reduce_dtype=torch.float64)
some_lengths = st.lists(st.integers(0, 40), min_size=1, max_size=30)
some_limits = st.one_of(
    st.fixed_dictionaries({"max_rows": st.integers(1, 6)}),
    st.fixed_dictionaries({"max_tokens": st.integers(40, 160)}),
    st.fixed_dictionaries({"max_rows": st.integers(1, 6), "max_tokens": st.integers(40, 160)}),
)


@given(some_lengths, some_limits, st.data())
def test_whole_microbatches_are_found_again(lengths, limits, data) -> None:
    whole = fill(lengths, **limits)
    assert sorted(itertools.chain(*whole)) == list(range(len(lengths)))
    mine = data.draw(st.lists(st.sampled_from(range(len(whole))), unique=True).map(sorted))
    share = [item for index in mine for item in whole[index]]
    again = fill([lengths[item] for item in share], **limits)
    assert [tuple(share[row] for row in rows) for rows in again] == [whole[index] for index in mine]


@given(some_lengths, some_limits)
def test_every_microbatch_is_as_full_as_its_limit_allows(lengths, limits) -> None:
    rows, tokens = limits.get("max_rows", math.inf), limits.get("max_tokens", math.inf)
    cut = fill(lengths, **limits)
    sizes = [(len(group), max(1, *(lengths[item] for item in group), 1)) for group in cut]
    assert all(number <= rows and number * longest <= tokens for number, longest in sizes)
    for group, later in itertools.pairwise(cut):
        assert len(group) + 1 > rows or (len(group) + 1) * max(1, lengths[later[0]]) > tokens


@settings(deadline=None)
@given(some_lengths, st.integers(1, 12), st.sampled_from([None, CostModel(seconds_per_microbatch=50.0)]))
def test_shares_are_the_microbatches_of_one_rank(lengths, size, cost) -> None:
    limit = {"max_microbatch_tokens": 80}

    def microbatches(degree: int) -> list[list[list[int]]]:
        """The sample ids of every microbatch of each update, over all ranks."""
        settings: dict[str, Any] = {"global_batch_size": size, "same_bits": True, "cost": cost, **limit}
        updates = zip(
            *(UpdateSampler(lengths, dp_rank=rank, dp_degree=degree, **settings) for rank in range(degree)), strict=True
        )
        return [
            sorted([share[row] for row in rows] for share in shares
                   for rows in fill([lengths[each] for each in share], max_tokens=80))
            for shares in updates
        ]  # fmt: skip

    alone = microbatches(1)
    assert sorted(itertools.chain(*itertools.chain(*alone))) == list(range(len(lengths)))
    assert all(microbatches(degree) == alone for degree in (2, 3, 5))


def gradients_of(values: Tensor, sizes: list[int]) -> list[nn.Parameter]:
    """Parameters whose gradients are ``values`` in pieces."""
    parameters = [nn.Parameter(torch.empty(len(piece))) for piece in values.split(sizes)]
    for parameter, piece in zip(parameters, values.split(sizes), strict=True):
        parameter.grad_dtype = None
        parameter.grad = piece.clone()
    return parameters


@pytest.mark.parametrize("outlier", [1.0, 1e4, 1e30])
def test_the_norm_has_the_same_bits_in_any_order(outlier: float) -> None:
    made = torch.Generator().manual_seed(0)
    values = torch.randn(200_000, generator=made, dtype=torch.float64) * 1e-3
    values[7] = outlier  # beside which a single grid would lose the others
    truth = math.sqrt(math.fsum(each * each for each in values.tolist()))
    norms, usual = set(), set()
    for cut in ([200_000], [3, 100_000, 99_997], [1] * 5 + [199_995]):
        parameters = gradients_of(values[torch.randperm(len(values), generator=made)], cut)
        norms.add(float(exact_norm(parameters)))
        usual.add(float(total_norm(parameters)))
    assert len(norms) == 1
    assert abs(norms.pop() - truth) <= 1e-12 * truth
    assert outlier > 1 or len(usual) > 1, "the usual norm depends on the order, or this test sees nothing"


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, 2.0**-140, 2.0**127])
def test_the_norm_of_extreme_gradients(value: float) -> None:
    norm = float(exact_norm(gradients_of(torch.tensor([value, 0.0], dtype=torch.float64), [1, 1])))
    assert norm == value if math.isfinite(value) else not math.isfinite(norm)


@given(st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=1, max_size=50), st.randoms())
def test_parts_add_up_in_any_order(values, random) -> None:
    parts = parts_of(torch.tensor(values, dtype=torch.float64))
    assert torch.equal(parts.sum(1), parts.new_tensor([round(each / 2.0**-88) * 2.0**-88 for each in values]))
    sums = parts.sum(0)
    random.shuffle(values)
    assert torch.equal(sums, sum(parts_of(torch.tensor([each], dtype=torch.float64))[0] for each in values))
    assert math.isclose(float(sums.sum()), math.fsum(values), rel_tol=1e-15, abs_tol=len(values) * 2.0**-88)


REFUSED = {
    "dropout": "Dropout(p=0.1) draws its mask by rank",
    "functional": "the loss draws random numbers",
    "adafactor": "Adafactor may step a shard to other bits",
    "batch-norm": "BatchNorm1d keeps statistics",
    "usual-sampler": "the ranks hold 4 microbatches that are not the 4 of the whole update",
    "other-limit": "the ranks hold 4 microbatches that are not the 4 of the whole update",
}


def run_job(name: str) -> str:
    """The error of a job "kind:world:"."""
    torch.manual_seed(0)
    kind = name.split(":")[0]
    extra = {"dropout": nn.Dropout(0.1), "batch-norm": nn.BatchNorm1d(5), "functional": nn.RReLU()}
    model = nn.Sequential(nn.Linear(5, 5), extra.get(kind, nn.Identity()))
    rank = torch.distributed.get_rank()
    samples = samples_of("branched")
    lengths = [len(each["x"]) for each in samples]
    cut = {"max_microbatch_tokens": 64}
    given: dict[str, Any] = {} if kind == "usual-sampler" else {"same_bits": True, **cut}
    share = next(iter(UpdateSampler(lengths, global_batch_size=9, **given)))
    if kind == "other-limit" and rank:
        cut = {"max_microbatch_tokens": 65}
    gradient = GradientAccumulator(model, planner=SameBits(Tokens(cut["max_microbatch_tokens"])))
    flat = loss(weigh=lambda each: float(len(each["x"])))(
        lambda model, each: (model(each["x"].flatten(0, 1)).sum(), len(each["x"]))
    )
    try:
        if kind == "adafactor":
            GradientAccumulator(fully_shard(model, mp_policy=POLICY), planner=SameBits(Tokens(64))).reserve_for(
                torch.optim.Adafactor(model.parameters())
            )
        gradient.forward_backward([samples[each] for each in share], flat)
    except Exception as error:
        return str(error)
    return ""


refused = of_ranks(f"{__name__}:run_job", [f"{kind}:2:" for kind in REFUSED])


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED)
def test_what_depends_on_ranks_is_refused_on_all_of_them(refused, kind: str) -> None:
    for message in refused(f"{kind}:2:"):
        assert REFUSED[kind] in message
