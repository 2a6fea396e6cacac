"""Sizes, bounds, samplers: what cannot be planned."""

import torch
from torch import nn

from megabatch import GradientAccumulator, Planner, UpdateSampler, losses, plan, verify
from megabatch.planners import Rows
from tests.unit.failures.table import SAMPLES, Failure, accumulator, linear, squares, update


def count(name: str, value: object) -> str:
    return f"{name} … {value!r}"


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


class Alone(Planner):
    def cut(self, lengths, samples):
        return [[index] for index in range(len(lengths))]


def frozen() -> nn.Module:
    return linear().requires_grad_(False)


NEITHER = "neither … micro_batch_size … max_microbatch_tokens"
BOTH = "both … micro_batch_size … max_microbatch_tokens"
TOO_LONG = "sample 1 has … 9 tokens … max_microbatch_tokens=8"
COST = "'auto'"
LONG_SAMPLES = [{"x": torch.ones(length, 1, dtype=torch.float64)} for length in (8, 9)]
NOTHING_TO_TRAIN = "requires a gradient"

COUNTS = {  # name of the setting -> what is called with a bad value
    "micro_batch_size": lambda value: GradientAccumulator(linear(), micro_batch_size=value),
    "max_microbatch_tokens": lambda value: GradientAccumulator(linear(), max_microbatch_tokens=value),
    "global_batch_size": lambda value: sampler(global_batch_size=value),
    "dp_degree": lambda value: sampler(dp_rank=0, dp_degree=value),
}
BAD_COUNTS = [0, -1, 2.0, float("nan"), "8", True]

FAILURES = {
    f"{name} is {value!r}": Failure(count(name, value), lambda call=call, value=value: call(value))
    for name, call in COUNTS.items()
    for value in BAD_COUNTS
} | {
    "plan over no ranks": Failure(count("dp_degree", 0), lambda: plan([1], dp_degree=0, micro_batch_size=1)),
    "plan of nothing at a time": Failure(count("micro_batch_size", 0), lambda: plan([1], micro_batch_size=0)),
    "plan without a number": Failure(
        count("max_microbatch_tokens", "auto"), lambda: plan([1], max_microbatch_tokens="auto")
    ),
    "verify nothing at a time": Failure(
        count("micro_batch_size", 0), lambda: verify(linear(), squares, SAMPLES, micro_batch_size=0)
    ),
    "neither bound, plan": Failure(NEITHER, lambda: plan([1])),
    "both bounds": Failure(BOTH, lambda: accumulator(max_microbatch_tokens=8)),
    "both bounds, plan": Failure(BOTH, lambda: plan([1], micro_batch_size=1, max_microbatch_tokens=1)),
    "a sample longer than the cap": Failure(
        TOO_LONG, lambda: update(batch=LONG_SAMPLES, micro_batch_size=None, max_microbatch_tokens=8)
    ),
    "a length longer than the cap": Failure(TOO_LONG, lambda: plan([8, 9], max_microbatch_tokens=8)),
    "two lengths longer than the cap": Failure(
        "sample 2 has … 12 tokens … max_microbatch_tokens=8", lambda: plan([8, 9, 12, 10], max_microbatch_tokens=8)
    ),
    **{
        f"a cost that is a word, {name}": Failure(COST, work)
        for name, work in {
            "plan": lambda: plan([1], micro_batch_size=1, cost="auto"),
            "sampler": lambda: sampler(cost="auto"),
            "planner": lambda: Rows(2, cost="auto"),
        }.items()
    },
    "a negative length": Failure("sample 1 is … -3", lambda: plan([2, -3], micro_batch_size=1)),
    "a function of nothing": Failure(count("global_batch_size", 0), lambda: sampler(global_batch_size=lambda seen: 0)),
    "a state that has counted nothing": Failure("global_batch_size", of_a_number),
    "an unknown tail": Failure("'keep'", lambda: sampler(tail="keep")),
    "a rank that is not there": Failure("dp_rank … is 2", lambda: sampler(dp_rank=2, dp_degree=2)),
    "a rank of nobody knows how many": Failure("dp_rank … is 1 and … dp_degree", lambda: sampler(dp_rank=1)),
    "an empty data set": Failure("set is empty", lambda: sampler(())),
    "a tail that is everything": Failure(
        'has 3 samples … global_batch_size=4 … tail= … "drop"', lambda: sampler((1, 1, 1), tail="drop")
    ),
    "a sampler's state of other data": Failure("num_samples=9 … has 10", of_other_data),
    "a sampler's state of another seed": Failure("seed= … 3 but … has 0", of_other_seed),
    "an order that is empty": Failure("(0) … gives 0 sample", lambda: sampler(order=lambda epoch: [])),
    "an order that grows": Failure(
        "(1) … gives 2 sample", lambda: [list(each) for each in [sampler(order=lambda epoch: range(epoch + 1))] * 2]
    ),
    "an order of other data": Failure("(0) … id 10", lambda: sampler(order=lambda epoch: range(11))),
    "no model": Failure("is a list", lambda: accumulator(model=[linear(), None])),
    "an unknown sync": Failure("'never'", lambda: accumulator(sync="never")),
    "every zeroth microbatch": Failure("'every:0' … 'every:4'", lambda: accumulator(sync="every:0")),
    "a part gathered once": Failure("'gather_once:2' … give 'gather_once'", lambda: accumulator(sync="gather_once:2")),
    "gather_once without shards": Failure("'gather_once'", lambda: accumulator(sync="gather_once")),
    "replica_last without replicas": Failure("'replica_last'", lambda: accumulator(sync="replica_last")),
    "a parameter of two models": Failure("share a parameter", lambda: accumulator(model=[(model := linear()), model])),
    "nothing to train": Failure(NOTHING_TO_TRAIN, lambda: accumulator(model=frozen())),
    "another accumulation dtype": Failure(
        "accumulate_dtype … torch.float32 … torch.float64", lambda: accumulator(accumulate_dtype=torch.float32)
    ),
    "verify with a planner": Failure(
        "verify() … planner=", lambda: verify(linear(), squares, SAMPLES, planner=Alone())
    ),
    "verify one sample": Failure("given 1 samples", lambda: verify(linear(), losses.mse, SAMPLES[:1])),
}
