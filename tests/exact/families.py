"""Families of models: the cut gradient of each is the uncut gradient of plain torch, or it is refused.

Both sides run in `Float64WithoutDropout`, which keeps what models cast to float32 in float64 and draws nothing.
"""

import copy
import functools
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch import GradientAccumulator, JointLoss, MegabatchError, experts, loss, losses, verify
from megabatch.verification.float64_copy import Float64WithoutDropout
from tests.exact.inputs import relative_error
from tests.exact.tiny import IMAGE, PAD, VOCABULARY, tiny

Sample = dict[str, Tensor]
LENGTHS = (3, 9, 5, 7, 4, 2, 6)
CLASSES = 3
CUTS: tuple[dict[str, int], ...] = ({"micro_batch_size": 1}, {"micro_batch_size": 3}, {"max_microbatch_tokens": 16})
AND_MEASURED = (*CUTS, {})  # the last is chosen by measured updates


@dataclass(frozen=True)
class Family:
    """A model, its samples and its loss; what the uncut batch is padded with, and what is said of a refused one."""

    make: Callable[[], nn.Module]
    samples: Callable[[], list[Sample]]
    loss_fn: Any
    uncut: Callable[[nn.Module, list[Sample]], Tensor]  # the loss of the whole batch in plain torch
    cuts: tuple[dict[str, int], ...] = CUTS
    refused: str = ""
    verify_refuses: str = ""


# Samples.


def _drawn(length: int, seed: int, low: int = 1, high: int = 60) -> Tensor:
    return torch.randint(low, high, (length,), generator=torch.Generator().manual_seed(seed))


