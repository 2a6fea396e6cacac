"""Wrappers in a process group of one rank: what sync they choose, and that they are exact, also after a failure."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator
from megabatch.wrappers.mesh import DataRanks, groups_of
from tests.unit.failures.wrappers import language_model, mesh, sharded_ends, tensor_parallel_ends
from tests.unit.small import expected, gradients, model_of_integers, same_bits, samples, squares, weighed

pytestmark = [
    pytest.mark.usefixtures("group_of_one"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),  # torch's: a linear layer of one dim more returns a view
]

BATCH = samples([3, 1, 0, 5, 2, 4, 1])


def without_spare() -> nn.Module:
    """The model of integers without the parameter that it never uses: DDP waits for every parameter."""
    model = model_of_integers()
    del model.spare
    return model


def ddp() -> nn.Module:
    return DistributedDataParallel(without_spare())


def fsdp2() -> nn.Module:
    return fully_shard(without_spare(), mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))


def fsdp2_mixed() -> nn.Module:
    """Computes in float32, where these integers are exact too, and keeps another copy of its gradient for that."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    return fully_shard(without_spare(), mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)


def static_graph() -> nn.Module:
    return DistributedDataParallel(without_spare(), static_graph=True)


WRAPPERS = {
    "plain": without_spare,
    "DDP": ddp,
    "DDP, static graph": static_graph,
    "FSDP2": fsdp2,
    "FSDP2, mixed": fsdp2_mixed,
}

CHOSEN = {  # wrapper -> what each of "auto", "last" and "every" comes to
    "plain": ("last", "last", "last"), "DDP": ("last", "last", "every"), "FSDP2": ("every", "last", "every"),
}  # fmt: skip


def full(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def is_exact(model: nn.Module) -> bool:
    return same_bits([full(each) for each in gradients(model)], expected(without_spare(), BATCH))


@pytest.mark.parametrize("wrapper", CHOSEN)
def test_the_plan_says_the_sync_and_why(wrapper):
    asked = ("auto", "last", "every")
    plans = [GradientAccumulator(WRAPPERS[wrapper](), micro_batch_size=2, sync=each).plan(BATCH) for each in asked]
    assert tuple(plan.sync for plan in plans) == CHOSEN[wrapper]
    assert all(plan.reason for plan in plans)


@pytest.mark.parametrize("wrapper", ["plain", "DDP", "FSDP2", "FSDP2, mixed"])
@pytest.mark.parametrize("policy", ["last", "every"])
@pytest.mark.parametrize("breaks_at", [0, 1, 3])
@pytest.mark.parametrize("after_forward", [True, False])
def test_after_a_loss_that_raised_the_next_update_is_exact(wrapper, policy, breaks_at, after_forward):
    seen = []

    def breaking(model, microbatch):
        seen.append(len(seen))
        total = squares(model, microbatch) if after_forward or len(seen) <= breaks_at else None
        if len(seen) > breaks_at:
            raise ArithmeticError("the loss broke")
        return total

    model = WRAPPERS[wrapper]()
    gradient = GradientAccumulator(model, micro_batch_size=2, sync=policy)
    for _ in range(2):
        seen.clear()
        with pytest.raises(ArithmeticError):
            gradient.forward_backward(BATCH, breaking)
        assert not any(isinstance(each, torch.Tensor) for each in gradients(model))
        gradient.forward_backward(BATCH, weighed)
        gradient.finalize()
        assert is_exact(model)


@pytest.mark.usefixtures("group_of_one")
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
