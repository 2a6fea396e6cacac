"""MegabatchTrainer: Hugging Face's Trainer, each of whose updates is the exact gradient of its samples."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from megabatch import losses
from megabatch.accumulator import GradientAccumulator
from megabatch.batching.packed_row import OneRow
from megabatch.batching.samples import Microbatch
from megabatch.engine.update import Update
from megabatch.errors import LossContractError, MegabatchError, PlanError, in_one_line
from megabatch.integrations import loss_trial, metric_means
from megabatch.integrations.balance import DealtBatches
from megabatch.integrations.trainer_arguments import refuse
from megabatch.losses.contract import JointLoss, LossFunction, LossHooks, loss_hooks
from megabatch.losses.ready_made import HALF_TYPES

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

LAST_TRIED = 2**7  # update; those of a power of two up to here are looked at


class MegabatchTrainer(Trainer):
    """A Trainer whose every update is the exact gradient of its samples, however many, and wherever they are.

    They are the ``per_device_train_batch_size * gradient_accumulation_steps`` samples of each process, re-cut by
    length. Loop, logging, callbacks, checkpoints and evaluation are Hugging Face's; the loss that is logged is the
    update's. Alone or with DistributedDataParallel (torchrun). An update whose loss, or clipped gradient, is not finite
    leaves weights and optimizer as they are. Put it before another Trainer to train with that one's loss:
    ``class Exact(MegabatchTrainer, SFTTrainer): pass``.

    ``_prepare_inputs`` and ``compute_loss_context_manager`` are called for each microbatch where you override them.
    ``get_train_dataloader`` may give lists of samples, which are collated here, or batches that are mappings of
    tensors with samples in dim 0. ``training_step`` gets batches that are run with the update's last one.

    Args:
        loss_fn: The loss in megabatch's contract. None: the next token's cross-entropy for a causal model that trains
            with it; else what ``compute_loss`` (yours, ``compute_loss_func``, label smoothing or the model's own)
            gives without ``num_items_in_batch``, taken as a mean over `count_targets`.
        max_microbatch_tokens: Padded tokens per forward, a hard cap, or "auto"; see `GradientAccumulator`. None:
            ``per_device_train_batch_size`` samples.
        check_loss: Try, without ``loss_fn``, whether the loss is that mean: on up to 8 samples that differ, before the
            first update and in updates 2, 4, 8 to 128 that bring other samples. It is refused where it is none.
        arguments: All of Trainer's, by name.

    Raises `PlanError` when training begins for settings that cannot be kept, each named in docs/integrations.md, and
    `LossContractError` for a loss that cannot be told to be exact.
    """

    def __init__(
        self,
        *positional: Any,
        loss_fn: LossFunction | JointLoss | None = None,
        max_microbatch_tokens: int | str | None = None,
        check_loss: bool = True,
        **arguments: Any,
    ) -> None:
        super().__init__(*positional, **arguments)
        self._max_microbatch_tokens = max_microbatch_tokens
        self._given_loss, self._checks_loss = loss_fn, check_loss
        self._loss_fn: LossFunction | JointLoss | None = None  # with the trainer's hooks
        self._gradient: GradientAccumulator | None = None  # of the model that is trained now
        self._batches: list[Any] = []  # this rank's, of the update
        self._gives_samples = False  # whether batches are those of get_train_dataloader below
        self._num_updates = 0
        self._tried: list[Any] = []  # samples of trials, and what they told
        self._features: set[Any] = set()
        self._update: Update | None = None
        self._was_stepped = False  # whether training_step below was called
        self._is_causal = self._shifts_labels()

    def train(self, *positional: Any, **named: Any) -> Any:
        """Trainer's, for settings that can be kept."""
        refuse(self.args, self.accelerator)
        if isinstance(self.data_collator, OneRow):
            raise PlanError(
                "MegabatchTrainer cannot keep data_collator=OneRow(), with which Trainer evaluates too; leave it "
                "out, or use GradientAccumulator"
            )
        owner = _owner(super().training_step)
        if owner is not Trainer and not hasattr(self, "maybe_activation_offload_context"):
            raise PlanError(f"MegabatchTrainer cannot keep {owner.__name__}.training_step; train with {owner.__name__}")
        if getattr(self, "calculate_KL", False):  # 0 before the first step, so that no trial would tell
            raise PlanError(
                "MegabatchTrainer cannot keep KTOTrainer's KL term, which couples the samples of a microbatch; set "
                "loss_type='apo_zero_unpaired', or train with KTOTrainer"
            )
        self._num_updates = 0
        return super().train(*positional, **named)

    def count_targets(self, microbatch: Any) -> Any:
        """What ``compute_loss`` is a mean over: labels that are not -100, but a causal model's first of each row.

        Rows where there are no ``labels`` and where they are one floating number each.
        """
        return metric_means.count_labels(microbatch, shifted=self._is_causal)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Samples as they are: they are collated when their microbatch is known. None is repeated."""
        if self.train_dataset is None or _owner(super().get_train_dataloader) is not Trainer:
            return super().get_train_dataloader()  # which says so; or that of another Trainer's subclass
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
            loader = _Loader(dataset, self._train_batch_size, drop_last=args.dataloader_drop_last, **settings)
        else:
            start = partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index)
            loader = _Loader(dataset, batch_sampler=self._dealt(), worker_init_fn=start, **settings)
        loader.total_batch_size = self._train_batch_size * args.world_size
        self._gives_samples = True
        return loader

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """The batches of an update, which are kept for its last `training_step`."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        for batch in [] if self._gives_samples else batches:
            if not isinstance(batch, Mapping | list) or any(isinstance(each, Tensor) for each in batch):
                raise PlanError(
                    f"get_train_dataloader() gives a {type(batch).__name__} of {type(next(iter(batch))).__name__}s; "
                    "expected lists of samples (collate_fn=list), or mappings of tensors with samples in dim 0"
                )
        self._batches = [_Samples(each) if isinstance(each, list) else each for each in batches]
        return self._batches, None

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """The whole update in its last call; nothing in those before. Returns the loss that they add up to."""
        self._was_stepped = True
        if not any(inputs is each for each in self._batches):
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
        self._try_loss(model)
        with self._offloading():
            for batch in self._calls():
                gradient.forward_backward(batch, cast(LossFunction, self._loss_fn))
        self._update = update = gradient.finalize(max_norm=self.args.max_grad_norm or None)
        if not update.finite:
            if isinstance(problem := update.problem(), LossContractError):
                raise problem
            model.zero_grad()  # so that nothing is stepped
        return update.loss.to(torch.float32)

    def floating_point_ops(self, inputs: Any) -> int:
        """Of a batch of samples, without padding. Called after each training_step."""
        if not self._was_stepped:
            raise PlanError(
                f"{type(self).__name__}.training_step does not call MegabatchTrainer's, so nothing was trained; call "
                "super().training_step(model, inputs, num_items_in_batch), and change the loss in compute_loss(), its "
                "inputs in _prepare_inputs()"
            )
        self._was_stepped = False
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

    def _offloading(self) -> contextlib.AbstractContextManager[Any]:
        """What the training_step of TRL's trainers does, where ours stands in its place."""
        is_replaced = _owner(super().training_step) is not Trainer
        return cast(Any, self).maybe_activation_offload_context if is_replaced else contextlib.nullcontext()

    @property
    def _is_collated(self) -> bool:
        """Whether batches of the update are mappings, which a get_train_dataloader of the user's gives."""
        return any(isinstance(each, Mapping) for each in self._batches)

    def _calls(self) -> list[Any]:
        """The update as batches of GradientAccumulator; mappings may be padded differently, so each is its own."""
        return self._batches if self._is_collated else [[sample for batch in self._batches for sample in batch]]

    def _accumulator(self, model: nn.Module) -> GradientAccumulator:
        """Made with the first update, when the model is wrapped."""
        if self._gradient is None or self._gradient.model is not model:
            self._loss_fn = self._with_hooks(self._given_loss or self._known_loss())
            tokens = self._max_microbatch_tokens
            self._gradient = GradientAccumulator(
                model,
                micro_batch_size=self.args.per_device_train_batch_size if tokens is None else None,
                max_microbatch_tokens=tokens,
                collate=None if self._is_collated else self._collate,
                length=self._length,
            )
            self._gradient.reserve_for(cast(Any, self.optimizer))
        return self._gradient

    @property
    def _collate(self) -> Callable[[list[Any]], Microbatch]:
        return self._get_collator_with_removed_columns(self.data_collator, "training")

    def _known_loss(self) -> LossFunction:
        """The next token's cross-entropy where nothing was put in its place, else the mean that there is."""
        is_replaced = self._overrides("compute_loss") or self.compute_loss_func or self.label_smoother
        if self._is_causal and not is_replaced:
            return losses.next_token
        return metric_means.times_count(self._mean, lambda microbatch: self.count_targets(microbatch))

    def _mean(self, model: nn.Module, microbatch: Microbatch) -> Any:
        """The mean; one that is not counted leaves no metrics."""
        if self._gradient is None or self._gradient.is_counting is not False:
            return self.compute_loss(cast(Any, model), microbatch)
        unseen = self._remembered()
        try:
            return self.compute_loss(cast(Any, model), microbatch)
        finally:
            unseen.put_back()

    def _remembered(self) -> loss_trial.Remembered:
        """What a loss may write to the trainer and to what it holds, but for its data."""
        return loss_trial.Remembered(self, leave=(self.train_dataset, self.eval_dataset, self._batches, self._tried))

    def _overrides(self, *names: str) -> bool:
        """Whether one of these is not Trainer's own."""
        return any(getattr(getattr(self, name), "__func__", None) is not getattr(Trainer, name) for name in names)

    def _with_hooks(self, loss_fn: LossFunction | JointLoss) -> LossFunction | JointLoss:
        """The loss inside ``compute_loss_context_manager``, of what ``_prepare_inputs`` gives, where they are own."""
        prepares = self._overrides("_prepare_inputs", "_prepare_input")
        surrounds = self._overrides("compute_loss_context_manager", "autocast_smart_context_manager")
        if not prepares and not surrounds:
            return loss_fn
        if isinstance(loss_fn, JointLoss):
            raise PlanError(
                "MegabatchTrainer cannot keep _prepare_inputs or compute_loss_context_manager with a JointLoss; do "
                "what they do in its encode"
            )

        @functools.wraps(loss_fn)
        def hooked(*given: Any) -> Any:
            with self.compute_loss_context_manager():
                return loss_fn(*given)

        own: LossHooks = loss_hooks(loss_fn)

        def prepare(microbatch: Microbatch) -> Microbatch:
            prepared = self._prepare_inputs(microbatch)
            return prepared if own.prepare is None else own.prepare(prepared)

        cast(Any, hooked).prepare = prepare if prepares else own.prepare
        return hooked

    def _try_loss(self, model: nn.Module) -> None:
        """Whether the loss is what it is taken for, on samples that differ; every rank tries the same ones."""
        self._num_updates += 1
        number = self._num_updates
        if not self._checks_loss or self._given_loss is not None or number & (number - 1) or number > LAST_TRIED:
            return
        samples, collate = self._to_try()
        new = loss_trial.choose(gather_object(loss_trial.choose(samples, self._features)), self._features)
        if not new:
            return
        if self._is_collated:  # stacked as they are
            shapes = _shapes(new[0])
            new, self._tried = [each for each in new if _shapes(each) == shapes], []
        self._features |= loss_trial.features_of(new)
        self._tried = loss_trial.choose([*new, *self._tried], set())
        problem = None
        unwrapped = self.accelerator.unwrap_model(model)
        try:
            with loss_trial.without_traces(unwrapped, self._remembered()):
                vars(self)["log"] = _say_nothing  # until attributes are put back
                self._run_trial(unwrapped, self._tried, collate)
        except loss_trial.NotFiniteError as error:  # later on, such an update is not stepped
            problem = str(error) if number == 1 else None
        except Exception as error:
            problem = (
                str(error) if isinstance(error, MegabatchError) else f"the trial of the loss: {in_one_line(error)}"
            )
        for told in cast(list[str | None], gather_object([problem])):
            if told is not None:
                raise LossContractError(told)

    def _to_try(self) -> tuple[list[Any], Callable[[list[Any]], Microbatch]]:
        """Samples of the update of which two fit in a microbatch, if there are any; and what collates them."""
        tokens, collate = self._max_microbatch_tokens, self._collate
        samples = [sample for batch in self._calls()[:1] for sample in _rows(batch)]
        if isinstance(tokens, int):
            samples.sort(key=self._length)
            samples = [each for each in samples[2:] if 2 * self._length(each) <= tokens] + samples[:2]
        return samples, _stacked if self._is_collated else collate

    def _run_trial(self, model: nn.Module, samples: list[Any], collate: Callable[[list[Any]], Microbatch]) -> None:
        is_half = self.accelerator.mixed_precision == "bf16" or next(model.parameters()).dtype in HALF_TYPES
        rounding = 5e-2 if is_half else 1e-3 if self.args.device.type == "cpu" else 1e-2  # TF32
        tokens, size = self._max_microbatch_tokens, self.args.per_device_train_batch_size
        if isinstance(tokens, int):
            size = tokens // max(map(self._length, samples))
        if isinstance(tokens, str) or (size > 1 and getattr(model, "is_gradient_checkpointing", False)):
            size = 2  # what fits is not known, or only in train mode

        def mean(model: nn.Module, microbatch: Microbatch) -> Any:
            with self.compute_loss_context_manager():
                return self.compute_loss(cast(Any, model), microbatch)

        is_next_token = self._known_loss() is losses.next_token
        tried = loss_trial.Trial(
            model, samples, collate, self._prepare_inputs, mean,
            losses.count_targets if is_next_token else self.count_targets,
            size=size, one_row=size == 1 and tokens is None, tolerance=rounding,
        )  # fmt: skip
        if is_next_token:
            prepare = cast(Any, losses.next_token).prepare
            tried.check_same(lambda model, microbatch: losses.next_token(model, prepare(microbatch))[0])
        else:
            tried.check_mean()

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
    """Tells its sampler which epoch begins, and how much there is, as Accelerate's loaders do."""

    total_batch_size = 0

    @property
    def total_dataset_length(self) -> int:
        return len(cast(Any, self.dataset))

    def set_epoch(self, epoch: int) -> None:
        if isinstance(self.batch_sampler, DealtBatches):
            self.batch_sampler.set_epoch(epoch)


class _Samples(list[Any]):
    """A batch of samples, which are not collated yet."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            raise PlanError(
                f"training_step reads inputs[{index!r}], but a batch of MegabatchTrainer is a list of samples that are "
                "collated later; read it in compute_loss() or _prepare_inputs()"
            )
        return super().__getitem__(index)


def _say_nothing(*positional: Any, **named: Any) -> None:
    """In place of ``log``."""


def _owner(method: Any) -> type:
    """The class that defines a method."""
    return next(kind for kind in type(method.__self__).__mro__ if vars(kind).get(method.__name__) is method.__func__)


def _rows(batch: Any) -> list[Any]:
    """The samples of a batch."""
    if not isinstance(batch, Mapping):
        return batch
    tensors = {name: each for name, each in batch.items() if isinstance(each, Tensor) and each.ndim}
    num_rows = min(map(len, tensors.values()), default=0)
    return [{name: each[row] for name, each in tensors.items()} for row in range(num_rows)]


def _stacked(rows: list[Any]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _shapes(row: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: each.shape for name, each in row.items()}
