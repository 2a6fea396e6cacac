"""Jobs that train with TRL's GRPO and RLOO, and the gradient of each update's rollouts in one piece in plain torch.

``python -m tests.integrations.rollout_users`` prints the error of each trainer's gradient before and after.
"""

import copy
import math
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor, nn
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from megabatch import MegabatchError
from megabatch.integrations.transformers import MegabatchTrainer
from tests.exact import oracle
from tests.exact.foreign import as_torchrun
from tests.integrations.trainers import Recorder
from tests.integrations.trl_users import gpt2, llama, text, tokenizer

PER_DEVICE, ACCUMULATED, GROUP, LONGEST, EPSILON = 2, 4, 4, 10, 0.2


class Recording:
    """Keeps the rollouts that TRL hands on, by step."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self.taken: list[dict[str, Tensor]] = []

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)  # type: ignore[misc]  # of the trainer it is mixed into
        self.taken.append({name: each.clone() for name, each in inputs.items()})
        return inputs


class ExactGRPO(MegabatchTrainer, Recording, GRPOTrainer):
    pass


class ExactRLOO(MegabatchTrainer, Recording, RLOOTrainer):
    pass


class PlainGRPO(Recording, GRPOTrainer):
    pass


class PlainRLOO(Recording, RLOOTrainer):
    pass


def reward(completions: list[str], **_: Any) -> list[float]:
    return [len(set(each.split())) + (sum(map(ord, each)) % 7) / 3 for each in completions]


def policy(make: Any) -> nn.Module:
    """A model that ends a third of its completions with each token."""
    model = make()
    model.generation_config.eos_token_id = list(range(1, 20))
    return model


@dataclass
class Case:
    settings: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)  # of the mixin
    model: Any = llama
    rloo: bool = False
    learning_rate: float = 0.0


CAP = {"max_microbatch_tokens": 40}
REUSED = {"steps_per_generation": 2 * ACCUMULATED, "num_iterations": 2}  # rollouts of older weights
SEQUENCES = {"importance_sampling_level": "sequence"}
MASKED = {"mask_truncated_completions": True}
CASES: dict[str, Case] = {
    "grpo": Case({"loss_type": "grpo"}),
    "dapo": Case({"loss_type": "dapo", "beta": 0.1}, CAP),
    "dapo, GPT-2": Case({"loss_type": "dapo"}, CAP, gpt2),
    "dapo, reused": Case({"loss_type": "dapo", **REUSED}, CAP, learning_rate=0.5),
    "dapo, two generations": Case({"loss_type": "dapo", "steps_per_generation": 2}, CAP, gpt2),
    "bnpo": Case({"loss_type": "bnpo", **MASKED}, CAP),
    "dr_grpo": Case({"loss_type": "dr_grpo"}, CAP),
    "grpo, sequences": Case({"loss_type": "grpo", **SEQUENCES, **REUSED}, learning_rate=0.5),
    "cispo": Case({"loss_type": "cispo", "epsilon_high": 5.0, **REUSED}, CAP, learning_rate=0.5),
    "sapo": Case({"loss_type": "sapo", **REUSED}, CAP, learning_rate=0.5),
    "luspo": Case({"loss_type": "luspo", **SEQUENCES}, CAP),
    "vespo": Case({"loss_type": "vespo", **REUSED}, CAP, learning_rate=0.5),
    "rloo": Case({"beta": 0.1}, CAP, rloo=True),
    "rloo, reused": Case(REUSED, CAP, gpt2, rloo=True, learning_rate=0.5),
    "entropy": Case({"loss_type": "dapo", "entropy_coef": 0.1}),
    "quantile": Case({"loss_type": "dapo", "top_entropy_quantile": 0.5}),
}  # fmt: skip


def make(case: Case, kind: type[Any], folder: str, **named: Any) -> tuple[Any, Recorder]:
    settings: dict[str, Any] = {
        "output_dir": folder, "per_device_train_batch_size": PER_DEVICE, "gradient_accumulation_steps": ACCUMULATED,
        "max_steps": 3, "learning_rate": case.learning_rate, "optim": "sgd", "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0, "bf16": False, "gradient_checkpointing": False, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "dataloader_pin_memory": False, "disable_tqdm": True,
        "num_generations": GROUP, "max_completion_length": LONGEST, "beta": 0.0,
    }  # fmt: skip
    data: Any = Dataset.from_list([{"prompt": text(index, 2 + 3 * index % 7)} for index in range(24)])
    recorder, model = Recorder(), policy(case.model)
    if "beta" in case.settings:  # TRL reads the reference from a folder
        save_reference(model, f"{folder}/reference")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = kind(
            model=model, reward_funcs=reward, train_dataset=data, processing_class=tokenizer(),
            args=(RLOOConfig if case.rloo else GRPOConfig)(**settings | case.settings), callbacks=[recorder], **named,
        )  # fmt: skip
    return trainer, recorder


def save_reference(model: Any, folder: str) -> None:
    """Save other weights than the policy's, so that the divergence is not 0."""
    other = copy.deepcopy(model)
    torch.manual_seed(9)
    with torch.no_grad():
        for each in other.parameters():
            each += 0.05 * torch.randn_like(each)
    other.save_pretrained(folder)
    model.config._name_or_path = folder


