"""Hugging Face's Trainer with exact gradients: `MegabatchTrainer`."""

import contextlib
import copy
import functools
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sized
from functools import partial
from itertools import chain, islice
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, SequentialSampler

from megabatch import losses
from megabatch.batching.inside_samples import InsideSamples
from megabatch.batching.packed_row import OneRow
from megabatch.batching.shared_prefix import SharedPrefix
from megabatch.core.contract import LossFunction, LossHooks, loss, loss_hooks, terms_of, weigh_of
from megabatch.core.samples import Length, Microbatch
from megabatch.core.update import Update
from megabatch.errors import LossContractError, MegabatchError, PlanError, in_one_line, require_version
from megabatch.gradient_accumulator import GradientAccumulator
from megabatch.integrations import mean_loss
from megabatch.integrations.embedding_noise import EmbeddingNoise, with_lengths
from megabatch.integrations.mean_loss import LossTrial, choose_samples, note_generators
from megabatch.integrations.object_snapshot import ObjectSnapshot, restore_after_trial
from megabatch.integrations.rollouts import Rollouts, makes_rollouts
from megabatch.integrations.update_metrics import UpdateMetrics, has_metrics
from megabatch.losses.coupled_loss import JointLoss
from megabatch.losses.mean import mean
from megabatch.losses.token_loss import HALF_TYPES
from megabatch.planning.dealing import deal
from megabatch.torch_private.loss_nodes import IGNORED_LABEL

require_version("transformers")
try:
    from accelerate.utils import gather_object
    from transformers import Trainer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.trainer_utils import seed_worker
except ModuleNotFoundError as error:
    # transformers wraps the error of its own import, and leaves out the name.
    missing = error.name or getattr(error.__cause__, "name", None)
    raise MegabatchError(
        f"megabatch.integrations.transformers needs {missing}, which is not installed: pip install transformers "
        "accelerate"
    ) from None

UNTRIED_ROWS = "a microbatch has several samples in one row, and none was tried before"
ROW_TRIALS = 3  # updates that try such a microbatch: one alone may hold samples that happen not to meet
LAST_TRIED = 2**7  # the last update that may try the loss; updates 1, 2, 4, ... do


