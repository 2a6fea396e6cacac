"""Layouts: the ways to divide a recipe's processes that `megabatch plan --layouts` compares."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from megabatch.errors import MegabatchError
from megabatch.train.config import Config, ParallelConfig
from megabatch.train.config.batch_size import sizes_of
from megabatch.train.config.contradictions import check_config
from megabatch.train.parallel.pipeline_stages import check_model, per_rank
from megabatch.train.parallel.tensor_parallel import check_divisible, plan_of
from megabatch.train.plan.estimate import measure_experts
from megabatch.train.plan.request import PlanRequest
from megabatch.train.plan.simulation import Outlines, Simulator, build_simulator, find_longest_sample
from megabatch.train.runtime.console import Console

# Factor from one number of nodes with a copy of the model to the next.
NODES_FACTOR = 4
# Ranks of a pipeline.
MAX_STAGES = 8
# A shorter stretch sends much and computes little.
MIN_STRETCH_TOKENS = 4096


def build_layouts(config: Config, request: PlanRequest, console: Console) -> tuple[list[Simulator], list[str]]:
    """Prepare every layout of a recipe for simulation. Return them, and a line for each that the trainer cannot run.

    Raises `MegabatchError` if it can run none.
    """
    if request.world == 1:
        raise MegabatchError("--layouts compares layouts of several processes and --world is 1; give --world N")
    sample = find_longest_sample(config, request.length_tokens, console)
    outlines = Outlines(config, sample.length_tokens)
    model: Any = outlines.whole
    simulators: list[Simulator] = []
    left_out: dict[str, str] = {}
    stages = pipeline_degrees(model, config, request)
    experts = measure_experts(model)
    num_experts = 1 if experts is None else experts.num_experts
    for parallel in propose_layouts(config.parallel, request, sample.length_tokens, stages, num_experts):
        divided = config.model_copy(update={"parallel": parallel})
        try:
            check_config(divided)
            if parallel.tp > 1:
                plan_of(model)
                check_divisible(model, parallel.tp)
            simulators.append(build_simulator(divided, request, console, sample, outlines))
        except MegabatchError as error:
            left_out.setdefault(str(error), f"without {layout_text(parallel)}: {error}")
    if not simulators:
        nothing = f"no layout of {request.world} processes has the degrees that the command line states; leave one out"
        raise MegabatchError(next(iter(left_out), nothing))
    return simulators, list(left_out.values())


def pipeline_degrees(model: Any, config: Config, request: PlanRequest) -> list[int]:
    """Return the ranks of a pipeline to propose: as stated, or powers of two for a model that can be cut."""
    parallel = config.parallel
    if "parallel.pp" in request.stated_keys:
        return [parallel.pp]
    try:
        check_model(model, parallel)
    except MegabatchError:
        return [1]
    # Each stage needs a layer, and a pipeline as many microbatches as ranks.
    limit = min(MAX_STAGES, sizes_of(config.update).largest, model.config.num_hidden_layers // per_rank(parallel))
    return [2**power for power in range(max(1, limit).bit_length())]


def propose_layouts(
    parallel: ParallelConfig, request: PlanRequest, length_tokens: int, stages: Sequence[int] = (1,),
    num_experts: int = 1,
) -> list[ParallelConfig]:  # fmt: skip
    """Return the layouts of all processes with the keys that the command line states.

    Args:
        parallel: The recipe's section.
        request: The command line.
        length_tokens: Of the longest sample.
        stages: Numbers of a pipeline's ranks.
        num_experts: Of a layer, which may be dealt out over ranks.
    """
    stated = [key.removeprefix("parallel.") for key in request.stated_keys if key.startswith("parallel.")]
    min_tokens = 2 if "cp" in stated else MIN_STRETCH_TOKENS
    keys = _layouts(parallel, request, "sequence_parallel" in stated, length_tokens // min_tokens, stages, num_experts)
    layouts = [parallel.model_copy(update=update) for update in keys]
    return [layout for layout in layouts if all(getattr(layout, key) == getattr(parallel, key) for key in stated)]


def _layouts(
    parallel: ParallelConfig, request: PlanRequest, keeps_stream: bool, most_stretches: int, stages: Sequence[int],
    num_experts: int,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield the keys of each layout: alone, with tensor or context parallelism inside of a node, with a pipeline."""
    per_node = min(request.world, request.device.ranks_per_node)
    degrees = [2**power for power in range(per_node.bit_length())]
    for tp, cp, pp in product(degrees, degrees, stages):
        ranks = tp * cp * pp
        if per_node % (tp * cp) or request.world % ranks or cp > max(1, most_stretches):
            continue
        cut = {
            "tp": tp, "cp": cp, "pp": pp, "loss_parallel": parallel.loss_parallel and tp > 1,
            "sequence_parallel": parallel.sequence_parallel if keeps_stream else tp > 1,
        }  # fmt: skip
        if pp == 1:
            cut |= {"schedule": ParallelConfig().schedule, "stages_per_rank": None}
        for wrapper, replicas, shards in _data_layouts(request.world // ranks, per_node // (tp * cp), cut, parallel):
            layout = {**cut, "wrapper": wrapper, "dp_replicate": replicas, "dp_shard": shards}
            yield {**layout, "ep": 1}
            for ep in [2**power for power in range(1, shards.bit_length())]:
                if ranks == 1 and wrapper == "fsdp2" and shards % ep == num_experts % ep == 0:
                    yield {**layout, "ep": ep}


def _data_layouts(
    num_ranks: int, per_node: int, cut: Mapping[str, Any], parallel: ParallelConfig
) -> Iterator[tuple[str | None, int, int]]:
    """Yield wrapper, copies and shards: one sharded model, a copy on each rank, or sharded copies on whole nodes.

    Wrappers shard and copy over ``cp`` too. Stages are sharded or copied over all their ranks.
    """
    copies = "replicate" if cut["tp"] * cut["cp"] * cut["pp"] > 1 else "ddp"
    if num_ranks * cut["cp"] == 1:
        yield copies if parallel.wrapper == "ddp" else parallel.wrapper, 1, 1
        return
    yield "fsdp2", 1, num_ranks
    yield copies, num_ranks, 1
    shards = per_node if cut["pp"] == 1 else num_ranks
    while shards < num_ranks:
        if shards > 1 and num_ranks % shards == 0:
            yield "fsdp2", num_ranks // shards, shards
        shards *= NODES_FACTOR


def layout_text(parallel: ParallelConfig) -> str:
    replicas, shards = parallel.dp_replicate or 1, parallel.dp_shard or 1
    if replicas > 1 and shards > 1:
        data = [f"hsdp {replicas} x {shards}"]
    else:
        data = [f"{parallel.wrapper} {replicas * shards}"] if replicas * shards > 1 else []
    cuts = [f"{axis} {degree}" for axis in ("ep", "cp", "tp", "pp") if (degree := getattr(parallel, axis)) > 1]
    return ", ".join([*data, *cuts, *["offloaded"] * parallel.cpu_offload])
