"""A parameter that only some ranks or microbatches use has the gradient of the uncut update, on every rank."""

from typing import Any

import pytest
from torch import nn

from megabatch import MegabatchError
from tests.exact import harness, models, oracle
from tests.exact.cells import Cell
from tests.exact.launch import of_ranks
from tests.tiers import some

# Which samples use the expert: (rank, index) of every call; the others do not.
USERS = {
    "first-sample-of-rank-0": {(0, 0)},
    "last-sample-of-last-rank": {(-1, -1)},
    "one-of-each-rank": {(rank, rank % 2) for rank in range(4)},
    "second-of-all": {(rank, 1) for rank in range(4)},  # in the first update: the longest, which runs first
    "nobody": set(),
}


class RoutedRun(harness.CellRun):
    """A cell on a model with an expert."""

    def __init__(self, cell: Cell, users: set[tuple[int, int]], find_unused_parameters: bool = True) -> None:
        self.users, self.find_unused_parameters = users, find_unused_parameters
        super().__init__(cell)

    def _new_model(self, dtype: Any) -> nn.Module:
        return models.integer_model("routed")

    def _wrapped(self, model: nn.Module) -> nn.Module:
        options = {"find_unused_parameters": self.find_unused_parameters} if self.cell.wrapper == "ddp" else {}
        return harness.wrap(model, self.cell.wrapper, **options)

    def updates(self) -> list[list[harness.Call]]:
        updates = super().updates()
        for update in updates:
            for call in update:
                for rank, share in enumerate(call):
                    for index, sample in enumerate(share):
                        self._route(sample, rank, index, len(share))
        return updates

    def _route(self, sample: oracle.Sample, rank: int, index: int, size: int) -> None:
        here = {(rank, index), (rank - self.cell.world, index - size)}
        sample["input_ids"][0] = 1 if here & self.users else 2


def _run(name: str, **options: bool) -> dict[str, Any]:
    users, wrapper, world, sync = name.split(":")
    values = ("bits", wrapper, world, sync, "updates", "list", "weigh", "one-sample", "forward_backward", "no-clip")
    return harness.run(RoutedRun(Cell.parse(":".join(values)), USERS[users], **options))


def run_job(name: str) -> dict[str, Any]:
    """The job "users:wrapper:world:sync"."""
    return _run(name)


def run_unsaid(name: str) -> str:
    """The same where DDP was not told that parameters can be unused: what is raised."""
    try:
        return str(_run(name, find_unused_parameters=False))
    except MegabatchError as error:
        return str(error)


WORLDS = {"plain": (1, 3), "ddp": (1, 3), "fsdp2": (1, 3), "hsdp": (4,), "replicate": (3,), "fsdp1": (2,)}
JOBS = [f"{users}:{wrapper}:{world}:{sync}" for wrapper, worlds in WORLDS.items() for world in worlds
        for users in USERS for sync in ("last", "every")]  # fmt: skip
JOBS += [f"{users}:hsdp:4:replica_last" for users in USERS]
results = of_ranks("tests.exact.test_routed:run_job", JOBS)


@pytest.mark.slow
@pytest.mark.parametrize("job", some(JOBS, 5))
def test_gradient_of_what_not_everyone_uses(results, job: str) -> None:
    for value in results(job):
        assert value["gradient"] <= (1e-15 if "ddp" in job and "every" in job else 0), value["parameter"]
        assert not value["wrong"], value["wrong"]


UNSAID = [f"second-of-all:ddp:{world}:last" for world in WORLDS["ddp"]]
unsaid = of_ranks("tests.exact.test_routed:run_unsaid", UNSAID)


@pytest.mark.slow
@pytest.mark.parametrize("job", UNSAID)
def test_what_ddp_leaves_unreduced_is_an_error(unsaid, job: str) -> None:
    assert all("find_unused_parameters=True" in value for value in unsaid(job))
