"""Lost replicas at a constant batch: `megabatch.integrations.torchft.Replicas` under real kills, stops and joins.

Each run starts three replicas beside one ``torchft_lighthouse``. Replicas die by SIGKILL at planned and at random
moments, are stopped for a while, and join. A run is right if each update's gradient is that of plain torch in float64
(1e-12), the weights too, and all replicas end with the same bits. Writes benchmarks/results/elastic_torchft_*.json.

    pip install torchft==0.2.0
    python -m benchmarks.elastic_torchft            # some minutes on two cores
    python -m benchmarks.elastic_torchft verdict    # the cases whose names have this in them; writes nothing
"""

import contextlib
import faulthandler
import json
import multiprocessing
import os
import random
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks import result
from megabatch import Extension, GradientAccumulator, UpdateSampler, loss, losses
from megabatch.planners import Rows, SameBits

CLAIM = (
    "a replica that is killed, stopped or added changes neither the samples nor the gradient of any update: survivors "
    "compute what it owed and keep what they have"
)
MISSING = "torchft is not installed: pip install torchft==0.2.0"
NUM_REPLICAS, NUM_UPDATES, BATCH_SIZE, MICRO_BATCH_SIZE = 3, 6, 24, 2
VOCABULARY, WIDTH, LENGTH, NUM_SAMPLES = 97, 64, 32, 100
MAX_NORM = 0.5  # below the norm of these gradients, so that the clip bites
TOLERANCE = 1e-12
SETTINGS = {  # and how far a gradient may be from that of plain torch
    "float64": TOLERANCE,
    "dropout": TOLERANCE,  # of 10 %
    "fsdp2": TOLERANCE,  # two ranks each
    "same_bits": 0.0,  # float32
    "mixed": 1e-7,  # a parameter in float32, two terms, and sums in float64
}
HEARTBEAT_SECONDS, HEARTBEAT_TIMEOUT_SECONDS, COLLECTIVE_TIMEOUT_SECONDS = 0.05, 0.5, 2.0
START_LIMIT_SECONDS, RUN_LIMIT_SECONDS = 300, 90  # on a machine that is busy with others
PRELOADED = ["torchft", "transformers.models.gpt2.modeling_gpt2", "megabatch.learner", "megabatch.integrations.torchft"]


@dataclass(frozen=True)
class Fault:
    """A signal to one replica: at a named point of an attempt, or from outside some seconds after an update.

    A stopped replica goes on once another has finished the update, or after so many seconds. ``split`` is no signal:
    the replica votes against an update whose reduction worked, with seconds once a stopped replica goes on.
    """

    replica: int
    update: int
    point: str
    attempt: int = 0
    signal: int = signal.SIGKILL
    seconds: float = 0.0


@dataclass(frozen=True)
class Case:
    """A run. ``setting`` is one of SETTINGS."""

    name: str
    faults: tuple[Fault, ...] = ()
    join_after: int | None = None  # a new replica starts once this update is finished
    setting: str = "float64"
    num_replicas: int = NUM_REPLICAS
    num_updates: int = NUM_UPDATES


def new_model(setting: str = "float64", seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    dropout = 0.1 if setting == "dropout" else 0.0
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=LENGTH,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    if setting == "mixed":
        return Scaled(model.double())
    return model if setting == "same_bits" else model.double()


class Scaled(nn.Module):
    """A model in float64 with a scale of its logits in float32."""

    def __init__(self, model: GPT2LMHeadModel) -> None:
        super().__init__()
        self.model, self.scale = model, nn.Parameter(torch.ones(VOCABULARY))

    @property
    def transformer(self) -> nn.Module:
        return self.model.transformer

    def forward(self, **batch: torch.Tensor) -> Any:
        output = self.model(**batch)
        output.logits = output.logits * self.scale.double()
        return output


def two_weights(microbatch: Any) -> dict[str, Any]:
    return {"next_token": losses.next_token.weigh(microbatch), "first": len(microbatch["labels"])}


@loss(weigh=two_weights)
def two_terms(model: Any, microbatch: Any) -> dict[str, tuple[torch.Tensor, Any]]:
    """Two means, over tokens and over samples."""
    labels = microbatch["labels"]
    logits = model(input_ids=microbatch["input_ids"]).logits
    total = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    first = logits[:, 0].logsumexp(-1).square().sum()
    return {"next_token": (total, (labels[:, 1:] != -100).sum()), "first": (first, len(labels))}


def new_optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def samples() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(5, LENGTH + 1, (NUM_SAMPLES,), generator=generator).tolist()
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]


