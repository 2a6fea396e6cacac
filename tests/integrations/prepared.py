"""Jobs that train what Accelerate has prepared, and what plain torch says of the same samples."""

import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader

from megabatch import PlanError, UpdateSampler, losses
from megabatch.integrations.accelerate import learner
from tests.exact import models, oracle
from tests.exact.foreign import as_torchrun, sums
from tests.integrations.ragged import DTYPES, samples, tensors

SIZE, SEED = 8, 2  # samples of an update, over all ranks


def order() -> list[list[dict[str, Any]]]:
    """The samples of each update, whichever rank has them."""
    lengths = [len(each["labels"]) for each in samples()]
    alone = UpdateSampler(lengths, global_batch_size=SIZE, seed=SEED, dp_rank=0, dp_degree=1)
    return [[samples()[index] for index in ids] for ids in alone]


def prepared(dtype: torch.dtype) -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = models.gpt2(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)
    return accelerator, *accelerator.prepare(model, optimizer, schedule)


def loader() -> DataLoader:
    given = tensors(samples())
    sampler = UpdateSampler([len(each["labels"]) for each in given], global_batch_size=SIZE, seed=SEED)
    return DataLoader(given, batch_sampler=sampler, collate_fn=list)


def by_hand(dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], list[float]]:
    model = models.gpt2(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)
    found = []
    for each in order():
        found.append(oracle.answer(model, sums, tensors(each)).loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, found


def exactness(dtype: str) -> dict[str, Any]:
    """Errors of the first gradient, of all losses and of the weights at the end; steps of the schedule."""
    accelerator, model, optimizer, schedule = prepared(DTYPES[dtype])
    made = learner(accelerator, model, optimizer, scheduler=schedule, max_norm=0.5, max_microbatch_tokens=40)
    first = oracle.answer(models.gpt2(torch.float64), sums, tensors(order()[0])).gradients
    found, gradient_error = [], None
    for batch in loader():
        made.forward_backward(batch, losses.next_token)
        update = made.optim_step()
        if gradient_error is None:  # p.grad is there until the next update; clipped
            assert update.grad_norm is not None
            scale = max(1.0, (float(update.grad_norm) + 1e-6) / 0.5)  # as torch clips
            gradients = {n.removeprefix("module."): p.grad * scale for n, p in model.named_parameters()}
            gradient_error = oracle.whole_error(gradients, first)
        found.append(float(update.loss))
    weights, expected = by_hand(DTYPES[dtype])
    trained = {name.removeprefix("module."): each.detach() for name, each in model.named_parameters()}
    return {
        "gradient": gradient_error, "weights": oracle.whole_error(trained, weights),
        "losses": max(abs(a - b) / b for a, b in zip(found, expected, strict=True)),
        "schedule": schedule.scheduler.last_epoch, "updates": made.step, "model": type(model).__name__,
    }  # fmt: skip


def saved() -> dict[str, Any]:
    """Return True if accelerator.save_state holds the stepped weights."""
    accelerator, model, optimizer, schedule = prepared(torch.float64)
    made = learner(accelerator, model, optimizer, scheduler=schedule, max_microbatch_tokens=40)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    states = []
    for batch in loader():
        made.forward_backward(batch, losses.next_token)
        made.optim_step()
        if made.step == 2:
            accelerator.save_state(folder[0])
            states.append({name: each.detach().clone() for name, each in model.named_parameters()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerator.load_state(folder[0])
    steps = {int(each["step"]) for each in optimizer.optimizer.state.values()}
    same = all(bool((each == states[0][name]).all()) for name, each in model.named_parameters())
    return {"same": same, "steps": sorted(steps), "schedule": schedule.scheduler.last_epoch}


def refused() -> str:
    accelerator, model, optimizer, _ = prepared(torch.float32)
    accelerator.state._mixed_precision = "fp16"  # which a CPU has not
    try:
        learner(accelerator, model, optimizer, max_microbatch_tokens=40)
    except PlanError as error:
        return str(error)
    return "nothing"


def run_job(name: str) -> Any:
    with as_torchrun():
        return {"saved": saved, "refused": refused}[name]() if name in ("saved", "refused") else exactness(name)
