"""For every test: one thread, no network, and the same examples at every run, however busy the machine."""

import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers is imported later, by the tests that need it
torch.set_num_threads(1)
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


@pytest.fixture(scope="module")
def group_of_one():
    """A process group of this process alone, as wrappers need one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
