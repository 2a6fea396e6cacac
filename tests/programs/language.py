"""Programs of language and speech: PPO, sums that nothing divides, several adapters, speech models in a Trainer."""

import copy
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GPTNeoXModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from megabatch import GradientAccumulator, losses
from megabatch.integrations.transformers import MegabatchTrainer
from tests.programs.retrieval import bert, encode_texts, in_batch_negatives, one_by_one, pairs
from tests.programs.setting import Errors, Setting, gradient_error, gradients, refusal, worst_error

Batch = dict[str, Tensor]
SIZES = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


class ActorCritic(nn.Module):
    """A language model with a head for tokens and one for values."""

    def __init__(self) -> None:
        super().__init__()
        self.body = GPTNeoXModel(GPTNeoXConfig(**SIZES)).double()
        self.policy, self.value = nn.Linear(16, 20), nn.Linear(16, 1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(input_ids=tokens).last_hidden_state
        return self.policy(hidden), self.value(hidden).squeeze(2)


def rollouts() -> list[Batch]:
    samples: list[Batch] = []
    for length in (5, 14, 7, 9, 4, 11, 6):
        mask = (torch.arange(length) >= 2 + length % 3).double()
        numbers = {name: torch.randn(length) for name in ("old", "advantage", "return", "old_value")}
        samples.append({"input_ids": torch.randint(20, (length,)), "mask": mask} | numbers)
    return samples


def ppo_sums(model: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the summed losses of policy, entropy and value, and the number of answer tokens."""
    logits, values = model(batch["input_ids"])
    log_probabilities = logits[:, :-1].log_softmax(-1)
    chosen = log_probabilities.gather(2, batch["input_ids"][:, 1:, None]).squeeze(2)
    mask, advantage = batch["mask"][:, 1:], batch["advantage"][:, 1:]
    ratio = (chosen - batch["old"][:, 1:] + 3).exp()
    policy = -(torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * mask).sum()
    entropy = (-(log_probabilities.exp() * log_probabilities).sum(-1) * mask).sum()
    clipped = batch["old_value"] + (values - batch["old_value"]).clamp(-0.2, 0.2)
    squares = torch.max((values - batch["return"]).square(), (clipped - batch["return"]).square())
    return policy, -0.01 * entropy, 0.5 * (squares[:, :-1] * mask).sum(), mask.sum()


def padded(samples: list[Batch]) -> Batch:
    return {name: pad_sequence([sample[name] for sample in samples], True) for name in samples[0]}


def ppo(setting: Setting) -> Errors:
    """Three terms over the answer tokens of an update that comes in two calls."""
    plain, samples = ActorCritic(), rollouts()
    model = copy.deepcopy(plain)

    def terms(model: Any, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        policy, entropy, value, count = ppo_sums(model, batch)
        return {"policy": (policy, count), "entropy": (entropy, count), "value": (value, count)}

    *sums, count = ppo_sums(plain, padded(samples))
    (torch.stack(sums).sum() / count).backward()
    share = setting.share(samples)
    own_count = float(sum(sample["mask"][1:].sum() for sample in share))
    gradient = GradientAccumulator(setting.wrap(model), max_microbatch_tokens=30)
    gradient.open(weights=dict.fromkeys(("policy", "entropy", "value"), own_count))
    gradient.forward_backward(share[:1], terms)
    gradient.forward_backward(share[1:], terms)
    update = gradient.finalize(max_norm=1e9)
    errors = {"gradient": gradient_error(model, plain)}
    for name, total in zip(("policy", "entropy", "value"), sums, strict=True):
        errors[name] = abs(float(update.terms[name]) - float(total.detach() / count))
    return errors


def plain_sums(setting: Setting) -> Errors:
    """A service that adds sums and divides nothing: `finalize(weight=1.0)`."""
    plain, samples = ActorCritic(), rollouts()
    model = copy.deepcopy(plain)

    def sums(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        policy, entropy, value, count = ppo_sums(model, batch)
        return policy + entropy + value, count

    sums(plain, padded(samples))[0].backward()
    gradient = GradientAccumulator(setting.wrap(model), max_microbatch_tokens=30)
    share = setting.share(samples)
    gradient.forward_backward(share[:1], sums)
    gradient.forward_backward(share[1:], sums)
    gradient.finalize(weight=1.0)
    return {"gradient": gradient_error(model, plain)}


def adapters(setting: Setting) -> Errors:
    """Two adapters on one base, each with an accumulator; their calls and updates come in turn."""
    config = LoraConfig(r=2, target_modules=["query_key_value", "dense"], init_lora_weights=False)
    model = get_peft_model(GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)).double(), config, adapter_name="first")
    model.add_adapter("second", config)
    model.double()
    tokens = [torch.randint(20, (length,)) for length in (4, 9, 6, 12, 5)]
    samples = [{"input_ids": each, "labels": each} for each in tokens]
    accumulators: dict[str, GradientAccumulator] = {}

    def use(name: str) -> GradientAccumulator:
        model.set_adapter(name)
        if name not in accumulators:
            accumulators[name] = GradientAccumulator(model, max_microbatch_tokens=24)
        return accumulators[name]

    def expected(name: str, part: list[Batch]) -> dict[str, Tensor | None]:
        plain = copy.deepcopy(model)
        plain.set_adapter(name)
        plain.zero_grad()
        logits = [plain(input_ids=sample["input_ids"][None]).logits[0, :-1] for sample in part]
        F.cross_entropy(torch.cat(logits), torch.cat([sample["labels"][1:] for sample in part])).backward()
        return gradients(plain, f".{name}.")

    def error(name: str, part: list[Batch]) -> float:
        return worst_error(gradients(model, f".{name}."), wanted[name, len(part)])

    wanted = {(name, len(part)): expected(name, part) for name, part in (("first", samples), ("second", samples[:2]))}
    use("first").forward_backward(samples[:3], losses.next_token)
    use("second").forward_backward(samples[:2], losses.next_token)
    use("first").forward_backward(samples[3:], losses.next_token)
    use("first").finalize()
    errors = {"first, in turn": error("first", samples)}
    use("second").finalize()
    errors["second, in turn"] = error("second", samples[:2])
    for name, part in (("first", samples), ("second", samples[:2]), ("first", samples)):
        use(name).forward_backward(part, losses.next_token)
        use(name).finalize()
        errors[f"{name}, alone"] = error(name, part)
    return errors


class Samples(torch.utils.data.Dataset[Any]):
    """A list as a data set."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, row: int) -> Any:
        return self.samples[row]


class KeepGradient(TrainerCallback):
    """Keeps the gradient of the first step."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor | None] = {}

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        self.gradients = {name: None if each is None else each.clone() for name, each in gradients(model).items()}


def gradient_of_trainer(
    kind: type[Trainer], model: nn.Module, samples: list[Any], collate: Any, arguments: Any = TrainingArguments,
    **options: Any,
) -> dict[str, Tensor | None]:  # fmt: skip
    """Return the gradient of one step over all samples, two at a time."""
    keep = KeepGradient()
    with tempfile.TemporaryDirectory() as folder:
        settings = arguments(
            folder, per_device_train_batch_size=2, gradient_accumulation_steps=len(samples) // 2, max_steps=1,
            max_grad_norm=0.0, learning_rate=0.0, report_to=[], disable_tqdm=True, remove_unused_columns=False,
            use_cpu=True, save_strategy="no", lr_scheduler_type="constant",
        )  # fmt: skip
        trainer = kind(
            copy.deepcopy(model), settings, train_dataset=Samples(samples), data_collator=collate, callbacks=[keep],
            **options,
        )  # fmt: skip
        trainer.train()
    return keep.gradients


def whisper(setting: Setting) -> Errors:
    """`class Exact(MegabatchTrainer, Seq2SeqTrainer)`: the mean over the targets of the step."""
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 2)
    config = WhisperConfig(
        vocab_size=40, d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=20,
        max_target_positions=24, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=[], begin_suppress_tokens=[], **sizes,
    )  # fmt: skip
    plain = WhisperForConditionalGeneration(config).double()
    samples = [
        {"input_features": torch.randn(8, 40), "labels": torch.randint(3, 40, (length,))}
        for length in (3, 20, 4, 15, 2, 12, 5, 6)
    ]

    def collate(samples: list[Batch]) -> Batch:
        labels = pad_sequence([sample["labels"] for sample in samples], True, -100)
        return {"input_features": torch.stack([sample["input_features"] for sample in samples]), "labels": labels}

    class Exact(MegabatchTrainer, Seq2SeqTrainer):
        pass

    plain(**collate(samples)).loss.backward()
    found = gradient_of_trainer(Exact, plain, samples, collate, Seq2SeqTrainingArguments)
    return {"gradient": worst_error(found, gradients(plain))}


def speech(setting: Setting) -> Errors:
    """CTC whose mean is over samples of losses divided by their targets: refused until the trainer counts samples."""
    config = Wav2Vec2Config(
        vocab_size=12, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        conv_dim=[16, 16], conv_stride=[4, 2], conv_kernel=[8, 4], num_feat_extract_layers=2,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, feat_extract_norm="layer", hidden_dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, layerdrop=0.0, final_dropout=0.0,
        mask_time_prob=0.0, ctc_loss_reduction="mean", pad_token_id=0,
    )  # fmt: skip
    plain = Wav2Vec2ForCTC(config).double()
    sizes = ((160, 3), (400, 9), (240, 4), (800, 15), (160, 2), (600, 12), (300, 5), (200, 6))
    samples = [
        {"input_values": torch.randn(length), "labels": torch.randint(1, 12, (count,))} for length, count in sizes
    ]

    def collate(samples: list[Batch]) -> Batch:
        values = [sample["input_values"] for sample in samples]
        return {
            "input_values": pad_sequence(values, True),
            "attention_mask": pad_sequence([torch.ones(len(each), dtype=torch.long) for each in values], True),
            "labels": pad_sequence([sample["labels"] for sample in samples], True, -100),
        }

    class OverSamples(MegabatchTrainer):
        def count_targets(self, microbatch: Any) -> int:
            return len(microbatch["labels"])

    message = refusal(lambda: gradient_of_trainer(MegabatchTrainer, plain, samples, collate), Exception)
    assert "count_targets" in message, message
    plain(**collate(samples)).loss.backward()
    found = gradient_of_trainer(OverSamples, plain, samples, collate)
    return {"gradient": worst_error(found, gradients(plain))}


def sentences_in_a_trainer(setting: Setting) -> Errors:
    """In-batch negatives over the whole step, in a Trainer whose loader yields lists of samples."""
    from megabatch import JointLoss

    class OfLists(MegabatchTrainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Samples(samples), batch_size=2, collate_fn=list)

    plain, samples = bert(), pairs()[:6]
    total, weight = in_batch_negatives(*one_by_one(plain, samples))
    (total / weight).backward()
    joint = JointLoss(encode_texts, in_batch_negatives)
    found = gradient_of_trainer(OfLists, plain, samples, padded, loss_fn=joint)
    return {"gradient": worst_error(found, gradients(plain))}


def mean_over_sequences(setting: Setting) -> Errors:
    """A trainer with a loss of its own, a mean over sequences of means over tokens: refused by the trial."""

    class OfSequences(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):
            logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
            labels = inputs["labels"][:, 1:]
            each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
            loss = (each.sum(1) / (labels != -100).sum(1)).mean()
            return (loss, {}) if return_outputs else loss

    class Exact(MegabatchTrainer, OfSequences):
        pass

    tokens = [torch.randint(20, (length,)) for length in (4, 9, 6, 12, 5, 3, 8, 2)]

    def collate(samples: list[Batch]) -> Batch:
        ids = [sample["input_ids"] for sample in samples]
        return {
            "input_ids": pad_sequence(ids, True),
            "attention_mask": pad_sequence([torch.ones_like(each) for each in ids], True),
            "labels": pad_sequence(ids, True, -100),
        }

    model = GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)).double()
    message = refusal(
        lambda: gradient_of_trainer(Exact, model, [{"input_ids": each} for each in tokens], collate), Exception
    )
    assert "no mean" in message, message
    return {}
