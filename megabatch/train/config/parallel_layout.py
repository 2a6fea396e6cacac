"""Layout of a run's processes: the degrees of parallelism, the ranks with the same samples, the mesh."""

from dataclasses import dataclass
from math import prod

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megabatch.errors import MegabatchError
from megabatch.train.config import ParallelConfig

# Of a mesh; the last one's ranks are neighbors, who talk most.
AXES = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
# By wrapper, the axis that it lays out.
COPYING = {"ddp": "dp_replicate", "replicate": "dp_replicate", "fsdp2": "dp_shard"}


@dataclass(frozen=True)
class Layout:
    """The degrees of parallelism; their product is the number of processes. One of the first two may be left open."""

    dp_replicate: int | None = None  # None: what dp_shard leaves; 1 where the wrapper shards
    dp_shard: int | None = None  # None: what dp_replicate leaves; 1 where the wrapper copies
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1  # of the ranks that dp_shard has

    def dp_degree(self, num_ranks: int) -> int:
        return num_ranks // (self.cp * self.tp * self.pp)

    def cp_rank(self, rank: int) -> int:
        """Return the index of a rank's stretch of its samples' sequences."""
        return rank // self.tp % self.cp

    def data_degrees(self, wrapper: str | None, num_ranks: int) -> tuple[int, int]:
        """dp_replicate and dp_shard for a wrapper, with what was left open."""
        degree = self.dp_degree(num_ranks)
        if self.dp_replicate is not None:
            return self.dp_replicate, degree // self.dp_replicate
        if self.dp_shard is not None:
            return degree // self.dp_shard, self.dp_shard
        return (1, degree) if wrapper == "fsdp2" else (degree, 1)

    def axes(self, wrapper: str, num_ranks: int) -> dict[str, int]:
        """Return the degrees of the mesh's axes that have more than one rank, and of the wrapper's axis.

        With ``ep``, dp_shard has the ranks that hold the same experts, and tp has one rank: transformers asks for it.
        """
        dp_replicate, dp_shard = self.data_degrees(wrapper, num_ranks)
        degrees = (self.pp, dp_replicate, dp_shard // self.ep, self.ep, self.cp, self.tp)
        single = (COPYING.get(wrapper), "tp" if self.ep > 1 else None)
        return {axis: degree for axis, degree in zip(AXES, degrees, strict=True) if degree > 1 or axis in single}

    def mesh(self, wrapper: str, num_ranks: int, device_type: str) -> DeviceMesh:
        axes = self.axes(wrapper, num_ranks)
        return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


# Every rank sees samples of its own.
ALONE = Layout()


def layout_of(parallel: ParallelConfig, num_ranks: int) -> Layout:
    """Return the layout of a recipe. Raises `MegabatchError` for degrees that do not fit processes or wrapper."""
    check_product(parallel, num_ranks)
    layout = Layout(parallel.dp_replicate, parallel.dp_shard, parallel.cp, parallel.tp, parallel.pp, parallel.ep)
    if parallel.pp > 1:
        check_schedule(parallel)
    dp_shard = layout.data_degrees("fsdp2", num_ranks)[1]
    if parallel.ep > 1 and dp_shard % parallel.ep:
        there = "1 rank has" if dp_shard == 1 else f"{dp_shard} ranks have"
        raise MegabatchError(
            f"parallel.ep is {parallel.ep} and {there} the shards of the model (parallel.dp_shard), which it must "
            "divide; change one of them, or the number of processes"
        )
    if parallel.wrapper is not None:
        check_wrapper(parallel.wrapper, *layout.data_degrees(parallel.wrapper, num_ranks))
    return layout


def check_product(parallel: ParallelConfig, num_ranks: int) -> None:
    degrees = {axis: getattr(parallel, axis) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp")}
    said = {axis: degree for axis, degree in degrees.items() if degree is not None}
    product, is_whole = prod(said.values()), len(said) == len(degrees)
    if num_ranks == product or (num_ranks % product == 0 and not is_whole):
        return
    shown = [axis for axis, degree in said.items() if degree > 1] or ["dp_replicate", "dp_shard"]
    names, numbers = (" x ".join(terms) for terms in (shown, [str(said[axis]) for axis in shown]))
    there = f"there {'is 1 process' if num_ranks == 1 else f'are {num_ranks} processes'}"
    expected = f"{product}" if is_whole else f"a multiple of {product}"
    raise MegabatchError(
        f"parallel.{names} is {numbers}{f' = {product}' if len(shown) > 1 else ''} and {there}; "
        f"take {expected}, or change a degree"
    )


def check_schedule(parallel: ParallelConfig) -> None:
    """Raise for a pipeline's schedule that cannot have so many stages, or DDP."""
    from megabatch.pipeline import SCHEDULES

    schedule = SCHEDULES[parallel.schedule]
    if parallel.stages_per_rank is not None and schedule.per_rank not in (None, parallel.stages_per_rank):
        raise MegabatchError(
            f'parallel.stages_per_rank is {parallel.stages_per_rank} and parallel.schedule "{parallel.schedule}" has '
            f'{schedule.per_rank} on each rank; set the schedule to "Interleaved1F1B", or leave stages_per_rank out'
        )
    if parallel.wrapper == "ddp" and schedule.splits:
        raise MegabatchError(
            f'parallel.wrapper is "ddp" and parallel.schedule "{parallel.schedule}", which computes gradients without '
            'the hooks by which DDP reduces; set the wrapper to "replicate", or the schedule to "1F1B"'
        )


def check_wrapper(wrapper: str, dp_replicate: int, dp_shard: int) -> None:
    if COPYING[wrapper] == "dp_replicate" and dp_shard > 1:
        raise MegabatchError(
            f'parallel.wrapper is "{wrapper}", which shards nothing, and parallel.dp_shard is {dp_shard}; set the '
            'wrapper to "fsdp2", or dp_shard to 1'
        )
    if wrapper == "fsdp2" and dp_shard == 1 < dp_replicate:
        raise MegabatchError(
            f'parallel.wrapper is "fsdp2" and parallel.dp_replicate {dp_replicate} leaves nothing to shard over; set '
            'the wrapper to "replicate", or dp_replicate lower'
        )
