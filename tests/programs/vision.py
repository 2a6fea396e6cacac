"""Programs of vision: detection, segmentation, diffusion, frozen batch norm, heads for several data sets."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification, YolosConfig, YolosForObjectDetection

import megabatch
from megabatch import GradientAccumulator, JointLoss, losses
from tests.programs.setting import Errors, Setting, gradient_error, refusal

Batch = dict[str, Tensor]


NUM_CLASSES, NUM_QUERIES, NO_OBJECT_WEIGHT = 3, 6, 0.1


def detector() -> nn.Module:
    config = YolosConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=[16, 16],
        patch_size=4, num_detection_tokens=NUM_QUERIES, num_labels=NUM_CLASSES, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return YolosForObjectDetection(config).double()


def match(logits: Tensor, boxes: Tensor, target: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return queries and the boxes that they are matched with, the cheapest pair first."""
    with torch.no_grad():
        cost = 5 * torch.cdist(boxes, target["boxes"], p=1) - logits.softmax(-1)[:, target["classes"]]
    queries: list[int] = []
    objects: list[int] = []
    for flat in cost.flatten().argsort().tolist():
        query, number = divmod(flat, cost.shape[1])
        if query not in queries and number not in objects:
            queries.append(query)
            objects.append(number)
    return queries, objects


def detection_sums(model: Any, images: list[dict[str, Any]]) -> tuple[Tensor, Tensor, float, int]:
    """Return summed class and box losses, the summed class weights, and the number of boxes."""
    output = model(pixel_values=torch.stack([image["pixels"] for image in images]))
    class_weights = torch.ones(NUM_CLASSES + 1)
    class_weights[-1] = NO_OBJECT_WEIGHT
    of_classes, of_boxes, weight, num_boxes = [], [], 0.0, 0
    for logits, boxes, image in zip(output.logits, output.pred_boxes, images, strict=True):
        queries, objects = match(logits, boxes, image)
        classes = torch.full((NUM_QUERIES,), NUM_CLASSES)
        classes[queries] = image["classes"][objects]
        of_classes.append(F.cross_entropy(logits, classes, class_weights, reduction="sum"))
        of_boxes.append((boxes[queries] - image["boxes"][objects]).abs().sum())
        weight += float(class_weights[classes].sum())
        num_boxes += len(objects)
    return torch.stack(of_classes).sum(), torch.stack(of_boxes).sum(), weight, num_boxes


def count_boxes(images: list[dict[str, Any]]) -> dict[str, float]:
    boxes = sum(len(image["classes"]) for image in images)
    return {"classes": boxes + NO_OBJECT_WEIGHT * (NUM_QUERIES * len(images) - boxes), "boxes": boxes}


@megabatch.loss(weigh=count_boxes)
def detection(model: Any, images: list[dict[str, Any]]) -> dict[str, tuple[Tensor, float]]:
    of_classes, of_boxes, weight, num_boxes = detection_sums(model, images)
    return {"classes": (of_classes, weight), "boxes": (5 * of_boxes, num_boxes)}


def boxes(setting: Setting) -> Errors:
    """DETR: a mean over class weights and one over boxes of the update. An image has none."""
    plain = detector()
    model = copy.deepcopy(plain)
    images = [
        {
            "pixels": torch.randn(3, 16, 16),
            "classes": torch.randint(NUM_CLASSES, (size,)),
            "boxes": 0.2 + torch.rand(size, 4) / 2,
        }
        for size in (1, 4, 0, 2, 5, 1, 3)
    ]
    of_classes, of_boxes, weight, num_boxes = detection_sums(plain, images)
    (of_classes / weight + 5 * of_boxes / num_boxes).backward()
    errors: Errors = {}
    for size in (1, 2):
        gradient = GradientAccumulator(
            setting.wrap(model, find_unused_parameters=True), micro_batch_size=size, collate=list,
            length=lambda image: 1,
        )  # fmt: skip
        gradient.forward_backward(setting.share(images), detection)
        gradient.finalize()
        errors[f"gradient, {size} an image" if size == 1 else f"gradient, {size} images"] = gradient_error(model, plain)
    return errors


def frozen_batch_norm(setting: Setting) -> Errors:
    """A fine-tuned ResNet whose batch norms keep their statistics."""
    config = ResNetConfig(
        num_channels=1, embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", num_labels=3
    )
    plain = ResNetForImageClassification(config).double().train()
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    model = copy.deepcopy(plain)
    batch = {"pixel_values": torch.randn(12, 1, 16, 16), "labels": torch.randint(3, (12,))}
    F.cross_entropy(plain(batch["pixel_values"]).logits, batch["labels"]).backward()
    gradient = GradientAccumulator(setting.wrap(model), micro_batch_size=4)
    gradient.forward_backward(setting.share(batch), losses.classification)
    gradient.finalize(max_norm=1e9)
    return {"gradient": gradient_error(model, plain)}


def overlaps(model: Any, batch: Batch) -> Batch:
    """Return the sums of each image, from which the ratio of the batch is made."""
    logits = model(batch["image"])
    shares, truth = logits.softmax(1), F.one_hot(batch["mask"], 3).movedim(3, 1).double()
    return {
        "intersection": (shares * truth).sum((2, 3)),
        "union": (shares + truth).sum((2, 3)),
        "cross_entropy": F.cross_entropy(logits, batch["mask"], reduction="none").sum((1, 2)),
        "pixels": torch.full((len(logits),), batch["mask"][0].numel()),
    }


def dice(rows: Batch) -> dict[str, tuple[Tensor, float]]:
    ratio = 2 * rows["intersection"].sum(0) / rows["union"].sum(0)
    pixels = int(rows["pixels"].sum())
    return {"dice": (1 - ratio.mean(), 1), "cross_entropy": (rows["cross_entropy"].sum(), pixels)}


