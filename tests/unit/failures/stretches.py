"""Errors on two ranks of a cp axis, each of which sees stretches of all samples."""

from collections.abc import Callable

import torch
from torch.distributed.device_mesh import init_device_mesh

from megabatch import loss, losses
from megabatch.batching.deferred import Deferred
from tests.unit.failures.table import accumulator, squares, told

UNWEIGHED_STRETCHES = "'cp'"
PREPARED_STRETCHES = "prepare="
WHOLE_WEIGHTS = "'cp'"
TEXTS = [{"input_ids": torch.arange(4), "labels": torch.arange(4)} for _ in range(2)]


def unweighed_stretches() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    return told(lambda: accumulator(mesh=mesh).forward_backward(TEXTS, squares))


def prepared_stretches() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    prepared = loss(weigh=losses.count_targets, prepare=dict)(squares)
    return told(lambda: accumulator(mesh=mesh).forward_backward(TEXTS, prepared))


def weights_of_whole_samples() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    batch = Deferred(TEXTS.__getitem__, [4, 4], [3, 3])
    return told(lambda: accumulator(mesh=mesh).forward_backward(batch, losses.next_token))


JOBS: dict[str, tuple[Callable[[], str], str]] = {
    "stretches without weigh": (unweighed_stretches, f"LossContractError: {UNWEIGHED_STRETCHES}"),
    "stretches of what is prepared": (prepared_stretches, f"PlanError: {PREPARED_STRETCHES}"),
    "stretches of weights told": (weights_of_whole_samples, f"PlanError: {WHOLE_WEIGHTS}"),
}
