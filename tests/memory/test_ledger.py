"""The ledger: what is alive, what it is for, and that nothing of it stays behind."""

import gc
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from megabatch import PlanError
from megabatch.simulate.allocator import reserved
from megabatch.simulate.devices import DEVICES
from megabatch.simulate.fake_cluster import fake_mesh
from megabatch.simulate.ledger import ALLOCATE, PHASE, Ledger, Step, list_storages, tagging_shards, trace_of
from megabatch.simulate.repeated_layers import align

KIBI = 1024  # a tensor of 256 float32


def ones(num_kibi: int = 1) -> torch.Tensor:
    return torch.ones(256 * num_kibi)


def watched() -> tuple[object, ...]:
    """The functions that the ledger replaces while it is open."""
    return (
        torch.UntypedStorage.resize_, "resize_" in vars(torch.UntypedStorage),
        ShardingPropagator._propagate_tensor_meta_non_cached,
        FSDPParamGroup.wait_for_unshard, FSDPParamGroup.post_backward,
    )  # fmt: skip


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_storages_are_counted_once_and_until_they_are_freed(fake: bool) -> None:
    with FakeTensorMode() if fake else torch.enable_grad(), Ledger() as ledger:
        ledger.enter_phase("one", "activations")
        first = ones(4)
        view = first[:256].view(16, 16)
        second = first + 1
        assert ledger.log.total_bytes == 8 * KIBI
        del first
        assert ledger.log.total_bytes == 8 * KIBI, "a view keeps it"
        del view
        assert ledger.log.total_bytes == 4 * KIBI
        ledger.enter_phase("two", "temporaries")
        second.mul_(2)
        third = ones(1)
        ledger.tag([second], "gradients")
    phases = {name: (phase.peak_bytes, phase.at_peak) for name, phase in ledger.log.phases.items()}
    assert phases == {
        "one": (8 * KIBI, {"activations": 8 * KIBI}),
        "two": (5 * KIBI, {"gradients": 4 * KIBI, "temporaries": KIBI}),
    }
    assert reserved(trace_of(ledger.log.steps)).allocated_bytes == 8 * KIBI
    del third


def test_sizes_are_rounded_as_the_allocator_rounds_them() -> None:
    with Ledger() as ledger:
        kept = [torch.ones(1), torch.ones(129)]
        assert ledger.log.total_bytes == 512 + 1024
    del kept