def text() -> list[Sample]:
    """Samples of a causal model; the last third of each has no target."""
    made = []
    for number, length in enumerate(LENGTHS):
        ids = _drawn(length, number)
        labels = ids.clone()
        labels[length - length // 3 :] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def masked_text() -> list[Sample]:
    return [sample | {"attention_mask": torch.ones_like(sample["input_ids"])} for sample in text()]


def classes(masked: bool = True) -> Callable[[], list[Sample]]:
    def made() -> list[Sample]:
        samples = masked_text() if masked else text()
        return [sample | {"labels": torch.tensor(number % CLASSES)} for number, sample in enumerate(samples)]

    return made


def pairs() -> list[Sample]:
    """Samples of an encoder and a decoder, whose lengths have nothing to do with each other."""
    made = []
    for number, sample in enumerate(masked_text()):
        ids = _drawn(number % 3 + 1, 20 + number)
        made.append(sample | {"decoder_input_ids": ids, "labels": _drawn(len(ids), 30 + number)})
    return made


def of_size(key: str, *size: int, decoded: bool = False) -> Callable[[], list[Sample]]:
    """Images, or sound: numbers of one shape."""

    def made() -> list[Sample]:
        drawn = torch.Generator().manual_seed(5)
        samples = []
        for number in range(len(LENGTHS)):
            sample = {key: torch.randn(*size, generator=drawn).double(), "labels": torch.tensor(number % CLASSES)}
            if decoded:
                ids = _drawn(number % 3 + 2, 20 + number)
                sample |= {"decoder_input_ids": ids, "labels": ids + 1}
            samples.append(sample)
        return samples

    return made


def captioned() -> list[Sample]:
    images = of_size("pixel_values", 3, 8, 8)()
    return [{"input_ids": _drawn(7, n), "pixel_values": image["pixel_values"]} for n, image in enumerate(images)]


# The uncut batch in plain torch.


def padded(samples: list[Sample], pad: int = 0) -> Sample:
    """One batch, with a mask of its real tokens."""
    fills = {"input_ids": pad, "labels": -100}
    batch = {
        key: nn.utils.rnn.pad_sequence([s[key] for s in samples], batch_first=True, padding_value=fills.get(key, 0))
        if samples[0][key].ndim == 1 else torch.stack([s[key] for s in samples])
        for key in samples[0]
    }  # fmt: skip
    if "input_ids" in batch:
        lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
        batch["attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    return batch


def outputs(model: nn.Module, samples: list[Sample], pad: int = 0) -> tuple[Any, Tensor]:
    batch = padded(samples, pad)
    labels = batch.pop("labels")
    return model(**batch), labels


def mean_next_token(model: nn.Module, samples: list[Sample], pad: int = 0) -> Tensor:
    output, labels = outputs(model, samples, pad)
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def mean_class(model: nn.Module, samples: list[Sample], pad: int = 0) -> Tensor:
    output, labels = outputs(model, samples, pad)
    return F.cross_entropy(output.logits.flatten(0, -2), labels.flatten())


def mean_class_padded(pad: int) -> Callable[[nn.Module, list[Sample]], Tensor]:
    return lambda model, samples: mean_class(model, samples, pad)


# A router loss within each sequence, and a contrast over all samples.

TOP_K = 2


def _counted(batch: Sample) -> dict[str, Any]:
    return {"loss": (batch["labels"][:, 1:] != -100).sum(), "balance": len(batch["labels"])}


@loss(weigh=_counted)
def balanced(model: nn.Module, batch: Sample) -> dict[str, Any]:
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    total = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
    balance = experts.sequence_balance(output.router_logits, batch["attention_mask"], top_k=TOP_K)
    counts = _counted(batch)
    return {"loss": (total, counts["loss"]), "balance": (0.1 * balance, counts["balance"])}


def mean_balanced(model: nn.Module, samples: list[Sample]) -> Tensor:
    """Each sequence by itself, expert by expert."""
    found, balance = mean_next_token(model, samples), torch.zeros(()).double()
    for sample in samples:
        output = model(input_ids=sample["input_ids"][None])
        for logits in output.router_logits:
            scores = logits.reshape(len(sample["input_ids"]), -1).softmax(-1)  # [T, E]
            chosen = F.one_hot(scores.topk(TOP_K).indices, scores.shape[-1]).sum(1).double()  # [T, E]
            balance = balance + scores.shape[-1] / TOP_K * (chosen.mean(0) * scores.mean(0)).sum()
    return found + 0.1 * balance / len(samples)


def _towers(model: nn.Module, batch: Sample) -> dict[str, Tensor]:
    output = model(**batch)
    return {"text": output.text_embeds, "image": output.image_embeds}


def _contrast(encoded: dict[str, Tensor]) -> tuple[Tensor, int]:
    scores = 10 * encoded["text"] @ encoded["image"].T  # [N, N]
    return -(scores.log_softmax(0) + scores.log_softmax(1)).diagonal().sum(), len(scores)


def mean_contrast(model: nn.Module, samples: list[Sample]) -> Tensor:
    total, weight = _contrast(_towers(model, {key: torch.stack([s[key] for s in samples]) for key in samples[0]}))
    return total / weight


# The families.


def causal(kind: str, *, cuts: tuple[dict[str, int], ...] = CUTS, **config: Any) -> Family:
    return Family(lambda: tiny(kind, **config), text, losses.next_token, mean_next_token, cuts)


def classifier(kind: str, pad: int, *, masked: bool = True, **config: Any) -> Family:
    made = {"num_labels": CLASSES, "pad_token_id": pad} | config
    uncut = mean_class_padded(pad)
    return Family(lambda: tiny(kind, "SequenceClassification", **made), classes(masked), losses.classification, uncut)


def tagger(kind: str, **config: Any) -> Family:
    made = {"num_labels": VOCABULARY, "pad_token_id": 0} | config
    return Family(lambda: tiny(kind, "TokenClassification", **made), masked_text, losses.classification, mean_class)


def seen(kind: str, task: str, samples: Callable[[], list[Sample]], **config: Any) -> Family:
    return Family(lambda: tiny(kind, task, **config), samples, losses.classification, mean_class, CUTS[:2])


def with_frozen_statistics() -> nn.Module:
    """Batch norms that use what they have seen before, as one fine-tunes them."""
    model = tiny("resnet", "ImageClassification", **STAGES, embedding_size=4)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


def adapted(config: Callable[[Any], Any], **expected: Any) -> Family:
    def make() -> nn.Module:
        import peft

        torch.manual_seed(7)
        return peft.get_peft_model(tiny("gpt2"), config(peft)).double()

    return Family(make, text, losses.next_token, mean_next_token, **expected)


EXPERTS = {"num_experts_per_tok": TOP_K, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 12}
AUDIO = {"vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 4,
         "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
         "max_source_positions": 6, "max_target_positions": 12, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
         "decoder_start_token_id": 1}  # fmt: skip
SOUND = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
         "conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_feat_extract_layers": 2,
         "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "mask_time_prob": 0.0,
         "feat_extract_norm": "layer", "classifier_proj_size": 8, "num_labels": CLASSES}  # fmt: skip
STAGES = {"num_channels": 3, "hidden_sizes": [4, 8], "depths": [1, 1], "num_labels": CLASSES}
FAMILIES: dict[str, Family] = {
    "gpt2": causal("gpt2", cuts=AND_MEASURED),
    "llama": causal("llama"),
    "mistral": causal("mistral", sliding_window=4),
    "qwen3": causal("qwen3", tie_word_embeddings=True),
    "gemma2": causal("gemma2", query_pre_attn_scalar=8, pad_token_id=0),
    "gemma3": causal("gemma3_text", query_pre_attn_scalar=8, sliding_window=4, pad_token_id=0),
    "olmo2": causal("olmo2", pad_token_id=PAD),
    "granite": causal("granite"),
    "opt": causal("opt", ffn_dim=24, word_embed_proj_dim=16, pad_token_id=1),
    "bloom": causal("bloom", n_layer=2, n_head=2),
    "falcon": causal("falcon"),
    "gpt-neox": causal("gpt_neox"),
    "phi": causal("phi"),
    "mamba": causal("mamba", cuts=AND_MEASURED, state_size=4),
    "qwen3-experts": causal("qwen3_moe", **EXPERTS),
    "mixtral-router-loss": Family(
        lambda: tiny("mixtral", output_router_logits=True, **EXPERTS), masked_text, balanced, mean_balanced,
        AND_MEASURED,
    ),
    "mixtral-router-loss-left-out": Family(
        lambda: tiny("mixtral", output_router_logits=True, **EXPERTS), masked_text, losses.next_token, mean_next_token,
        refused="rout", verify_refuses="rout",
    ),
    "llama-classifier": classifier("llama", PAD),
    "llama-classifier-no-mask": classifier("llama", PAD, masked=False),
    "qwen3-classifier": classifier("qwen3", PAD),
    "mistral-classifier": classifier("mistral", PAD),
    "gpt2-classifier": classifier("gpt2", PAD),
    "bert-classifier": classifier("bert", 0),
    "bert-classifier-no-mask": classifier("bert", 0, masked=False),
    "roberta-classifier": classifier("roberta", 1),
    "modernbert-classifier": classifier("modernbert", PAD, cls_token_id=1, sep_token_id=2),
    "distilbert-classifier": classifier("distilbert", 0, dim=16, hidden_dim=24, n_layers=1, n_heads=2),
    "electra-tagger": tagger("electra", embedding_size=16),
    "albert-tagger": tagger("albert", embedding_size=16),
    "deberta-v2-tagger": tagger("deberta-v2"),
    "t5": Family(lambda: tiny("t5", "Seq2SeqLM"), pairs, losses.classification, mean_class),
    "bart": Family(lambda: tiny("bart", "Seq2SeqLM"), pairs, losses.classification, mean_class),
    "vit": seen("vit", "ImageClassification", of_size("pixel_values", 3, 8, 8), num_labels=CLASSES),
    "convnext": seen("convnext", "ImageClassification", of_size("pixel_values", 3, 32, 32), patch_size=2,
                     num_stages=2, **STAGES),
    "swin": seen("swin", "ImageClassification", of_size("pixel_values", 3, 8, 8), image_size=8, patch_size=2,
                 embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2, num_labels=CLASSES, drop_path_rate=0.0),
    "resnet-frozen-statistics": Family(with_frozen_statistics, of_size("pixel_values", 3, 32, 32),
                                       losses.classification, mean_class, CUTS[:2]),
    "whisper": seen("whisper", "SpeechSeq2Seq", of_size("input_features", 4, 12, decoded=True), **AUDIO),
    "wav2vec2": seen("wav2vec2", "AudioClassification", of_size("input_values", 160), **SOUND),
    "clip": Family(
        lambda: tiny("clip", "", text_config=dict(IMAGE, vocab_size=VOCABULARY, max_position_embeddings=16,
                     eos_token_id=2), vision_config=dict(IMAGE), projection_dim=8),
        captioned, JointLoss(_towers, _contrast), mean_contrast, CUTS[:2], verify_refuses="JointLoss",
    ),
    "lora": adapted(lambda peft: peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True,
                                                 init_lora_weights=False)),
    "ia3": adapted(lambda peft: peft.IA3Config(target_modules=["c_attn"], feedforward_modules=[],
                                               fan_in_fan_out=True, init_ia3_weights=False)),
    "prefix-tuning": adapted(lambda peft: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")),
    "prompt-tuning": adapted(
        lambda peft: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        refused="labels", verify_refuses="labels",
    ),
}  # fmt: skip


def run_job(name: str) -> dict[str, Any]:
    """The job by its family: the worst error of each cut and of verify, or what was said."""
    family = FAMILIES[name]
    if dist.is_initialized():
        dist.destroy_process_group()
    with warnings.catch_warnings(), Float64WithoutDropout():
        warnings.simplefilter("ignore")
        model, samples = family.make(), family.samples()
        reference, *models = [copy.deepcopy(model) for _ in range(1 + len(family.cuts))]
        found: dict[str, Any] = {"verify": _said(lambda: _verified(family, model, samples))}
        if not family.refused:
            family.uncut(reference, samples).backward()
        for cut, fresh in zip(family.cuts, models, strict=True):  # a first forward leaves its marks on some models
            found[str(cut)] = _said(functools.partial(_trained, family, fresh, samples, cut, reference))
    return found


def _said(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except MegabatchError as error:
        return str(error)
    except Exception:
        return traceback.format_exc()[-1500:]


def _verified(family: Family, model: nn.Module, samples: list[Sample]) -> Any:
    found = verify(model, family.loss_fn, samples)
    return found.worst if found.ok else "\n".join(found.causes)


def _trained(family: Family, model: nn.Module, samples: list[Sample], cut: dict[str, int], reference: nn.Module) -> Any:
    accumulator = GradientAccumulator(model, **cut)
    accumulator.forward_backward(samples, family.loss_fn)
    update = accumulator.finalize()
    assert update.finite
    found = dict(model.named_parameters())
    errors = {name: relative_error(found[name].grad, each.grad) for name, each in reference.named_parameters()}
    parameter, worst = max(errors.items(), key=lambda pair: pair[1])
    return worst if worst < 1e-12 else f"{parameter} is off by {worst:.1e}"
