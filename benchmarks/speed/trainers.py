"""Peers that bring a loop of their own, as their documents say; each is imported where it is used."""

import functools
import tempfile
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import TrainerCallback

from benchmarks.speed.model import Sample, collate
from benchmarks.speed.setting import NUM_MEASURED
from benchmarks.speed.task import Task


def accelerate(task: Task) -> None:
    """Accelerate's `accumulate`."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=task.setting.steps(task.world))
    loader = DataLoader(task.samples, batch_size=task.setting.micro_batch_size, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(task.model, task.optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()


def hugging_face(task: Task, strategy: str = "sequential", trainer: Any = None, **given: Any) -> None:
    """transformers' Trainer, or one like it, over the drawn order: "sequential" is the default but unshuffled."""
    from transformers import Trainer, TrainingArguments

    class InOrder(trainer or Trainer):
        def _get_train_sampler(self, *arguments: Any) -> Any:
            sampler = super()._get_train_sampler(*arguments)
            sampler.shuffle = False  # of "batch_rebalance": an update keeps the samples that are drawn for it
            return sampler

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, train_sampling_strategy=strategy, gradient_accumulation_steps=task.setting.steps(task.world),
            per_device_train_batch_size=task.setting.micro_batch_size, **quiet(),
        )  # fmt: skip
        InOrder(task.model, arguments, collate, task.samples, optimizers=moved_by(task), **given).train()


batch_rebalance = functools.partial(hugging_face, strategy="batch_rebalance")


def quiet() -> dict[str, Any]:
    """Settings of Trainer: one epoch on the CPU, no clipping, nothing written."""
    return {
        "num_train_epochs": 1, "max_grad_norm": 0.0, "use_cpu": True, "report_to": "none", "save_strategy": "no",
        "logging_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False, "remove_unused_columns": False,
    }  # fmt: skip


def moved_by(task: Task) -> tuple[torch.optim.Optimizer, Any]:
    """Everybody's optimizer, and a schedule that leaves it alone."""
    return task.optimizer, torch.optim.lr_scheduler.LambdaLR(task.optimizer, lambda step: 1.0)


def lightning(task: Task) -> None:
    """Lightning's `accumulate_grad_batches`; the sampler that it would add by itself on several ranks shuffles."""
    from lightning.pytorch import LightningModule, Trainer

    class Causal(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model

        def training_step(self, batch: Sample) -> torch.Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return task.optimizer

    trainer = Trainer(
        accelerator="cpu", devices=task.world, strategy="ddp" if task.world > 1 else "auto", max_epochs=1, logger=False,
        accumulate_grad_batches=task.setting.steps(task.world), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    dealt = DistributedSampler(task.samples, task.world, task.rank, shuffle=False) if task.world > 1 else None
    loader = DataLoader(task.samples, task.setting.micro_batch_size, sampler=dealt, collate_fn=collate)
    trainer.fit(Causal(), loader)


def trl(task: Task) -> None:
    """TRL's SFTTrainer with packing, in full rows of the bound, without the recomputation that is its default.

    Packs are made of all samples given, so that the warm-up has a trainer of its own.
    """
    size = task.setting.update_size
    _pack(task, task.samples[:size], 1)
    _pack(task, task.samples[size:], NUM_MEASURED)


class _Begins(TrainerCallback):
    """The clock starts where training does, after the packing."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.task.meter.begin()


def _pack(task: Task, samples: list[Sample], num_updates: int) -> None:
    """As many updates of packs, one pack a forward."""
    from datasets import Dataset
    from transformers import ByT5Tokenizer
    from trl import SFTConfig, SFTTrainer, pack_dataset

    data = Dataset.from_dict({"input_ids": [sample["input_ids"].tolist() for sample in samples]})
    length = task.setting.max_microbatch_tokens
    num_packs = len(pack_dataset(data, length, "bfd"))
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            folder, packing=True, max_length=length, per_device_train_batch_size=1, bf16=False,
            gradient_accumulation_steps=-(-num_packs // (num_updates * task.world)), gradient_checkpointing=False,
            train_sampling_strategy="sequential", **quiet() | {"remove_unused_columns": True},
        )  # fmt: skip
        trainer = SFTTrainer(
            task.model, config, train_dataset=data, processing_class=ByT5Tokenizer(), optimizers=moved_by(task),
            callbacks=[_Begins(task)],
        )  # fmt: skip
        trainer.train()