def test_a_storage_that_is_resized_is_counted_anew() -> None:
    with Ledger() as ledger:
        kept = ones(4)
        (storage,) = list_storages(kept)
        storage.resize_(0)
        assert ledger.log.total_bytes == 0
        storage.resize_(8 * KIBI)
        assert ledger.log.total_bytes == 8 * KIBI
    assert [(event.is_allocation, event.num_bytes // KIBI) for event in trace_of(ledger.log.steps)] == [
        (True, 4), (False, 4), (True, 8)
    ]  # fmt: skip


def test_what_lies_on_the_host_is_apart() -> None:
    with Ledger(on_host=["optimizer states"]) as ledger:
        ledger.enter_phase("one", "activations")
        kept, state = ones(2), ones(4)
        ledger.tag([state], "optimizer states")
        assert (ledger.log.total_bytes, ledger.log.host_bytes) == (2 * KIBI, 4 * KIBI)
        ledger.tag([kept], "host")
        assert (ledger.log.total_bytes, ledger.log.host_bytes) == (0, 6 * KIBI)
        ledger.tag([kept], "optimizer states")
    assert (ledger.log.host_bytes, +ledger.log.held) == (6 * KIBI, {})


def test_a_peak_is_where_memory_turns_or_ends() -> None:
    for num_more, peak in ((0, 3), (4, 6)):
        with Ledger() as ledger:
            ledger.enter_phase("one", "activations")
            first, second = ones(1), ones(2)
            del first
            third = ones(num_more)
        assert ledger.log.phases["one"].at_peak == {"activations": peak * KIBI}
        del second, third


@pytest.mark.parametrize("fails", [False, True], ids=["as it ends", "after an exception"])
def test_nothing_stays_replaced(fails: bool) -> None:
    before = watched()
    try:
        with Ledger() as ledger, tagging_shards(ledger):
            assert all(new is not old for new, old in zip(watched(), before, strict=True))
            if fails:
                raise KeyError("of the code that is watched")
    except KeyError:
        assert fails
    assert watched() == before


def test_a_world_that_fails_leaves_no_process_group() -> None:
    def fail() -> None:
        with fake_mesh({"dp": 3}):
            assert dist.get_world_size() == 3
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not dist.is_initialized()


def test_a_world_is_not_made_beside_another() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    expected = (
        "this process has a process group, and a simulated one would take its place; simulate in a process of its "
        "own, or call torch.distributed.destroy_process_group() before"
    )
    try:
        with pytest.raises(PlanError, match=re.escape(expected)):
            fake_mesh({"dp": 2}).__enter__()
        assert dist.get_world_size() == 1, "the other one is as it was"
    finally:
        dist.destroy_process_group()


def of_a_shard() -> int:
    """The peak of one operation on a shard of 1 KiB of 8."""
    with fake_mesh({"dp": 8}) as mesh, FakeTensorMode(allow_non_fake_inputs=True), Ledger() as ledger:
        ledger.enter_phase("one", "activations")
        shard = DTensor.from_local(ones(1), mesh, [Shard(0)], run_check=False)
        result = shard.sin()
        assert ledger.log.total_bytes == 2 * KIBI
    del result
    return ledger.log.phases["one"].peak_bytes


def test_trials_of_an_operation_on_the_global_shape_are_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_a_shard() == 2 * KIBI
    monkeypatch.setattr(Ledger, "_mute_trials", lambda self, propagate: propagate)
    assert of_a_shard() >= 9 * KIBI, "without this, they would be"


def test_meshes_of_an_earlier_world_are_forgotten() -> None:
    """DTensor would hand out a mesh that equals this one, with groups of other names."""
    for groups_before in (3, 0):
        with fake_mesh({"dp": 2, "tp": 2}) as mesh:
            for _ in range(groups_before):
                dist.new_group([0, 1])
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
            partial = DTensor.from_local(ones(1).reshape(16, 16), mesh, [Shard(1)], run_check=False) @ (
                DTensor.from_local(ones(1).reshape(16, 16), mesh, [Shard(0)], run_check=False)
            )
            partial.full_tensor()


def test_arithmetic_and_memory_take_what_a_device_needs_for_them() -> None:
    device = DEVICES["a100-80g"]
    with FakeTensorMode(), Ledger(device) as ledger:
        ledger.enter_phase("product", "activations")
        layer = nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16)
        left = torch.empty(8192, 4096, dtype=torch.bfloat16)
        ledger.begin()
        ledger.enter_phase("product", "activations")
        product = layer(left)
        ledger.enter_phase("copy", "activations")
        copy = product.clone()
    phase, copying = ledger.log.phases["product"], ledger.log.phases["copy"]
    assert phase.flops == 2 * 8192 * 4096 * 4096
    assert phase.compute_seconds == pytest.approx(phase.flops / (device.efficiency * 312e12))
    assert copying.compute_seconds == pytest.approx(2 * product.numel() * 2 / 2039e9)
    assert (copying.flops, copying.arithmetic_seconds) == (0, 0)
    del copy, left
    gc.collect()


@pytest.mark.parametrize(
    ("phase", "more", "aligns"),
    [
        ("forward", (512, 1024), True),  # a layer more
        ("forward", (512, 2048), False),
        ("step", (512, 2048), True),  # an optimizer keeps states of other sizes
    ],
)
def test_steps_that_do_not_repeat_are_not_multiplied(phase: str, more: tuple[int, ...], aligns: bool) -> None:
    shorter, longer = (
        [Step(PHASE, category=phase), *(Step(ALLOCATE, name, size, 0, "kept") for name, size in enumerate(sizes))]
        for sizes in ((512, 1024, 4096), (512, 1024, *more, 4096))
    )
    assert (align(shorter, longer) is not None) == aligns


def test_a_layer_before_bytes_that_grow_with_the_layers_is_found() -> None:
    """A step that collects the outputs of all layers has other bytes in the shallow model than in the deeper one."""
    layer, end = (1024, 4096), (512, 8192, *range(512, 4096, 512))
    shorter, longer = (
        [Step(PHASE, category="forward"), *(Step(ALLOCATE, name, size, 0, "kept") for name, size in enumerate(sizes))]
        for sizes in ((*3 * layer, 3 * 512, *end), (*4 * layer, 4 * 512, *end))
    )
    found = align(shorter, longer)
    assert found is not None
    assert (found.blocks, found.sizes) == ([(1 + 3 * 2, 2)], {1 + 4 * 2: 3 * 512})


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_a_cpu_casts_operands_to_the_common_dtype_first(fake: bool) -> None:
    """A GPU does so inside of its kernel."""
    peaks: list[int] = []
    for device in ("cpu", "h100-80g"):
        with FakeTensorMode() if fake else torch.enable_grad(), Ledger(DEVICES[device]) as ledger:
            total, part = ones(8), ones(8).bfloat16()
            ledger.enter_phase("one", "activations")
            total.add_(part).mul_(2.0).add_(total)
            peaks.append(ledger.log.phases["one"].peak_bytes)
            assert ledger.log.total_bytes == 12 * KIBI
    assert peaks == [20 * KIBI, 12 * KIBI]
