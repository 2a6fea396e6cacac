"""Runs of torchtitan's own Trainer and ExactTrainer, on gloo ranks: `python -m tests.integrations.titan_runs OUT`.

With `seconds` after OUT, they are timed. torchtitan 0.3.0 is made for GPUs and for a newer torch. The lines under "A
CPU" stand for what a CPU or torch 2.13 lacks; model, loss, FSDP2, data path, clipping, optimizer and schedule are
torchtitan's.
"""

import json
import math
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

# A CPU
torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.current_device = lambda: 0  # torch's is the string "cpu"
torch.cpu.get_device_name = lambda *_: "cpu"
torch.cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=1)
torch.cpu.memory_stats = lambda *_: {}
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *_: None
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout

# E402: torchtitan asks for the device when it is imported, so these imports follow the stand-ins.
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

from megabatch import MegabatchError, PlanError  # noqa: E402
from megabatch.integrations.torchtitan import exact_config  # noqa: E402
from tests.comm.counting import Collectives  # noqa: E402

TOKENS, ROWS, STEPS = 64, 2, 4  # of a row; of a microbatch; microbatches of an update on each rank
IGNORED = -100
Batches = list[tuple[dict[str, Tensor], Tensor]]


class ListLoader(BaseDataLoader):
    """The batches of each data rank, once."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        batches: list[Batches] = field(default_factory=list)

    def __init__(self, config: Any, *, dp_rank: int, **_: Any) -> None:
        self._batches = config.batches[dp_rank]

    def __iter__(self) -> Any:
        return iter([({**inputs}, labels.clone()) for inputs, labels in self._batches])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    """Batches are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **_: Any) -> None:
        pass

    encode = decode = get_vocab_size = lambda *_, **__: None


def batch(rank: int, number: int, *, rows: int = ROWS, targets: int | None = None) -> tuple[dict[str, Tensor], Tensor]:
    """Random tokens, of which the first few of each row are learned: from 3 to 59, unequal over ranks and batches."""
    targets = 3 + 14 * ((2 * number + rank) % 5) if targets is None else targets
    generator = torch.Generator().manual_seed(1000 * rank + number)
    ids = torch.randint(0, 2048, (rows, TOKENS + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[:, targets:] = IGNORED
    positions = torch.arange(TOKENS).expand(rows, TOKENS).contiguous()
    return {"input": ids[:, :-1].contiguous(), "positions": positions}, labels


def config(batches: list[Batches], *, replicate: int = 1, chunked: bool = True, steps: int = 2) -> Any:
    """titan's debug Llama, two layers of it, in float32 and without a GPU's features."""
    made = llama3_debugmodel()
    del made.model_spec.model.layers[2:]
    for layer in made.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex attention has no backward on CPUs
    training, parallelism = made.training, made.parallelism
    training.local_batch_size, training.global_batch_size = ROWS, ROWS * STEPS * dist_size()
    training.seq_len, training.steps, training.max_norm = TOKENS, steps, math.inf
    training.disable_cuda_graphs, training.mixed_precision_param = True, "float32"
    parallelism.data_parallel_replicate_degree = replicate
    parallelism.spmd_backend = "partial_dtensor"  # the default needs a newer torch
    made.activation_checkpoint, made.lr_scheduler.total_steps = None, 100
    made.dump_folder = os.environ["DUMP_FOLDER"]
    made.debug.seed, made.debug.enable_structured_logging = 0, False
    made.dataloader, made.tokenizer = ListLoader.Config(batches=batches), NoTokenizer.Config()
    if not chunked:
        made.loss = made.loss.loss_fn
    return made


def dist_size() -> int:
    return int(os.environ["WORLD_SIZE"])


class Run:
    """A run of a trainer, with the gradient and the collectives of each update."""

    def __init__(self, made: Any) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.weights: list[dict[str, Tensor]] = []  # before each update, and at the end
        self.collectives: list[dict[str, int]] = []
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)  # the last run's store may still listen
        self.trainer = trainer = made.build()
        (self.model,) = trainer.model_parts
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it reduces
        self._step, trainer.optimizers.step = trainer.optimizers.step, self._note
        inner = trainer.forward_backward_step

        def counted(**given: Any) -> Tensor:
            with Collectives() as seen:
                loss = inner(**given)
            for name, number in seen.table().items():
                self._counts[name] = self._counts.get(name, 0) + number
            return loss

        trainer.forward_backward_step, self._counts = counted, {}
        self.error = ""
        try:
            trainer.train()
        except (RuntimeError, MegabatchError) as error:
            self.error = f"{type(error).__name__}: {error}"
        self.end = self._whole(lambda each: each.data)
        trainer.close()
        dist.destroy_process_group()

    def _note(self, *given: Any, **named: Any) -> None:
        self.weights.append(self._whole(lambda each: each.data))
        self.gradients.append(self._whole(lambda each: each.grad))
        self.collectives.append(self._counts)
        self._counts = {}
        self._step(*given, **named)

    def _whole(self, of: Any) -> dict[str, Tensor]:
        return {name: of(each).full_tensor().clone() for name, each in self.model.named_parameters()}


def uncut(run: Run, update: int, batches: Batches) -> dict[str, Tensor]:
    """The gradient of all batches at once, in plain torch and in float64 as far as titan's model lets it be."""
    model = run.trainer.model_config.build()
    model.init_weights()
    model.load_state_dict(run.weights[update], strict=False)
    model.double()
    inputs = {name: torch.cat([each[name] for each, _ in batches]) for name in ("input", "positions")}
    labels = torch.cat([each for _, each in batches])
    logits = model(inputs["input"], positions=inputs["positions"])
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), labels.flatten(), reduction="sum")
    (total / (labels != IGNORED).sum()).backward()
    return {name: each.grad for name, each in model.named_parameters()}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error of a parameter's gradient."""
    return max(float((found[name] - each).norm() / each.norm()) for name, each in expected.items())


