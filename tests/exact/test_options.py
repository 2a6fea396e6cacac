"""The same bits with the wrappers' options, and where parameters are frozen."""

from dataclasses import replace
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from tests.exact import harness
from tests.exact.cells import Cell
from tests.exact.launch import of_ranks
from tests.exact.wrappers import WRAPPERS, Wrapped
from tests.tiers import some

OPTIONS = {  # with the wrappers that have them
    "keep_unsharded": ("fsdp2", "hsdp"),
    "cpu_offload": ("fsdp2", "hsdp"),
    "gather_once": ("fsdp2", "hsdp", "fsdp2-tp"),
    "mesh_told": ("ddp", "hsdp", "fsdp1-hybrid"),
    "mesh_untold": ("tp", "fsdp2-tp"),
    "some": ("ddp", "ddp-find-unused", "fsdp2", "hsdp", "replicate", "fsdp1", "several", "fsdp2-tp"),  # every second
    "frozen": ("plain", "ddp", "fsdp2", "hsdp", "replicate", "fsdp1", "several", "tp", "fsdp2-tp"),
}
SHARDED_WITH: dict[str, dict[str, Any]] = {  # of fully_shard
    "keep_unsharded": {"reshard_after_forward": False},
    "cpu_offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}
CASES = ("C1", "short-tail", "calls-updates", "empty-update")


class OptionRun(harness.CellRun):
    """A cell with an option."""

    def __init__(self, cell: Cell, option: str) -> None:
        self.option = option
        super().__init__(cell)
        if option == "mesh_told":
            self.mesh = harness.mesh_of(cell.wrapper, cell.world)
        if option == "mesh_untold":
            self.mesh = None

    def _new_model(self, dtype: Any) -> nn.Module:
        model = super()._new_model(dtype)
        if self.option == "frozen":
            model.embedding.requires_grad_(False)
            model.head.bias.requires_grad_(False)
        return model

    def _wrapped(self, model: nn.Module) -> Wrapped:
        return harness.wrap(model, self.cell.wrapper, **SHARDED_WITH.get(self.option, {}))


def world_of(wrapper: str) -> int:
    """Return the number of processes for a wrapper's options: two, or four where it has two axes."""
    return 4 if len(WRAPPERS[wrapper].axes(4)) > 1 else 2


def run_job(name: str) -> dict[str, Any]:
    """The job "option:case:wrapper:world:sync", with a "/" for the colon of a sync."""
    option, case, wrapper, world, sync = name.split(":")
    values = ("bits", wrapper, world, "auto", case, "list", "weigh", "one-sample", "forward_backward", "no-clip")
    return harness.run(OptionRun(replace(Cell.parse(":".join(values)), sync=sync.replace("/", ":")), option))


JOBS = [
    f"{option}:{case}:{wrapper}:{world_of(wrapper)}:{sync}"
    for option, wrappers in OPTIONS.items()
    for wrapper in wrappers
    for case in CASES
    for sync in {"gather_once": ("gather_once",), "some": ("every/2",)}.get(option, ("last", "every"))
]
results = of_ranks("tests.exact.test_options:run_job", JOBS)


@pytest.mark.slow
@pytest.mark.parametrize("job", some(JOBS, 4))
def test_same_bits_with_the_option(results, job: str) -> None:
    for value in results(job):
        assert value["gradient"] == 0, value["parameter"]
        assert not value["wrong"], value["wrong"]
