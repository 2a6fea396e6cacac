"""MegabatchTrainer: Hugging Face's Trainer, each of whose updates is the exact gradient of its samples."""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from megabatch import losses
from megabatch.accumulator import GradientAccumulator
from megabatch.batch import Collate
from megabatch.contract import JointLoss, LossFunction
from megabatch.errors import LossContractError, MegabatchError, PlanError, in_one_line
from megabatch.integrations import means
from megabatch.integrations.arguments import refuse
from megabatch.integrations.dealing import DealtBatches
from megabatch.rows import OneRow
from megabatch.update import Update
from megabatch.vocabulary import HALF_TYPES

try:
    from accelerate.utils import gather_object
    from transformers import Trainer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.trainer_utils import seed_worker
except ModuleNotFoundError as error:
    raise MegabatchError(
        f"megabatch.integrations.transformers needs {error.name}, which is not installed: pip install transformers "
        "accelerate"
    ) from None


class MegabatchTrainer(Trainer):
    """A Trainer whose every update is the exact gradient of its samples, however many, and wherever they are.

    They are the ``per_device_train_batch_size * gradient_accumulation_steps`` samples of each process, re-cut by
    length. Loop, logging, callbacks, checkpoints and evaluation are Hugging Face's; the loss that is logged is the
    update's. Alone or with DistributedDataParallel (torchrun). An update whose loss, or clipped gradient, is not finite
    leaves weights and optimizer as they are.

    Args:
        loss_fn: The loss in megabatch's contract. None: the next token's cross-entropy for a causal model that trains
            with it; else what ``compute_loss`` (yours, ``compute_loss_func``, label smoothing or the model's own)
            gives without ``num_items_in_batch``, taken as a mean over `count_targets`: so it is tried on a sample
            before the first update, and refused where it is none.
        max_microbatch_tokens: Padded tokens per forward, a hard cap, or "auto"; see `GradientAccumulator`. None:
            ``per_device_train_batch_size`` samples.
        arguments: All of Trainer's, by name.

    Raises `PlanError` for settings that cannot be kept, each named in docs/integrations.md, and `LossContractError`
    for a loss that cannot be told to be exact.
    """

    def __init__(
        self,
        *positional: Any,
        loss_fn: LossFunction | JointLoss | None = None,
        max_microbatch_tokens: int | str | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(*positional, **arguments)
        refuse(self.args, self.accelerator)
        if isinstance(self.data_collator, OneRow):
            raise PlanError(
                "MegabatchTrainer cannot keep data_collator=OneRow(), with which Trainer evaluates too; leave it "
                "out, or use GradientAccumulator"
            )
        if isinstance(self.train_dataset, IterableDataset) and self.args.world_size > 1:
            raise PlanError(
                "MegabatchTrainer cannot deal an IterableDataset to several processes; give a dataset with a length"
            )
        self._max_microbatch_tokens = max_microbatch_tokens
        self._gradient: GradientAccumulator | None = None  # of the model that is trained now
        self._samples: list[Any] = []  # this rank's, of the update
        self._update: Update | None = None
        self._is_causal = self._shifts_labels()
        self._loss_fn = loss_fn or self._known_loss()
        self._has_own_loss = loss_fn is not None

    def count_targets(self, microbatch: Any) -> Tensor:
        """What ``compute_loss`` is a mean over: labels that are not -100, but a causal model's first of each row."""
        return means.count_labels(microbatch, shifted=self._is_causal)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Samples as they are: they are collated when their microbatch is known. None is repeated."""
        if self.train_dataset is None:
            return super().get_train_dataloader()  # which says so
        dataset: Any = self.train_dataset
        if hasattr(dataset, "remove_columns") and not isinstance(dataset, IterableDataset):
            dataset = self._remove_unused_columns(dataset, "training")
        args = self.args
        settings: dict[str, Any] = {
            "collate_fn": list,
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory,
            "persistent_workers": args.dataloader_persistent_workers,
            "multiprocessing_context": args.dataloader_multiprocessing_context,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "in_order": args.dataloader_in_order,
        }
        if isinstance(dataset, IterableDataset):
            return DataLoader(dataset, self._train_batch_size, drop_last=args.dataloader_drop_last, **settings)
        start = partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index)
        return _Loader(dataset, batch_sampler=self._dealt(), worker_init_fn=start, **settings)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """The batches of an update, whose samples are kept for its last `training_step`."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._samples = [sample for batch in batches for sample in batch]
        return batches, None

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """The whole update in its last call; nothing in those before. Returns the loss that they add up to."""
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):  # of a schedule-free one
            cast(Any, self.optimizer).train()
        gradient = self._accumulator(model)
        gradient.forward_backward(self._samples, self._loss_fn)
        self._update = update = gradient.finalize(max_norm=self.args.max_grad_norm or None)
        if not update.finite:
            if isinstance(problem := update.problem(), LossContractError):
                raise problem
            model.zero_grad()  # so that nothing is stepped
        return update.loss.to(torch.float32)

    def floating_point_ops(self, inputs: Any) -> int:
        """Of a batch of samples, without padding."""
        if isinstance(inputs, list):
            num_tokens = sum(map(self._length, cast(list[Any], inputs)))
            inputs = {self._input_name: torch.empty(num_tokens, device="meta")}
        return super().floating_point_ops(inputs)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Without padding: how much of it there is follows from the cut."""
        if self.args.include_num_input_tokens_seen != "no" and self.accelerator.sync_gradients and self._update:
            self.state.num_input_tokens_seen += self._update.num_tokens

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """The norm before the gradient was clipped, which is done."""
        return None if self._update is None else self._update.grad_norm

    def _shifts_labels(self) -> bool:
        """Whether the model predicts the next label from each position, as causal models do."""
        model: Any = self.model
        model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of PEFT
        is_named = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        return self._loss_shifts_labels or (is_named and not getattr(model.config, "is_encoder_decoder", False))

    def _known_loss(self) -> LossFunction:
        """The next token's cross-entropy where nothing was put in its place, else the mean that there is."""
        is_own = type(self).compute_loss is Trainer.compute_loss and not (self.compute_loss_func or self.label_smoother)
        if self._is_causal and is_own:
            return losses.next_token
        return means.times_count(self.compute_loss, self.count_targets)

    def _accumulator(self, model: nn.Module) -> GradientAccumulator:
        """Made with the first update, when the model is wrapped."""
        if self._gradient is None or self._gradient.model is not model:
            collate = self._get_collator_with_removed_columns(self.data_collator, "training")
            if not self._has_own_loss:
                self._check_loss(model, collate)
            tokens = self._max_microbatch_tokens
            size = self.args.per_device_train_batch_size if tokens is None else None
            self._gradient = GradientAccumulator(
                model, micro_batch_size=size, max_microbatch_tokens=tokens, collate=collate, length=self._length
            )
            self._gradient.reserve_for(cast(Any, self.optimizer))
        return self._gradient

    def _check_loss(self, model: nn.Module, collate: Collate) -> None:
        """Whether the loss is what it is taken for, tried on two samples; told to all ranks."""
        problem = None
        try:
            if self._samples:
                self._try_loss(self.accelerator.unwrap_model(model), self._prepare_inputs(collate(self._pair(collate))))
        except Exception as error:
            problem = str(error) if isinstance(error, MegabatchError) else f"compute_loss failed: {in_one_line(error)}"
        for told in cast(list[str | None], gather_object([problem])):
            if told is not None:
                raise LossContractError(told)

    def _try_loss(self, model: nn.Module, pair: Any) -> None:
        is_half = self.accelerator.mixed_precision == "bf16" or next(model.parameters()).dtype in HALF_TYPES
        tolerance = 5e-2 if is_half else 1e-3
        if self._loss_fn is losses.next_token:
            count = losses.count_targets
            means.check_same(losses.next_token, count, self.compute_loss, model, pair, tolerance=tolerance)
        else:
            means.check_mean(self.compute_loss, self.count_targets, model, pair, tolerance=tolerance)

    def _pair(self, collate: Collate) -> list[Any]:
        """The first two samples with targets, or such as there are."""
        real = (sample for sample in self._samples if self.count_targets(collate([sample])))
        return ([*islice(real, 2)] * 2 or [*self._samples] * 2)[:2]

    def _dealt(self) -> DealtBatches:
        args = self.args
        sampler: Any = self._get_train_sampler()
        seed = args.seed if args.data_seed is None else args.data_seed
        return DealtBatches(
            sampler, self._train_batch_size, rank=args.process_index, world=args.world_size,
            drop_last=args.dataloader_drop_last, seed=seed,
        )  # fmt: skip

    @property
    def _input_name(self) -> str:
        return getattr(self.model, "main_input_name", "input_ids")

    def _length(self, sample: Any) -> int:
        """Tokens of a sample; 1 where it has none to count and none are asked for."""
        try:
            return len(sample[self._input_name])
        except (KeyError, TypeError, IndexError):
            if self._max_microbatch_tokens is None:
                return 1
            raise PlanError(
                f"a sample has no {self._input_name!r} to count tokens of; leave max_microbatch_tokens out"
            ) from None


class _Loader(DataLoader[Any]):
    """Tells its sampler which epoch begins."""

    def set_epoch(self, epoch: int) -> None:
        cast(DealtBatches, self.batch_sampler).set_epoch(epoch)
