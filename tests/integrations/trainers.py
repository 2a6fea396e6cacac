"""Jobs that train with MegabatchTrainer, and what plain torch says of the same samples."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import get_length_grouped_indices

from megabatch import losses
from megabatch.batching.packed_row import OneRow
from megabatch.integrations.transformers import MegabatchTrainer
from tests.exact import models, oracle
from tests.exact.foreign import as_torchrun, sums
from tests.integrations.ragged import DTYPES, NUM_SAMPLES, collate, samples, tensors

PER_DEVICE, ACCUMULATED = 2, 3


class Stream(IterableDataset):
    def __iter__(self):
        return iter(samples())


def whole(gradient: Tensor) -> Tensor:
    """The gradient of all shards of FSDP2."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


class Recorder(TrainerCallback):
    """Note the gradients of each step of the optimizer."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor | None]] = []
        self.learning_rates: list[float] = []
        self.logged: list[dict[str, float]] = []
        self.steps = 0

    def on_pre_optimizer_step(self, args, state, control, model=None, **rest):
        self.gradients.append(
            {n: None if p.grad is None else whole(p.grad).clone() for n, p in model.named_parameters()}
        )

    def on_optimizer_step(self, args, state, control, lr_scheduler=None, **rest):
        self.steps += 1
        self.learning_rates.append(lr_scheduler.get_last_lr()[0])

    def on_log(self, args, state, control, logs=None, **rest):
        self.logged.append(dict(logs))


def arguments(folder: str, **changed: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": folder, "per_device_train_batch_size": PER_DEVICE, "gradient_accumulation_steps": ACCUMULATED,
        "num_train_epochs": 1, "learning_rate": 0.0, "optim": "sgd", "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0, "train_sampling_strategy": "sequential", "logging_steps": 1, "save_strategy": "no",
        "report_to": [], "use_cpu": True, "dataloader_pin_memory": False, "disable_tqdm": True,
    }  # fmt: skip
    return TrainingArguments(**settings | changed)


class OwnMean(MegabatchTrainer):
    """A mean over counted targets, as its user has always written it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")[:, 1:]
        logits = model(**inputs).logits[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


class OwnSum(MegabatchTrainer):
    """A sum is not a mean."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return sums(model, inputs)["loss"][0]


class MeanOfMeans(MegabatchTrainer):
    """A mean over samples of means over tokens, which its count does not say."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        rows = [{name: value[row : row + 1] for name, value in inputs.items()} for row in range(len(inputs["labels"]))]
        return torch.stack([total / count for total, count in (sums(model, row)["loss"] for row in rows)]).mean()


def own_function(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs.logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


WAYS: dict[str, tuple[type[MegabatchTrainer], dict[str, Any]]] = {
    "default": (MegabatchTrainer, {}),
    "capped": (MegabatchTrainer, {"max_microbatch_tokens": 40}),
    "cut": (MegabatchTrainer, {"max_microbatch_tokens": 6, "long_samples": "cut"}),
    "cut compute_loss": (OwnMean, {"max_microbatch_tokens": 6, "long_samples": "cut"}),
    "loss_fn": (MegabatchTrainer, {"loss_fn": losses.next_token}),
    "compute_loss": (OwnMean, {}),
    "compute_loss_func": (MegabatchTrainer, {"compute_loss_func": own_function}),
}


def shard_on_cpu(trainer: Any) -> None:
    """Turn on FSDP2, which Accelerate's state ignores without GPUs and replaces by DistributedDataParallel."""
    state = trainer.accelerator.state
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    trainer.is_fsdp_enabled = True


def trained(way: str, dtype: torch.dtype, folder: str, *, dataset: Any = None, **changed: Any):
    """A trainer after its training, and what was recorded."""
    kind, given = WAYS[way]
    recorder = Recorder()
    trainer = kind(
        model=models.gpt2(dtype), args=arguments(folder, **changed), train_dataset=dataset or samples(),
        data_collator=collate, callbacks=[recorder], **given,
    )  # fmt: skip
    if changed.get("fsdp"):
        shard_on_cpu(trainer)
    trainer.train(resume_from_checkpoint=changed.pop("resume_from_checkpoint", None))
    return trainer, recorder


def updates(chosen: list[Any], world: int) -> list[list[Any]]:
    size = PER_DEVICE * ACCUMULATED * world
    return [chosen[start : start + size] for start in range(0, len(chosen), size)]


def without_wrapper(found: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name.removeprefix("module."): each for name, each in found.items()}


def smoothed(model: nn.Module, batch: oracle.Sample) -> oracle.Sums:
    labels = batch["labels"][:, 1:]
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    total = nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum", label_smoothing=0.1
    )
    return {"loss": (total, (labels != -100).sum())}


def grouped() -> list[int]:
    """The first epoch of Trainer's group_by_length, on one process or two."""
    generator = torch.Generator().manual_seed(9)
    size = PER_DEVICE * ACCUMULATED  # of one process: LengthGroupedSampler knows no others
    return get_length_grouped_indices([len(each["labels"]) for each in samples()], size, generator=generator)


FSDP2 = {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}
SETTINGS: dict[str, dict[str, Any]] = {
    "smoothed": {"label_smoothing_factor": 0.1},
    "grouped": {
        "train_sampling_strategy": "group_by_length",
        "data_seed": 9,
        "dataloader_num_workers": 1,
        "include_num_input_tokens_seen": "non_padding",
    },
    "dropped": {"dataloader_drop_last": True},
    "streamed": {"max_steps": 3},
    "bf16": {"bf16": True},
    "checkpointed": {"gradient_checkpointing": True},
    "fsdp2": {"fsdp": True, "fsdp_config": FSDP2},
}


def exactness(name: str, dtype: str) -> dict[str, Any]:
    """Errors of every update's gradient and of its loss, as logged; steps of optimizer and schedule."""
    name, _, way = name.partition(" ")
    way, changed = (name, {}) if name in WAYS else (way or "default", SETTINGS[name])
    dataset = Stream() if name == "streamed" else samples()
    with tempfile.TemporaryDirectory() as folder:
        trainer, recorder = trained(
            way, DTYPES[dtype], folder, dataset=dataset, lr_scheduler_type="linear", learning_rate=0.0, **changed
        )
    chosen = [samples()[index] for index in (grouped() if name == "grouped" else range(NUM_SAMPLES))]
    if name in ("dropped", "streamed"):
        chosen = chosen[: {"dropped": NUM_SAMPLES // (PER_DEVICE * dist.get_world_size()) * PER_DEVICE
                           * dist.get_world_size(), "streamed": 18}[name]]  # fmt: skip
    expected, own = [], []
    for each in updates(chosen, dist.get_world_size()):
        formula = smoothed if name == "smoothed" else sums
        expected.append(oracle.answer(models.gpt2(torch.float64), formula, tensors(each)))
        with torch.autocast("cpu", torch.bfloat16, enabled=name == "bf16"):
            answer = oracle.answer(models.gpt2(DTYPES[dtype]), formula, tensors(each))
        own.append(oracle.whole_error(answer.gradients, expected[-1].gradients))
    logged = [each["loss"] for each in recorder.logged if "loss" in each]
    worst = oracle.worst_error if dtype == "float64" else lambda *pair: [oracle.whole_error(*pair)]
    return {
        "errors": [worst(without_wrapper(found), answer.gradients)[0]
                   for found, answer in zip(recorder.gradients, expected, strict=True)],
        "own": own,
        "tokens": trainer.state.num_input_tokens_seen, "expected_tokens": sum(len(each["labels"]) for each in chosen),
        "losses": [abs(found - answer.loss) / answer.loss for found, answer in zip(logged, expected, strict=True)],
        "steps": recorder.steps, "schedule": trainer.lr_scheduler.last_epoch, "global_step": trainer.state.global_step,
        "model": type(trainer.model_wrapped).__name__, "expected": len(expected),
    }  # fmt: skip


def by_hand(epochs: int, world: int, order: list[list[int]], max_norm: float) -> dict[str, Tensor]:
    """Weights after plain torch's AdamW on every update of every epoch."""
    model = models.gpt2(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for epoch in range(epochs):
        for each in updates([samples()[index] for index in order[epoch]], world):
            oracle.answer(model, sums, tensors(each))
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def seeded(epochs: int, seed: int) -> list[list[int]]:
    """The order of a Trainer whose data_seed is this."""
    generators = [torch.Generator().manual_seed(seed + epoch) for epoch in range(epochs)]
    return [torch.randperm(NUM_SAMPLES, generator=each).tolist() for each in generators]


MOVING: dict[str, Any] = {
    "learning_rate": 1e-2, "optim": "adamw_torch", "max_grad_norm": 0.5, "train_sampling_strategy": "random",
    "num_train_epochs": 2, "data_seed": 9,
}  # fmt: skip


def resumed() -> dict[str, float]:
    """The error of the weights after two epochs in one go, and of those after going on from a checkpoint."""
    world, rank = dist.get_world_size(), dist.get_rank()
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    number = 3  # of the update after which it goes on, in the middle of an epoch
    saving = {"save_strategy": "steps", "save_steps": number, "logging_strategy": "no"}
    first, _ = trained("default", torch.float64, folder[0], **MOVING | saving)
    whole = by_hand(2, world, seeded(2, 9), 0.5)
    checkpoint = str(Path(folder[0]) / f"checkpoint-{number}")
    second = MegabatchTrainer(
        model=models.gpt2(torch.float64), args=arguments(folder[0], **MOVING | saving), train_dataset=samples(),
        data_collator=collate,
    )  # fmt: skip
    second.train(resume_from_checkpoint=checkpoint)
    errors = [
        oracle.worst_error({n: p.detach() for n, p in trainer.model.named_parameters()}, whole)[0]
        for trainer in (first, second)
    ]
    return {"in one go": errors[0], "resumed": errors[1], "steps": second.state.global_step}


def refused(way: type[MegabatchTrainer], **changed: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            trainer = way(
                model=models.gpt2(torch.float64), args=arguments(folder, **changed), train_dataset=samples(),
                data_collator=collate,
            )  # fmt: skip
            if changed:
                shard_on_cpu(trainer)
            trainer.train()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


REFUSED: dict[str, dict[str, Any]] = {
    "average": {"average_tokens_across_devices": False},
    "auto": {"auto_find_batch_size": True},
    "rebalance": {"train_sampling_strategy": "batch_rebalance"},
    "layerwise": {"optim": "galore_adamw_layerwise", "optim_target_modules": ["attn"]},
    "lomo": {"optim": "adalomo"},
    "cache": {"torch_empty_cache_steps": 4},
    "split": {"accelerator_config": {"split_batches": True}},
    "dispatch": {"accelerator_config": {"dispatch_batches": True}},
    "seedable": {"accelerator_config": {"use_seedable_sampler": False}},
    "accumulation": {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
    "collator": {},
}


def refusals() -> dict[str, str]:
    """The error of each setting that cannot be kept."""
    said: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, changed in REFUSED.items():
            try:
                collator = OneRow() if name == "collator" else None
                MegabatchTrainer(models.gpt2(), arguments(folder, **changed), collator, samples()).train()
                said[name] = "nothing"
            except Exception as error:
                said[name] = f"{type(error).__name__}: {error}"
    return said


class Spoilt(OwnMean):
    """Its second update has no finite loss."""

    def compute_loss(self, model, inputs, *rest, **more):
        loss = super().compute_loss(model, inputs, *rest, **more)
        return loss * float("nan") if self.state.global_step == 1 else loss


def spoilt() -> dict[str, Any]:
    """The updates that had a gradient, and True if all weights are finite afterwards."""
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(folder, learning_rate=1e-2, optim="adamw_torch", max_grad_norm=1.0)
        trainer = Spoilt(
            models.gpt2(), args, train_dataset=samples(), data_collator=collate, callbacks=[recorder]
        )  # fmt: skip
        trainer.train()
    stepped = [any(each is not None for each in found.values()) for found in recorder.gradients]
    return {"stepped": stepped, "finite": all(bool(p.isfinite().all()) for p in trainer.model.parameters())}


def run_job(name: str) -> Any:
    """The job "way/dtype", or another by its name."""
    way, _, dtype = name.partition("/")
    with as_torchrun():
        if way in ("resumed", "refusals", "spoilt"):
            return {"resumed": resumed, "refusals": refusals, "spoilt": spoilt}[way]()
        if way.startswith("refused"):
            changed = SETTINGS["fsdp2"] if "fsdp2" in way else {}
            return refused({"sum": OwnSum, "means": MeanOfMeans}[dtype], **changed)
        return exactness(way, dtype)