def new_sampler(setting: str = "float64") -> UpdateSampler:
    """Return a sampler of all samples of each update: 24, and 4 in the last of the five updates of an epoch."""
    limits: dict[str, Any] = {"same_bits": True, "micro_batch_size": MICRO_BATCH_SIZE} if setting == "same_bits" else {}
    return UpdateSampler(
        list(map(len, samples())), global_batch_size=BATCH_SIZE, seed=3, dp_rank=0, dp_degree=1, **limits
    )


def new_planner(setting: str) -> Rows | SameBits:
    return SameBits(Rows(MICRO_BATCH_SIZE)) if setting == "same_bits" else Rows(MICRO_BATCH_SIZE)


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


Reference = tuple[list[torch.Tensor], torch.Tensor]


def undisturbed(setting: str = "float64") -> Reference:
    """Every update's clipped gradient, and the weights after the last, in plain torch, sample by sample."""
    model, data, sampler = new_model(setting), samples(), new_sampler()
    optimizer, scheduler = new_optimizer(model)
    gradients = []
    while len(gradients) < NUM_UPDATES:
        for ids in sampler:
            optimizer.zero_grad()
            weight = sum(len(data[sample]) - 1 for sample in ids)
            for sample in ids:
                row = data[sample][None]
                logits = model(input_ids=row).logits[0, :-1]
                total = nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum") / weight
                if setting == "mixed":
                    total = total + model(input_ids=row).logits[0, 0].logsumexp(-1).square() / len(ids)
                total.backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            gradients.append(flat(parameter.grad for parameter in model.parameters()))
            optimizer.step()
            scheduler.step()
            if len(gradients) == NUM_UPDATES:
                break
    return gradients, flat(model.parameters())


def undisturbed_bits() -> Reference:
    """The same of one process with `SameBits`, in float32."""
    model, data, sampler = new_model("same_bits"), samples(), new_sampler("same_bits")
    optimizer, scheduler = new_optimizer(model)
    gradient = GradientAccumulator(model, planner=new_planner("same_bits"))
    gradients = []
    while len(gradients) < NUM_UPDATES:
        for ids in sampler:
            batch = [{"input_ids": data[sample], "labels": data[sample]} for sample in ids]
            gradient.forward_backward(batch, losses.next_token)
            gradient.finalize(max_norm=MAX_NORM)
            gradients.append(flat(parameter.grad for parameter in model.parameters()))
            optimizer.step()
            scheduler.step()
            if len(gradients) == NUM_UPDATES:
                break
    return gradients, flat(model.parameters())


@dataclass
class Journal:
    """Log of a replica: one JSON object a line, readable after a kill."""

    folder: Path
    name: str
    faults: list[Fault] = field(default_factory=list)
    attempt: int = 0
    num_messages: int = 0

    def write(self, event: str, **values: Any) -> None:
        with (self.folder / f"{self.name}.jsonl").open("a") as file:
            file.write(json.dumps({"time": time.time(), "event": event, **values}) + "\n")

    def reach(self, point: str, update: int) -> bool:
        """Carry out the fault that is planned here, once. Return True for a split."""
        for fault in self.faults:
            if (fault.point, fault.update) == (point, update) and self.attempt >= fault.attempt:
                self.faults.remove(fault)
                if point == "split":
                    if fault.seconds:
                        wait_for_file(self.folder / "back")
                    return True
                self.write("fault", signal=int(fault.signal), update=update)
                os.kill(os.getpid(), fault.signal)
                (self.folder / "back").touch()
        return False


