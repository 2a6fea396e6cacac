"""Models that Accelerate has prepared: the same gradient as plain torch, whatever it has put around them."""

import contextlib
import os
import warnings
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn

from megabatch import GradientAccumulator, losses
from tests.exact import harness, models, oracle

LENGTHS = ((5, 9), (3, 7, 12, 4, 2))  # tokens by rank and sample
PRECISIONS = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.float32}


@contextlib.contextmanager
def as_torchrun() -> Generator[None]:
    """The environment that torchrun makes for the ranks that there are; nothing of Accelerate stays."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in own.items()} if world > 1 else {})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def accelerator(**settings: Any) -> Generator[Accelerator]:
    """An Accelerator for the ranks that there are."""
    with as_torchrun():
        yield Accelerator(cpu=True, **settings)


def samples() -> list[list[oracle.Sample]]:
    generator = torch.Generator().manual_seed(4)
    made = [[torch.randint(models.VOCABULARY, (length,), generator=generator) for length in share] for share in LENGTHS]
    return [[{"input_ids": ids, "labels": ids} for ids in share] for share in made]


def sharded(prepared_by: Accelerator, model: nn.Module) -> nn.Module:
    """By Accelerate's own FSDP2, which it only takes by itself where there is a GPU."""
    prepared_by.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=True, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPT2Block"], cpu_ram_efficient_loading=False,
    )  # fmt: skip
    return fsdp2_prepare_model(prepared_by, model)


def sums(model: nn.Module, batch: oracle.Sample) -> oracle.Sums:
    labels = batch["labels"][:, 1:]
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return {"loss": (total, (labels != -100).sum())}


def expected(precision: str, everything: list[oracle.Sample]) -> dict[str, Tensor | None]:
    """The gradient of the batch whole, by plain torch; under autocast where Accelerate uses it."""
    reference = models.gpt2(PRECISIONS[precision])
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        return oracle.answer(reference, sums, everything).gradients


def errors(precision: str, wrapper: str = "prepared") -> tuple[str, float, float]:
    """The kind of the prepared model, and the error of its gradient and that of the uncut one's own."""
    rank = dist.get_rank() if dist.is_initialized() and dist.get_world_size() > 1 else None
    shares = samples()
    everything = [sample for share in shares for sample in share]
    settings = {"mixed_precision": "bf16"} if precision == "bf16" else {}
    with accelerator(gradient_accumulation_steps=4, **settings) as made:
        model = models.gpt2(PRECISIONS[precision])
        model = sharded(made, model) if wrapper == "sharded" else made.prepare(model)
        gradient = GradientAccumulator(model, micro_batch_size=2)
        gradient.forward_backward(everything if rank is None else shares[rank], losses.next_token)
        assert gradient.finalize().finite
        found = {name.removeprefix("module."): each for name, each in model.named_parameters()}
        found = harness.full_gradients(found)
    exact, own = expected("float64", everything), expected(precision, everything)
    if precision == "float64":
        return type(model).__name__, oracle.worst_error(found, exact)[0], 0.0
    return type(model).__name__, oracle.whole_error(found, exact), oracle.whole_error(own, exact)


def run_job(name: str) -> tuple[str, float, float]:
    """The job "wrapper/precision"."""
    wrapper, precision = name.split("/")
    return errors(precision, wrapper)
