"""Jobs that train by Lightning, and what plain torch says of the same samples."""

import os
import pickle
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from megabatch import losses
from megabatch.integrations.lightning import ExactUpdates
from tests.exact import models, oracle
from tests.exact.foreign import as_torchrun, sums
from tests.integrations.ragged import DTYPES, samples, tensors

BATCH, BATCHES = 2, 3  # samples of a rank's batch; batches of an update
MAX_NORM = {torch.float64: None, torch.float32: 0.5}


class Model(ExactUpdates, LightningModule):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(
            losses.next_token, batches_per_update=BATCHES, max_norm=MAX_NORM[dtype], max_microbatch_tokens=40
        )
        self.model = models.gpt2(dtype)

    def forward(self, *args: Any, **inputs: Any) -> Any:
        return self.model(*args, **inputs)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.0)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)]


class Plateau(Model):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "loss"}]


class Recorder(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.gradients.append({n.removeprefix("model."): p.grad.clone() for n, p in module.named_parameters()})

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (batch_idx + 1) % BATCHES == 0 or trainer.is_last_batch:
            self.losses.append(float(trainer.callback_metrics["train_loss"]))


def trainer(folder: str, *callbacks: Callback, **settings: Any) -> Trainer:
    world = dist.get_world_size()
    given = {
        "strategy": DDPStrategy(process_group_backend="gloo") if world > 1 else "auto", "devices": world,
        "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "callbacks": list(callbacks),
        "default_root_dir": folder, "use_distributed_sampler": False,
    }  # fmt: skip
    return Trainer(**given | settings)


def loader(collate: Any = list) -> DataLoader:
    """This rank's every so many-th sample, in order."""
    return DataLoader(tensors(samples())[dist.get_rank() :: dist.get_world_size()], BATCH, collate_fn=collate)


def by_hand(dtype: torch.dtype, world: int) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses and gradients of the same updates."""
    model = models.gpt2(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)
    given, size, found, gradients = tensors(samples()), BATCH * BATCHES * world, [], []
    for start in range(0, len(given), size):
        found.append(oracle.answer(model, sums, given[start : start + size]).loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM[dtype] or float("inf"))
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
        schedule.step()
    return found, gradients


def exactness(dtype: str) -> dict[str, Any]:
    """Errors of every update's gradient, at the weights so far, and of the losses; steps of optimizer and schedule."""
    recorder, module = Recorder(), Model(DTYPES[dtype])
    with tempfile.TemporaryDirectory() as folder:
        ran = trainer(folder, recorder)
        ran.fit(module, loader())
    copied = pickle.loads(pickle.dumps(module))
    expected, gradients = by_hand(DTYPES[dtype], dist.get_world_size())
    pairs = zip(recorder.gradients, gradients, strict=True)
    return {
        "gradients": max(oracle.whole_error(*pair) for pair in pairs),
        "global_step": ran.global_step, "expected": len(expected),
        "losses": max(abs(a - b) / b for a, b in zip(recorder.losses, expected, strict=True)),
        "schedule": module.lr_schedulers().last_epoch, "strategy": type(ran.strategy).__name__,
        "saved": all(map(torch.equal, copied.parameters(), module.parameters())),
    }  # fmt: skip


def refusals() -> dict[str, str]:
    said: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (model, collate, settings) in {
            "batch": (Model, oracle.collate, {}),
            "precision": (Model, list, {"precision": "16-true"}),
            "schedule": (Plateau, list, {}),
        }.items():
            try:
                trainer(folder, **settings).fit(model(torch.float32), loader(collate))
                said[name] = "nothing"
            except Exception as error:
                said[name] = f"{type(error).__name__}: {error}"
    return said


def run_job(name: str) -> Any:
    with as_torchrun(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ["TORCHELASTIC_RUN_ID"] = "job"  # so that Lightning starts no processes of its own
        seed_everything(0, verbose=False)
        return refusals() if name == "refusals" else exactness(name)