class Watch(Extension):
    """Notes each microbatch, and reaches the point "forward" in the second of an attempt."""

    def __init__(self, journal: Journal, manager: Any) -> None:
        self.journal, self.manager, self.num_begun = journal, manager, 0

    def surround_steps(self, steps: Any, call: Any) -> Any:
        for step in steps:
            self.num_begun += 1
            hook = call.wrapper.models[0].transformer.register_forward_hook(self.reach)
            yield step
            hook.remove()
            self.journal.write("microbatch", update=self.manager.current_step())

    def reach(self, *_: object) -> None:
        if self.num_begun > 1:
            self.journal.reach("forward", self.manager.current_step())


def watched_manager(journal: Journal, lighthouse: str, **settings: Any) -> tuple[Any, Any]:
    """A manager and its process group that write to the journal, and at which faults are carried out."""
    from torchft import Manager, ProcessGroupGloo

    class Group(ProcessGroupGloo):
        num_sums = 0

        def allreduce(self, tensors: Any, opts: Any) -> Any:
            journal.num_messages += 1
            work = super().allreduce(tensors, opts)
            if tensors[0].is_floating_point():  # a part of the gradient
                self.num_sums += 1
                if self.num_sums == 2:
                    journal.reach("reduction", manager.current_step())
            return work

    class Watched(Manager):
        def start_quorum(self, *given: Any, **named: Any) -> None:
            began, group.num_sums = time.time(), 0
            super().start_quorum(*given, **named)
            failed = self.errored() is not None
            size, seconds = self.num_participants(), time.time() - began
            journal.write("quorum", update=self.current_step(), size=size, failed=failed, seconds=seconds)
            journal.reach("regroup", self.current_step())

        def should_commit(self, *given: Any, **named: Any) -> bool:
            update = self.current_step()
            journal.reach("verdict", update)
            if journal.reach("split", update):
                self.report_error(RuntimeError("planned: this replica missed the end of the reduction"))
            if (failure := self.errored()) is not None:
                journal.write("failure", update=update, reason=str(failure.original_exception))
            commits = super().should_commit(*given, **named)
            journal.attempt = 0 if commits else journal.attempt + 1
            return commits

    limit = timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS)
    group = Group(timeout=limit)
    manager = Watched(
        pg=group, load_state_dict=None, state_dict=None, min_replica_size=1, use_async_quorum=False, timeout=limit,
        heartbeat_interval=timedelta(seconds=HEARTBEAT_SECONDS), store_addr="localhost", lighthouse_addr=lighthouse,
        replica_id=journal.name, hostname="localhost", **settings,
    )  # fmt: skip
    return manager, group


