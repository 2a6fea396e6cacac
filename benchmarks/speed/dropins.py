"""The loops of other libraries with exact updates in them: what `trainers.py` has, and the line that changes."""

from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.speed.task import Task
from benchmarks.speed.trainers import hugging_face
from megabatch import UpdateSampler, losses


def trainer(task: Task) -> None:
    """MegabatchTrainer in place of Trainer."""
    from megabatch.integrations.transformers import MegabatchTrainer

    hugging_face(task, trainer=MegabatchTrainer, max_microbatch_tokens=task.setting.max_microbatch_tokens)


def accelerate(task: Task) -> None:
    """What Accelerate has prepared, in a Learner."""
    from accelerate import Accelerator

    from megabatch.integrations.accelerate import learner

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(task.model, task.optimizer)
    made = learner(accelerator, model, optimizer, max_microbatch_tokens=task.setting.max_microbatch_tokens)
    sampler = UpdateSampler(
        [len(sample["input_ids"]) for sample in task.samples], global_batch_size=task.setting.update_size,
        dp_rank=task.rank, dp_degree=task.world, order=lambda epoch: range(len(task.samples)),
    )  # fmt: skip
    for batch in DataLoader(task.samples, batch_sampler=sampler, collate_fn=list):
        made.forward_backward(batch, losses.next_token)
        made.optim_step()


def lightning(task: Task) -> None:
    """ExactUpdates before LightningModule, and no training_step."""
    from lightning.pytorch import LightningModule, Trainer

    from megabatch.integrations.lightning import ExactUpdates

    setting = task.setting

    class Causal(ExactUpdates, LightningModule):
        def __init__(self) -> None:
            bound = setting.max_microbatch_tokens
            super().__init__(
                losses.next_token, batches_per_update=setting.steps(task.world), max_microbatch_tokens=bound
            )
            self.model = task.model

        def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
            return self.model(*inputs, **named)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return task.optimizer

    made = Trainer(
        accelerator="cpu", devices=task.world, strategy="ddp" if task.world > 1 else "auto", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    dealt = DistributedSampler(task.samples, task.world, task.rank, shuffle=False) if task.world > 1 else None
    made.fit(Causal(), DataLoader(task.samples, setting.micro_batch_size, sampler=dealt, collate_fn=list))
