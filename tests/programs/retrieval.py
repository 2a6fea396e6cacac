"""Contrastive programs: CLIP with a caption loss, a sentence encoder, and late interaction."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import megabatch
from megabatch import GradientAccumulator, JointLoss, verify
from tests.programs.setting import Errors, Setting, gradient_error, inner, refusal

Batch = dict[str, Tensor]
Terms = dict[str, tuple[Tensor, float]]


class ImageText(nn.Module):
    """Two encoders, a caption head, a temperature and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.head = nn.Linear(6, 8), nn.Embedding(30, 8), nn.Linear(16, 30)
        self.scale, self.bias = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(-2.0))

    def forward(self, image: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        of_image, of_tokens = self.image(image), self.text(tokens)
        beside = of_image[:, None].expand(-1, tokens.shape[1], -1)
        captions = self.head(torch.cat([of_tokens, beside], dim=2))
        return F.normalize(of_image, dim=-1), F.normalize(of_tokens.mean(1), dim=-1), captions


def clip(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    scores, places = scale.exp() * images @ texts.T, torch.arange(len(images))
    return (F.cross_entropy(scores, places, reduction="sum") + F.cross_entropy(scores.T, places, reduction="sum")) / 2


def siglip(images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    scores = scale.exp() * images @ texts.T + bias
    return -F.logsigmoid(scores * (2 * torch.eye(len(images)) - 1)).sum()


def encode_pairs(model: Any, batch: Batch) -> Batch:
    """The temperature and the bias go with the representations, a row per sample."""
    images, texts, captions = model(batch["image"], batch["tokens"])
    size = len(images)
    return {
        "images": images,
        "texts": texts,
        "scale": inner(model).scale.expand(size),
        "bias": inner(model).bias.expand(size),
        "captions": F.cross_entropy(captions.transpose(1, 2), batch["labels"], reduction="none").sum(1),
        "targets": (batch["labels"] != -100).sum(1),
    }


def contrast(rows: Batch) -> Terms:
    scale, bias, size = rows["scale"][0], rows["bias"][0], len(rows["images"])
    return {
        "clip": (clip(rows["images"], rows["texts"], scale), size),
        "siglip": (siglip(rows["images"], rows["texts"], scale, bias), size),
    }


def contrast_and_captions(rows: Batch) -> Terms:
    return contrast(rows) | {"captions": (2 * rows["captions"].sum(), int(rows["targets"].sum()))}


def without_captions(model: Any, batch: Batch) -> Batch:
    rows = encode_pairs(model, batch)
    return {name: rows[name] for name in ("images", "texts", "scale", "bias")}


@megabatch.loss(weigh=lambda batch: {"captions": (batch["labels"] != -100).sum()})
def captions(model: Any, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    logits = model(batch["image"], batch["tokens"])[2].transpose(1, 2)
    total = F.cross_entropy(logits, batch["labels"], reduction="sum")
    return {"captions": (2 * total, (batch["labels"] != -100).sum())}


def images_and_texts(setting: Setting) -> Errors:
    """CLIP, SigLIP and a caption loss per token: in one JointLoss, or in a call each."""
    plain = ImageText()
    tokens = torch.randint(30, (9, 5))
    labels = tokens.masked_fill(torch.rand(9, 5) < 0.4, -100)
    batch = {"image": torch.randn(9, 6), "tokens": tokens, "labels": labels}
    images, texts, logits = plain(batch["image"], tokens)
    loss = (clip(images, texts, plain.scale) + siglip(images, texts, plain.scale, plain.bias)) / len(images)
    (loss + 2 * F.cross_entropy(logits.transpose(1, 2), labels)).backward()
    share = setting.share(batch)
    together, in_turn = copy.deepcopy(plain), copy.deepcopy(plain)
    gradient = GradientAccumulator(setting.wrap(together), micro_batch_size=2)
    gradient.forward_backward(share, JointLoss(encode_pairs, contrast_and_captions))
    gradient.finalize(max_norm=1e9)
    gradient = GradientAccumulator(setting.wrap(in_turn), micro_batch_size=2)
    size, targets = len(share["image"]), int((share["labels"] != -100).sum())
    gradient.open(weights={"clip": size, "siglip": size, "captions": targets})
    gradient.forward_backward(share, JointLoss(without_captions, contrast))
    gradient.forward_backward(share, captions)
    gradient.finalize()
    return {
        "gradient, one call": gradient_error(together, plain),
        "gradient, two calls": gradient_error(in_turn, plain),
    }


def bert(width: int = 32) -> nn.Module:
    config = BertConfig(
        vocab_size=45, hidden_size=width, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertModel(config, add_pooling_layer=False).double()


def texts(lengths: tuple[int, ...]) -> list[Tensor]:
    return [torch.randint(5, 45, (length,)) for length in lengths]


def pairs() -> list[Batch]:
    """Anchors and positives of other lengths, with their masks."""
    columns = {"anchor": texts((3, 8, 5, 12, 2, 6, 9)), "positive": texts((10, 2, 7, 4, 11, 3, 5))}
    return [
        {f"{name}_input_ids": column[row] for name, column in columns.items()}
        | {f"{name}_attention_mask": torch.ones_like(column[row]) for name, column in columns.items()}
        for row in range(7)
    ]


def mean_pooled(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    return F.normalize((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=1)


def encode_texts(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    anchors, positives = (
        mean_pooled(model, batch[f"{name}_input_ids"], batch[f"{name}_attention_mask"])
        for name in ("anchor", "positive")
    )
    return anchors, positives


def in_batch_negatives(anchors: Tensor, positives: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(20 * anchors @ positives.T, torch.arange(len(anchors)), reduction="sum"), len(anchors)


def one_by_one(model: Any, samples: list[Batch]) -> tuple[Tensor, Tensor]:
    """Encode each sample alone, without any padding."""
    rows = [encode_texts(model, {name: each[None] for name, each in sample.items()}) for sample in samples]
    anchors, positives = (torch.cat(column) for column in zip(*rows, strict=True))
    return anchors, positives


def sentences(setting: Setting) -> Errors:
    """Multiple negatives ranking over the whole update, with masks in the samples."""
    plain, samples = bert(), pairs()
    model = copy.deepcopy(plain)
    total, weight = in_batch_negatives(*one_by_one(plain, samples))
    (total / weight).backward()
    joint = JointLoss(encode_texts, in_batch_negatives)
    gradient = GradientAccumulator(setting.wrap(model), micro_batch_size=2)
    # The samples of a rank are together in the loss; another order of pairs is the same loss.
    gradient.forward_backward(setting.share(samples), joint)
    gradient.finalize()
    errors = {"gradient": gradient_error(model, plain)}
    if setting.world == 1:
        assert verify(plain, joint, samples).ok
    return errors


def one_length(samples: list[Batch], length: int) -> list[Batch]:
    return [{name: F.pad(each, (0, length - len(each))) for name, each in sample.items()} for sample in samples]


def encode_tokens(model: Any, batch: Batch) -> tuple[Tensor, ...]:
    """A vector per token, [B, T, D], and which are tokens."""
    rows: list[Tensor] = []
    for name in ("anchor", "positive"):
        mask = batch[f"{name}_attention_mask"]
        hidden = model(input_ids=batch[f"{name}_input_ids"], attention_mask=mask).last_hidden_state
        rows += [F.normalize(hidden, dim=2) * mask[..., None], mask]
    return tuple(rows)


def late_interaction(queries: Tensor, query_mask: Tensor, documents: Tensor, mask: Tensor) -> tuple[Tensor, int]:
    scores = torch.einsum("qid,pjd->qpij", queries, documents)  # [N, N, T, T]
    scores = scores.masked_fill(mask[None, :, None, :] == 0, -1e4).amax(3)
    scores = (scores * query_mask[:, None]).sum(2)
    return F.cross_entropy(scores, torch.arange(len(scores)), reduction="sum"), len(scores)


def tokens(setting: Setting) -> Errors:
    """ColBERT: refused for rows of several lengths, and exact once they are padded to one."""
    plain, samples = bert(), pairs()
    model = copy.deepcopy(plain)
    joint = JointLoss(encode_tokens, late_interaction)
    gradient = GradientAccumulator(setting.wrap(model), micro_batch_size=2)
    refused = refusal(lambda: gradient.forward_backward(setting.share(samples), joint), megabatch.LossContractError)
    assert "padded to one length" in refused, refused
    padded = one_length(samples, 12)
    everything = {name: torch.stack([sample[name] for sample in padded]) for name in padded[0]}
    total, weight = late_interaction(*encode_tokens(plain, everything))
    (total / weight).backward()
    gradient.forward_backward(setting.share(padded), joint)
    gradient.finalize()
    return {"gradient": gradient_error(model, plain)}
