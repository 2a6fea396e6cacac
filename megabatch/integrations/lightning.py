"""Exact updates in a LightningModule, by manual optimization: `ExactUpdates`."""

from collections.abc import Mapping
from typing import Any, cast

from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from megabatch.core.contract import LossFunction
from megabatch.core.update import Update
from megabatch.errors import LossContractError, PlanError, require_count
from megabatch.gradient_accumulator import GradientAccumulator
from megabatch.losses.coupled_loss import JointLoss

STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")  # every rank holds the whole module


class ExactUpdates:
    """A mixin for ``LightningModule`` whose updates have the exact gradient of their batches.

    Write ``class Model(ExactUpdates, LightningModule)`` and call ``super().__init__(losses.next_token, ...)`` first.
    Define ``forward`` and ``configure_optimizers``, and no ``training_step``. A batch is a list of samples: give the
    DataLoader ``collate_fn=list``. The last update of an epoch has the remaining batches. The schedule, if there is
    one, steps once with each update. "train_loss" is the loss of the update over all ranks. It supports one device
    and DDP.

    Args:
        loss_fn: A loss in megabatch's contract; its model is this module.
        batches_per_update: Batches of each rank in an update. Replaces Trainer's ``accumulate_grad_batches``.
        max_norm: Clips each update's gradient to this norm. Replaces Trainer's ``gradient_clip_val``.
        cut: `GradientAccumulator`'s arguments: ``max_microbatch_tokens``, ``micro_batch_size``, ``collate``, ...

    Raises:
        PlanError: In the first update, for float16, another strategy, several optimizers or other batches.
    """

    def __init__(
        self,
        loss_fn: LossFunction | JointLoss,
        *,
        batches_per_update: int = 1,
        max_norm: float | None = None,
        **cut: Any,
    ) -> None:
        super().__init__()
        lightning = cast(Any, self)
        lightning.automatic_optimization = False
        lightning.loss_fn, lightning.max_norm, lightning.cut = loss_fn, max_norm, cut
        lightning.batches_per_update = require_count("batches_per_update", batches_per_update)
        self._gradient: GradientAccumulator | None = None
        self._samples: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the accumulator and pending samples; a copy makes its own."""
        return cast(Any, super()).__getstate__() | {"_gradient": None, "_samples": []}

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Leave training batches on their device: each microbatch is moved later."""
        lightning = cast(Any, self)
        if lightning.trainer.training:
            return batch
        return cast(Any, super()).transfer_batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Run the whole update with its last batch; only collect samples before."""
        lightning = cast(Any, self)
        if isinstance(batch, Mapping) or not isinstance(batch, list):
            raise PlanError(
                f"a batch is a {type(cast(Any, batch)).__name__}; expected a list of samples: give the DataLoader "
                "collate_fn=list"
            )
        if batch_idx % lightning.batches_per_update == 0:
            self._samples = []
        self._samples += cast(list[Any], batch)
        if (batch_idx + 1) % lightning.batches_per_update and not lightning.trainer.is_last_batch:
            return
        optimizer, schedule = lightning.optimizers(), lightning.lr_schedulers()
        if self._gradient is None:
            self._gradient = self._accumulator(optimizer, schedule)
        self._gradient.forward_backward(self._samples, lightning.loss_fn)
        self._step(self._gradient.finalize(max_norm=lightning.max_norm), optimizer, schedule)

    def _step(self, update: Update, optimizer: Any, schedule: Any) -> None:
        """Step optimizer and schedule once; neither for an update that is not finite."""
        if update.finite:
            optimizer.step()
            if schedule is not None:
                schedule.step()
        elif isinstance(problem := update.problem(), LossContractError):
            raise problem
        cast(Any, self).log("train_loss", update.loss.float(), prog_bar=True, batch_size=1)

    def _accumulator(self, optimizer: Any, schedule: Any) -> GradientAccumulator:
        lightning = cast(Any, self)
        strategy = type(lightning.trainer.strategy).__name__
        if strategy not in STRATEGIES:
            raise PlanError(f"the strategy is a {strategy}; expected one device, or strategy='ddp'")
        if str(lightning.trainer.precision).startswith("16"):
            raise PlanError(
                f"the Trainer has precision={lightning.trainer.precision!r}, which loses small gradients; give "
                "precision='bf16-mixed'"
            )
        if isinstance(optimizer, list) or isinstance(schedule, list):
            raise PlanError("configure_optimizers() gives several optimizers or schedules; give one of each")
        if isinstance(schedule, ReduceLROnPlateau):
            raise PlanError(
                "ReduceLROnPlateau is stepped with a metric, and updates have none; step it yourself, in "
                "on_validation_epoch_end, or give another schedule"
            )
        # The plain module: in manual optimization Lightning's DDP reduces nothing by itself.
        gradient = GradientAccumulator(cast(nn.Module, self), **lightning.cut)
        gradient.reserve_for(optimizer.optimizer)
        return gradient
