"""Jobs that train with TRL's trainers, and the gradient of each update in one piece, by the same trainer's own loss.

``python -m tests.integrations.trl_users`` prints the error of each trainer's gradient before and after.
"""

import copy
import math
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from megabatch import MegabatchError
from megabatch.integrations.transformers import MegabatchTrainer
from tests.exact import oracle
from tests.exact.foreign import as_torchrun
from tests.integrations.trainers import Recorder

VOCABULARY, PER_DEVICE, ACCUMULATED, NUM_SAMPLES = 60, 2, 3, 12


class ExactSFT(MegabatchTrainer, SFTTrainer):
    pass


class ExactDPO(MegabatchTrainer, DPOTrainer):
    pass


class ExactReward(MegabatchTrainer, RewardTrainer):
    pass


class ExactKTO(MegabatchTrainer, KTOTrainer):
    pass


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{number}": number for number in range(3, VOCABULARY)}
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def text(seed: int, num_words: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{number}" for number in torch.randint(3, VOCABULARY, (num_words,), generator=generator).tolist())


def texts() -> list[dict[str, Any]]:
    return [{"text": text(index, 3 + 5 * index % 17)} for index in range(NUM_SAMPLES)]


def completions() -> list[dict[str, Any]]:
    return [{"prompt": text(index, 2 + index % 4), "completion": " " + text(50 + index, 1 + 7 * index % 13)}
            for index in range(NUM_SAMPLES)]  # fmt: skip


def pairs() -> list[dict[str, Any]]:
    return [{"prompt": text(index, 2 + index % 4), "chosen": " " + text(50 + index, 1 + 7 * index % 13),
             "rejected": " " + text(90 + index, 2 + 5 * index % 11)} for index in range(NUM_SAMPLES)]  # fmt: skip


def unpaired() -> list[dict[str, Any]]:
    return [row | {"label": index % 3 > 0} for index, row in enumerate(completions())]


SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
LLAMA: dict[str, Any] = SIZES | {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 128,
}  # fmt: skip


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 128}
    return GPT2LMHeadModel(GPT2Config(**SIZES, **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).double()


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**LLAMA)).double()


def reference() -> nn.Module:
    """Another model than the one that is trained, so that rewards are not 0."""
    model = gpt2()
    with torch.no_grad():
        for each in model.parameters():
            each += 0.05 * torch.randn_like(each)
    return model


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForSequenceClassification(LlamaConfig(**LLAMA, num_labels=1)).double()


@dataclass
class Case:
    """A trainer of TRL, with the mixin, and what it is given."""

    exact: type[MegabatchTrainer]
    config: type[Any]
    data: Callable[[], list[dict[str, Any]]]
    model: Callable[[], nn.Module] = gpt2
    settings: dict[str, Any] = field(default_factory=dict)  # of its config
    arguments: dict[str, Any] = field(default_factory=dict)  # of the mixin
    trainer: dict[str, Any] = field(default_factory=dict)
    ref_model: Callable[[], nn.Module] | None = None
    streams: bool = False
    metrics: tuple[str, ...] = ("entropy", "mean_token_accuracy", "num_tokens")

    @property
    def plain(self) -> type[Any]:
        return self.exact.__bases__[1]


LORA = LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0)
WRAPPED = {"packing": True, "packing_strategy": "wrapped", "max_length": 24}
CAP = {"max_microbatch_tokens": 64}
UNPAIRED = {"loss_type": "apo_zero_unpaired"}
OF_PAIRS = ("rewards/chosen", "rewards/accuracies", "rewards/margins", "logps/rejected", "logits/chosen", "entropy")
OF_REWARDS = ("min_reward", "mean_reward", "max_reward", "accuracy", "margin", "num_tokens")
OF_KTO = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logits/rejected", "entropy", "num_tokens")
CASES: dict[str, Case] = {
    "SFT, text": Case(ExactSFT, SFTConfig, texts),
    "SFT, text, Llama": Case(ExactSFT, SFTConfig, texts, llama),
    "SFT, text, capped": Case(ExactSFT, SFTConfig, texts, arguments=CAP),
    "SFT, completions": Case(ExactSFT, SFTConfig, completions),
    "SFT, packed": Case(ExactSFT, SFTConfig, texts, llama, {"packing": True, "max_length": 24}),
    "SFT, wrapped": Case(ExactSFT, SFTConfig, texts, settings=WRAPPED),
    "SFT, padding-free": Case(ExactSFT, SFTConfig, texts, llama, {"padding_free": True, "max_length": None}),
    "SFT, LoRA": Case(ExactSFT, SFTConfig, texts, trainer={"peft_config": LORA}),
    "SFT, streamed": Case(ExactSFT, SFTConfig, texts, settings={"max_steps": 2}, streams=True),
    "SFT, unchecked": Case(ExactSFT, SFTConfig, texts, arguments={"check_loss": False}),
    "DPO": Case(ExactDPO, DPOConfig, pairs, ref_model=reference, metrics=OF_PAIRS),
    "DPO, capped": Case(ExactDPO, DPOConfig, pairs, ref_model=reference, arguments=CAP, metrics=OF_PAIRS),
    "DPO, sorted pairs": Case(ExactDPO, DPOConfig, pairs, ref_model=reference, settings={"loss_type": ["aot"]}),
    "DPO, mean over tokens": Case(ExactDPO, DPOConfig, pairs, ref_model=reference, settings={"loss_type": ["sft"]}),
    "Reward": Case(ExactReward, RewardConfig, pairs, classifier, metrics=OF_REWARDS),
    "Reward, capped": Case(ExactReward, RewardConfig, pairs, classifier, arguments=CAP, metrics=OF_REWARDS),
    "KTO": Case(ExactKTO, KTOConfig, unpaired, ref_model=reference, settings=UNPAIRED, metrics=OF_KTO),
    "KTO, capped": Case(ExactKTO, KTOConfig, unpaired, ref_model=reference, settings=UNPAIRED, arguments=CAP,
                        metrics=OF_KTO),
    "KTO, coupled": Case(ExactKTO, KTOConfig, unpaired, ref_model=reference),
}  # fmt: skip