def log_probs(model: nn.Module, rollout: dict[str, Tensor]) -> Tensor:
    ids = torch.cat([rollout["prompt_ids"], rollout["completion_ids"]], 1)
    mask = torch.cat([rollout["prompt_mask"], rollout["completion_mask"]], 1)
    logits = nn.Module.__call__(model, input_ids=ids, attention_mask=mask).logits[:, :-1]
    every = -F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
    return every[:, -rollout["completion_ids"].shape[1] :]


def sums(case: Case, model: nn.Module, rollout: dict[str, Tensor]) -> tuple[Tensor, float]:
    """The total of TRL's loss and its count, written from the papers' formulas."""
    given, new = case.settings, log_probs(model, rollout)
    mask = rollout["completion_mask"]
    rows = len(mask)
    if case.rloo:
        ratio = ((new * mask).sum(1) - rollout["old_logps"]).exp()
        advantage = rollout["advantages"]
        return -torch.min(ratio * advantage, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantage).sum(), rows
    kind, advantage = given["loss_type"], rollout["advantages"][:, None]
    log_ratio = new - rollout.get("old_per_token_logps", new.detach())
    by_row = (log_ratio * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    ratio = (by_row if given.get("importance_sampling_level") == "sequence" else log_ratio).exp()
    if kind == "cispo":
        loss = -ratio.clamp(max=given["epsilon_high"]).detach() * advantage * new
    elif kind == "sapo":
        heat = torch.where(advantage > 0, 1.0, 1.05)
        loss = -torch.sigmoid(heat * (ratio - 1)) * 4 / heat * advantage
    elif kind == "vespo":
        log_w = (log_ratio * mask).sum(1, keepdim=True).detach()
        k, rate = torch.where(advantage >= 0, 2.0, 3.0), torch.where(advantage >= 0, 3.0, 2.0)
        loss = -(rate + k * log_w - rate * log_w.exp()).exp() * advantage * new
    else:
        loss = -torch.min(ratio * advantage, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantage)
    if beta := given.get("beta"):
        other = rollout["ref_per_token_logps"] - new
        loss = loss + beta * (other.exp() - other - 1) * ratio  # use_bias_correction_kl
    total = loss * mask
    if kind in ("grpo", "sapo"):
        return (total.sum(1) / mask.sum(1).clamp(min=1)).sum(), rows
    if kind in ("dr_grpo", "luspo"):
        return total.sum() / (LONGEST if kind == "dr_grpo" else 1), rows
    return total.sum(), float(mask.sum())


def uncut(case: Case, model: nn.Module, taken: list[dict[str, Tensor]]) -> dict[str, Tensor | None]:
    """The gradient of the rollouts of an update. Each is a batch of its own, as its padding may be another."""
    model.zero_grad()
    found = [sums(case, model, each) for each in taken]
    (sum(total for total, _ in found) / max(sum(count for _, count in found), 1)).backward()  # type: ignore[union-attr]  # sum() may be the int 0
    return {name: each.grad for name, each in model.named_parameters()}


class Weights(Recorder):
    """The weights before each update too."""

    def on_step_begin(self, args, state, control, model=None, **rest):
        vars(self).setdefault("weights", []).append(copy.deepcopy(model.state_dict()))


def errors_of(case: Case, trainer: Any, recorder: Recorder, weights: list[Any]) -> list[float]:
    """Errors of the gradient of each update, of the rollouts of all ranks."""
    taken = trainer.taken
    model = policy(case.model)
    found = []
    for number, gradient in enumerate(recorder.gradients):
        mine = taken[number * ACCUMULATED : (number + 1) * ACCUMULATED]
        every: list[Any] = [mine]
        if dist.is_initialized():
            every = [None] * dist.get_world_size()
            dist.all_gather_object(every, mine)
        model.load_state_dict({name.removeprefix("module."): each for name, each in weights[number].items()})
        expected = uncut(case, model, [each for one in every for each in one])
        named = {name.removeprefix("module."): each for name, each in gradient.items()}
        found.append(oracle.whole_error({name: named[name] for name in expected}, expected))
    return found


METRICS = ("entropy", "kl", "clip_ratio/region_mean", "clip_ratio/low_min", "clip_ratio/high_max", "cispo_clip_ratio")


def wrong_metrics(case: Case, trainer: Any, recorder: Recorder, plain: Any, weights: list[Any]) -> dict[str, Any]:
    """Metrics of the loss that were logged, and are not those that TRL computes of an update in one piece."""
    wrong: dict[str, Any] = {}
    plain.current_gradient_accumulation_steps = 1
    for number in range(len(recorder.gradients)):
        taken = trainer.taken[number * ACCUMULATED : (number + 1) * ACCUMULATED]
        if len({each["prompt_ids"].shape for each in taken}) > 1:
            continue
        whole = {name: torch.cat([each[name] for each in taken]) for name in taken[0] if name != "num_items_in_batch"}
        plain.model.load_state_dict(weights[number])
        plain._metrics["train"].clear()
        plain.model.train()
        plain.compute_loss(plain.model, whole | {"num_items_in_batch": whole["completion_mask"].sum()})
        for name in METRICS:
            for expected in plain._metrics["train"].get(name, []):
                if not math.isclose(recorder.logged[number].get(name, math.nan), expected, rel_tol=1e-5, abs_tol=1e-7):
                    wrong[name] = (recorder.logged[number].get(name), expected)
        if not recorder.logged[number]["step_time"] > 0:
            wrong["step_time"] = recorder.logged[number]["step_time"]
    return wrong


def run(name: str, *, plain: bool = False) -> dict[str, Any]:
    case = CASES[name]
    exact, theirs = (ExactRLOO, PlainRLOO) if case.rloo else (ExactGRPO, PlainGRPO)
    with tempfile.TemporaryDirectory() as folder:
        trainer, recorder = make(case, theirs if plain else exact, folder, **({} if plain else case.arguments))
        states = Weights()
        trainer.add_callback(states)
        try:
            trainer.train()
        except MegabatchError as error:
            return {"refused": f"{type(error).__name__}: {error}"}
        weights = vars(states)["weights"]
        found = {"errors": errors_of(case, trainer, recorder, weights), "metrics": {}}
        if not plain and not dist.is_initialized():
            other, _ = make(case, theirs, folder)
            found["metrics"] = wrong_metrics(case, trainer, recorder, other, weights)
        found["uneven"] = len({int(each["completion_mask"].sum()) for each in trainer.taken}) > 2
        return found


def run_job(name: str) -> dict[str, Any]:
    with as_torchrun():
        torch.manual_seed(dist.get_rank())
        return run(name)


if __name__ == "__main__":
    for each in sys.argv[1:] or CASES:
        before, after = run(each, plain=True), run(each)
        print(f"RESULT {each}: {before} -> {after}", flush=True)
