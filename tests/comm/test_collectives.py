"""A sync policy is proved by counting: collectives and bytes of one update, per rank, are those that were planned."""

import pytest

from tests.comm.planned import AUTO, POLICIES, Counts, Policy, Sizes, evaluate, expected, messages
from tests.exact.launch import of_ranks
from tests.exact.wrappers import WRAPPERS
from tests.tiers import full_unless

pytestmark = pytest.mark.slow
SHAPES = ((1, 1), (3, 2))  # microbatches of a call, and calls of an update
WORLDS = {wrapper: 4 if len(WRAPPERS[wrapper].axes(4)) > 1 else 2 for wrapper in AUTO}
THREE = ("plain", "ddp", "fsdp2")  # on three ranks too
CELLS = [(policy, world) for policy in POLICIES
         for world in ([2, 3] if policy.wrapper in THREE else [WORLDS[policy.wrapper]])]  # fmt: skip
of_every_cell = pytest.mark.parametrize(
    ("policy", "world"),
    full_unless(CELLS, lambda _, cell: cell[1] == 2),
    ids=lambda it: f"{it.wrapper}-{it.sync}" if isinstance(it, Policy) else str(it),
)
of_every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")


HELD = ((2, "plain"), (2, "ddp"), (2, "ddp-find-unused"), (2, "replicate"), (2, "fsdp2"), (4, "hsdp"), (2, "fsdp1"))


SOME = ((2, "ddp"), (2, "replicate"), (2, "fsdp2"), (2, "fsdp1"), (4, "hsdp"))
TUNED = ("plain", "ddp", "fsdp2")


def _opened(wrapper: str, calls: int) -> str:
    return f"opened:{wrapper}:{'replica_last' if wrapper == 'hsdp' else 'last'}:2:{calls}"


def _jobs(world: int) -> list[str]:
    """Every job that is asked for on so many ranks."""
    policies = [policy for policy, its in CELLS if its == world]
    wrappers = sorted({policy.wrapper for policy in policies})
    jobs = [f"{kind}:{wrapper}" for kind in ("model", "pytorch") for wrapper in wrappers]
    jobs += [f"{wrapper}:{sync}:{microbatches}:{calls}" for microbatches, calls in SHAPES
             for wrapper, sync in {(policy.wrapper, policy.sync): None for policy in policies}]  # fmt: skip
    jobs += [f"{wrapper}:auto:3:2" for wrapper in wrappers]
    jobs += [_opened(wrapper, calls) for its, wrapper in HELD if its == world for calls in (1, 3)]
    jobs += [f"held:{policy.wrapper}:{policy.sync}" for policy in policies]
    jobs += [f"tuned:{wrapper}:1" for wrapper in TUNED if world == 2]
    jobs += [f"{wrapper}:{sync}:5:2" for its, wrapper in SOME if its == world for sync in ("last", "every:2")]
    return [*jobs, *(["pytorch:tp", "pytorch:tp-sp"] if world == 4 else []), *(["order:ddp"] if world == 2 else [])]


counted = of_ranks("tests.comm.jobs:run_job", {world: _jobs(world) for world in (2, 3, 4)})


@pytest.fixture(scope="module")
def found(counted):
    """The result of a job; the same on every rank."""

    def of(job: str, world: int):
        first, *others = counted(job, world)
        assert all(value == first for value in others), others
        return first

    return of


def _sizes(found, wrapper: str, world: int, microbatches: int, calls: int) -> Sizes:
    model = found(f"model:{wrapper}", world)
    one = found(f"pytorch:{wrapper}", world)
    buckets = one.get("all_reduce", 0) - ("unused" in wrapper) if "ddp" in wrapper else 0
    known = {name: value for name, value in model.items() if name in Sizes._fields}
    return Sizes(C=calls, N=microbatches, B=buckets, **known)


def _activations(found, wrapper: str, world: int) -> Counts:
    """The traffic of tensor parallelism in a microbatch of plain PyTorch, whoever reduces the gradient."""
    if "tp" not in WRAPPERS[wrapper].axes(4):
        return {}
    return found("pytorch:tp-sp" if wrapper.endswith("-sp") else "pytorch:tp", world)


@of_every_shape
@of_every_cell
def test_what_is_counted_is_what_was_planned(found, policy: Policy, world: int, shape: tuple[int, int]) -> None:
    counts = found(f"{policy.wrapper}:{policy.sync}:{shape[0]}:{shape[1]}", world)
    planned = expected(policy, _sizes(found, policy.wrapper, world, *shape), _activations(found, policy.wrapper, world))
    apart = ("message", "broadcast")  # counted by tests of their own
    assert {name: number for name, number in counts.items() if not name.startswith(apart)} == planned


