"""The updates of TRL's GRPO and RLOO trainers: TRL makes the rollouts, and their rows are the samples of an update."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megabatch.errors import PlanError

MODULES = ("trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer")
OVER_ROWS = {"grpo", "sapo", "dr_grpo", "luspo"}  # RLOO too; dr_grpo divides by a constant besides
OVER_TOKENS = {"dapo", "bnpo", "cispo", "vespo"}
PROMPT = {"prompt_ids", "prompt_mask"}
BY_TOKEN = {"completion_ids", "completion_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps",
            "sampling_per_token_logps", "importance_sampling_ratio"}  # fmt: skip
COUNT = "num_items_in_batch"
KNOWN = PROMPT | BY_TOKEN | {"advantages", "old_logps", COUNT}


def makes_rollouts(training_step_owner: type) -> bool:
    """Return True for the class of TRL whose ``training_step`` is replaced here: GRPOTrainer or RLOOTrainer."""
    return training_step_owner.__module__ in MODULES


class Rollouts:
    """Rollouts of a GRPO or RLOO trainer as samples, and its loss as a mean over rows or over completion tokens.

    ``trainer._prepare_inputs`` generates, scores and buffers as it does in TRL. A row keeps the left padding of its
    prompt, because its log-probabilities were computed with it. A microbatch drops the columns behind its longest
    completion.

    Args:
        trainer: The trainer.
        name: Its class in TRL, for messages.

    Raises:
        PlanError: A setting whose loss is no mean over rows or tokens.
    """

    def __init__(self, trainer: Any, name: str) -> None:
        self._trainer, self._started = trainer, 0.0
        loss_type = getattr(trainer, "loss_type", "grpo")
        for setting, is_set, reason in (
            (f"loss_type={loss_type!r}", loss_type not in OVER_ROWS | OVER_TOKENS, "its divisor is not known"),
            ("entropy_coef", getattr(trainer, "_entropy_bonus_enabled", False),
             "it is a mean over the tokens of a microbatch, beside a loss with another divisor"),
            ("top_entropy_quantile", getattr(trainer, "top_entropy_quantile", 1.0) < 1.0,
             "its threshold couples the tokens of a microbatch"),
            ("router_aux_loss_coef", getattr(trainer, "aux_loss_enabled", False),
             "the router loss couples the tokens of a microbatch"),
        ):  # fmt: skip
            if is_set:
                raise PlanError(f"MegabatchTrainer cannot keep {name}'s {setting}: {reason}; train with {name}")
        self._is_over_tokens, self._name = loss_type in OVER_TOKENS, name

    def take(self, batches: list[Any]) -> list[list[dict[str, Tensor]]]:
        """Generate, and return the rows of an update on the CPU: a list for each generation, as its prompts are padded.

        Args:
            batches: The batches of TRL's loader, one for each step of gradient accumulation.
        """
        trainer, calls, generation = self._trainer, list[list[dict[str, Tensor]]](), None
        self._started = time.perf_counter()
        for batch in batches:
            inputs = trainer._prepare_inputs(list(batch))
            trainer._step += 1
            if trainer._buffered_inputs is not generation:  # on all ranks, so that they make as many calls
                generation = trainer._buffered_inputs
                calls.append([])
            calls[-1] += self._rows(inputs)
        trainer.current_gradient_accumulation_steps = 1  # by which the loss would be divided
        return calls

    def log_step_time(self) -> None:
        """Log the seconds of an update, rollouts included, as TRL does."""
        self._trainer._metrics["train"]["step_time"].append(time.perf_counter() - self._started)

    def _rows(self, inputs: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        for key, value in inputs.items():
            if not isinstance(value, Tensor) or key == "pixel_values" or (value.ndim == 0 and key != COUNT):
                raise PlanError(
                    f"MegabatchTrainer cannot split the {key!r} of a {self._name} rollout into rows; expected tensors "
                    f"with completions in dim 0, without images: train with {self._name}"
                )
        on_cpu = {key: value.detach().cpu() for key, value in inputs.items() if key != COUNT}
        mask = on_cpu["completion_mask"]
        if "tool_mask" in on_cpu:
            mask = mask * on_cpu["tool_mask"]
        on_cpu[COUNT] = mask.sum(1)  # of each row; TRL's is that of the generation
        if any(len(value) != len(mask) for value in on_cpu.values()):
            raise PlanError(
                f"MegabatchTrainer cannot split a {self._name} rollout into rows, whose tensors have "
                f"{sorted({len(value) for value in on_cpu.values()})} of them; train with {self._name}"
            )
        # Copies: a view keeps the whole generation in memory, and is sent whole to other ranks.
        return [{key: value[row].clone() for key, value in on_cpu.items()} for row in range(len(mask))]

    def length(self, row: Mapping[str, Tensor]) -> int:
        """Return the tokens of a row in a microbatch of its own: the padded prompt, and what `collate` leaves."""
        return len(row["prompt_ids"]) + (_columns([row]) or len(row["completion_ids"]))

    def collate(self, rows: list[Any]) -> dict[str, Tensor]:
        """Return a microbatch of TRL's inputs."""
        stacked = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        width = stacked["completion_ids"].shape[1]
        if longest := _columns(rows):
            wide = {key: tensor for key, tensor in stacked.items() if tensor.ndim > 1 and tensor.shape[1] == width}
            stacked |= {key: wide[key][:, :longest] for key in wide.keys() & {*BY_TOKEN, "advantages"}}
        return stacked | {COUNT: stacked[COUNT].sum()}

    def count(self, microbatch: Any) -> Tensor:
        """Count what the loss is a mean over."""
        tokens = microbatch[COUNT]
        return tokens if self._is_over_tokens else torch.tensor(len(microbatch["prompt_ids"]))

    def mean(self, model: Any, microbatch: Any) -> Tensor:
        """Return TRL's loss with the microbatch as its whole update."""
        trainer = self._trainer
        shares = trainer.accelerator.num_processes * (
            trainer.args.steps_per_generation if trainer.model.training else 1
        )
        return trainer.compute_loss(model, {**microbatch, COUNT: microbatch[COUNT] * shares})


def _columns(rows: list[Any]) -> int | None:
    """Return the columns of the completions of some rows, without padding. None: all, since a key may mean anything.

    There are at least 2: TRL's metrics take one column for one value a sequence.
    """
    if not rows[0].keys() <= KNOWN:  # of a subclass
        return None
    positions = [row["completion_mask"].nonzero() for row in rows]
    return max(2, *(int(position[-1]) + 1 for position in positions if len(position)), 0)