def times(rows: int, exact: bool) -> list[tuple[float, float]]:
    """The CPU time of this rank, and the time, at each of six updates of 16 rows a rank."""
    rank, num_updates, of_rank = int(os.environ["RANK"]), 6, 16
    batches = [[batch(each, number, rows=rows) for number in range(num_updates * of_rank // rows)] for each in (0, 1)]
    made = config(batches, steps=num_updates)
    made.training.local_batch_size, made.training.global_batch_size = rows, of_rank * dist_size()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    trainer, found = (exact_config(made, sync="last") if exact else made).build(), []
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it reduces
    step = trainer.optimizers.step

    def note(*given: Any, **named: Any) -> None:
        found.append((time.process_time(), time.perf_counter()))
        step(*given, **named)

    trainer.optimizers.step = note
    trainer.train()
    trainer.close()
    dist.destroy_process_group()
    assert len(found) == num_updates, rank
    return found


def write_times(out: Path) -> None:
    """Write the times of titan and of ExactTrainer at each number of rows in a microbatch, from rank 0."""
    torch.set_num_threads(1)
    found = {name: {rows: times(rows, name == "last") for rows in (1, 2, 4, 8)} for name in ("titan", "last")}
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(found))


def main(out: Path) -> None:
    """Write what the runs gave, from rank 0."""
    world, rank = dist_size(), int(os.environ["RANK"])
    even = [[batch(each, number) for number in range(2 * STEPS)] for each in range(world)]
    # An epoch's end: the first rank has two batches left, the others one of a single row.
    tail = [rows[: STEPS + 2] for rows in even]
    tail[1:] = [[*rows[:STEPS], batch(each, STEPS, rows=1)] for each, rows in enumerate(tail[1:], 1)]
    # Another epoch's end: the first rank has two batches left, the others none.
    alone = [rows[: STEPS + 2 * (number == 0)] for number, rows in enumerate(even)]
    # The second of three windows has no target.
    void = [[*rows[:STEPS], *(batch(0, number, targets=0) for number in range(STEPS)), *rows[STEPS:]] for rows in even]

    def exact(*given: Any, sync: str = "auto", **named: Any) -> Run:
        return Run(exact_config(config(*given, **named), sync=sync))

    titan, same, last = Run(config(even)), exact(even), exact(even, sync="last")
    plain = exact(even, sync="last", chunked=False)
    titan_hsdp, hsdp = Run(config(even, replicate=2)), exact(even, replicate=2)
    ended, titan_ended = exact(tail, sync="last", steps=9), Run(config([each[: STEPS + 2] for each in even], steps=9))
    lonely = exact(alone, sync="last", steps=9)
    passed, titan_stopped = exact(void, sync="last", steps=3), Run(config(void, steps=3))
    first, rest = [each for rows in even for each in rows[:STEPS]], [each for rows in tail for each in rows[STEPS:]]
    expected, of_hsdp = uncut(titan, 0, first), uncut(hsdp, 0, first)
    runs = {
        "titan": titan,
        "auto": same,
        "last": last,
        "last, no chunks": plain,
        "titan, HSDP": titan_hsdp,
        "HSDP": hsdp,
    }
    hsdp.trainer.config.training.disable_cuda_graphs = False
    assert hsdp.trainer._make_accumulator("auto") is None
    try:
        hsdp.trainer._make_accumulator("last")
        refused = ""
    except PlanError as error:
        refused = str(error)
    results = {
        "refused": refused,
        "errors": {
            name: distance(each.gradients[0], of_hsdp if "HSDP" in name else expected) for name, each in runs.items()
        }
        | {"tail": distance(ended.gradients[1], uncut(ended, 1, rest))}
        | {"one rank": distance(lonely.gradients[1], uncut(lonely, 1, even[0][STEPS : STEPS + 2]))},
        "apart": {  # from titan's own, in the second update
            "auto": distance(same.gradients[1], titan.gradients[1]),
            "last": distance(last.gradients[1], titan.gradients[1]),
            "HSDP": distance(hsdp.gradients[1], titan_hsdp.gradients[1]),
        },
        "collectives": {name: each.collectives[0] for name, each in runs.items()},
        "tail": {
            "updates": [len(ended.gradients), len(titan_ended.gradients)], "error": ended.error,
            "tokens": [ended.trainer.ntokens_seen, sum(labels.numel() for _, labels in tail[rank])],
        },
        "one rank": {
            "updates": len(lonely.gradients), "error": lonely.error,
            "tokens": [lonely.trainer.ntokens_seen, sum(labels.numel() for _, labels in alone[rank])],
        },
        "void": {
            "updates": len(passed.gradients), "steps": passed.trainer.step, "weights": distance(passed.end, last.end),
            "errors": [passed.error, titan_stopped.error],
        },
    }  # fmt: skip
    if rank == 0:
        out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    (write_times if sys.argv[2:] == ["seconds"] else main)(Path(sys.argv[1]))