def batch_dice(setting: Setting) -> Errors:
    """Dice of the whole update: a ratio of sums, so no sum over samples. Its sums are the representations."""
    plain = nn.Conv2d(1, 3, 3, padding=1)
    batch = {"image": torch.randn(9, 1, 8, 8), "mask": torch.randint(3, (9, 8, 8))}
    joint = JointLoss(overlaps, dice)
    terms = dice(overlaps(plain, batch))
    torch.stack([total / weight for total, weight in terms.values()]).sum().backward()
    model = copy.deepcopy(plain)
    gradient = GradientAccumulator(setting.wrap(model), micro_batch_size=2)
    gradient.forward_backward(setting.share(batch), joint)
    update = gradient.finalize(max_norm=1e9)
    total = sum(float(total.detach() / weight) for total, weight in terms.values())
    errors = {"gradient": gradient_error(model, plain), "loss": abs(float(update.loss) - total)}
    if setting.world == 1:
        verification = megabatch.verify(plain, joint, batch)
        assert verification.ok, str(verification)
    return errors


class Denoiser(nn.Module):
    """A small UNet: a level down and up again, with the time added, for images of any even size."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(100, 16)
        self.enter, self.down = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm, self.middle = nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 3, padding=1)
        self.up, self.leave = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 2, 3, padding=1)

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        high = F.silu(self.enter(noisy))
        low = self.down(high) + self.time(time)[:, :, None, None]
        low = low + self.middle(F.silu(self.norm(low)))
        return self.leave(torch.cat([high, self.up(low)], dim=1))


KEPT = torch.linspace(0.99, 0.02, 100, dtype=torch.float64)  # share of the signal, by time


def denoising(model: Any, batch: Batch) -> Tensor:
    """Min-SNR weighted errors, [B]."""
    kept = KEPT[batch["time"]]
    noisy = kept.sqrt()[:, None, None, None] * batch["image"]
    noisy = noisy + (1 - kept).sqrt()[:, None, None, None] * batch["noise"]
    ratio = kept / (1 - kept)
    errors = (model(noisy, batch["time"]) - batch["noise"]).square().mean((1, 2, 3))
    return ratio.clamp(max=5) / ratio * errors


@megabatch.loss(weigh=lambda batch: len(batch["time"]))
def denoised(model: Any, batch: Batch) -> tuple[Tensor, int]:
    return denoising(model, batch).sum(), len(batch["time"])


def buckets(setting: Setting) -> Errors:
    """Diffusion on images of three shapes: a call per shape in one update. Noise and times are in the samples."""
    plain = Denoiser()
    model = copy.deepcopy(plain)
    groups = [
        {
            "image": torch.randn(size, 2, *shape),
            "noise": torch.randn(size, 2, *shape),
            "time": torch.randint(100, (size,)),
        }
        for size, shape in ((5, (8, 8)), (4, (8, 16)), (2, (16, 8)))
    ]
    (torch.cat([denoising(plain, group) for group in groups]).mean()).backward()
    gradient = GradientAccumulator(setting.wrap(model), micro_batch_size=2)
    shares = [setting.share(group) for group in groups]
    gradient.open(weights=sum(len(share["time"]) for share in shares))
    for share in shares:
        gradient.forward_backward(share, denoised)
    gradient.finalize(max_norm=1e9)
    return {"gradient": gradient_error(model, plain)}


class Heads(nn.Module):
    """An encoder with a head per data set."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.classes, self.numbers = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x: Tensor, head: str) -> Tensor:
        return self.get_submodule(head)(self.encoder(x).tanh())


@megabatch.loss(weigh=lambda batch: {"classes": len(batch["x"])})
def classified(model: Any, batch: Batch) -> dict[str, tuple[Tensor, int]]:
    return {"classes": (F.cross_entropy(model(batch["x"], "classes"), batch["y"], reduction="sum"), len(batch["x"]))}


@megabatch.loss(weigh=lambda batch: {"numbers": len(batch["x"])})
def regressed(model: Any, batch: Batch) -> dict[str, tuple[Tensor, int]]:
    errors = model(batch["x"], "numbers").squeeze(1) - batch["y"]
    return {"numbers": (0.5 * errors.square().sum(), len(errors))}


def several_data_sets(setting: Setting) -> Errors:
    """A mean per task, of two data sets and two heads, under DDP without `find_unused_parameters`."""
    plain = Heads()
    model = copy.deepcopy(plain)
    first = {"x": torch.randn(11, 4), "y": torch.randint(3, (11,))}
    second = {"x": torch.randn(6, 4), "y": torch.randn(6)}
    loss = F.cross_entropy(plain(first["x"], "classes"), first["y"])
    (loss + 0.5 * F.mse_loss(plain(second["x"], "numbers").squeeze(1), second["y"])).backward()
    own_first, own_second = setting.share(first), setting.share(second)
    if setting.way.endswith("a rank without one"):
        own_second = second if setting.rank == 0 else []
    gradient = GradientAccumulator(setting.wrap(model), micro_batch_size=2)
    count = len(own_second["x"]) if own_second else 0
    gradient.open(weights={"classes": len(own_first["x"]), "numbers": count})
    gradient.forward_backward(own_first, classified)
    gradient.forward_backward(own_second, regressed)
    gradient.finalize()
    errors = {"gradient": gradient_error(model, plain)}
    if setting.way == "plain" and setting.world == 1:
        gradient.forward_backward(own_first, classified)
        message = refusal(lambda: gradient.forward_backward(own_second, regressed), megabatch.MegabatchError)
        assert "open(" in message, message
    return errors