def run_replica(index: int, rank: int, folder: Path, lighthouse: str, case: Case, port: int) -> None:
    """Train as one rank of one replica; libraries print into a file of its own."""
    from megabatch.integrations import torchft

    if case.num_updates == NUM_UPDATES:
        torchft.MESSAGE_ELEMENTS = 2**14  # several sums for a small model
    torch.set_num_threads(1)
    name = f"replica{index}" if rank == 0 else f"replica{index}.rank{rank}"
    faults = [fault for fault in case.faults if fault.replica == index and rank == 0]
    journal = Journal(folder, name, faults)
    with (folder / f"{journal.name}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    num_ranks = 2 if case.setting == "fsdp2" else 1
    model = new_model(case.setting, seed=0 if num_ranks > 1 else index)  # the first quorum gives all the weights of one
    store = dist.TCPStore("localhost", port, is_master=rank == 0, wait_for_workers=False)
    if num_ranks > 1:
        dist.init_process_group("gloo", store=dist.PrefixStore("ranks", store), rank=rank, world_size=num_ranks)
        for module in [*model.transformer.h, model]:
            fully_shard(module)
    optimizer, scheduler = new_optimizer(model)
    data, sampler = samples(), new_sampler(case.setting)
    (folder / f"{journal.name}.ready").touch()
    wait_for_file(folder / "go")
    faulthandler.dump_traceback_later(RUN_LIMIT_SECONDS / 2)
    if rank > 0:
        wait_for_file(folder / f"replica{index}.managed")
    manager, group = watched_manager(journal, lighthouse, rank=rank, world_size=num_ranks, store_port=port)
    (folder / f"{journal.name}.managed").touch()
    for other in range(case.num_replicas):  # a replica that asks for a quorum now waits for those that send heartbeats
        wait_for_file(folder / f"replica{other}.managed")
    replicas = torchft.Replicas(manager, group, sampler, optimizer, scheduler=scheduler, lighthouse=lighthouse)
    is_mixed = case.setting == "mixed"
    gradient = GradientAccumulator(
        model, planner=new_planner(case.setting), extensions=[replicas, Watch(journal, manager)],
        accumulate_dtype=torch.float64 if is_mixed else None,
    )  # fmt: skip
    loss_fn = two_terms if is_mixed else losses.next_token

    def load(ids: list[int]) -> list[dict[str, torch.Tensor]]:
        if manager.current_step() == case.num_updates - 2:  # who comes later is alone
            if case.join_after is not None:
                wait_for_file(folder / f"replica{case.num_replicas}.managed")
            if any(fault.signal == signal.SIGSTOP for fault in case.faults):
                wait_for_file(folder / "back")
        return [{"input_ids": data[sample], "labels": data[sample]} for sample in ids]

    began = resource.getrusage(resource.RUSAGE_SELF)
    for update in replicas.updates(gradient, load, loss_fn, num_updates=case.num_updates, max_norm=MAX_NORM):
        number = manager.current_step() - 1
        journal.reach("step", number)
        assert update.finite
        gradients = [parameter.grad for parameter in model.parameters()]
        whole = flat(each.full_tensor() if num_ranks > 1 else each for each in gradients)
        if rank == 0:
            (folder / f"{journal.name}.{number}.gradient").write_bytes(whole.numpy().tobytes())
        optimizer.step()
        scheduler.step()
        counts = {"samples": update.num_samples, "weight": float(update.weight), "loss": float(update.loss)}
        journal.write("step", update=number, size=replicas.num_replicas, **counts)
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = used.ru_utime + used.ru_stime - began.ru_utime - began.ru_stime
    weights = flat(each.full_tensor() if num_ranks > 1 else each for each in model.parameters())
    if rank == 0:
        (folder / f"{journal.name}.weights").write_bytes(weights.numpy().tobytes())
    journal.write("end", cpu_seconds=seconds, messages=journal.num_messages)
    time.sleep(0.2 * (num_ranks - 1))
    os._exit(0)  # a manager's threads hold the process


def wait_for_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.005)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("localhost", port)) == 0


@contextlib.contextmanager
def lighthouse() -> Iterator[str]:
    """The address of a Lighthouse of its own."""
    with lighthouse_process() as (address, _):
        yield address


@contextlib.contextmanager
def lighthouse_process() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address of a Lighthouse of its own, and its process."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--bind", f"[::]:{port}"]
    command += ["--min_replicas", "1", "--quorum_tick_ms", "10", "--join_timeout_ms", "10000"]
    command += ["--heartbeat_timeout_ms", str(int(1000 * HEARTBEAT_TIMEOUT_SECONDS))]
    with tempfile.NamedTemporaryFile("w", prefix="lighthouse_") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_until(lambda: answers(port), time.time() + START_LIMIT_SECONDS)
            yield f"http://localhost:{port}", process
        finally:
            process.kill()
            process.wait()


def wait_until(happened: Callable[[], bool], deadline: float) -> bool:
    while not happened():
        if time.time() > deadline:
            return False
        time.sleep(0.01)
    return True


