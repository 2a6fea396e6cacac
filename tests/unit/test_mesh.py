"""Names of mesh axes, in a process group of one rank; what is refused is in tests/test_errors.py."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from megabatch.mesh import DataRanks, data_axes, mesh_groups

pytestmark = pytest.mark.usefixtures("group_of_one")

AXES = [  # of the mesh, and those of them along which samples differ
    (("dp",), ("dp",)),
    (("dp_replicate", "dp_shard"), ("dp_replicate", "dp_shard")),
    (("pp", "dp_shard", "cp", "tp", "ep"), ("dp_shard",)),  # one rank each: nothing to do along them
    (("tp",), ()),
]


@pytest.mark.parametrize(("axes", "expected"), AXES)
def test_data_axes(axes, expected):
    mesh = init_device_mesh("cpu", (1,) * len(axes), mesh_dim_names=axes)
    assert data_axes(mesh) == expected
    assert DataRanks(mesh_groups(mesh, expected)).degree == 1


def test_alone_every_message_comes_back():
    alone = DataRanks()
    assert alone.degree == 1
    assert alone.exchange([1, 2.5]) == [[1, 2.5]]
    assert alone.exchange_objects("sample") == ["sample"]
    assert alone.gather(torch.tensor([1.0, 2.0])).tolist() == [[1.0, 2.0]]
