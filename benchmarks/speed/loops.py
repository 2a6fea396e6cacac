"""Loops by hand: plain PyTorch in order and sorted, and torchtune's; and megabatch's."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from benchmarks.speed.model import NO_TARGET, Sample, collate
from benchmarks.speed.task import Task
from megabatch import GradientAccumulator, UpdateSampler, losses


def megabatch(task: Task) -> None:
    """README's loop."""
    sampler = UpdateSampler(
        [len(sample["input_ids"]) for sample in task.samples], global_batch_size=task.setting.update_size,
        dp_rank=task.rank, dp_degree=task.world, order=lambda epoch: range(len(task.samples)),
    )  # fmt: skip
    loader = DataLoader(task.samples, batch_sampler=sampler, collate_fn=list)
    gradient = GradientAccumulator(task.wrapped(), max_microbatch_tokens=task.setting.max_microbatch_tokens)
    for batch in loader:
        gradient.forward_backward(batch, losses.next_token)
        if gradient.finalize().finite:
            task.optimizer.step()


def plain(task: Task) -> None:
    """The loop that everybody writes: each microbatch's mean, divided by their number."""
    model = task.wrapped()

    def run(batches: Sequence[Sample]) -> None:
        for batch in held_back(model, batches):
            (model(**batch).loss / len(batches)).backward()

    _train(task, run, task.setting.micro_batch_size)


def sorted_by_length(task: Task) -> None:
    """Sort the samples of each update by length, which keeps the update: a sum over the number of all targets."""
    model = task.wrapped()

    def run(batches: Sequence[Sample]) -> None:
        num_here = sum(int((batch["labels"][:, 1:] != NO_TARGET).sum()) for batch in batches)
        num_targets = _over_ranks(num_here, task.world)
        for batch in held_back(model, batches):
            logits = model(input_ids=batch["input_ids"]).logits[:, :-1]  # [B, T - 1, V]
            targets = batch["labels"][:, 1:]
            total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="sum")
            (total * task.world / num_targets).backward()

    _train(task, run, task.setting.micro_batch_size, sorts=True)


def torchtune(task: Task) -> None:
    """What torchtune's recipe full_finetune_distributed does: no mask, no no_sync, a pass over all gradients."""
    model = task.wrapped()

    def run(batches: Sequence[Sample]) -> None:
        num_tokens, running_loss = 0, 0.0
        for batch in batches:
            labels = F.pad(batch["labels"], (0, 1), value=NO_TARGET)[:, 1:].flatten()  # shifted in its data sets
            current_num_tokens = (labels != NO_TARGET).sum()
            num_tokens += current_num_tokens
            logits = model(input_ids=batch["input_ids"]).logits.flatten(0, 1)  # [B * T, V]
            current_loss = F.cross_entropy(logits, labels, ignore_index=NO_TARGET) * current_num_tokens
            running_loss += current_loss.detach()
            current_loss.backward()
        if task.world > 1:
            dist.all_reduce(num_tokens)
            dist.all_reduce(running_loss)
        for parameter in model.parameters():  # scale_grads
            parameter.grad *= task.world / num_tokens

    _train(task, run, task.setting.micro_batch_size)


def _train(task: Task, run: Callable[[Sequence[Sample]], None], rows: int, *, sorts: bool = False) -> None:
    """Microbatches of ``rows`` samples, in the order of arrival or of length, dealt to ranks by turns."""
    for update in task.updates():
        if sorts:
            update.sort(key=lambda sample: len(sample["input_ids"]))
        starts = range(task.rank * rows, len(update), task.world * rows)
        run([collate(update[start : start + rows]) for start in starts])
        task.optimizer.step()
        task.optimizer.zero_grad()


def held_back(model: nn.Module, batches: Sequence[Sample]) -> Iterator[Sample]:
    """The microbatches, all but the last of them inside no_sync of DistributedDataParallel."""
    for index, batch in enumerate(batches):
        is_inner = index < len(batches) - 1 and isinstance(model, DistributedDataParallel)
        with model.no_sync() if is_inner else contextlib.nullcontext():
            yield batch


def _over_ranks(number: int, world: int) -> Any:
    count = Tensor([number])
    if world > 1:
        dist.all_reduce(count)
    return count.item()
