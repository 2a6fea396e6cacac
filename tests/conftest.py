"""For every test: one thread, no network, and the same examples at every run, however busy the machine."""

import gc
import os
import signal
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers is imported later, by the tests that need it
STATE = tempfile.TemporaryDirectory(prefix="megabatch-state-")  # no test writes into the home of whoever runs it
os.environ["XDG_STATE_HOME"] = STATE.name
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")
CHEAP = {"group_of_one"}  # a module's fixtures that every process may make for itself
MANY = 1000  # tests, of which some share a module's fixtures
STARTS_RUNS = ("train", "page")  # folders in which what is slow starts the command line; tests/trainer runs it inside


@pytest.hookimpl(tryfirst=True)  # before those that the tier leaves out are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Choose the tier, and keep in one process the tests that share what a module has made."""
    for item in items:
        if item.path.parent.name in STARTS_RUNS and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.full)
        if item.get_closest_marker("xdist_group"):
            continue
        fixtures = item._fixtureinfo.name2fixturedefs
        if any(each[-1].scope == "module" and name not in CHEAP for name, each in fixtures.items()):
            item.add_marker(pytest.mark.xdist_group(str(item.path)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Stop where pytest-xdist does not group tests: every worker would run the ranks of a module again."""
    if node.config.option.dist == "loadgroup" and len(ids) > MANY and not any("@" in each for each in ids):
        raise pytest.UsageError("this pytest-xdist does not group tests under this pytest; see dev in pyproject.toml")


@pytest.fixture(scope="module")
def group_of_one():
    """A process group of this process alone, as wrappers need one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    destroy_group()


def destroy_group() -> None:
    """Destroy the process group, after the reducers of DDP that still refer to it.

    A reducer that is collected last joins gloo's threads while it holds the GIL, for which one of them may wait.
    """
    gc.collect()
    dist.destroy_process_group()
