"""Names of mesh axes, in a process group of one rank; what is refused is in tests/test_errors.py."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from megabatch.wrappers.mesh import DataRanks, groups_of

pytestmark = pytest.mark.usefixtures("group_of_one")

AXES = [("dp",), ("dp_replicate", "dp_shard"), ("pp", "dp_shard", "cp", "tp", "ep"), ("tp",)]


@pytest.mark.parametrize("axes", AXES)
def test_axes_of_one_rank_each_need_no_message(axes):
    mesh = init_device_mesh("cpu", (1,) * len(axes), mesh_dim_names=axes)
    ranks = DataRanks.of_mesh(mesh)
    assert (ranks.degree, ranks.num_weighing, ranks.num_all) == (1, 1, 1)
    assert len(groups_of(mesh, axes)) == len(axes)
    assert ranks.exchange_numbers([1, 2.5]) == [[1, 2.5]]


def test_alone_every_message_comes_back():
    alone = DataRanks()
    assert alone.degree == 1
    assert alone.exchange_numbers([1, 2.5]) == [[1, 2.5]]
    assert alone.exchange_objects("sample") == ["sample"]
    assert alone.gather_on_device(torch.tensor([1.0, 2.0])).tolist() == [[1.0, 2.0]]