class MegabatchTrainer(Trainer):
    """A Trainer whose every update has the exact gradient of its samples.

    An update consumes ``per_device_train_batch_size * gradient_accumulation_steps`` samples of each process. The
    trainer groups them into microbatches by length. Loop, logging, callbacks, checkpoints and evaluation are Hugging
    Face's. The logged loss is the update's. It runs in one process, with DistributedDataParallel or with FSDP2.
    An update whose loss or clipped gradient is not finite leaves weights and optimizer unchanged. Put this class before
    another Trainer to train with that one's loss: ``class Exact(MegabatchTrainer, SFTTrainer): pass``.

    If you override ``_prepare_inputs`` or ``compute_loss_context_manager``, they are called for each microbatch.
    ``get_train_dataloader`` may yield lists of samples, which the trainer collates, or batches that are mappings of
    tensors with samples in dim 0. ``training_step`` runs all batches of an update with the last one.

    Args:
        loss_fn: The loss in megabatch's contract. None: the next-token cross-entropy for a causal model that trains
            with it; otherwise the result of ``compute_loss`` (yours, ``compute_loss_func``, label smoothing or the
            model's own) without ``num_items_in_batch``, as a mean over `count_targets`.
        max_microbatch_tokens: Padded tokens per forward, a hard cap, or "auto"; see `GradientAccumulator`. None:
            ``per_device_train_batch_size`` samples.
        long_samples: "cut" cuts samples that are longer than ``max_microbatch_tokens`` into chunks, exactly, see
            `InsideSamples`. The collator is given chunks as samples of their own. None: such a sample is an error.
        length: Counts the padded tokens that a sample adds to a microbatch. None counts its ``input_ids``, and without
            those the numbers of ``input_ids`` in a microbatch of this sample alone (a pair of DPO has two rows).
        check_loss: Without ``loss_fn``, check that the loss is that mean: on up to 8 samples of different lengths, in
            updates 1, 2, 4, 8 to 128.
        arguments: All arguments of Trainer, by name.

    Raises:
        PlanError: When training begins, for a setting that exact updates cannot keep (docs/integrations.md lists
            them).
        LossContractError: The loss is not that mean, or its trial cannot tell.
    """

    def __init__(
        self,
        *positional: Any,
        loss_fn: LossFunction | JointLoss | None = None,
        max_microbatch_tokens: int | str | None = None,
        long_samples: Literal["cut"] | None = None,
        length: Length | None = None,
        check_loss: bool = True,
        **arguments: Any,
    ) -> None:
        super().__init__(*positional, **arguments)
        self._max_microbatch_tokens, self._given_length = max_microbatch_tokens, length
        if long_samples not in (None, "cut"):
            raise PlanError(f"long_samples is {long_samples!r}; give 'cut', or leave it out")
        self._long_samples = long_samples
        self._given_loss, self._checks_loss = loss_fn, check_loss
        self._loss_fn: LossFunction | JointLoss | None = None  # with the trainer's hooks
        self._gradient: GradientAccumulator | None = None  # of the model that is trained now
        self._batches: list[Any] = []  # this rank's, of the update
        self._gives_samples = False  # whether batches are those of get_train_dataloader below
        self._num_updates = 0
        self._trial_samples: list[Any] = []  # of past trials
        self._row_trials = 0  # updates that may still try a microbatch with several samples in a row
        self._tries_rows = False  # this update does
        self._packed_samples: list[Any] = []  # of the first such microbatch
        self._update: Update | None = None
        self._update_metrics: UpdateMetrics | None = None  # of a trainer of TRL
        self._rollouts: Rollouts | None = None  # of a trainer that generates
        self._was_stepped = False  # whether training_step below was called
        self._noise: EmbeddingNoise | None = None  # of neftune_noise_alpha
        self._warned = False  # of an update without a target
        self._has_batches = False  # whether the loader has given any since training began
        self._is_causal = self._shifts_labels()

    def train(self, *positional: Any, **named: Any) -> Any:
        """Train as Trainer does, after a check of the settings."""
        check_arguments(self.args, self.accelerator)
        if isinstance(self.data_collator, OneRow | SharedPrefix):
            raise PlanError(
                f"MegabatchTrainer cannot keep data_collator={type(self.data_collator).__name__}(), with which Trainer "
                "evaluates too; leave it out, or use GradientAccumulator"
            )
        owner = _defining_class(super().training_step)
        if makes_rollouts(owner):
            self._rollouts = Rollouts(self, owner.__name__)
        elif owner is not Trainer and not hasattr(self, "maybe_activation_offload_context"):
            raise PlanError(f"MegabatchTrainer cannot keep {owner.__name__}.training_step; train with {owner.__name__}")
        self._check_noise()
        if getattr(self, "calculate_KL", False):  # 0 before the first step, so that no trial would tell
            raise PlanError(
                "MegabatchTrainer cannot keep KTOTrainer's KL term, which couples the samples of a microbatch; set "
                "loss_type='apo_zero_unpaired', or train with KTOTrainer"
            )
        if {"aot", "aot_unpaired"} & set(getattr(self, "loss_types", ())):  # too small for the trial with little beta
            raise PlanError(
                "MegabatchTrainer cannot keep DPOTrainer's loss_type 'aot', which sorts the pairs of a microbatch; set "
                "another, or train with DPOTrainer"
            )
        self._num_updates, self._has_batches = 0, False
        ignores_skip = self.args.ignore_data_skip
        try:
            return super().train(*positional, **named)
        finally:
            self.args.ignore_data_skip = ignores_skip

    def _check_noise(self) -> None:
        """Raise `PlanError` where the length of a sample that scales NEFTune's noise would not be known."""
        is_encoder_decoder = getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
        unknown = {"an encoder-decoder": is_encoder_decoder, "rollouts": self._rollouts is not None,
                   "a JointLoss": isinstance(self._given_loss, JointLoss)}  # fmt: skip
        for name, is_given in unknown.items():
            if self.args.neftune_noise_alpha is not None and is_given:
                raise PlanError(f"MegabatchTrainer cannot keep neftune_noise_alpha with {name}; leave it out")

    def count_targets(self, microbatch: Any) -> Any:
        """Count the targets that ``compute_loss`` is a mean over.

        They are the labels that are not -100, except the first of each row for a causal model. Without ``labels``,
        or with one floating-point label each, they are the rows.
        """
        if self._rollouts is not None:
            return self._rollouts.count(microbatch)
        return mean_loss.count_labels(microbatch, shifted=self._is_causal)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of uncollated samples: each microbatch is collated later. No sample is repeated."""
        if self.train_dataset is None or _defining_class(super().get_train_dataloader) is not Trainer:
            return super().get_train_dataloader()  # raises without a dataset; or the one that a subclass defines
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
            if args.world_size > 1:
                raise PlanError(
                    "MegabatchTrainer cannot deal an IterableDataset to several processes; give a dataset with a length"
                )
            loader = _StreamLoader(dataset, self._train_batch_size, drop_last=args.dataloader_drop_last, **settings)
            if not args.ignore_data_skip:
                loader.skip_updates(lambda: self.state.global_step, args.gradient_accumulation_steps, args.device)
                args.ignore_data_skip = True  # until training ends: Trainer would skip batches of the first pass only
        else:
            start = partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index)
            loader = _Loader(dataset, batch_sampler=self._batch_sampler(), worker_init_fn=start, **settings)
        loader.total_batch_size = self._train_batch_size * args.world_size
        self._gives_samples = True
        return loader

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Return the batches of an update and keep them for its last `training_step`."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches and not self._has_batches and self.state.global_step:
            raise PlanError(
                f"training resumes at step {self.state.global_step}, and the loader of get_train_dataloader() ends "
                "before: Trainer skips batches of its first pass only; give it a length, or set ignore_data_skip=True"
            )
        self._has_batches = True
        for batch in [] if self._gives_samples else batches:
            if not isinstance(batch, Mapping | list) or any(isinstance(sample, Tensor) for sample in batch):
                raise PlanError(
                    f"get_train_dataloader() gives a {type(batch).__name__} of {type(next(iter(batch))).__name__}s; "
                    "expected lists of samples (collate_fn=list), or mappings of tensors with samples in dim 0"
                )
        self._batches = [_Samples(batch) if isinstance(batch, list) else batch for batch in batches]
        return self._batches, None

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Run the whole update in its last call and return its loss; return zero in the calls before."""
        self._was_stepped = True
        if not any(inputs is batch for batch in self._batches):
            raise PlanError(
                f"{type(self).__name__}.training_step hands on other inputs than it was given, which an update would "
                "not see; change them in _prepare_inputs(inputs)"
            )
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):  # of a schedule-free one
            cast(Any, self.optimizer).train()
        gradient = self._accumulator(model)
        calls = self._calls()
        self._try_loss(model, calls)
        if self._update_metrics is not None:
            self._update_metrics.open_update()
        self._tries_rows = self._row_trials > 0
        try:
            self._run(gradient, calls)
        except PlanError as error:  # raised on all ranks, before the first forward
            if UNTRIED_ROWS not in str(error):
                raise
            self._try_rows(model)
            self._run(gradient, calls)
        if self._rollouts is not None:
            self._rollouts.log_step_time()
        self._update = update = gradient.finalize(max_norm=self.args.max_grad_norm or None)
        if not update.finite:
            if isinstance(problem := update.problem(), LossContractError):
                raise problem
            self._warn_without_targets(update)
            model.zero_grad()  # so that the optimizer has nothing to step
        return update.loss.to(torch.float32)

    def _loss_of(self, batch: list[Any]) -> LossFunction | JointLoss:
        """Return the loss of a call's samples, with the trainer's hooks."""
        return cast(LossFunction, self._loss_fn)

    def _warn_without_targets(self, update: Update) -> None:
        if not self._warned and not update.weight:
            self._warned = True
            warnings.warn(
                f"the {update.num_samples} samples of update {self._num_updates} have no target (all labels are -100, "
                "perhaps), so that it is not stepped, and its loss is logged as 0; look at what sets the labels. Later "
                "updates without a target are not reported",
                stacklevel=2,
            )

    def _run(self, gradient: GradientAccumulator, calls: list[Any]) -> None:
        with self._offloading():
            for batch in calls:
                gradient.forward_backward(batch, self._loss_of(batch))

    def floating_point_ops(self, inputs: Any) -> int:
        """Estimate the operations of a batch, without padding. Trainer calls this after each training_step."""
        if not self._was_stepped:
            raise PlanError(
                f"{type(self).__name__}.training_step does not call MegabatchTrainer's, so nothing was trained; call "
                "super().training_step(model, inputs, num_items_in_batch), and change the loss in compute_loss(), its "
                "inputs in _prepare_inputs()"
            )
        self._was_stepped = False
        if isinstance(inputs, list) and self._rollouts is None:
            num_tokens = sum(map(self._length, cast(list[Any], inputs)))
            inputs = {self._input_name: torch.empty(num_tokens, device="meta")}
        return super().floating_point_ops(cast(Any, inputs))

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count tokens without padding, which depends on the microbatches. TRL counts those of its rollouts itself."""
        if self._rollouts is not None:
            return
        if self.args.include_num_input_tokens_seen != "no" and self.accelerator.sync_gradients and self._update:
            self.state.num_input_tokens_seen += self._update.num_tokens

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Return the norm before clipping; `GradientAccumulator.finalize` has clipped already."""
        return None if self._update is None else self._update.grad_norm

    def _shifts_labels(self) -> bool:
        """Return true if the model predicts the next label from each position, as causal models do."""
        model: Any = self.model
        model = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's base model
        is_named = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        return self._loss_shifts_labels or (is_named and not getattr(model.config, "is_encoder_decoder", False))

    def _offloading(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context that the training_step of TRL's trainers opens, which ours replaces."""
        return getattr(self, "maybe_activation_offload_context", None) or contextlib.nullcontext()

    @property
    def _is_collated(self) -> bool:
        """True if the batches are mappings, from a get_train_dataloader of the user."""
        return any(isinstance(batch, Mapping) for batch in self._batches)

    def _calls(self) -> list[Any]:
        """Return the update as batches for GradientAccumulator; a mapping is its own batch, as it is padded."""
        if self._rollouts is not None:
            return self._rollouts.take(self._batches)
        if self._is_collated:
            return self._batches if self._noise is None else [with_lengths(batch) for batch in self._batches]
        return [[sample for batch in self._batches for sample in batch]]

    def _accumulator(self, model: nn.Module) -> GradientAccumulator:
        """Return the accumulator; the first update makes it, when the model is wrapped."""
        lacks_noise = self._lacks_noise(model)
        if self._gradient is None or self._gradient.model is not model or lacks_noise:
            self._loss_fn = self._with_hooks(self._given_loss or self._default_loss())
            # Without `weigh` microbatches are collated one by one, when other ranks may wait for this one.
            is_early = weigh_of(self._loss_fn) is not None or self.args.world_size == 1
            tries_rows = self._checks_loss and is_early and self._rollouts is None
            self._row_trials = ROW_TRIALS if tries_rows else 0
            if self._given_loss is None and has_metrics(self):
                self._update_metrics = UpdateMetrics(self)
            tokens = self._max_microbatch_tokens
            self._gradient = GradientAccumulator(
                model,
                micro_batch_size=self.args.per_device_train_batch_size if tokens is None else None,
                max_microbatch_tokens=tokens,
                **self._batching_of_update(),
                length=self._length,
            )
            self._gradient.reserve_for(cast(Any, self.optimizer))
        return self._gradient

    def _batching_of_update(self) -> dict[str, Any]:
        """Return the argument that makes microbatches of an update. None for batches of the user's loader."""
        if self._long_samples is None:
            return {} if self._is_collated else {"collate": self._collate_tried}
        kind_of_batch = "batches that get_train_dataloader() has collated" if self._is_collated else None
        kind_of_batch = "rollouts" if self._rollouts is not None else kind_of_batch
        kind_of_batch = "neftune_noise_alpha" if self._noise is not None else kind_of_batch
        if kind_of_batch is not None:
            raise PlanError(
                f"MegabatchTrainer cannot keep long_samples={self._long_samples!r} with {kind_of_batch}; leave "
                "one of them out"
            )
        return {"batching": InsideSamples(self._collate_tried)}

    def _lacks_noise(self, model: nn.Module) -> bool:
        """Replace the hook of transformers that adds NEFTune's noise, which each training sets anew.

        Return True if the loss was made for another hook.
        """
        handle = getattr(self, "neftune_hook_handle", None)
        if self.args.neftune_noise_alpha is None or handle is None:
            lacked, self._noise = self._noise is not None, None
            return lacked
        if self._noise is not None and self._noise.handle is handle:
            return False
        handle.remove()
        embeddings = next(module for module in model.modules() if hasattr(module, "neftune_noise_alpha"))
        self._noise = EmbeddingNoise(embeddings)
        self.neftune_hook_handle = self._noise.handle  # Trainer removes it at the end
        return True

    @property
    def _collate(self) -> Callable[[list[Any]], Microbatch]:
        if self._rollouts is not None:
            return self._rollouts.collate
        return self._get_collator_with_removed_columns(self.data_collator, "training")

    def _collate_tried(self, samples: list[Any]) -> Microbatch:
        """Return a microbatch. Raise `PlanError` for the first with several samples in a row, which is to be tried."""
        microbatch = self._collate(samples)
        if self._tries_rows and mean_loss.is_packed(microbatch, len(samples)):
            self._packed_samples = samples
            raise PlanError(UNTRIED_ROWS)
        if self._noise is not None:
            return with_lengths(microbatch, samples, is_packed=mean_loss.is_packed(microbatch, len(samples)))
        return microbatch

    def _default_loss(self) -> LossFunction:
        """Return next-token cross-entropy unless the user replaced it, otherwise the mean of ``compute_loss``."""
        if not self._trains_next_token:
            return mean(self._mean, over=self.count_targets)
        if not self._num_virtual_tokens:
            return losses.next_token
        hooks = loss_hooks(losses.next_token)

        def prepare(microbatch: Microbatch) -> Microbatch:
            return cast(Any, hooks.prepare)(self._with_virtual_labels(microbatch))

        return loss(weigh=cast(Any, hooks.weigh), prepare=prepare)(losses.next_token)

    @property
    def _trains_next_token(self) -> bool:
        is_replaced = self._overrides("compute_loss") or self.compute_loss_func or self.label_smoother
        return self._is_causal and not is_replaced

    @property
    def _num_virtual_tokens(self) -> int:
        """Positions that PEFT puts in front of the tokens, for which its own loss adds labels of -100."""
        config: Any = getattr(self.accelerator.unwrap_model(cast(Any, self.model)), "active_peft_config", None)
        if config is None or not config.is_prompt_learning or config.peft_type in ("PREFIX_TUNING", "CARTRIDGE"):
            return 0
        return int(config.num_virtual_tokens)

    def _with_virtual_labels(self, microbatch: Any) -> Any:
        """Return a microbatch whose labels begin with one of -100 for each virtual token."""
        labels = microbatch.get("labels")
        if not isinstance(labels, Tensor) or self._has_virtual_labels(microbatch):
            return microbatch
        return {**microbatch, "labels": nn.functional.pad(labels, (self._num_virtual_tokens, 0), value=IGNORED_LABEL)}

    def _without_virtual_labels(self, microbatch: Any) -> Any:
        """Return a microbatch whose labels leave out virtual tokens, as the loss of a PeftModel takes them."""
        if not isinstance(microbatch, Mapping) or not self._has_virtual_labels(microbatch):
            return microbatch
        return {**microbatch, "labels": cast(Any, microbatch)["labels"][:, self._num_virtual_tokens :]}

    def _has_virtual_labels(self, microbatch: Any) -> bool:
        labels, ids = microbatch.get("labels"), microbatch.get("input_ids")
        if not self._num_virtual_tokens or not isinstance(labels, Tensor) or not isinstance(ids, Tensor):
            return False
        return labels.ndim == 2 and labels.shape[1] == ids.shape[1] + self._num_virtual_tokens

    def prediction_step(self, model: Any, inputs: Any, *positional: Any, **named: Any) -> Any:
        """Evaluate as Trainer does; labels may begin with those of virtual tokens."""
        return super().prediction_step(model, self._without_virtual_labels(inputs), *positional, **named)

    def _mean(self, model: nn.Module, microbatch: Microbatch) -> Any:
        """Return the mean loss; a dummy microbatch leaves no metrics behind."""
        is_counting = self._gradient.is_counting if self._gradient is not None else None
        with contextlib.ExitStack() as around:
            if self._update_metrics is not None and is_counting is not None:
                weight = float(self.count_targets(microbatch)) if is_counting else None
                around.enter_context(self._update_metrics.gathering(weight))
            elif is_counting is False:
                around.callback(self._take_snapshot().put_back)
            return self._compute_mean(model, mean_loss.copy_mapping(microbatch))

    def _compute_mean(self, model: nn.Module, microbatch: Microbatch) -> Any:
        return (self._rollouts.mean if self._rollouts else self.compute_loss)(cast(Any, model), microbatch)

    def _take_snapshot(self) -> ObjectSnapshot:
        """Snapshot what a loss may write to: the trainer and the objects it holds, except its data."""
        return ObjectSnapshot(self, leave=(self.train_dataset, self.eval_dataset, self._batches, self._trial_samples))

    def _overrides(self, *names: str) -> bool:
        """Return true if one of these methods is not Trainer's own."""
        return any(getattr(getattr(self, name), "__func__", None) is not getattr(Trainer, name) for name in names)

    def _with_hooks(self, loss_fn: LossFunction | JointLoss) -> LossFunction | JointLoss:
        """Wrap the loss in the user's ``compute_loss_context_manager`` and ``_prepare_inputs``, if overridden."""
        prepares = self._rollouts is None and self._overrides("_prepare_inputs", "_prepare_input")
        surrounds = self._overrides("compute_loss_context_manager", "autocast_smart_context_manager")
        if not prepares and not surrounds and self._noise is None:
            return loss_fn
        if isinstance(loss_fn, JointLoss):
            raise PlanError(
                "MegabatchTrainer cannot keep _prepare_inputs or compute_loss_context_manager with a JointLoss; do "
                "what they do in its encode"
            )

        @functools.wraps(loss_fn)
        def hooked(model: nn.Module, microbatch: Microbatch, *divisor: Any) -> Any:
            if self._noise is not None:
                microbatch = self._noise.take_lengths(microbatch)
            with self.compute_loss_context_manager():
                return loss_fn(model, microbatch, *divisor)

        user_hooks: LossHooks = loss_hooks(loss_fn)

        def prepare(microbatch: Microbatch) -> Microbatch:
            prepared = self._prepare_inputs(microbatch)
            return prepared if user_hooks.prepare is None else user_hooks.prepare(prepared)

        cast(Any, hooked).weigh = user_hooks.weigh
        cast(Any, hooked).prepare = prepare if prepares else user_hooks.prepare
        return hooked

    def _try_loss(self, model: nn.Module, calls: list[Any]) -> None:
        """Check the loss on samples that differ; every rank tries the same ones.

        Raises:
            LossContractError: The loss is not the mean over `count_targets`; on all ranks.
        """
        self._num_updates += 1
        number = self._num_updates
        if not self._checks_loss or self._given_loss is not None or number & (number - 1) or number > LAST_TRIED:
            return
        samples, collate = self._choose_candidates(calls)
        samples = [*gather_object(samples), *self._trial_samples]
        if not samples:
            return
        if self._is_collated or self._rollouts:  # stacked as they are
            samples = [sample for sample in samples if _shapes(sample) == _shapes(samples[0])]
        self._trial_samples = choose_samples(samples, self._length)
        self._run_on_all(model, partial(self._run_trial, samples=self._trial_samples, collate=collate))

    def _try_rows(self, model: nn.Module) -> None:
        """Check that samples in one row of a microbatch do not see each other; every rank tries the same ones.

        Raises:
            LossContractError: The gradient of the row is not the sum of the samples' gradients; on all ranks.
        """
        packed = next(samples for samples in gather_object([self._packed_samples]) if samples)
        self._tries_rows, self._packed_samples, self._row_trials = False, [], self._row_trials - 1
        few = choose_samples(packed, self._length)
        samples = few if mean_loss.is_packed(self._collate(few), len(few)) else packed
        loss_fn = self._given_loss or self._default_loss()
        prepare = loss_hooks(loss_fn).prepare

        def total(model: nn.Module, microbatch: Microbatch) -> Any:
            with self.compute_loss_context_manager():
                terms = terms_of(cast(Any, loss_fn)(model, microbatch if prepare is None else prepare(microbatch)))
            return sum(term.total for term in terms.values())

        def check(model: nn.Module) -> None:
            self._make_trial(model, samples, self._collate, len(samples)).check_rows(total)

        if not isinstance(loss_fn, JointLoss):
            self._run_on_all(model, check)

    def _run_on_all(self, model: nn.Module, trial: Callable[[nn.Module], None]) -> None:
        """Run a trial of the unwrapped model. Raise what it raises on any rank as `LossContractError` on all."""
        problem = None
        unwrapped = self.accelerator.unwrap_model(model)
        try:
            with restore_after_trial(unwrapped, self._take_snapshot()):
                vars(self)["log"] = _ignore_log  # until attributes are put back
                trial(unwrapped)
        except mean_loss.NotFiniteError:  # the model has diverged: no update is stepped while its loss is not finite
            pass
        except Exception as error:
            problem = (
                str(error) if isinstance(error, MegabatchError) else f"the trial of the loss: {in_one_line(error)}"
            )
        for reported in cast(list[str | None], gather_object([problem])):
            if reported is not None:
                raise LossContractError(reported)

    def _choose_candidates(self, calls: list[Any]) -> tuple[list[Any], Callable[[list[Any]], Microbatch]]:
        """Return samples of the update, if possible such that two fit in one microbatch, and their collate function."""
        tokens = self._max_microbatch_tokens
        samples = [sample for batch in calls[:1] for sample in _rows(batch)]
        if isinstance(tokens, int):
            fit = [sample for sample in samples if 2 * self._length(sample) <= tokens]
            samples = fit if len(fit) > 1 else sorted(samples, key=self._length)[:2]
        return choose_samples(samples, self._length), _stacked if self._is_collated else self._collate

    def _run_trial(self, model: nn.Module, samples: list[Any], collate: Callable[[list[Any]], Microbatch]) -> None:
        tokens, size = self._max_microbatch_tokens, self.args.per_device_train_batch_size
        if isinstance(tokens, int):
            size = tokens // max(map(self._length, samples))
        recomputes = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        if isinstance(tokens, str) or (size > 1 and recomputes):
            size = 2  # the size that fits is unknown, or known only in train mode

        tried = self._make_trial(model, samples, collate, size)
        if self._trains_next_token:
            prepare = cast(Any, self._default_loss()).prepare
            tried.check_same(lambda model, microbatch: losses.next_token(model, prepare(microbatch))[0])
        else:
            tried.check_mean()

    def _make_trial(
        self, model: nn.Module, samples: list[Any], collate: Callable[[list[Any]], Microbatch], size: int
    ) -> LossTrial:
        is_half = self.accelerator.mixed_precision == "bf16" or next(model.parameters()).dtype in HALF_TYPES
        rounding = 5e-2 if is_half else 1e-3 if self.args.device.type == "cpu" else 1e-2  # TF32

        def mean(model: nn.Module, microbatch: Microbatch) -> Any:
            with self.compute_loss_context_manager():
                return self._compute_mean(model, self._without_virtual_labels(microbatch))

        def count_next_tokens(microbatch: Any) -> Tensor:
            return losses.count_targets(self._with_virtual_labels(microbatch))

        return LossTrial(
            model, samples, collate, partial(Trainer._prepare_inputs, self) if self._rollouts else self._prepare_inputs,
            mean,
            count_next_tokens if self._trains_next_token else self.count_targets,
            size=size, one_row=size == 1 and self._max_microbatch_tokens is None, tolerance=rounding,
        )  # fmt: skip

    def _batch_sampler(self) -> "RankBatchSampler":
        args = self.args
        sampler: Any = self._get_train_sampler()
        seed = args.seed if args.data_seed is None else args.data_seed
        return RankBatchSampler(
            sampler, self._train_batch_size, rank=args.process_index, world=args.world_size,
            drop_last=args.dataloader_drop_last, seed=seed, deal=self._dealer(),
            num_batches=args.gradient_accumulation_steps,
        )  # fmt: skip

    def _dealer(self) -> "Callable[[list[int]], np.ndarray] | None":
        """Return a function that deals an update by length. None where no length is known without reading samples."""
        args, tokens = self.args, self._max_microbatch_tokens
        if args.world_size == 1 or isinstance(tokens, str):  # "auto" is measured after the first update is dealt
            return None
        if self._long_samples is not None:  # which may be longer than a microbatch
            return None
        lengths = self._known_lengths()
        if not self._is_same_on_all_ranks(lengths) or lengths is None:
            return None
        rows = args.per_device_train_batch_size if tokens is None else None
        return lambda ids: deal(lengths[ids], args.world_size, max_rows=rows, max_tokens=tokens)

    def _known_lengths(self) -> "np.ndarray | None":
        """Return the tokens of each sample, from a column or a list of tokens. None where they are not counted."""
        dataset, column = cast(Any, self.train_dataset), self.args.length_column_name
        try:
            if column in (getattr(dataset, "column_names", None) or ()):
                lengths = np.asarray(dataset[column], dtype=np.int64)
            elif isinstance(dataset, list):
                lengths = np.asarray(list(map(self._cheap_length, dataset)), dtype=np.int64)
            else:
                return None
        except (KeyError, IndexError, TypeError, ValueError, OverflowError):
            return None
        return lengths if lengths.ndim == 1 and lengths.min(initial=0) >= 0 else None

    def _cheap_length(self, sample: Any) -> int:
        """Count the tokens of a sample without its collator, which may be slow or draw random numbers."""
        return int(self._given_length(sample)) if self._given_length is not None else len(sample[self._input_name])

    def _is_same_on_all_ranks(self, lengths: "np.ndarray | None") -> bool:
        """Return True if all ranks have the same lengths, and so deal alike. Collective."""
        checksums: list[Any] = [None] * self.args.world_size
        local_checksum = None if lengths is None else zlib.crc32(lengths.tobytes())
        torch.distributed.all_gather_object(checksums, local_checksum)
        return len(set(checksums)) == 1

    @property
    def _input_name(self) -> str:
        return getattr(self.model, "main_input_name", "input_ids")

    def _length(self, sample: Any) -> int:
        """Count the padded tokens that a sample adds to a microbatch; 1 if it has none and no token limit is set."""
        if self._given_length is not None:
            return int(self._given_length(sample))
        if self._rollouts is not None:
            return self._rollouts.length(sample)
        try:
            return len(sample[self._input_name])
        except (KeyError, TypeError, IndexError):
            if self._max_microbatch_tokens is None:
                return 1
        try:
            return self._collate([copy.copy(sample)])[self._input_name].numel()
        except (KeyError, TypeError, IndexError, AttributeError):
            raise PlanError(
                f"a sample has no {self._input_name!r} to count tokens of; give length=, or leave "
                "max_microbatch_tokens out"
            ) from None


class _Loader(DataLoader[Any]):
    """A loader that passes the epoch to its sampler and reports its size, as Accelerate's loaders do."""

    total_batch_size = 0

    @property
    def total_dataset_length(self) -> int:
        return len(cast(Any, self.dataset))

    def set_epoch(self, epoch: int) -> None:
        if isinstance(self.batch_sampler, RankBatchSampler):
            self.batch_sampler.set_epoch(epoch)


class _StreamLoader(_Loader):
    """A loader of passes over a data set without a length, which a resumed training enters where it was left."""

    num_passes = 0
    _count_skipped: Callable[[], int] | None = None

    def skip_updates(self, count: Callable[[], int], num_batches: int, device: torch.device) -> None:
        """Leave out ``count()`` updates of ``num_batches`` batches each, with the draws of a training that begins."""
        self._count_skipped, self._num_batches, self._device = count, num_batches, device
        self._begin = note_generators(device)

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        skipped = self._count_skipped() if self._count_skipped is not None and not self.num_passes else 0
        if not skipped:
            yield from self._begin_pass()
            return
        resume = note_generators(self._device)
        self._begin()
        batches = self._begin_pass()
        while True:
            num_seen = sum(1 for _ in islice(batches, skipped * self._num_batches)) // self._num_batches
            skipped -= num_seen
            if not skipped:
                break
            if not num_seen:
                raise PlanError(
                    f"training resumes after {skipped} more updates, and a pass over the data has not one; give the "
                    "data set that the checkpoint was trained on"
                )
            batches = self._begin_pass()
        remaining = list(islice(batches, 1))
        resume()
        yield from chain(remaining, batches) if remaining else self._begin_pass()

    def _begin_pass(self) -> Iterator[Any]:
        if hasattr(self.dataset, "set_epoch"):
            cast(Any, self.dataset).set_epoch(self.num_passes)
        self.num_passes += 1
        return super().__iter__()


class _Samples(list[Any]):
    """A batch of samples that are not collated yet."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            raise PlanError(
                f"training_step reads inputs[{index!r}], but a batch of MegabatchTrainer is a list of samples that are "
                "collated later; read it in compute_loss() or _prepare_inputs()"
            )
        return super().__getitem__(index)


def _ignore_log(*positional: Any, **named: Any) -> None:
    """Replace ``log`` during a trial."""


def _defining_class(method: Any) -> type:
    """Return the class that defines a method."""
    return next(kind for kind in type(method.__self__).__mro__ if vars(kind).get(method.__name__) is method.__func__)


def _rows(batch: Any) -> list[Any]:
    """Return the samples of a batch."""
    if not isinstance(batch, Mapping):
        return batch
    tensors = {name: tensor for name, tensor in batch.items() if isinstance(tensor, Tensor) and tensor.ndim}
    num_rows = min(map(len, tensors.values()), default=0)
    return [{name: tensor[row] for name, tensor in tensors.items()} for row in range(num_rows)]


def _stacked(rows: list[Any]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _shapes(row: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.shape for name, tensor in row.items()}


class RankBatchSampler(Sampler[list[int]]):
    """A ``batch_sampler`` that yields this rank's samples of each global batch, in the order of another sampler.

    It repeats no sample, and drops none without ``drop_last``. In the last batch some ranks may have fewer samples
    than others, or none. Every rank has the same number of batches.

    Args:
        sampler: Sample ids of an epoch, in order; the same on every rank.
        batch_size: Samples per rank.
        rank: This process.
        world: Number of processes.
        drop_last: Leave out a last batch that is not full.
        seed: Seeds, together with the epoch, a sampler that has a generator.
        deal: Returns the rank of each sample of an update. None deals them in turns.
        num_batches: Batches of an update, over which a rank's share is spread.

    Raises:
        PlanError: The order of the sampler may differ from rank to rank.
    """

    def __init__(
        self, sampler: Sampler[int], batch_size: int, *, rank: int, world: int, drop_last: bool, seed: int,
        deal: Callable[[list[int]], np.ndarray] | None = None, num_batches: int = 1,
    ) -> None:  # fmt: skip
        self.sampler = sampler
        self._size = batch_size * world
        self._deal, self._num_batches = deal, num_batches
        self._rank, self._world, self._drop_last, self._seed = rank, world, drop_last, seed
        known = isinstance(sampler, SequentialSampler) or hasattr(sampler, "set_epoch") or hasattr(sampler, "generator")
        if isinstance(sampler, DistributedSampler) or (world > 1 and not known):
            raise PlanError(
                f"the order of samples is a {type(sampler).__name__}'s, which may differ from rank to rank; give a "
                "sampler with set_epoch(), the same on all ranks, and let this one deal"
            )
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch from now on."""
        self._epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            cast(Any, self.sampler).set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        if hasattr(self.sampler, "generator"):  # as Accelerate seeds it
            cast(Any, self.sampler).generator = torch.Generator().manual_seed(self._seed + self._epoch)
        ids = iter(self.sampler)
        while update := list(islice(ids, self._size * self._num_batches)):
            if self._drop_last:
                update = update[: len(update) // self._size * self._size]
            yield from self._share(update)

    def _share(self, update: list[int]) -> Iterator[list[int]]:
        """Yield this rank's batches of an update."""
        starts = range(0, len(update), self._size)
        if self._deal is None:
            for start in starts:
                yield update[start : start + self._size][self._rank :: self._world]
            return
        share = np.asarray(update, dtype=np.int64)[self._deal(update) == self._rank]
        for batch in np.array_split(share, len(starts)) if starts else ():
            yield batch.tolist()

    def __len__(self) -> int:
        num_full, num_left = divmod(len(cast(Sized, self.sampler)), self._size)
        return num_full + (num_left > 0 and not self._drop_last)


OTHER_WRAPPERS = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA", "TP")


def check_arguments(args: Any, accelerator: Any) -> None:
    """Raise `PlanError` for the first argument that exact updates cannot keep; docs/integrations.md lists them."""
    for setting, is_set, instead in _find_refused(args, accelerator):
        if is_set:
            raise PlanError(f"MegabatchTrainer cannot keep {setting}; {instead}")


def _find_refused(args: Any, accelerator: Any) -> list[tuple[str, bool, str]]:
    """Return settings, true for each that is set, and the change to make."""
    data = args.accelerator_config
    wrapper = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    optim = str(getattr(args.optim, "value", args.optim))
    return [
        ("fp16", accelerator.mixed_precision in ("fp16", "fp8"), "float16 loses small gradients: set bf16=True"),
        (
            wrapper,
            wrapper in OTHER_WRAPPERS and not accelerator.is_fsdp2,
            "use DistributedDataParallel (torchrun), or fsdp=True with fsdp_config={'version': 2}",
        ),
        ("parallelism_config", args.parallelism_config is not None, "leave it out, or use megabatch train"),
        (f"{args.n_gpu} GPUs in one process", args.n_gpu > 1, "start a process for each with torchrun"),
        (
            "auto_find_batch_size=True",
            args.auto_find_batch_size,
            "it would change the update; leave it out, and set max_microbatch_tokens to what fits",
        ),
        (
            "average_tokens_across_devices=False",
            not args.average_tokens_across_devices,
            "each rank would weigh its own way; leave it out",
        ),
        (
            "train_sampling_strategy='batch_rebalance'",
            args.train_sampling_strategy == "batch_rebalance",
            "set 'random': an update is cut by length whatever its order",
        ),
        (
            f"optim={optim!r}",
            "layerwise" in optim or "lomo" in optim,
            "it steps inside backward; choose one that steps afterwards",
        ),
        ("torch_empty_cache_steps", args.torch_empty_cache_steps is not None, "leave it out"),
        ("accelerator_config.split_batches", data.split_batches, "leave it out: batches are dealt by sample"),
        ("accelerator_config.dispatch_batches", bool(data.dispatch_batches), "leave it out: each rank reads its own"),
        (
            "accelerator_config.use_seedable_sampler=False",
            not data.use_seedable_sampler,
            "leave it out: ranks must draw one order",
        ),
        (
            "accelerator_config.gradient_accumulation_kwargs",
            bool(data.gradient_accumulation_kwargs),
            "leave it out: gradients are summed by megabatch",
        ),
    ]
