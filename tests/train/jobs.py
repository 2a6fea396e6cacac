"""Jobs of a group of ranks in the tests of optimizer, average and evaluation; see exact/launch.py."""

import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megabatch import Learner, losses
from megabatch.core.contract import LossFunction
from megabatch.train.callbacks.ema import Average
from megabatch.train.callbacks.evaluation import build_terms, evaluate_set
from megabatch.train.config import Config, EvalConfig, ModelConfig, OptimConfig, RunConfig, UpdateConfig
from megabatch.train.data.updates import NumUpdates
from megabatch.train.model.build import ParallelModel
from megabatch.train.model.optimizer import build_learner
from megabatch.train.parallel.wrap import WrapperChoice
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks

CPU = torch.device("cpu")
VOCAB_SIZE = 11
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Adam": {"options": {"amsgrad": True}},
    "SGD": {"options": {"momentum": 0.9, "dampening": 0.5}},
    "Adagrad": {},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "RMSprop": {"options": {"momentum": 0.9, "centered": True}},
    "Adadelta": {},
    "ASGD": {},
    "Adafactor": {},
    "Rprop": {},
    "Muon": {"adamw_lr": 1e-3, "betas": (0.8, 0.9)},
}
WHOLE_ONLY = ("Adafactor", "Rprop", "Muon")  # whose steps torch cannot make on shards, or not as on whole ones


class Tiny(nn.Module):
    """A causal model of tokens: each sees the mean of those before it; the last layer is never used."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.embed = nn.Embedding(VOCAB_SIZE, 6, dtype=dtype)
            self.norm = nn.LayerNorm(6, dtype=dtype)
            self.head = nn.Linear(6, VOCAB_SIZE, bias=False, dtype=dtype)
            self.unused = nn.Linear(2, 2, dtype=dtype)

    def forward(self, input_ids: Tensor) -> Tensor:
        embedded = self.embed(input_ids)  # [B, T, 6]
        counts = torch.arange(1, input_ids.shape[1] + 1, dtype=embedded.dtype)[:, None]  # [T, 1]
        return self.head(self.norm(embedded.cumsum(1) / counts + embedded))  # [B, T, V]


def text(size: int, seed: int, *, learned: bool = True) -> dict[str, Tensor]:
    """A sample of ``size`` tokens, the first of which are a prompt."""
    tokens = torch.randint(VOCAB_SIZE, (size,), generator=torch.Generator().manual_seed(seed))
    labels = tokens.clone()
    labels[: size // 3 if learned else size] = -100
    return {"input_ids": tokens, "labels": labels}


def lay(model: nn.Module, wrapper: str) -> nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    if wrapper == "fsdp2":
        fully_shard(model.head)
        fully_shard(model)
    return model


def whole(tensors: Any) -> list[Tensor]:
    """Tensors as they are on one process, on their own memory; collective."""
    return [(each.full_tensor() if isinstance(each, DTensor) else each).detach().clone() for each in tensors]


def config_of(**optim: Any) -> Config:
    return Config(
        model=ModelConfig(),
        update=UpdateConfig(global_batch_size=4, micro_batch_size=2),
        optim=OptimConfig(**optim),
        run=RunConfig(folder="nowhere"),
    )


def learner_of(wrapper: str, dtype: torch.dtype = torch.float64, **optim: Any) -> Learner:
    base = Tiny(dtype)
    model = lay(base, wrapper)
    parallel_model = ParallelModel(model, base, WrapperChoice(wrapper, "asked for"), [], [], {})
    return build_learner(parallel_model, config_of(**{"lr": 0.02, "warmup_steps": 2} | optim), NumUpdates(20, 20), None)


def move(learner: Learner, step: int) -> None:
    """One update, of other samples on every rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    samples = [text(size, 100 * step + 10 * rank + size) for size in (4, 9, 6)]
    learner.forward_backward(samples, losses.next_token)
    assert bool(learner.optim_step().finite)


def folder_for_all() -> Path:
    """A new folder that all ranks know."""
    made = [tempfile.mkdtemp()]
    if dist.is_initialized():
        dist.broadcast_object_list(made, src=0)
    return Path(made[0])


def through_a_checkpoint(state: dict[str, Any], template: dict[str, Any]) -> dict[str, Any]:
    """Save ``state`` and return what is read of it."""
    folder = folder_for_all()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
        dcp.load(template, checkpoint_id=folder, no_dist=not dist.is_initialized())
    if dist.is_initialized():
        dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    return template


