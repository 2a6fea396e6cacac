"""A lost replica on one host: `Replicas` beside torchft alone and torchrun's restart. Their price, beside DDP.

Seconds count from a SIGKILL until a survivor, or a restarted process, finishes its next microbatch in a quorum without
the lost replica. The price is CPU time and messages of an update in which nobody is lost. Writes
benchmarks/results/elastic_peers_*.json.

    pip install torchft==0.2.0
    python -m benchmarks.elastic_peers
"""

import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import elastic_torchft, result
from benchmarks.elastic_torchft import MAX_NORM, MICRO_BATCH_SIZE, NUM_REPLICAS, Case, Fault, Journal
from megabatch import Extension, GradientAccumulator, UpdateSampler, losses
from megabatch.core.mesh import num_collectives

CLAIM = "survivors go on as fast as torchft's do, without a lost update and with the whole batch"
NUM_RUNS, NUM_UPDATES, KILLED_IN = 3, 6, 2
FEW, MANY = 10, 40  # updates of the runs that are timed; the difference leaves out what comes once
PER_REPLICA = 8 // 2  # microbatches of an update


def loss_of(model: nn.Module, ids: list[int], weight: float) -> torch.Tensor:
    data = elastic_torchft.samples()
    total = torch.zeros((), dtype=torch.float64)
    for sample in ids:
        row = data[sample][None]
        logits = model(input_ids=row).logits[0, :-1]
        total = total + nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum")
    return total / weight


def run_torchft_alone(index: int, folder: Path, address: str) -> None:
    """torchft's own loop: the mean over the quorum, and an update that is dropped if a member is lost."""
    torch.set_num_threads(1)
    journal = Journal(folder, f"replica{index}", [Fault(1, KILLED_IN, "reduction")] if index == 1 else [])
    with (folder / f"{journal.name}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    model = elastic_torchft.new_model()
    optimizer, _ = elastic_torchft.new_optimizer(model)
    (folder / f"{journal.name}.ready").touch()
    elastic_torchft.wait_for_file(folder / "go")
    port = elastic_torchft.free_port()
    store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    manager, group = elastic_torchft.watched_manager(journal, address, rank=0, world_size=1, store_port=port)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager.register_state_dict_fn(
        "all", load, lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    )
    (folder / f"{journal.name}.managed").touch()
    for other in range(NUM_REPLICAS):
        elastic_torchft.wait_for_file(folder / f"replica{other}.managed")
    while manager.current_step() < NUM_UPDATES:
        manager.start_quorum()
        optimizer.zero_grad()
        for number in range(PER_REPLICA):
            first = (manager.current_step() * 24 + index * 8 + number * 2) % 90
            loss_of(model, [first, first + 1], 100.0).backward()
            journal.write("microbatch", update=manager.current_step())
        flat = elastic_torchft.flat(parameter.grad for parameter in model.parameters())
        for part in flat.split(2**14):
            manager.allreduce(part).wait()
        size, update = manager.num_participants(), manager.current_step()
        commits = manager.should_commit()
        journal.write("verdict", update=update, commits=commits, samples=PER_REPLICA * MICRO_BATCH_SIZE * size)
        if commits:
            optimizer.step()
    journal.write("end")
    del store, group
    os._exit(0)


def run_ddp(rank: int, folder: Path, port: int, num_updates: int) -> None:
    """The same updates on three ranks of DDP."""
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_REPLICAS)
    model = elastic_torchft.new_model()
    data, sampler = elastic_torchft.samples(), UpdateSampler(
        list(map(len, elastic_torchft.samples())), global_batch_size=24, seed=3, micro_batch_size=MICRO_BATCH_SIZE
    )  # fmt: skip
    optimizer, scheduler = elastic_torchft.new_optimizer(model)
    journal = Journal(folder, f"replica{rank}")

    wrapped, step = DistributedDataParallel(model), 0
    watch = PlainWatch(journal)
    gradient = GradientAccumulator(wrapped, micro_batch_size=MICRO_BATCH_SIZE, extensions=[watch])
    began, before = resource.getrusage(resource.RUSAGE_SELF), num_collectives() or 0
    while step < num_updates:
        for ids in sampler:
            batch = [{"input_ids": data[sample], "labels": data[sample]} for sample in ids]
            gradient.forward_backward(batch, losses.next_token)
            update = gradient.finalize(max_norm=MAX_NORM)
            assert update.finite
            whole = elastic_torchft.flat(parameter.grad for parameter in model.parameters())
            (folder / f"{journal.name}.{step}.gradient").write_bytes(whole.numpy().tobytes())
            optimizer.step()
            scheduler.step()
            journal.write("step", update=step, loss=float(update.loss))
            step += 1
            if step == num_updates:
                break
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = used.ru_utime + used.ru_stime - began.ru_utime - began.ru_stime
    journal.write("end", cpu_seconds=seconds, messages=(num_collectives() or 0) - before)
    dist.barrier()
    os._exit(0)