def make(case: Case, kind: type[Any], folder: str, **named: Any) -> tuple[Any, Recorder]:
    settings: dict[str, Any] = {
        "output_dir": folder, "per_device_train_batch_size": PER_DEVICE, "gradient_accumulation_steps": ACCUMULATED,
        "num_train_epochs": 1, "learning_rate": 0.0, "optim": "sgd", "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0, "bf16": False, "gradient_checkpointing": False,
        "train_sampling_strategy": "sequential", "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "use_cpu": True, "dataloader_pin_memory": False, "disable_tqdm": True,
    }  # fmt: skip
    data: Any = Dataset.from_list(case.data())
    recorder, others = Recorder(), {"ref_model": case.ref_model()} if case.ref_model else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = kind(
            model=case.model(), args=case.config(**settings | case.settings),
            train_dataset=data.to_iterable_dataset() if case.streams else data, processing_class=tokenizer(),
            callbacks=[recorder], **case.trainer, **named, **others,
        )  # fmt: skip
    return trainer, recorder


def uncut(trainer: Any, chosen: list[Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """The gradient and the metrics of all samples at once, by TRL's own loss."""
    collate = trainer._get_collator_with_removed_columns(trainer.data_collator, "training")
    trainer.model.train()
    trainer._metrics["train"].clear()
    trainer._total_train_tokens = 0
    loss = trainer.compute_loss(trainer.model, collate(copy.deepcopy(chosen)))
    trainer.model.zero_grad()
    loss.backward()
    metrics = {name: sum(values) / len(values) for name, values in trainer._metrics["train"].items()}
    return {name: each.grad for name, each in trainer.model.named_parameters() if each.requires_grad}, metrics


def errors_of(recorder: Recorder, expected: list[tuple[dict[str, Any], dict[str, float]]]) -> list[float]:
    found = [{name.removeprefix("module."): each for name, each in one.items()} for one in recorder.gradients]
    return [
        oracle.whole_error({name: one[name] for name in gradient}, gradient)
        for one, (gradient, _) in zip(found, expected, strict=True)
    ]


def wrong_metrics(
    case: Case, recorder: Recorder, expected: list[tuple[dict[str, Any], dict[str, float]]]
) -> dict[str, Any]:
    """Metrics that were logged and are not those of the update in one piece."""
    wrong, num_tokens = {}, 0.0
    for logged, (_, metrics) in zip(recorder.logged, expected, strict=False):
        num_tokens += metrics["num_tokens"]
        for name in case.metrics:
            right = num_tokens if name == "num_tokens" else metrics[name]
            if not math.isclose(logged.get(name, math.nan), right, rel_tol=1e-5, abs_tol=1e-7):
                wrong[name] = (logged.get(name), right)
    return wrong


def run(name: str, *, with_plain: bool = False) -> dict[str, Any]:
    case = CASES[name]
    world = dist.get_world_size() if dist.is_initialized() else 1
    with tempfile.TemporaryDirectory() as folder:
        trainer, recorder = make(case, case.exact, folder, **case.arguments)
        try:
            trainer.train()
        except MegabatchError as error:
            return {"refused": f"{type(error).__name__}: {error}"}
        whole, _ = make(case, case.plain, folder)
        data = trainer.train_dataset if case.streams else whole._remove_unused_columns(whole.train_dataset, "training")
        samples = list(data)
        size = PER_DEVICE * ACCUMULATED * world
        if world > 1:  # the oracle is of one process
            whole.accelerator.gather = whole.accelerator.gather_for_metrics = lambda values, *_: values
        expected = [uncut(whole, samples[start : start + size]) for start in range(0, len(samples), size)]
        found = {
            "errors": errors_of(recorder, expected), "updates": len(expected),
            "metrics": wrong_metrics(case, recorder, expected),
        }  # fmt: skip
        if with_plain:
            plain, recorded = make(case, case.plain, folder)
            plain.train()
            found["before"] = errors_of(recorded, expected)
    return found


def run_job(name: str) -> dict[str, Any]:
    with as_torchrun():
        return run(name)


if __name__ == "__main__":
    for each in sys.argv[1:] or CASES:
        try:
            told = run(each, with_plain=True)
        except Exception as error:
            traceback.print_exc()
            told = {"refused": repr(error)}
        numbers = (
            told.get("refused")
            or f"{told['updates']} updates, {max(told['before']):.1e} {max(told['errors']):.1e} {told['metrics']}"
        )
        print(f"RESULT {each}: {numbers}", flush=True)