def run(case: Case, seed: int, address: str, folder: Path | None = None) -> Path:
    """Run a case. Return the folder with what its replicas wrote."""
    folder = folder or Path(tempfile.mkdtemp(prefix="elastic_torchft_"))
    deadline = time.time() + START_LIMIT_SECONDS
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    num_ranks = 2 if case.setting == "fsdp2" else 1
    processes: list[list[Any]] = []

    def start() -> None:
        port = free_port()
        ranks = [
            context.Process(target=run_replica, args=(len(processes), rank, folder, address, case, port))
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        processes.append(ranks)

    def finished(update: int) -> bool:
        return any(folder.glob(f"*.{update}.gradient"))

    def send(fault: Fault, number: int) -> None:
        for process in processes[fault.replica]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    try:
        for _ in range(case.num_replicas):
            start()
        wait_until(lambda: len(list(folder.glob("*.ready"))) == case.num_replicas * num_ranks, deadline)
        (folder / "go").touch()
        deadline = time.time() + RUN_LIMIT_SECONDS
        for fault in case.faults:
            if fault.point == "outside":
                wait_until(lambda update=fault.update: finished(update), deadline)
                time.sleep(fault.seconds)
                Journal(folder, f"outside{fault.replica}").write("fault", signal=fault.signal, update=fault.update)
                send(fault, fault.signal)
            elif fault.signal == signal.SIGSTOP and fault.point != "split":
                if fault.seconds:
                    wait_until(lambda: any("fault" in path.read_text() for path in folder.glob("*.jsonl")), deadline)
                    time.sleep(fault.seconds)
                else:
                    wait_until(lambda update=fault.update: finished(update), deadline)
                send(fault, signal.SIGCONT)
            elif num_ranks > 1:  # torchrun ends the other ranks of a replica
                wait_until(lambda ranks=processes[fault.replica]: not ranks[0].is_alive(), deadline)
                send(fault, signal.SIGKILL)
        if case.join_after is not None:
            wait_until(lambda: finished(case.join_after or 0), deadline)
            start()
        alive = [process for ranks in processes for process in ranks]
        hung = not wait_until(lambda: not any(process.is_alive() for process in alive), deadline)
    finally:
        for process in (process for ranks in processes for process in ranks):
            process.kill()
    if hung:
        (folder / "hung").touch()
    return folder


def read_tensor(path: Path, setting: str = "float64") -> torch.Tensor:
    dtype = torch.float32 if setting == "same_bits" else torch.float64
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=dtype)


def error_of(tensor: torch.Tensor, exact: torch.Tensor) -> float:
    return float((tensor - exact).norm() / exact.norm())


def read_events(folder: Path) -> list[dict[str, Any]]:
    events = []
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            events.append({**json.loads(line), "replica": path.stem})
    return sorted(events, key=lambda event: event["time"])


def judge(folder: Path, case: Case, reference: Reference) -> dict[str, Any]:
    """Compare what the replicas have written with the undisturbed run."""
    gradients, weights = reference
    errors: dict[int, float] = {}
    for path in folder.glob("*.gradient"):
        update = int(path.name.split(".")[1])
        errors[update] = max(error_of(read_tensor(path, case.setting), gradients[update]), errors.get(update, 0.0))
    last_weights = [read_tensor(path, case.setting) for path in folder.glob("*.weights")]
    weight_errors = [error_of(tensor, weights) for tensor in last_weights]
    events = read_events(folder)
    faults = [event for event in events if event["event"] == "fault"]
    steps = [event for event in events if event["event"] == "step"]
    numbers = {update: {(step["samples"], step["weight"], step["loss"]) for step in steps if step["update"] == update}
               for update in range(case.num_updates)}  # fmt: skip
    lost = {fault["replica"][-1] for fault in faults if fault["signal"] == signal.SIGKILL}
    num_started = case.num_replicas + (case.join_after is not None)
    num_computed = sum(event["event"] == "microbatch" for event in events if "rank" not in event["replica"])
    row: dict[str, Any] = {
        "kills": len(lost),
        "updates": len(errors),
        "gradient_error": max(errors.values(), default=None),
        "weights_error": max(weight_errors, default=None),
        "replicas_agree": all(torch.equal(tensor, last_weights[0]) for tensor in last_weights)
        and all(len(seen) == 1 for seen in numbers.values()),
        "ended": len(last_weights),
        "computed_again": num_computed - num_microbatches(case),
        "hung": (folder / "hung").exists(),
    }
    tolerance = SETTINGS[case.setting]
    row["right"] = (
        len(faults) == sum(fault.point != "split" for fault in case.faults)
        and row["updates"] == case.num_updates
        and row["gradient_error"] <= tolerance
        and row["ended"] == num_started - len(lost)
        and row["weights_error"] <= tolerance
        and row["replicas_agree"]
    )
    if faults:
        row |= times_after(faults[-1], num_started - len(faults), events)
    return row


