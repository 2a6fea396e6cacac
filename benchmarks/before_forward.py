"""What an update does before its first forward, and what of its loading runs behind forwards.

    python -m benchmarks.before_forward               # two minutes; writes benchmarks/results/before_forward_*.json
    python -m benchmarks.before_forward --quick       # small, to see that it works; writes nothing

Two processes on gloo, a small Llama in DDP, updates of samples as long as those of GSM8K. Timed are the message by
which ranks agree on a call and the collating and weighing before it, inside of real updates; and the message alone, on
more processes too. Of lists in memory, the CPU time of one rank from the call to its first forward, without and with
`GradientAccumulator.prepare` before, and the parts of the former. Where loads take time, by
sleeping, the update's time says which of them ran while a forward or backward did.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import result
from megabatch import GradientAccumulator, UpdateSampler, losses
from megabatch.batching.deferred import Deferred
from megabatch.core import call as engine_call
from megabatch.core.contract import loss, loss_hooks
from megabatch.core.mesh import DataRanks
from megabatch.train.runtime.ranks import Ranks
from tests.train.on_ranks import on_ranks

CLAIM = (
    "a prepared batch in memory is at its first forward in under 1 ms for 64 samples and under 10 ms for 8,192; the "
    "message before it is a few thousandths of a small update, and less of any other"
)
NUM_RANKS, CAP_TOKENS = 2, 4096
SIZES = (8, 32)  # samples of an update
IN_MEMORY = (64, 8192)  # samples of a rank
GROUPS = (2, 4, 8)  # processes that send the message alone
NUM_UPDATES, NUM_MESSAGES = 8, 500
LOAD_SECONDS, RUN_SECONDS, NUM_LOADED = 0.01, 0.02, 16  # of a sample; of a microbatch; samples, two to a microbatch
Row = dict[str, Any]


class Timed:
    """A function of the library's, with the seconds of every call."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds: list[float] = []
        self._function: Callable[..., Any] = getattr(owner, name)
        setattr(owner, name, lambda *given: self(*given))

    def __call__(self, *given: Any) -> Any:
        start = time.perf_counter()
        found = self._function(*given)
        self.seconds.append(time.perf_counter() - start)
        return found

    def take(self) -> float:
        """Seconds since the last time."""
        seconds, self.seconds = sum(self.seconds), []
        return seconds


def build() -> nn.Module:
    """The model of recipes/gsm8k.toml."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=384, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=4096, use_cache=False,
    )  # fmt: skip
    return DistributedDataParallel(AutoModelForCausalLM.from_config(config))


def updates(ranks: Ranks, size: int, number: int) -> Row:
    """Milliseconds of this rank's updates, and of what comes before their first forward."""
    message, collated = Timed(DataRanks, "exchange_numbers"), Timed(engine_call, "collate_planned")
    lengths = lengths_of(2000)
    sampler = UpdateSampler(lengths, global_batch_size=size, dp_rank=ranks.rank, dp_degree=ranks.size)
    gradient = GradientAccumulator(build(), max_microbatch_tokens=CAP_TOKENS)
    rows: list[list[float]] = []
    for ids, _ in zip(sampler, range(number + 2), strict=False):
        samples = [{"input_ids": torch.zeros(int(lengths[each]), dtype=torch.long)} for each in ids]
        samples = [{**each, "labels": each["input_ids"]} for each in samples]
        ranks.barrier()
        message.take()
        start = time.perf_counter()
        gradient.forward_backward(samples, losses.next_token)
        gradient.finalize(max_norm=1.0)
        rows.append([1000 * (time.perf_counter() - start), 1000 * message.take(), 1000 * collated.take()])
    update, told, made = (statistics.median(column) for column in zip(*rows[2:], strict=True))
    return {"update_ms": update, "message_ms": told, "collating_ms": made, "messages_ms": [row[1] for row in rows[2:]]}


