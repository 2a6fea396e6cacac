"""Runs of the trainer whose every step is noted, and the same run as a plain loop in torch."""

import importlib.util
import json
import math
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.train.processes import overrides, rank_environment

OWN = Path(__file__).with_name("own.py")
SIZE, MICRO, LR, WARMUP, DECAY_STEPS, FINAL_SHARE, MAX_NORM, EMA = 4, 2, 1e-2, 2, 8, 0.1, 0.5, 0.5
BETAS, WEIGHT_DECAY, NUM_HELD_OUT = (0.9, 0.95), 0.1, 2
RECIPE = f"""
[model]
dtype = "float64"
[data]
[update]
global_batch_size = {SIZE}
micro_batch_size = {MICRO}
max_norm = {MAX_NORM}
[optim]
lr = {LR}
betas = [{BETAS[0]}, {BETAS[1]}]
weight_decay = {WEIGHT_DECAY}
warmup_steps = {WARMUP}
decay_steps = {DECAY_STEPS}
final_lr_share = {FINAL_SHARE}
[eval]
every = 2
num_samples = {NUM_HELD_OUT}
[run]
max_epochs = 9
max_steps = 8
tensorboard = false
"""
Rows = list[dict[str, Any]]


@dataclass
class Run:
    """The files that a run of the trainer left behind."""

    folder: Path
    status: list[int]

    def notes(self, rank: int = 0) -> Rows:
        path = self.folder / f"seen{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def updates(self, ranks: int = 1) -> list[list[int]]:
        """The numbers of the samples that each update trained on, over all ranks, in order."""
        made: list[list[int]] = []
        for rank in range(ranks):
            found: list[list[int]] = [[]]
            for note in self.notes(rank):
                if note["kind"] == "update":
                    found.append([])
                elif note["training"] and note["grad"]:
                    found[-1] += note["numbers"]
            made = [a + b for a, b in zip(made or [[]] * len(found), found, strict=True)]
        return [sorted(each) for each in made[:-1]]

    def evaluated(self) -> set[int]:
        forwards = [note for note in self.notes() if note["kind"] == "forward" and not note["training"]]
        return {number for note in forwards for number in note["numbers"]}

    def rows(self) -> Rows:
        """The rows of updates."""
        return [row for row in self._all() if "loss" in row]

    def evaluations(self) -> Rows:
        return [row for row in self._all() if "set" in row]

    def _all(self) -> Rows:
        return [json.loads(line) for line in (self.folder / "run" / "metrics.jsonl").read_text().splitlines()]

    def weights(self, step: int) -> dict[str, Tensor]:
        return torch.load(self.folder / f"weights{step}-0.pt")


class Ranks:
    """The ranks of this check, which meet in a file: a process group would come along into what they fork."""

    def __init__(self) -> None:
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._folder, self._runs = Path(tempfile.mkdtemp() if self.size == 1 else "."), 0
        if dist.is_initialized():
            dist.barrier()  # one that leaves while the other still joins would fail it
            dist.destroy_process_group()
        self._store = dist.FileStore(str(self._folder / "met"), self.size)

    def train(self, folder: Path | None = None, *, die: int | None = None, **values: Any) -> Run:
        """Run the recipe on these ranks, each in a process of its own; in a folder with a run it resumes."""
        self._runs += 1
        folder = folder or (self._folder / f"run{self._runs}").resolve()
        if self.rank == 0 and not folder.exists():
            folder.mkdir()
            shutil.copy(OWN, folder / "own.py")
            (folder / "recipe.toml").write_text(RECIPE)
        if die is not None:
            (folder / f"die{die}").touch()
        own = folder / "own.py"
        named = {"data__function": f"{own}:samples", "model__function": f"{own}:model",
                 "run__folder": folder / "run", "run__after_update": f"{own}:after_update"}  # fmt: skip
        return Run(
            folder,
            self._run(folder, ["train", str(folder / "recipe.toml"), *overrides(named | values)], dies=die is not None),
        )

    def _run(self, folder: Path, arguments: Sequence[str], *, dies: bool) -> list[int]:
        """The command line in this process, or in a child of each rank; the exit status of each."""
        environment: dict[str, str] = {}
        if self.size > 1:
            held = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if self.rank == 0 else None
            port = self._told("port", str(held.port) if held else "")[0]
            environment = rank_environment(self.rank, self.size, int(port))
        log = folder / f"log{self.rank}"
        if self.size == 1 and not dies:
            return [_call(arguments, log)]
        child = os.fork()
        if not child:
            os.environ |= environment
            os._exit(_call(arguments, log))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return [int(each) for each in self._told("status", str(status))]

    def _told(self, key: str, mine: str) -> list[str]:
        """The notes of each rank."""
        self._store.set(f"{key}{self._runs}/{self.rank}", mine)
        return [self._store.get(f"{key}{self._runs}/{rank}").decode() for rank in range(self.size)]


