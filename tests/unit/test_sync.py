"""Wrappers and meshes in a process group of one rank: the sync they choose, tied embeddings, axes without messages."""

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator
from megabatch.core.mesh import DataRanks
from megabatch.inspection.mesh_axes import groups_of
from tests.unit.failures.table import SAMPLES, linear
from tests.unit.failures.wrappers import language_model, mesh, sharded_ends, tensor_parallel_ends

pytestmark = pytest.mark.usefixtures("group_of_one")

WRAPPERS = {
    "plain": linear, "DDP": lambda: DistributedDataParallel(linear()),
    "FSDP2": lambda: fully_shard(linear(), mesh=mesh("dp")),
}  # fmt: skip
CHOSEN = {  # wrapper -> what each of "auto", "last" and "every" comes to
    "plain": ("last", "last", "last"), "DDP": ("last", "last", "every"), "FSDP2": ("every", "last", "every"),
}  # fmt: skip


@pytest.mark.parametrize("wrapper", CHOSEN)
def test_the_plan_says_the_sync_and_why(wrapper):
    asked = ("auto", "last", "every")
    plans = [GradientAccumulator(WRAPPERS[wrapper](), micro_batch_size=2, sync=each).plan(SAMPLES) for each in asked]
    assert tuple(plan.sync for plan in plans) == CHOSEN[wrapper]
    assert all(plan.reason for plan in plans)


@pytest.mark.parametrize(
    "make", [lambda: tensor_parallel_ends(tied_again=True), lambda: sharded_ends(together=True), language_model]
)
def test_tied_embeddings_that_stay_one_parameter_are_taken(make) -> None:
    GradientAccumulator(make(), mesh=mesh("dp", "tp"), micro_batch_size=1)


AXES = [("dp",), ("dp_replicate", "dp_shard"), ("pp", "dp_shard", "cp", "tp", "ep"), ("tp",)]


@pytest.mark.parametrize("axes", AXES)
def test_axes_of_one_rank_each_need_no_message(axes):
    mesh = init_device_mesh("cpu", (1,) * len(axes), mesh_dim_names=axes)
    ranks = DataRanks.of_mesh(mesh)
    assert (ranks.degree, ranks.num_weighing, ranks.num_all) == (1, 1, 1)
    assert len(groups_of(mesh, axes)) == len(axes)
    assert ranks.exchange_numbers([1, 2.5]) == [[1, 2.5]]
