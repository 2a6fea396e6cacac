"""Exact updates in torchtitan's own Trainer: `ExactTrainer`. And a recipe of its config, for `megabatch plan`.

Written for torchtitan 0.3.0. As a program, ``python -m megabatch.integrations.torchtitan`` takes the arguments of
``torchtitan.train`` and prints a recipe.
"""

# torchtitan has an environment of its own, where no types are checked.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from megabatch.core.mesh import DataRanks
from megabatch.errors import MegabatchError, PlanError
from megabatch.gradient_accumulator import GradientAccumulator
from megabatch.torch_private.fsdp2_groups import param_groups
from megabatch.torch_private.loss_nodes import IGNORED_LABEL

try:
    from torchtitan.components.dataloader import DataloaderExhaustedError
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.config import ConfigManager
    from torchtitan.tools.logging import logger
    from torchtitan.trainer import Trainer
except ModuleNotFoundError:
    raise MegabatchError(
        "megabatch.integrations.torchtitan needs torchtitan, which is not installed: pip install torchtitan==0.3.0"
    ) from None

TitanBatch = tuple[dict[str, Any], Tensor]  # inputs by name, and labels: [rows, tokens] each
Sync = Literal["auto", "every", "last", "replica_last"]


class ExactTrainer(Trainer):
    """torchtitan's Trainer, whose updates take every batch and reduce gradients once.

    Build configs from ``ExactTrainer.Config``, or convert one with `exact_config`. Model, loss, optimizer, schedule,
    metrics and checkpoints stay torchtitan's. Three things change:

    * The last update of an epoch takes the batches that are left, whatever their number on each rank. A rank with
      fewer batches runs dummy microbatches: a batch of its own, without targets. torchtitan drops these batches; if
      the ranks' numbers differ, one rank leaves and the others wait for it.
    * An update without targets is passed over: the step counts, and optimizer and schedule stay as they are.
      torchtitan divides by zero and stops the run.
    * ``sync`` holds gradients back until the last microbatch. torchtitan reduces them with every microbatch.

    Each update sends one more small message between hosts, and two if ``sync`` holds gradients back.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's config, and ``sync``."""

        sync: Sync = "auto"
        """
        When gradients are reduced. "every": with each microbatch, as torchtitan does. "last": once per update, for
        which FSDP keeps the whole gradient. "replica_last": reduce-scatter with each microbatch, all-reduce once per
        update (HSDP). "auto": "replica_last" for HSDP without CUDA graphs, pipeline and expert parallelism, else
        "every".
        """

    def __init__(self, config: "ExactTrainer.Config") -> None:
        super().__init__(config)
        dims = self.parallel_dims
        self._data_ranks = DataRanks([dims.get_mesh("batch").get_group()] if dims.dp_enabled else [])
        self._gradient = self._make_accumulator(config.sync)
        if self._gradient is not None and isinstance(self.loss_fn, ChunkedLossWrapper):
            self.loss_fn = HeldChunkedLoss(self.loss_fn)
        self._latest: TitanBatch | None = None  # of this rank; dummy microbatches are made of it
        self._index = 0  # of the next microbatch of the update

    def _make_accumulator(self, sync: Sync) -> GradientAccumulator | None:
        """Return an accumulator for the reduction. None leaves it to torchtitan: with every microbatch."""
        dims = self.parallel_dims
        if sync == "every" or (sync == "auto" and (dims.dp_replicate == 1 or self.gradient_accumulation_steps == 1)):
            return None
        obstacle = None
        if not self.config.training.disable_cuda_graphs:
            obstacle = "a CUDA graph, which repeats one microbatch's reduction: set training.disable_cuda_graphs"
        elif dims.pp_enabled:
            obstacle = "pipeline parallelism, whose schedule reduces"
        elif dims.ep_enabled:
            obstacle = "expert parallelism, whose experts have another mesh"
        if obstacle is None:
            return GradientAccumulator(self.model_parts[0], micro_batch_size=1, sync=sync)
        if sync != "auto":
            raise PlanError(f'sync is {sync!r}, and the run has {obstacle}; or leave sync at "auto"')
        logger.info(f"Gradients are reduced with every microbatch: the run has {obstacle}")
        return None

    def train_step(self, data_iterator: Iterator[TitanBatch]) -> None:
        """Run one update of the batches that are left, up to ``gradient_accumulation_steps`` on each rank."""
        num_configured, per_step = self.gradient_accumulation_steps, self.num_pipeline_parallel_microbatches
        batches = self._take(data_iterator, num_configured * per_step)
        num_steps, num_targets = self._agree(batches, per_step)
        if not num_steps:
            raise DataloaderExhaustedError
        if not num_targets:
            logger.warning(f"Step {self.step} has no targets on any rank, and is passed over")
            return
        self._fill(batches, num_steps * per_step)
        self.gradient_accumulation_steps, self._index = num_steps, 0
        try:
            super().train_step(iter(batches))
        finally:
            self.gradient_accumulation_steps = num_configured

    def forward_backward_step(self, **named: Any) -> Tensor:
        """Run one microbatch. Reduce gradients with it if it is their turn."""
        if self._gradient is None:
            return super().forward_backward_step(**named)
        number = self.gradient_accumulation_steps
        with self._gradient.microbatch(self._index, of=number, divided=True):
            loss = super().forward_backward_step(**named)
        self._index += 1
        if self._index == number:
            self._gradient.finalize()
        return loss

    def _take(self, data_iterator: Iterator[TitanBatch], number: int) -> list[TitanBatch]:
        """Return the next batches, fewer at the end of the data."""
        batches: list[TitanBatch] = []
        while len(batches) < number:
            try:
                inputs, labels = next(data_iterator)
            except (DataloaderExhaustedError, StopIteration):  # the second from then on
                break
            if labels.is_floating_point():
                raise PlanError(
                    f"labels are {labels.dtype}; expected token ids, {IGNORED_LABEL} where there is no target"
                )
            if self._latest is not None and len(labels) < len(self._latest[1]):  # the last batch of an epoch
                inputs, labels = self._fill_rows(inputs, labels, len(self._latest[1]))
            self._latest = {**inputs}, labels  # titan moves what is in the other mapping
            batches.append((inputs, labels))
        return batches

    def _agree(self, batches: list[TitanBatch], per_step: int) -> tuple[int, int]:
        """Return the number of microbatches of the update, the largest of any rank, and its targets over all ranks."""
        num_targets = sum(int((labels != IGNORED_LABEL).sum()) for _, labels in batches)
        local_counts = [math.ceil(len(batches) / per_step), num_targets, self._latest is None]
        rows = self._data_ranks.exchange_numbers(local_counts)
        num_steps = int(max(row[0] for row in rows))
        if num_steps and any(row[2] for row in rows):
            empty = [rank for rank, row in enumerate(rows) if row[2]]
            raise PlanError(f"data rank {empty[0]} has no batch at all; give each rank one, or use fewer ranks")
        return num_steps, int(sum(row[1] for row in rows))

    def _fill(self, batches: list[TitanBatch], number: int) -> None:
        """Add batches without targets up to a number."""
        while len(batches) < number:
            assert self._latest is not None  # all ranks have checked it
            inputs, labels = self._latest
            self._discount(labels.numel())
            self.metrics_processor.data_loading_times.append(0.0)  # titan averages them over at least one
            batches.append(({**inputs}, torch.full_like(labels, IGNORED_LABEL)))

    def _fill_rows(self, inputs: dict[str, Any], labels: Tensor, number: int) -> TitanBatch:
        """Repeat the last row without targets, so that each microbatch has one shape."""
        missing, rows = number - len(labels), len(labels)

        def repeat_last(tensor: Tensor) -> Tensor:
            return torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])])

        filled = {
            name: repeat_last(value) if isinstance(value, Tensor) and value.ndim and len(value) == rows else value
            for name, value in inputs.items()
        }
        labels = repeat_last(labels)
        labels[rows:] = IGNORED_LABEL
        self._discount(labels[rows:].numel())
        return filled, labels

    def _discount(self, num_tokens: int) -> None:
        """Leave tokens out of ``ntokens_seen``, to which titan adds those of every batch."""
        self.ntokens_seen -= num_tokens // self.parallel_dims.cp