def _call(arguments: Sequence[str], log: Path) -> int:
    """Call the command line as `python -m megabatch` does; its exit status."""
    from megabatch.__main__ import main

    with log.open("a") as file, redirect_stdout(file), redirect_stderr(file):
        sys.argv = ["megabatch", *arguments]
        try:
            main()
        except SystemExit as exit:
            return int(exit.code or 0)
        except BaseException:
            traceback.print_exc()
    return 70


class Expected(NamedTuple):
    """An update of the plain loop."""

    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    num_target_tokens: int
    weights: dict[str, Tensor]
    average: dict[str, Tensor]


def own() -> Any:
    """The user's file as a module of this process, whose notes go nowhere and whose clock goes on."""
    import time

    kept = time.perf_counter
    spec = importlib.util.spec_from_file_location("own_of_the_plain_loop", OWN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    time.perf_counter, module.note = kept, lambda **_: None
    return module


def lr_at(step: int) -> float:
    """The learning rate of the update after so many."""
    if step < WARMUP:
        return LR * (step + 1) / (WARMUP + 1)
    progress = min(1.0, (step - WARMUP) / (DECAY_STEPS - WARMUP))
    return LR * (FINAL_SHARE + (1 - FINAL_SHARE) * (1 + math.cos(math.pi * progress)) / 2)


def loss_of(model: Any, samples: Iterable[dict[str, Tensor]]) -> tuple[Tensor, int, int]:
    """The sum over targets, how many there are, and how many of them the model finds likeliest; sample by sample."""
    total, count, right = torch.zeros((), dtype=torch.float64), 0, 0
    for sample in samples:
        logits, targets = model(sample["input_ids"][None]).logits[0, :-1], sample["labels"][1:]
        total = total + cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        count += int((targets != -100).sum())
        right += int((logits.argmax(-1) == targets).sum())
    return total, count, right


def plain_loop(updates: Sequence[Sequence[int]], skipped: Sequence[int] = (), decay: float = EMA) -> list[Expected]:
    """The updates by hand; those that are skipped, by their place, leave everything as it was."""
    parts = own()
    model, samples = parts.model(), parts.samples()
    groups = [[p for p in model.parameters() if p.dim() >= 2], [p for p in model.parameters() if p.dim() < 2]]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": WEIGHT_DECAY}, {"params": groups[1], "weight_decay": 0.0}], betas=BETAS
    )
    average = {name: each.detach().clone() for name, each in model.named_parameters()}
    found, stepped = [], 0
    for place, numbers in enumerate(updates):
        optimizer.zero_grad()
        total, count, _ = loss_of(model, [samples[number] for number in numbers])
        (total / count).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        lr = lr_at(stepped)
        if place not in skipped:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            stepped += 1
            for name, each in model.named_parameters():
                average[name].lerp_(each.detach(), 1 - decay)
        weights = {name: each.detach().clone() for name, each in model.named_parameters()}
        tokens = sum(len(samples[number]["input_ids"]) for number in numbers)
        copy = {name: each.clone() for name, each in average.items()}
        found.append(Expected(float(total.detach() / count), norm, lr, tokens, count, weights, copy))
    return found


def evaluate(weights: dict[str, Tensor], numbers: Iterable[int]) -> tuple[float, float, int]:
    """Loss, accuracy and number of targets of some samples."""
    parts = own()
    model, samples = parts.model(), parts.samples()
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        total, count, right = loss_of(model, [samples[number] for number in numbers])
    return float(total) / count, right / count, count
