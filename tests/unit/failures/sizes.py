"""Sizes, bounds, samplers: what cannot be planned."""

import torch
from torch import nn

from megabatch import GradientAccumulator, PlanError, UpdateSampler, losses, plan, verify
from tests.unit.failures.table import SAMPLES, Failure, accumulator, linear, squares, update


def count(name: str, value: object) -> str:
    return f"{name} is {value!r}; it counts things and must be a whole number of at least 1"


def sampler(lengths=(1,) * 10, **settings) -> UpdateSampler:
    return UpdateSampler(lengths, **{"global_batch_size": 4, **settings})


def of_other_data() -> None:
    sampler().load_state_dict(sampler((1,) * 9).state_dict())


def of_a_number() -> None:
    before = sampler()
    next(iter(before))
    sampler(global_batch_size=lambda seen: 4).load_state_dict(before.state_dict())


def of_other_seed() -> None:
    sampler().load_state_dict(sampler(seed=3).state_dict())


def frozen() -> nn.Module:
    return linear().requires_grad_(False)


NEITHER = (
    "neither of micro_batch_size and max_microbatch_tokens given; "
    "give one: samples per forward, or padded tokens per forward"
)
BOTH = NEITHER.replace("neither", "both")
TOO_LONG = (
    "sample 1 has 9 tokens, more than max_microbatch_tokens=8 allows; raise it to 9 or shorten the sample"
)  # fmt: skip
COST = "cost is 'auto'; expected a CostModel, or leave it out: with max_microbatch_tokens=\"auto\" it is measured"
LONG_SAMPLES = [{"x": torch.ones(length, 1, dtype=torch.float64)} for length in (8, 9)]
NOTHING_TO_TRAIN = "no parameter of the model requires a gradient; unfreeze what is to be trained"

COUNTS = {  # name of the setting -> what is called with a bad value
    "micro_batch_size": lambda value: GradientAccumulator(linear(), micro_batch_size=value),
    "max_microbatch_tokens": lambda value: GradientAccumulator(linear(), max_microbatch_tokens=value),
    "global_batch_size": lambda value: sampler(global_batch_size=value),
    "dp_degree": lambda value: sampler(dp_rank=0, dp_degree=value),
}
BAD_COUNTS = [0, -1, 2.0, float("nan"), "8", True]