def messages(ranks: Ranks, number: int) -> float:
    """Milliseconds of the message alone, sent by ranks that have just had the one before."""
    group = DataRanks([torch.distributed.group.WORLD])  # pyright: ignore[reportArgumentType]
    found: list[float] = []
    for _ in range(number):
        start = time.perf_counter()
        group.exchange_numbers([0.0] * 15)
        found.append(1000 * (time.perf_counter() - start))
    return statistics.median(found[number // 10 :])


def in_memory(size: int) -> Row:
    """CPU milliseconds of one rank before the first forward of a list of samples."""
    gradient = GradientAccumulator(nn.Embedding(384, 8), max_microbatch_tokens=2 * CAP_TOKENS)
    texts = [torch.zeros(int(length), dtype=torch.long) for length in lengths_of(size)]
    samples = [{"input_ids": each, "labels": each} for each in texts]
    planner, hooks = gradient.planner, loss_hooks(losses.next_token)  # the methods that forward_backward calls first
    rows: list[list[float]] = []
    for _ in range(NUM_UPDATES):
        times = [time.thread_time()]
        measured = planner.samples(samples, hooks.prepare)
        times.append(time.thread_time())
        plan = planner.plan(measured)
        times.append(time.thread_time())
        engine_call.collate_planned(measured, plan, hooks.weigh)
        times.append(time.thread_time())
        rows.append([1000 * (after - before) for before, after in pairwise(times)])
    found = [round(statistics.median(column), 3) for column in zip(*rows, strict=True)]
    parts = dict(zip(("measured_ms", "split_ms", "collated_and_weighed_ms"), found, strict=True))
    return {"samples": size, **before_first_forward(gradient, samples), **parts}


def before_first_forward(gradient: GradientAccumulator, samples: list[Any]) -> Row:
    """CPU milliseconds of the calling thread from a call to its first forward, without and with `prepare` before it."""
    started: list[float] = []

    @loss(weigh=losses.next_token.weigh, prepare=losses.next_token.prepare)
    def run(model: nn.Module, microbatch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        started.append(time.thread_time())
        return model.weight.sum(), losses.next_token.weigh(microbatch)

    rows: list[tuple[float, float, float]] = []
    for _ in range(NUM_UPDATES):
        times: list[float] = []
        for is_prepared in (False, True):
            batch: Any = samples
            asked = time.thread_time()
            if is_prepared:
                batch = gradient.prepare(samples, run)
                times.append(1000 * (time.thread_time() - asked))
                batch.preparation._result.result()  # as after an update that takes longer
            started.clear()
            called = time.thread_time()
            gradient.forward_backward(batch, run)
            times.append(1000 * (started[0] - called))
            gradient.finalize()
        rows.append((times[0], times[1], times[2]))
    alone, asking, prepared = (round(statistics.median(column), 3) for column in zip(*rows, strict=True))
    return {"before_first_forward_ms": alone, "the_same_when_prepared_ms": prepared, "prepare_itself_ms": asking}


def lengths_of(size: int) -> np.ndarray:
    """Lengths as those of GSM8K."""
    return np.random.default_rng(0).lognormal(np.log(485), 0.4, size).clip(50, 1692).astype(np.int64)


def asleep(seconds: float, value: Any) -> Any:
    time.sleep(seconds)
    return value


def loading(look_ahead: int, *, weighs: bool, tells: bool) -> float:
    """Seconds of an update on one rank, whose loads and forwards sleep."""

    def run(model: nn.Module, microbatch: Any) -> tuple[torch.Tensor, float]:
        time.sleep(RUN_SECONDS)
        return model(microbatch["x"]).sum(), len(microbatch["x"])

    loss_fn = loss(weigh=lambda microbatch: len(microbatch["x"]))(run) if weighs else run
    gradient = GradientAccumulator(nn.Linear(4, 1), micro_batch_size=2)
    weights = [1.0] * NUM_LOADED if tells else None
    batch = Deferred(
        lambda _: asleep(LOAD_SECONDS, {"x": torch.ones(4)}), [4] * NUM_LOADED, weights, look_ahead=look_ahead
    )
    start = time.perf_counter()
    gradient.forward_backward(batch, loss_fn)
    gradient.finalize()
    return time.perf_counter() - start


def measured(ranks: Ranks, sizes: tuple[int, ...], number: int) -> list[Row]:
    return [updates(ranks, size, number) for size in sizes]


def of_processes(number: int, function: Callable[..., Any], *given: Any) -> list[Any]:
    """What each of so many ranks returns."""
    with tempfile.TemporaryDirectory() as name:
        return on_ranks(number, Path(name), function, *given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    made_with = result.made_with(["transformers"])
    sizes, number, num_messages = (SIZES[:1], 2, 50) if quick else (SIZES, NUM_UPDATES, NUM_MESSAGES)
    found = of_processes(NUM_RANKS, measured, sizes, number)
    rows: list[Row] = []
    for place, size in enumerate(sizes):
        of_ranks = [of_rank[place] for of_rank in found]
        last = [min(both) for both in zip(*(row["messages_ms"] for row in of_ranks), strict=True)]  # who waits for none
        rows.append({
            "samples_of_an_update": size,
            "update_ms": round(max(row["update_ms"] for row in of_ranks), 2),
            "collating_and_weighing_ms": round(max(row["collating_ms"] for row in of_ranks), 3),
            "message_ms": round(max(row["message_ms"] for row in of_ranks), 3),
            "message_of_the_last_to_come_ms": round(statistics.median(last), 3),
        })  # fmt: skip
        print(rows[-1], flush=True)
    in_lists = [in_memory(size) for size in ((64,) if quick else IN_MEMORY)]
    print(*in_lists, sep="\n", flush=True)
    alone = {size: round(max(of_processes(size, messages, num_messages)), 3) for size in GROUPS}
    print(f"the message alone, by processes: {alone} ms", flush=True)
    ways = {"without weigh": (False, False), "weighed, weights told": (True, True), "weighed": (True, False)}
    loads = {name: {f"look_ahead={ahead}": round(loading(ahead, weighs=weighs, tells=tells), 3) for ahead in (0, 1, 2)}
             for name, (weighs, tells) in ways.items()}  # fmt: skip
    print(loads)
    if not quick:
        serial = {"loads_s": NUM_LOADED * LOAD_SECONDS, "microbatches_s": NUM_LOADED / 2 * RUN_SECONDS}
        whole = {"claim": CLAIM, **made_with, "threads": 1, "ranks": NUM_RANKS, "message_alone_ms_by_processes": alone,
                 "rows": rows, "lists_in_memory": in_lists,
                 "loading": {"asleep": serial, "update_s": loads}}  # fmt: skip
        print(result.write(result.dated("before_forward"), whole))


if __name__ == "__main__":
    from benchmarks.before_forward import main as run  # processes find its functions by the module's name

    run()
