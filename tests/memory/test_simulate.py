"""simulate: traffic as planned for every wrapper, memory by formulas, and two microbatches that tell of any number."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megabatch import losses
from megabatch.optim import LowBits, low_bits
from megabatch.simulate import DEVICES, Replica, Simulated, busy_seconds, simulate
from megabatch.simulate.fake_cluster import fake_mesh
from tests.comm import jobs
from tests.comm.counting import Collectives
from tests.comm.planned import POLICIES, Policy, Sizes, expected
from tests.conftest import destroy_group
from tests.exact.wrappers import WRAPPERS
from tests.memory.runs import Run, batch_of, llama, optimizer_of, predicted

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torch warns of what it is about to change
REPLICAS: dict[str, dict[str, Any]] = {
    "ddp": {}, "ddp-find-unused": {"find_unused_parameters": True},
    "ddp-bucket-view": {"gradient_as_bucket_view": True},
}  # fmt: skip
SIMULATED = [each for each in POLICIES if not each.wrapper.startswith("fsdp1") and each.wrapper != "ddp-static-graph"]
TOY = Run("toy", "fsdp2", 2, 16, 2)
MLP = "model.layers.*.mlp."
MLP_OVER_RANKS = {
    **{f"{MLP}{name}_proj": ColwiseParallel() for name in ("gate", "up")}, f"{MLP}down_proj": RowwiseParallel(),
}  # fmt: skip


def axes_of(wrapper: str) -> dict[str, int]:
    axes = WRAPPERS[wrapper].axes
    return axes(4) if len(axes(4)) > 1 else axes(2)


def model_of(wrapper: str, mesh: DeviceMesh | None) -> Any:
    with torch.device("meta"):
        model = jobs.Counted().double()
    if wrapper in REPLICAS:
        return Replica(model, bucket_cap_mb=jobs.BUCKET_MB, **REPLICAS[wrapper])
    return WRAPPERS[wrapper].wrap(model, mesh)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)


def of_policy(policy: Policy, **options: Any) -> Simulated:
    return simulate(
        lambda mesh: model_of(policy.wrapper, mesh), sgd, lambda: jobs.batch(jobs.ROWS), jobs.squares,
        **{"axes": axes_of(policy.wrapper), "num_microbatches": 3, "sync": policy.sync, "device": "cpu"} | options,
    )  # fmt: skip


def counts_of(found: Simulated) -> dict[str, int]:
    counts: dict[str, int] = {}
    for sent in found.sent:
        counts[sent.collective] = counts.get(sent.collective, 0) + sent.calls
        counts[f"{sent.collective}_bytes"] = counts.get(f"{sent.collective}_bytes", 0) + sent.buffer_bytes
    return {name: number for name, number in counts.items() if not name.startswith("broadcast")}


@pytest.fixture(scope="module")
def buckets() -> Callable[[str], int]:
    """The number of buckets that DDP makes of the model, in a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = {wrapper: jobs.of_pytorch(f"pytorch:{wrapper}")["all_reduce"] - ("unused" in wrapper)
             for wrapper in REPLICAS}  # fmt: skip
    destroy_group()
    return lambda wrapper: found.get(wrapper, 0)