def num_microbatches(case: Case) -> int:
    """Return the microbatches of a run. The last update of an epoch has 4 samples, each in one unless bits matter."""
    num_ranks, rows = 2 if case.setting == "fsdp2" else 1, {BATCH_SIZE: MICRO_BATCH_SIZE, 4: 1}
    if case.setting == "same_bits":
        rows[4] = MICRO_BATCH_SIZE
    sizes = [size for _, size in zip(range(case.num_updates), new_sampler(case.setting).sizes(100), strict=False)]
    return sum(-(-size // (rows[size] * num_ranks)) for size in sizes)


def times_after(fault: dict[str, Any], most: int, events: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds from the last fault until the survivors are in a quorum without the lost, finish a microbatch and step.

    ``most`` is the largest number of replicas in that quorum.
    """
    lost = "replica" + fault["replica"][-1]
    before = {event["replica"] for event in events if event["time"] < fault["time"]}
    survivors = {event["replica"] for event in events if event["event"] == "end"} & before - {lost}
    times: dict[str, dict[str, float]] = {"regrouped_seconds": {}, "microbatch_seconds": {}, "stepped_seconds": {}}
    for event in events:
        name, seconds = event["replica"], event["time"] - fault["time"]
        if seconds <= 0 or name not in survivors:
            continue
        if event["event"] == "quorum" and not event["failed"] and event["size"] <= most:
            times["regrouped_seconds"].setdefault(name, seconds)
        if event["event"] == "microbatch" and name in times["regrouped_seconds"]:
            times["microbatch_seconds"].setdefault(name, seconds)
        if event["event"] == "step" and event["size"] <= most:
            times["stepped_seconds"].setdefault(name, seconds)
    # The first microbatch of any survivor, and the last of them to regroup and step.
    found = {name: max(seconds.values()) for name, seconds in times.items() if seconds}
    if times["microbatch_seconds"]:
        found["microbatch_seconds"] = min(times["microbatch_seconds"].values())
    return {name: round(seconds, 3) for name, seconds in found.items()}


def cases() -> list[tuple[Case, int]]:
    """Every case with its seed; which replica is lost, and when, differs by seed."""
    found: list[tuple[Case, int]] = []
    for seed in range(3):
        lost, update = seed % NUM_REPLICAS, 1 + seed % 3
        other = (lost + 1) % NUM_REPLICAS
        draw = random.Random(seed)
        for point in ("forward", "reduction", "verdict", "step"):
            found.append((Case(f"killed in {point}", (Fault(lost, update, point),)), seed))
        first = Fault(lost, update, "reduction")
        second = Fault(other, update, draw.choice(["regroup", "reduction", "verdict"]), attempt=1)
        found.append((Case("a second killed while the first is made up for", (first, second)), seed))
        killed = Fault(lost, 1, draw.choice(["forward", "reduction"]))
        found.append((Case("killed, and one joins", (killed,), join_after=1), seed))
        paused = Fault(lost, update, draw.choice(["forward", "reduction"]), signal=signal.SIGSTOP)
        found.append((Case("stopped for a while", (paused,)), seed))
        split = tuple(Fault(index, update, "split") for index in range(NUM_REPLICAS) if index != lost)
        found.append((Case("one steps, the others do not", split), seed))
        away = Fault(lost, update, "step", signal=signal.SIGSTOP)
        found.append((Case("one steps and is stopped, the others do not", (*split, away)), seed))
        found.append((Case("same bits: killed", (Fault(lost, update, "reduction"),), setting="same_bits"), seed))
        joined = Case("same bits: killed, and one joins", (killed,), join_after=1, setting="same_bits")
        found.append((joined, seed))
        found.append((Case("dropout: killed", (Fault(lost, update, "forward"),), setting="dropout"), seed))
        sharded = Case("replicas of two FSDP2 ranks: killed", (Fault(lost, update, "forward"),), setting="fsdp2")
        found.append((sharded, seed))
    joined = Case("replicas of two FSDP2 ranks: killed, and one joins", (Fault(1, 1, "reduction"),), 1, "fsdp2")
    found.append((joined, 0))
    for seed in range(30):
        found.append((at_random(seed), seed))
    found += [(Case("nobody lost"), seed) for seed in range(3)]
    return found


def at_random(seed: int) -> Case:
    """Some random moments: one or two kills, a stop, a join."""
    draw = random.Random(seed)
    lost, other = draw.sample(range(NUM_REPLICAS), 2)
    first = Fault(lost, draw.randrange(3), "outside", seconds=0.25 * draw.random())
    faults: tuple[Fault, ...] = (first,)
    if seed % 5 == 1:
        point = draw.choice(["forward", "reduction", "regroup", "verdict"])
        faults = (Fault(other, draw.randrange(first.update + 1, 5), point), first)
    if seed % 5 == 2:
        faults = (Fault(lost, 1 + draw.randrange(3), draw.choice(["forward", "reduction"]), signal=signal.SIGSTOP),)
    return Case("at random", faults, join_after=draw.randrange(3) if seed % 2 else None)


def references() -> dict[str, Reference]:
    """The undisturbed run of each setting. That of dropout is a run of one replica."""
    plain, case = undisturbed(), Case("undisturbed", setting="dropout", num_replicas=1)
    with lighthouse() as address:
        folder = run(case, 0, address)
    gradients = [read_tensor(folder / f"replica0.{update}.gradient") for update in range(NUM_UPDATES)]
    dropout = gradients, read_tensor(folder / "replica0.weights")
    assert error_of(gradients[0], plain[0][0]) > 0.01
    return {"float64": plain, "fsdp2": plain, "same_bits": undisturbed_bits(), "dropout": dropout}


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for name in dict.fromkeys(row["case"] for row in rows):
        members = [row for row in rows if row["case"] == name]
        errors = [row[kind] for row in members for kind in ("gradient_error", "weights_error") if row[kind] is not None]
        entry = {
            "runs": len(members),
            "right": sum(row["right"] for row in members),
            "kills": sum(row["kills"] for row in members),
            "largest_error": max(errors, default=None),
            "computed_again": sum(row["computed_again"] for row in members),
        }
        for key in ("regrouped_seconds", "microbatch_seconds", "stepped_seconds"):
            seconds = [row[key] for row in members if key in row]
            if seconds:
                entry |= {f"{key}_median": statistics.median(seconds), f"{key}_worst": max(seconds)}
        summary[name] = entry
    return summary


def main() -> None:
    if result.version("torchft") is None:
        raise SystemExit(f"benchmarks.elastic_torchft: {MISSING}")
    torch.set_num_threads(1)
    origin = result.made_with(["torchft"])
    exact, only, rows = references(), sys.argv[1:], []
    with lighthouse() as address:
        for case, seed in cases():
            if only and not any(word in case.name for word in only):
                continue
            folder = run(case, seed, address)
            rows.append({"case": case.name, "seed": seed, **judge(folder, case, exact[case.setting])})
            print(json.dumps(rows[-1]) + ("" if rows[-1]["right"] else f" {folder}"), flush=True)
    summary = summarize(rows)
    for name, entry in summary.items():
        print(name, json.dumps(entry))
    settings = {
        "replicas": NUM_REPLICAS,
        "updates": NUM_UPDATES,
        "global_batch_size": BATCH_SIZE,
        "micro_batch_size": MICRO_BATCH_SIZE,
        "heartbeat_timeout_seconds": HEARTBEAT_TIMEOUT_SECONDS,
        "collective_timeout_seconds": COLLECTIVE_TIMEOUT_SECONDS,
        "tolerance": TOLERANCE,
    }
    if not only:
        found = {"claim": CLAIM, "settings": settings, "summary": summary, "rows": rows, **origin}
        print(result.write(result.dated("elastic_torchft"), found).name)


if __name__ == "__main__":
    main()
