"""Layouts: the ways to divide a recipe's processes that `megabatch plan --layouts` compares."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from megabatch.errors import MegabatchError
from megabatch.train.config import Config, ParallelConfig
from megabatch.train.config.contradictions import check_config
from megabatch.train.parallel.tensor_parallel import check_divisible, plan_of
from megabatch.train.plan.request import PlanRequest
from megabatch.train.plan.simulation import Simulator, bare_model, build_simulator, find_longest_sample
from megabatch.train.runtime.console import Console

NODES_FACTOR = 4  # from one number of nodes with a copy of the model to the next
MIN_STRETCH_TOKENS = 4096  # of a sequence that is cut over ranks: a shorter one sends much and computes little


def build_layouts(config: Config, request: PlanRequest, console: Console) -> tuple[list[Simulator], list[str]]:
    """Prepare every layout of a recipe for simulation. Return them, and a line for each that the trainer cannot run.

    Raises `MegabatchError` if it can run none.
    """
    if request.world == 1:
        raise MegabatchError("--layouts compares layouts of several processes and --world is 1; give --world N")
    if config.parallel.pp > 1 and "parallel.pp" in request.stated_keys:
        raise MegabatchError("--layouts does not compare pipelines; leave --parallel.pp out")
    sample = find_longest_sample(config, request.length_tokens, console)
    model: Any = bare_model(config)
    simulators: list[Simulator] = []
    left_out: dict[str, str] = {}
    for parallel in propose_layouts(config.parallel, request, sample.length_tokens):
        divided = config.model_copy(update={"parallel": parallel})
        try:
            check_config(divided)
            if parallel.tp > 1:
                plan_of(model)
                check_divisible(model, parallel.tp)
            simulators.append(build_simulator(divided, request, console, sample))
        except MegabatchError as error:
            left_out.setdefault(str(error), f"without {layout_text(parallel)}: {error}")
    if not simulators:
        nothing = f"no layout of {request.world} processes has the degrees that the command line states; leave one out"
        raise MegabatchError(next(iter(left_out), nothing))
    return simulators, list(left_out.values())


def propose_layouts(parallel: ParallelConfig, request: PlanRequest, length_tokens: int) -> list[ParallelConfig]:
    """Return the layouts of all processes with the keys that the command line states.

    Args:
        parallel: The recipe's section.
        request: The command line.
        length_tokens: Of the longest sample.
    """
    stated = [key.removeprefix("parallel.") for key in request.stated_keys if key.startswith("parallel.")]
    least = 2 if "cp" in stated else MIN_STRETCH_TOKENS
    keys = _layouts(parallel, request, "sequence_parallel" in stated, length_tokens // least)
    found = [parallel.model_copy(update=each) for each in keys]
    return [each for each in found if all(getattr(each, key) == getattr(parallel, key) for key in stated)]


def _layouts(
    parallel: ParallelConfig, request: PlanRequest, keeps_stream: bool, most_stretches: int
) -> Iterator[dict[str, Any]]:
    """Yield the keys of each layout, without and with tensor and context parallelism inside of a node."""
    per_node = min(request.world, request.device.ranks_per_node)
    degrees = [2**power for power in range(per_node.bit_length())]
    for tp, cp in product(degrees, degrees):
        ranks = tp * cp
        if per_node % ranks or request.world % ranks or cp > max(1, most_stretches):
            continue
        cut = {
            "tp": tp, "cp": cp, "pp": 1, "loss_parallel": parallel.loss_parallel and tp > 1,
            "sequence_parallel": parallel.sequence_parallel if keeps_stream else tp > 1,
        }  # fmt: skip
        for wrapper, replicas, shards in _data_layouts(request.world // ranks, per_node // ranks, tp, cp, parallel):
            yield {**cut, "wrapper": wrapper, "dp_replicate": replicas, "dp_shard": shards}


def _data_layouts(
    num_ranks: int, per_node: int, tp: int, cp: int, parallel: ParallelConfig
) -> Iterator[tuple[str | None, int, int]]:
    """Yield wrapper, copies and shards: one sharded model, a copy on each rank, or sharded copies on whole nodes.

    Wrappers shard and copy over ``cp`` too.
    """
    copies = "replicate" if tp * cp > 1 else "ddp"
    if num_ranks * cp == 1:
        yield copies if parallel.wrapper == "ddp" else parallel.wrapper, 1, 1
        return
    yield "fsdp2", 1, num_ranks
    yield copies, num_ranks, 1
    shards = per_node
    while shards < num_ranks:
        if shards > 1 and num_ranks % shards == 0:
            yield "fsdp2", num_ranks // shards, shards
        shards *= NODES_FACTOR


def layout_text(parallel: ParallelConfig) -> str:
    """Return a layout in words."""
    replicas, shards = parallel.dp_replicate or 1, parallel.dp_shard or 1
    if replicas > 1 and shards > 1:
        data = [f"hsdp {replicas} x {shards}"]
    else:
        data = [f"{parallel.wrapper} {replicas * shards}"] if replicas * shards > 1 else []
    cuts = [f"{axis} {degree}" for axis in ("cp", "tp", "pp") if (degree := getattr(parallel, axis)) > 1]
    return ", ".join([*data, *cuts, *["offloaded"] * parallel.cpu_offload])