@functools.cache
def known_of(wrapper: str) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes of the model for formulas, and another counter's count of one microbatch's activations."""
    axes = axes_of(wrapper)
    with fake_mesh(axes) as mesh:
        model = jobs.of_model(f"model:{wrapper}")
        activations: dict[str, int] = {}
        if "tp" in axes:
            alone = "tp-sp" if wrapper.endswith("-sp") else "tp"
            wrapped = WRAPPERS[alone].wrap(jobs.Counted().double(), mesh)
            with Collectives() as collectives:
                jobs.squares(wrapped, jobs.batch(jobs.ROWS))[0].backward()
            activations = collectives.table()
    return {name: value for name, value in model.items() if name in Sizes._fields}, activations


@pytest.mark.parametrize("policy", SIMULATED, ids=lambda policy: f"{policy.wrapper}-{policy.sync}")
def test_what_is_sent_is_what_was_planned(policy: Policy, buckets: Callable[[str], int]) -> None:
    known, activations = known_of(policy.wrapper)
    sizes = Sizes(C=1, N=3, B=buckets(policy.wrapper), **known)
    assert counts_of(of_policy(policy)) == expected(policy, sizes, activations)


@pytest.mark.parametrize(
    ("wrapper", "sync"),
    [
        ("plain", "last"),
        ("ddp", "last"),
        ("hsdp", "replica_last"),
        ("fsdp2", "gather_once"),
        ("fsdp2-tp", "every"),
    ],
)
def test_few_microbatches_tell_of_five(wrapper: str, sync: str) -> None:
    (policy,) = [each for each in SIMULATED if (each.wrapper, each.sync) == (wrapper, sync)]
    num_run = 3 if sync == "gather_once" else 2
    few, five = (of_policy(policy, num_microbatches=5, run_all=run_all) for run_all in (False, True))
    expected = [f"{phase} {index}" for index in range(1, num_run + 1) for phase in ("forward", "backward")]
    assert list(few.phases) == [*expected, "step"]
    assert (few.peak_bytes, few.where, few.flops) == (five.peak_bytes, few.where, five.flops)
    assert set(map(whole, few.sent)) == set(map(whole, five.sent))
    # A backward in between adds to the gradient, two numbers read and one written, as the first does not.
    adding = 3 * few.phases["step"].at_peak["gradients"] / DEVICES["cpu"].memory_bytes_per_second
    num_read_without = 3 if num_run == 2 else 0
    assert five.compute_seconds == pytest.approx(few.compute_seconds + num_read_without * adding, rel=1e-3)


def whole(sent: Any) -> tuple[object, ...]:
    """The counts in whole numbers."""
    return sent.collective, sent.axis, sent.num_ranks, sent.calls, sent.buffer_bytes, sent.sent_bytes


def test_a_ring_sends_each_part_once_or_twice() -> None:
    found = predicted(Run("toy", "hsdp", 2, 16, 2, "replica_last"))
    sent = {(each.collective, each.axis): each for each in found.sent}
    shards, replicas = sent["reduce_scatter", "dp_shard"], sent["all_reduce", "dp_replicate"]
    assert (shards.num_ranks, replicas.num_ranks) == (2, 2)
    assert shards.sent_bytes * 2 == shards.buffer_bytes
    assert replicas.sent_bytes == replicas.buffer_bytes, "to be reduced, and then to be gathered"
    assert found.sent_bytes == sum(each.sent_bytes for each in found.sent)
    gathered = 4 * found.num_parameters
    assert shards.buffer_bytes == 2 * gathered
    assert replicas.buffer_bytes - gathered // 2 < 1000, "and the norm's"


@pytest.mark.parametrize(
    ("slow", "bound"),
    [
        ({"link_bytes_per_second": 1.0}, "traffic"),
        ({"memory_bytes_per_second": 1.0}, "memory bandwidth"),
        ({"efficiency": 1e-12}, "compute"),
        ({"launch_seconds": 6e-6}, "launches"),
    ],
)
def test_what_bounds_an_update(slow: dict[str, Any], bound: str) -> None:
    fast = {"link_bytes_per_second": 1e15, "memory_bytes_per_second": 1e15, "flops": {torch.float32: 1e18}}
    fast |= {"launch_seconds": 0.0}
    found = predicted(TOY, device=replace(DEVICES["cpu"], **fast | slow))
    assert found.bound == bound
    parts = {"traffic": found.traffic_seconds, "launches": sum(each.host_seconds for each in found.phases.values())}
    assert found.seconds == pytest.approx(parts.get(bound, found.compute_seconds), rel=1e-2)


@pytest.mark.parametrize(
    ("computing", "host", "collectives", "busy"),
    [
        (5.0, 0.0, 0.0, 5.0),
        (1.0, 0.0, 1.189, 1.189),  # all of it beside collectives
        (5.0, 0.0, 1.189, 4.0 + 1.189),
        (1.0, 0.0, 7.0, 7.0),
        (1.0, 6.0, 1.189, 6.0),  # launches are the host's
    ],
)
def test_computing_is_slower_beside_a_collective(
    computing: float, host: float, collectives: float, busy: float
) -> None:
    assert busy_seconds(computing, host, collectives) == pytest.approx(busy)
    assert busy_seconds(computing, 100.0, collectives, is_cpu=True) >= 100.0 + computing


def test_a_cpu_launches_before_it_computes() -> None:
    for is_cpu, together in ((True, sum), (False, max)):
        forward = predicted(TOY, device=replace(DEVICES["cpu"], is_cpu=is_cpu)).phases["forward 1"]
        assert forward.host_seconds > forward.compute_seconds > 0
        assert forward.seconds == pytest.approx(together((forward.compute_seconds, forward.host_seconds)), rel=0.03)


def test_computing_waits_for_the_collectives_of_a_layer_and_not_for_those_of_parameters() -> None:
    sharded = predicted(TOY).phases["forward 1"]
    assert sharded.traffic_seconds > 0 == sharded.awaited_seconds
    parts = sharded.compute_seconds, sharded.host_seconds, sharded.traffic_seconds
    assert sharded.seconds == busy_seconds(*parts, is_cpu=True)

    def in_rows(mesh: DeviceMesh) -> nn.Module:
        with torch.device("meta"):
            model = llama(TOY)
        return parallelize_module(model, mesh, MLP_OVER_RANKS)

    layered = simulate(
        in_rows, sgd, lambda: batch_of(TOY, 1), losses.next_token, axes={"tp": 2}, device="cpu"
    ).phases["forward 1"]  # fmt: skip
    assert layered.awaited_seconds == layered.traffic_seconds > 0
    parts = layered.compute_seconds, layered.host_seconds, layered.traffic_seconds
    assert layered.seconds == pytest.approx(sum(parts))


def rounded(model: nn.Module, itemsize: int, share: int = 1) -> int:
    """Bytes of the parameters, each rounded as memory is."""
    return sum(-(-each.numel() * itemsize // share // 512) * 512 for each in model.parameters())


def test_holding_back_costs_the_gradient_that_is_not_sharded() -> None:
    """`last` keeps P in place of P / N; `every` keeps the root's reduction until the next forward has begun."""
    last, every = predicted(TOY), predicted(Run("toy", "fsdp2", 2, 16, 2, "every"))
    model = on_meta(TOY)
    whole = rounded(model, 4)
    layers = [4 * sum(each.numel() for each in layer.parameters()) for layer in model.model.layers]
    root = 4 * sum(each.numel() for each in model.parameters()) - sum(layers)
    shard = sum(-(-num_bytes // 2 // 512) * 512 for num_bytes in (*layers, root))  # a group's shards lie together
    held = last.phases["forward 2"].at_peak
    assert (held["unsharded gradients"], held.get("gradients", 0)) == (whole, 0)
    held = every.phases["forward 2"].at_peak
    assert (held.get("unsharded gradients", 0), held["gradients"]) == (0, shard)
    forward = {each.sync: each.phases["forward 2"].peak_bytes for each in (last, every)}
    assert forward["last"] - forward["every"] == whole - shard - -(-root // 512) * 512


def test_steady_memory_is_parameters_states_and_buckets() -> None:
    with torch.device("meta"):
        model = llama(TOY)
    whole, buffers = rounded(model, 4), 1024
    steps = 512 * len(list(model.parameters()))  # AdamW's count of each parameter
    assert predicted(Run("toy")).steady_bytes == 3 * whole + steps + buffers
    ddp = predicted(Run("toy", "ddp")).steady_bytes
    flat = 4 * sum(each.numel() for each in model.parameters())
    assert ddp == 3 * whole + steps + buffers + -(-flat // 512) * 512, "one bucket"
    assert predicted(Run("toy", optimizer="sgd-foreach")).steady_bytes == whole + buffers


def test_a_gradient_that_is_held_back_lies_beside_its_bucket() -> None:
    def viewed(microbatches: int) -> int:
        run = Run("toy", "ddp", 2, 16, microbatches)
        return simulate(
            lambda mesh: Replica(on_meta(run), gradient_as_bucket_view=True), lambda model: optimizer_of(model, run),
            lambda: batch_of(run, 1), losses.next_token, axes=run.axes, num_microbatches=microbatches, device="cpu",
        ).phases["step"].peak_bytes  # fmt: skip

    two = predicted(Run("toy", "ddp", 2, 16, 2), max_norm=None).phases
    whole = rounded(on_meta(TOY), 4)
    assert two["forward 2"].at_peak["gradients"] == whole
    assert two["step"].peak_bytes - viewed(2) == whole, "in the step a view is in its bucket alone"


def on_meta(run: Run) -> nn.Module:
    with torch.device("meta"):
        return llama(run)


def of_toy(shard: Callable[[nn.Module, Any], Any], **options: Any) -> Simulated:
    return simulate(
        lambda mesh: shard(on_meta(TOY), mesh), lambda model: optimizer_of(model, TOY), lambda: batch_of(TOY, 1),
        losses.next_token, **{"axes": {"dp_shard": 4}, "num_microbatches": 2, "device": "cpu"} | options,
    )  # fmt: skip


def sharded(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, **options)
    return model


@pytest.mark.parametrize("pin_memory", [False, True])
def test_what_is_offloaded_is_on_the_host(pin_memory: bool) -> None:
    policy = CPUOffloadPolicy(pin_memory=pin_memory)
    here, there = of_toy(sharded), of_toy(lambda model, mesh: sharded(model, mesh, offload_policy=policy))
    kept = {name: size for name, size in here.at_peak.items() if name in ("parameters", "optimizer states")}
    assert here.steady_bytes - there.steady_bytes == sum(kept.values())
    assert there.host_bytes > sum(kept.values())
    assert not {"parameters", "optimizer states", "gradients"} & set(there.at_peak)
    assert there.sent_bytes == here.sent_bytes


def test_categories_add_up_to_the_peak_in_every_phase() -> None:
    for found in (of_toy(sharded, max_norm=1.0), predicted(Run("toy", "ddp")), predicted(Run("toy"))):
        for phase in found.phases.values():
            assert sum(phase.at_peak.values()) == phase.peak_bytes
        assert found.peak_bytes == max(phase.peak_bytes for phase in found.phases.values())


def test_recomputing_trades_activations_for_flops() -> None:
    run = Run("toy", rows=16, tokens=64)
    kept, some, recomputed = (predicted(replace(run, recompute=each)) for each in ("no", "selective", "yes"))
    assert recomputed.at_peak["activations"] < some.at_peak["activations"] < 0.8 * kept.at_peak["activations"]
    assert recomputed.at_peak["activations"] < 0.6 * kept.at_peak["activations"]
    assert recomputed.flops > 1.2 * kept.flops
    assert 1.05 * kept.flops < some.flops < 0.95 * recomputed.flops


@pytest.mark.parametrize(("shard", "num_shards"), [(lambda model, mesh: model, 1), (sharded, 4)])
def test_shared_parameters_stay_shared(shard: Callable[[nn.Module, Any], nn.Module], num_shards: int) -> None:
    def tied(model: nn.Module, mesh: Any) -> nn.Module:
        model.lm_head.weight = model.model.embed_tokens.weight
        return shard(model, mesh)

    axes = {"dp_shard": num_shards}
    apart, together = of_toy(shard, axes=axes), of_toy(tied, axes=axes)
    embedding = 256 * 64
    assert apart.num_parameters - together.num_parameters == embedding
    assert apart.steady_bytes - together.steady_bytes == 3 * 4 * embedding // num_shards + 512


def test_several_models_are_one_update() -> None:
    run = Run("toy")
    found = simulate(
        lambda mesh: [on_meta(run), on_meta(run)],
        lambda both: torch.optim.SGD([each for model in both for each in model.parameters()], lr=0.1, foreach=True),
        lambda: batch_of(run, 1),
        lambda both, batch: (sum(losses.next_token(model, batch).total for model in both), 1),
    )
    assert found.num_parameters == 2 * predicted(run).num_parameters


def test_reserved_follows_the_true_history() -> None:
    found = predicted(TOY)
    free = found.reserved()
    assert free.fits
    assert free.peak_bytes >= free.allocated_bytes >= found.peak_bytes
    assert not found.reserved(found.peak_bytes // 2).fits
    assert found.reserved(free.peak_bytes) == free


def test_nothing_of_a_real_model_is_kept() -> None:
    """Weights that are there are replaced, and the process can go on to another simulation, or to a real group."""
    run = Run("toy")
    found = simulate(lambda mesh: llama(run), sgd, lambda: batch_of(run, 1), losses.next_token, device="cpu")
    assert found.at_peak == predicted(Run("toy", optimizer="sgd-for"), max_norm=None).at_peak
    assert not dist.is_initialized()


def test_a_gpu_steps_whole_tensors() -> None:
    """`LowBits` cuts them into pieces for the cache of a CPU alone, where launching costs nothing."""

    def step_of(num_features: int, device: str) -> float:
        found = simulate(
            lambda _: nn.Linear(num_features, num_features, bias=False, device="meta", dtype=torch.bfloat16),
            lambda model: LowBits(torch.optim.AdamW(model.parameters(), fused=True)),
            lambda: torch.zeros(1, num_features, dtype=torch.bfloat16), lambda model, batch: (model(batch).sum(), 1.0),
            device=device,
        )  # fmt: skip
        return found.phases["step"].host_seconds

    before = low_bits.PIECE
    assert step_of(64, "h100") == step_of(2048, "h100") > 0
    assert before == low_bits.PIECE