@of_every_shape
@of_every_cell
def test_one_message_per_call_and_one_per_update(found, policy: Policy, world: int, shape: tuple[int, int]) -> None:
    counts = found(f"{policy.wrapper}:{policy.sync}:{shape[0]}:{shape[1]}", world)
    model = found(f"model:{policy.wrapper}", world)
    assert counts["message"] == messages(policy.wrapper, model["axes"], model["data_axes"], shape[1])
    assert counts["message_bytes"] < 1024 * world * counts["message"]


@pytest.mark.parametrize("wrapper", TUNED)
def test_a_limit_that_is_known_costs_no_message(found, wrapper: str) -> None:
    sync = AUTO[wrapper]
    assert found(f"tuned:{wrapper}:1", 2)["message"] == found(f"{wrapper}:{sync}:1:1", 2)["message"]


@pytest.mark.parametrize(("world", "wrapper"), HELD)
def test_an_opened_update_is_reduced_once_however_many_calls(found, world: int, wrapper: str) -> None:
    one, three = (found(_opened(wrapper, calls), world) for calls in (1, 3))
    model, microbatches = found(f"model:{wrapper}", world), 6
    of_gradients = "reduce_scatter" if wrapper == "fsdp2" else "all_reduce"
    groups, buckets = model["G"], model["F"]
    reductions = {"plain": buckets, "ddp": buckets, "ddp-find-unused": buckets, "fsdp1": 0}.get(wrapper, groups)
    size = model["P"] // model["S"] if wrapper == "hsdp" else model["P"]
    if wrapper == "fsdp1":  # it cannot hold a reduction back
        assert three["reduce_scatter"] == 3 * one["reduce_scatter"]
        return
    for counts in (one, three):
        assert (counts[of_gradients], counts[f"{of_gradients}_bytes"]) == (reductions, size)
        assert counts.get("broadcast", 0) <= 1
    if wrapper == "hsdp":  # its shards are summed with each microbatch, and with none when replicas are
        assert three["reduce_scatter"] == (microbatches + 1) * groups
    messages = [counts["message"] for counts in (one, three)]
    assert messages[1] - messages[0] == 2 * model["axes"], "one message per call"


@pytest.mark.parametrize(("world", "wrapper"), SOME)
def test_every_second_microbatch_and_the_last_reduce(found, world: int, wrapper: str) -> None:
    """Reduce the second, the fourth and the fifth of five microbatches."""
    some, last = (found(f"{wrapper}:{sync}:5:2", world) for sync in ("every:2", "last"))
    for name in ("all_reduce", "all_reduce_bytes", "reduce_scatter", "reduce_scatter_bytes"):
        assert some.get(name, 0) == 3 * last.get(name, 0), name
    assert last.get("all_reduce", 0) + last.get("reduce_scatter", 0) > 0


@pytest.mark.parametrize("wrapper", full_unless(AUTO, lambda _, wrapper: WORLDS[wrapper] == 2))
def test_auto_is_the_policy_in_bold(found, wrapper: str) -> None:
    world = WORLDS[wrapper]
    assert found(f"{wrapper}:auto:3:2", world) == found(f"{wrapper}:{AUTO[wrapper]}:3:2", world)


@of_every_cell
def test_the_gradient_that_is_held_between_microbatches(found, policy: Policy, world: int) -> None:
    sizes = _sizes(found, policy.wrapper, world, 3, 1)
    assert found(f"held:{policy.wrapper}:{policy.sync}", world) == evaluate(policy.held, sizes)


@of_every_shape
def test_ddp_last_broadcasts_no_buffers_between_microbatches(found, shape: tuple[int, int]) -> None:
    before_a_reducing_forward = found("pytorch:ddp", 2)["broadcast"]
    counts = found(f"ddp:last:{shape[0]}:{shape[1]}", 2)
    assert counts.get("broadcast", 0) <= before_a_reducing_forward * shape[1]


def test_ddp_reduces_behind_the_last_backward(found) -> None:
    events = found("order:ddp", 2)
    num_buckets = found("pytorch:ddp", 2)["all_reduce"]
    assert num_buckets > 1, "several buckets"
    assert events.count("all_reduce") == num_buckets
    assert events.index("all_reduce") < len(events) - 1 - events[::-1].index("gradient"), events


@pytest.mark.full
def test_plain_pytorch_gathers_as_often(found) -> None:
    for world in (2, 3):
        one, counts = found("pytorch:fsdp2", world), found("fsdp2:every:3:2", world)
        assert {name: 6 * one[name] for name in ("all_gather", "all_gather_bytes", "reduce_scatter")} == {
            name: counts[name] for name in ("all_gather", "all_gather_bytes", "reduce_scatter")
        }
