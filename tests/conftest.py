"""For every test: one thread, no network, and the same examples at every run, however busy the machine."""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers is imported later, by the tests that need it
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")
LONGEST = (  # files that begin first, so that processes that share them end together
    "exact/test_exact.py", "train/test_pipeline.py", "train/test_tensor.py", "test_examples.py",
    "train/test_resume.py", "comm/test_collectives.py", "train/test_same_losses.py", "train/test_cli.py",
    "train/test_train.py", "exact/test_disturbed.py", "exact/test_joint.py", "exact/test_pipeline.py",
    "train/test_parts.py", "exact/test_mutations.py", "exact/test_options.py", "train/test_model.py",
    "exact/test_precision.py", "exact/test_routed.py", "exact/test_context.py", "exact/test_compiled.py",
    "unit/test_stepping.py", "exact/test_experts.py", "elastic/test_pulse.py", "elastic/test_resize.py",
    "elastic/test_stop.py", "elastic/test_kills.py", "elastic/test_restart.py", "exact/test_inputs.py",
    "exact/test_families.py", "integrations/test_users_of_trainer.py", "exact/test_proofs.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    places = {folder / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(scope="module")
def group_of_one():
    """A process group of this process alone, as wrappers need one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