class HeldChunkedLoss:
    """torchtitan's chunked loss, which leaves the reduction of the head's gradient to the decoder's backward.

    The loss runs a backward of the head for each chunk, and has FSDP reduce in the last one. The gradient of the norm,
    which shares the head's FSDP group, is reduced later. Here both are reduced together, when the sync policy says so.
    """

    def __init__(self, loss: Any) -> None:
        self._loss = loss

    def __call__(self, *positional: Any, **named: Any) -> Any:
        """Run the loss with the reduction of the head switched off."""
        head = self._loss.lm_head
        if not isinstance(head, FSDPModule):
            return self._loss(*positional, **named)
        groups = param_groups([head])
        policy = [(group.reduce_grads, group.all_reduce_grads) for group in groups]
        head.set_requires_gradient_sync(False, recurse=False)
        cast(Any, head).set_requires_gradient_sync = _ignore  # hides the method from the loss
        try:
            return self._loss(*positional, **named)
        finally:
            del head.set_requires_gradient_sync
            for group, (reduces, all_reduces) in zip(groups, policy, strict=True):
                group.reduce_grads, group.all_reduce_grads = reduces, all_reduces


def _ignore(*_: Any, **__: Any) -> None:
    """Replace ``set_requires_gradient_sync``."""


def exact_config(config: Any, *, sync: Sync = "auto") -> Any:
    """Return the config of an `ExactTrainer` with everything that a config of torchtitan's Trainer says."""
    if type(config) is not Trainer.Config:
        raise PlanError(
            f"config is a {type(config).__qualname__} of {type(config).__module__}; expected Trainer.Config"
        )
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return ExactTrainer.Config(**values, sync=sync)