FAILURES = {
    f"{name} is {value!r}": Failure(
        PlanError, count(name, value), lambda call=call, value=value: call(value)
    )
    for name, call in COUNTS.items()
    for value in BAD_COUNTS
} | {
    "plan over no ranks": Failure(
        PlanError, count("dp_degree", 0), lambda: plan([1], dp_degree=0, micro_batch_size=1)
    ),
    "plan of nothing at a time": Failure(
        PlanError, count("micro_batch_size", 0), lambda: plan([1], micro_batch_size=0)
    ),
    "verify nothing at a time": Failure(
        PlanError, count("micro_batch_size", 0), lambda: verify(linear(), squares, SAMPLES, micro_batch_size=0)
    ),
    "neither bound, plan": Failure(PlanError, NEITHER, lambda: plan([1])),
    "both bounds": Failure(PlanError, BOTH, lambda: accumulator(max_microbatch_tokens=8)),
    "both bounds, plan": Failure(PlanError, BOTH, lambda: plan([1], micro_batch_size=1, max_microbatch_tokens=1)),
    "a sample longer than the cap": Failure(
        PlanError, TOO_LONG, lambda: update(batch=LONG_SAMPLES, micro_batch_size=None, max_microbatch_tokens=8)
    ),
    "a length longer than the cap": Failure(PlanError, TOO_LONG, lambda: plan([8, 9], max_microbatch_tokens=8)),
    "two lengths longer than the cap": Failure(
        PlanError, TOO_LONG.replace("1 has 9", "2 has 12").replace("to 9", "to 12"),
        lambda: plan([8, 9, 12, 10], max_microbatch_tokens=8),
    ),
    **{
        f"a cost that is a word, {name}": Failure(PlanError, COST, work)
        for name, work in {
            "plan": lambda: plan([1], micro_batch_size=1, cost="auto"),
            "sampler": lambda: sampler(cost="auto"),
            "accumulator": lambda: accumulator(cost="auto"),
        }.items()
    },
    "a negative length": Failure(
        PlanError,
        "the length of sample 1 is -3; it counts things and must be a whole number of at least 0",
        lambda: plan([2, -3], micro_batch_size=1),
    ),
    "a function of nothing": Failure(
        PlanError, count("global_batch_size", 0), lambda: sampler(global_batch_size=lambda seen: 0)
    ),
    "a state that has counted nothing": Failure(
        PlanError,
        "the sampler's state does not say what was handed out before it, which a global_batch_size that is a function "
        "asks for; give a state of a sampler that has such a one",
        of_a_number,
    ),
    "an unknown tail": Failure(
        PlanError, "tail is 'keep'; expected one of step, drop, carry", lambda: sampler(tail="keep")
    ),
    "a rank that is not there": Failure(
        PlanError, "dp_rank is 2; expected 0 to 1 with dp_degree=2", lambda: sampler(dp_rank=2, dp_degree=2)
    ),
    "a rank of nobody knows how many": Failure(
        PlanError,
        "dp_rank is 1 and dp_degree is None; give both, or neither, to take them from the process group",
        lambda: sampler(dp_rank=1),
    ),
    "an empty data set": Failure(PlanError, "the data set is empty; give at least one sample", lambda: sampler(())),
    "a tail that is everything": Failure(
        PlanError,
        "the data set has 3 samples, fewer than global_batch_size=4, and "
        'tail="drop" would leave no update; use tail="step" or a smaller global_batch_size',
        lambda: sampler((1, 1, 1), tail="drop"),
    ),
    "a sampler's state of other data": Failure(
        PlanError,
        "the sampler's state has num_samples=9 but this sampler has 10; give the same data and seed",
        of_other_data,
    ),
    "a sampler's state of another seed": Failure(
        PlanError, "the sampler's state has seed=3 but this sampler has 0; give the same data and seed", of_other_seed
    ),
    "an order that is empty": Failure(
        PlanError,
        "order(0) gives 0 sample ids; expected some, equally many in every epoch",
        lambda: sampler(order=lambda epoch: []),
    ),
    "an order that grows": Failure(
        PlanError,
        "order(1) gives 2 sample ids; expected 1, equally many in every epoch",
        lambda: [list(each) for each in [sampler(order=lambda epoch: range(epoch + 1))] * 2],
    ),
    "an order of other data": Failure(
        PlanError,
        "order(0) gives the sample id 10; the data set has the ids 0 to 9",
        lambda: sampler(order=lambda epoch: range(11)),
    ),
    "no model": Failure(
        PlanError,
        "model is a list; expected a torch.nn.Module, or a list of them",
        lambda: accumulator(model=[linear(), None]),
    ),
    "an unknown sync": Failure(
        PlanError,
        "sync is 'never'; expected one of auto, last, every, replica_last",
        lambda: accumulator(sync="never"),
    ),
    "replica_last without replicas": Failure(
        PlanError,
        "sync is 'replica_last', which is for HSDP, and the model has no wrapper; leave sync out, or shard with "
        "fully_shard over a mesh of two axes (dp_replicate, dp_shard)",
        lambda: accumulator(sync="replica_last"),
    ),
    "a parameter of two models": Failure(
        PlanError,
        "two of the models share a parameter, which would be reduced twice; give each to one model",
        lambda: accumulator(model=[(model := linear()), model]),
    ),
    "nothing to train": Failure(PlanError, NOTHING_TO_TRAIN, lambda: accumulator(model=frozen())),
    "another accumulation dtype": Failure(
        PlanError,
        "accumulate_dtype is torch.float32, coarser than parameters in torch.float64; leave it out, or give a finer "
        "one",
        lambda: accumulator(accumulate_dtype=torch.float32),
    ),
    "verify one sample": Failure(
        PlanError,
        "verify was given 1 samples; cutting needs at least 2",
        lambda: verify(linear(), losses.mse, SAMPLES[:1]),
    ),
}  # fmt: skip