def resumes(wrapper: str, dtype: torch.dtype, **optim: Any) -> bool:
    """Return True if a learner saved after three updates goes on bit for bit when loaded, with an average too."""
    learner, other = (learner_of(wrapper, dtype, **optim) for _ in range(2))
    average, other_average = (Average(each.model, 0.9) for each in (learner, other))
    for step in range(3):
        move(learner, step)
        average.update()
    state, template = (
        {"learner": each.state_dict(), "average": mean.state_dict()}
        for each, mean in ((learner, average), (other, other_average))
    )
    read = through_a_checkpoint(state, template)
    other.load_state_dict(read["learner"])
    other_average.load_state_dict(read["average"])
    for step in range(3, 6):
        for each, mean in ((learner, average), (other, other_average)):
            move(each, step)
            mean.update()
    pairs = zip(
        whole([*learner.model.parameters(), *average.state_dict().values()]),
        whole([*other.model.parameters(), *other_average.state_dict().values()]),
        strict=True,
    )
    same = [torch.equal(one, two) for one, two in pairs]
    return all(same) and learner.step == other.step == 6


def resume_job(name: str) -> bool:
    """``"AdamW fsdp2"``"""
    optimizer, wrapper = name.split()
    return resumes(wrapper, torch.float64, name=optimizer, **OPTIMIZERS[optimizer])


def average_job(wrapper: str) -> dict[str, list[float]]:
    """Logits of the model before, with and after its average; forwards are run in between, which gather shards."""
    learner = learner_of(wrapper)
    average = Average(learner.model, 0.5)
    tokens = torch.arange(VOCAB_SIZE)[None]

    @torch.no_grad()
    def logits() -> list[float]:
        return learner.model(tokens).flatten().tolist()

    for step in range(3):
        logits()
        move(learner, step)
        logits()
        average.update()
    before = logits()
    with average.swapped():
        inside = logits()
    return {"before": before, "inside": inside, "after": logits()}


SETS: dict[str, list[dict[str, Tensor]]] = {
    "many": [text(size, size) for size in (3, 17, 5, 12, 8, 9, 30, 2, 4, 11, 6)],
    "two": [text(7, 1), text(12, 2)],
    "untold": [text(7, 1, learned=False), text(3, 2, learned=False)],
    "empty": [],
}
CUTS: dict[str, dict[str, Any]] = {
    "one": {"micro_batch_size": 1},
    "three": {"micro_batch_size": 3},
    "tokens": {"max_microbatch_tokens": 40},
}


def squares(model: nn.Module, microbatch: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    """A loss of two terms, and a metric among them that is to be no part of it."""
    logits = model(microbatch["input_ids"])  # [B, T, V]
    learned = microbatch["labels"] != -100  # [B, T]
    per_token = logits.square().sum(-1)[learned]  # [N]
    return {
        "square": (per_token.sum(), int(learned.sum())),
        "first": (logits[:, 0, 0].abs().sum(), len(logits)),
        "largest": (per_token.detach().sqrt().sum(), int(learned.sum())),
    }


def lengths(model: nn.Module, microbatch: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    """A metric of the user's: how many tokens of a sample are learned."""
    learned = (microbatch["labels"] != -100).sum()
    return {"learned": (learned, len(microbatch["labels"]))}


def evaluation_job(name: str) -> dict[str, Any]:
    """``"next_token fsdp2 many tokens"``: the row; and whether the model is as before."""
    loss, wrapper, samples, cut = name.split()
    base = Tiny()
    lay(base, wrapper)
    base.norm.eval()  # a mode that is to stay
    with_metrics = build_terms(EvalConfig(metrics="tests.train.jobs:lengths"), losses.next_token)
    terms: LossFunction = with_metrics if loss == "next_token" else squares
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), CPU)
    update = UpdateConfig(global_batch_size=4, **CUTS[cut])
    console = Console(enabled=False, loss_digits=4)
    row = evaluate_set(base, terms, SETS[samples], update, ranks, console, name=samples)
    sharded = all(isinstance(parameter, DTensor) for parameter in base.parameters())
    return row | {"as before": base.training and not base.norm.training and sharded == (wrapper == "fsdp2")}