def recipe_text(config: Any) -> str:
    """Return the recipe, in TOML, that ``megabatch plan`` reads in place of a torchtitan config.

    It has the dense Llama 3 and Qwen 3 models. Selective activation checkpointing is planned as full, so the plan's
    memory is a lower bound and its time an upper one.

    Raises:
        PlanError: Another model, or a global batch size that follows from the number of ranks.
    """
    spec, training, parallelism = config.model_spec, config.training, config.parallelism
    model = spec.model
    layer = model.layers[0]
    if spec.name not in ("llama3", "qwen3") or layer.feed_forward is None:
        raise PlanError(
            f"the model is {spec.name} {spec.flavor}, which has no recipe; expected a dense llama3 or qwen3"
        )
    if training.global_batch_size < 1:
        raise PlanError("training.global_batch_size is -1, which follows from the number of ranks; give it")
    attention, feed_forward = layer.attention, layer.feed_forward
    architecture = {
        "model_type": spec.name.replace("llama3", "llama"), "vocab_size": model.vocab_size, "hidden_size": model.dim,
        "intermediate_size": feed_forward.w1.out_features, "num_hidden_layers": len(model.layers),
        "num_attention_heads": attention.n_heads, "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "head_dim": attention.head_dim or model.dim // attention.n_heads,
        "tie_word_embeddings": model.enable_weight_tying, "max_position_embeddings": training.seq_len,
    }  # fmt: skip
    sections: dict[str, dict[str, Any]] = {
        "model": {"dtype": training.dtype, "activation_checkpointing": config.activation_checkpoint is not None},
        "model.config": architecture,
        "data": {"pack_tokens": training.seq_len},
        "update": {"global_batch_size": training.global_batch_size, "micro_batch_size": training.local_batch_size},
        "parallel": {
            "wrapper": "fsdp2", "dp_replicate": parallelism.data_parallel_replicate_degree,
            "tp": parallelism.tensor_parallel_degree, "cp": parallelism.context_parallel_degree,
            "pp": parallelism.pipeline_parallel_degree,
        },
    }  # fmt: skip
    if training.dtype == "float32" and training.mixed_precision_param == "bfloat16":
        sections["model"]["compute_dtype"] = "bfloat16"
    texts = [
        "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())])
        for name, keys in sections.items()
    ]
    return "\n\n".join(texts) + "\n"


if __name__ == "__main__":
    print(recipe_text(ConfigManager().parse_args()), end="")