class PlainWatch(Extension):
    """Notes each microbatch, as `Watch` does."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def surround_steps(self, steps: Any, call: Any) -> Any:
        for step in steps:
            yield step
            self.journal.write("microbatch")


def start(target: Callable[..., None], arguments: list[tuple[Any, ...]]) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(elastic_torchft.PRELOADED)
    processes = [context.Process(target=target, args=given) for given in arguments]
    for process in processes:
        process.start()
    return processes


def wait_for(processes: list[Any]) -> None:
    deadline = time.time() + elastic_torchft.START_LIMIT_SECONDS
    elastic_torchft.wait_until(lambda: not any(process.is_alive() for process in processes), deadline)
    for process in processes:
        process.kill()


def torchft_alone(address: str) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="elastic_peers_"))
    processes = start(run_torchft_alone, [(index, folder, address) for index in range(NUM_REPLICAS)])
    deadline = time.time() + elastic_torchft.START_LIMIT_SECONDS
    elastic_torchft.wait_until(lambda: len(list(folder.glob("*.ready"))) == NUM_REPLICAS, deadline)
    (folder / "go").touch()
    wait_for(processes)
    events = elastic_torchft.read_events(folder)
    fault = next(event for event in events if event["event"] == "fault")
    seconds = elastic_torchft.times_after(fault, NUM_REPLICAS - 1, events)
    verdicts = [event for event in events if event["event"] == "verdict" and event["replica"] == "replica0"]
    return {
        "microbatch_seconds": seconds["microbatch_seconds"],
        "dropped_updates": sum(not verdict["commits"] for verdict in verdicts),
        "samples_after": verdicts[-1]["samples"],
        "samples_before": verdicts[0]["samples"],
    }


def replicas(address: str) -> dict[str, Any]:
    case = Case("killed in reduction", (Fault(1, KILLED_IN, "reduction"),))
    folder = elastic_torchft.run(case, 0, address)
    events = elastic_torchft.read_events(folder)
    fault = next(event for event in events if event["event"] == "fault")
    seconds = elastic_torchft.times_after(fault, NUM_REPLICAS - 1, events)
    steps = [event for event in events if event["event"] == "step" and event["replica"] == "replica0"]
    return {
        "microbatch_seconds": seconds["microbatch_seconds"],
        "dropped_updates": NUM_UPDATES - len(steps),
        "samples_after": steps[3]["samples"],
        "samples_before": steps[0]["samples"],
    }


def torchrun_restart() -> dict[str, Any]:
    """DDP under one torchrun with a checkpoint after each update; the killed rank costs a restart of all."""
    folder = Path(tempfile.mkdtemp(prefix="elastic_peers_"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_REPLICAS)]
    command += ["--max-restarts", "3", "-m", "benchmarks.elastic_peers", "rank", str(folder)]
    with (folder / "log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=log, timeout=600, check=True)
    events = elastic_torchft.read_events(folder)
    fault = next(event for event in events if event["event"] == "fault")
    after = [event["time"] for event in events if event["event"] == "microbatch" and event.get("attempt", "0") != "0"]
    return {"microbatch_seconds": round(min(after) - fault["time"], 3), "dropped_updates": 0}


def run_rank(folder: Path) -> None:
    """One rank of `torchrun_restart`."""
    torch.set_num_threads(1)
    rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"attempt{attempt}", store)  # torch's own store still has addresses of dead ranks
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_REPLICAS)
    faults = [Fault(1, KILLED_IN, "reduction")] if rank == 1 and attempt == "0" else []
    journal, saved = Journal(folder, f"replica{rank}", faults), folder / "checkpoint.pt"
    model = elastic_torchft.new_model()
    optimizer, _ = elastic_torchft.new_optimizer(model)
    step = 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while step < NUM_UPDATES:
        optimizer.zero_grad()
        for number in range(PER_REPLICA):
            first = (step * 24 + rank * 8 + number * 2) % 90
            loss_of(model, [first, first + 1], 300.0).backward()
            journal.write("microbatch", update=step, attempt=attempt)
        journal.reach("reduction", step)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        step += 1
        if rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, folder / "new")
            (folder / "new").rename(saved)
        dist.barrier()
    dist.destroy_process_group()


def price(address: str) -> dict[str, Any]:
    """CPU milliseconds and messages of an update, of one rank."""
    found: dict[str, Any] = {}
    for name in ("DDP", "replicas"):
        ends = []
        for num_updates in (FEW, MANY):
            if name == "replicas":
                folder = elastic_torchft.run(Case("price", num_updates=num_updates), 0, address)
            else:
                folder, port = Path(tempfile.mkdtemp(prefix="elastic_peers_")), elastic_torchft.free_port()
                wait_for(start(run_ddp, [(rank, folder, port, num_updates) for rank in range(NUM_REPLICAS)]))
            events = elastic_torchft.read_events(folder)
            ends.append([event for event in events if event["event"] == "end"])
        seconds = [statistics.mean(event["cpu_seconds"] for event in found) for found in ends]
        messages = [statistics.mean(event["messages"] for event in found) for found in ends]
        found[name] = {
            "cpu_ms_per_update": round(1000 * (seconds[1] - seconds[0]) / (MANY - FEW), 2),
            "messages_per_update": round((messages[1] - messages[0]) / (MANY - FEW), 2),
        }
    return found


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        run_rank(Path(sys.argv[2]))
        return
    if result.version("torchft") is None:
        raise SystemExit(f"benchmarks.elastic_peers: {elastic_torchft.MISSING}")
    torch.set_num_threads(1)
    origin, rows = result.made_with(["torchft"]), []
    with elastic_torchft.lighthouse() as address:
        for number in range(NUM_RUNS):  # interleaved
            for name, run in (
                ("replicas", lambda: replicas(address)),
                ("torchft alone", lambda: torchft_alone(address)),
                ("torchrun's restart", torchrun_restart),
            ):
                rows.append({"name": name, "run": number, **run()})
                print(json.dumps(rows[-1]), flush=True)
        prices = [price(address) for _ in range(2)]
    print(json.dumps(prices))
    summary: dict[str, Any] = {}
    for name in dict.fromkeys(row["name"] for row in rows):
        members = [row for row in rows if row["name"] == name]
        seconds = [row["microbatch_seconds"] for row in members]
        rest = {key: value for key, value in members[-1].items() if key.startswith(("dropped", "samples"))}
        median = round(statistics.median(seconds), 3)
        summary[name] = {"runs": len(members), "seconds_median": median, "seconds_worst": max(seconds), **rest}
    cost = {
        name: {key: statistics.median(each[name][key] for each in prices) for key in prices[0][name]}
        for name in prices[0]
    }
    found = {"claim": CLAIM, "summary": summary, "price": cost, "rows": rows, "prices": prices, **origin}
    print(json.dumps(summary), json.dumps(cost))
    print(result.write(result.dated("elastic_peers"), found).name)


if __name__ == "__main__":
    main()
