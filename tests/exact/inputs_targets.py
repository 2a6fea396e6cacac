"""Input mutations of targets: keys that hold targets and are padded with what the loss counts."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megabatch
from megabatch import LossContractError, loss
from megabatch.batching import Padded
from tests.exact.inputs import Sample, User, refused, right
from tests.exact.inputs_batches import LENGTHS

CLASSES = 6


def tagger() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(CLASSES, 5), nn.Linear(5, CLASSES)).double()
    nn.init.normal_(model[0].weight)
    return model


def ragged(targets: str = "y") -> list[Sample]:
    """Samples of other lengths, with a target for each token."""
    drawn = torch.Generator().manual_seed(4)
    return [{name: torch.randint(CLASSES, (length,), generator=drawn) for name in ("x", targets)} for length in LENGTHS]


def each_target(reference: nn.Module, samples: list[Sample], targets: str = "y") -> None:
    """Leaves the gradient of the mean over the targets of all samples."""
    x, y = (torch.cat([sample[name] for sample in samples]) for name in ("x", targets))
    F.cross_entropy(reference(x), y).backward()


def flat(model: nn.Module, batch: Sample, targets: str, **options: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch[targets].flatten(), **options)


def by_mean(model: nn.Module, batch: Sample) -> Tensor:
    return flat(model, batch, "y", ignore_index=-1)


def by_weigh(model: nn.Module, batch: Sample) -> tuple[Tensor, Tensor]:
    return flat(model, batch, "y", ignore_index=-1, reduction="sum"), (batch["y"] != -1).sum()


def of_each(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
    """The losses of all positions, added by the user."""
    return flat(model, batch, "y", reduction="none").sum(), len(batch["x"])


def shifted(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
    logits, y = model(batch["x"])[:, :-1], batch["y"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1, reduction="sum"), len(y)


def transposed(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
    """torch's own order, [B, C, T], and a batch that is emptied on the way."""
    y = batch.pop("y")
    return F.cross_entropy(model(batch.pop("x")).transpose(1, 2), y, ignore_index=-1, reduction="sum"), len(y)


def by_own_arithmetic(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
    chosen = model(batch["x"]).log_softmax(-1).gather(-1, batch["y"][..., None])
    return -chosen.sum(), batch["y"].numel()


def targets_of(batch: Sample) -> Tensor:
    return (batch["y"] != -1).sum()


COUNTED = {
    "mean": megabatch.mean(by_mean, over=targets_of),
    "weigh": loss(weigh=targets_of)(lambda model, batch: by_weigh(model, batch)),
    "uncounted": by_weigh,
    "of_samples": loss(weigh=lambda batch: len(batch["x"]))(of_each),
    "shifted": shifted,
    "transposed": loss(weigh=lambda batch: len(batch["x"]))(transposed),
    "own_arithmetic": loss(weigh=lambda batch: batch["y"].numel())(by_own_arithmetic),
}


@refused(LossContractError, "Padded", 1, 2, 3, **COUNTED)
def targets_padded_with_a_class(user: User, variant: Any) -> None:
    user.update(tagger(), user.part(ragged()) or ragged()[:2], variant)


@right(1, 2, 3, mean=COUNTED["mean"], weigh=COUNTED["weigh"], uncounted=COUNTED["uncounted"])
def targets_padded_with_what_the_loss_leaves_out(user: User, variant: Any) -> None:
    """The remedy."""
    model, samples = tagger(), ragged()
    reference = copy.deepcopy(model)
    user.update(model, user.part(samples), variant, batching=Padded({"y": -1}))
    each_target(reference, samples)
    user.expect(model, reference)


@refused(LossContractError, "ignore_index", 1, 2)
def labels_under_a_loss_with_another_ignore_index(user: User) -> None:
    def other(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
        return flat(model, batch, "labels", ignore_index=-1, reduction="sum"), len(batch["labels"])

    user.update(tagger(), user.part(ragged("labels")), other)


@refused(LossContractError, "'labels'", 1, 2)
def labels_under_a_mean_with_another_ignore_index(user: User) -> None:
    other = megabatch.mean(
        lambda model, batch: flat(model, batch, "labels", ignore_index=-1),
        over=lambda batch: (batch["labels"] != -1).sum(),
    )
    user.update(tagger(), user.part(ragged("labels")), other)


@refused(LossContractError, "padding", 1, 2)
def counts_per_microbatch(user: User) -> None:
    """A mean of means: each microbatch counts one."""
    counted = loss(weigh=lambda batch: 1)
    user.update(tagger(), user.part(ragged()), counted(lambda model, batch: (flat(model, batch, "y"), 1)))


# Numbers as targets.


def line() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 2).double()


def series() -> list[Sample]:
    drawn = torch.Generator().manual_seed(5)
    return [
        {name: torch.randn(length, width, generator=drawn).double() for name, width in (("x", 3), ("goal", 2))}
        for length in LENGTHS
    ]


def summed(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
    return F.mse_loss(model(batch["x"]), batch["goal"], reduction="sum"), len(batch["x"])


def masked(model: nn.Module, batch: Sample) -> tuple[Tensor, Tensor]:
    errors = F.mse_loss(model(batch["x"]), batch["goal"], reduction="none") * batch["real"][..., None]
    return errors.sum(), batch["real"].sum() * 2


@refused(LossContractError, "padded positions of 'goal'", 1, 2, counted=True, uncounted=False)
def numbers_padded_with_zero(user: User, variant: bool) -> None:
    counted = loss(weigh=lambda batch: len(batch["x"]))(summed) if variant else summed
    user.update(line(), user.part(series()), counted)


@refused(LossContractError, "padded positions of 'goal'", 1, 2)
def numbers_of_which_a_mask_leaves_nothing_out(user: User) -> None:
    """The mask is padded with ones."""
    samples = [sample | {"real": torch.ones(len(sample["x"]))} for sample in series()]
    user.update(line(), user.part(samples), masked, batching=Padded({"real": 1}))


@right(1, 2, 3)
def numbers_under_a_mask(user: User) -> None:
    """No false refusal: padding is multiplied by 0."""
    model, samples = line(), [sample | {"real": torch.ones(len(sample["x"])).double()} for sample in series()]
    reference = copy.deepcopy(model)
    user.update(model, user.part(samples), masked)
    x, goal = (torch.cat([sample[name] for sample in samples]) for name in ("x", "goal"))
    F.mse_loss(reference(x), goal).backward()
    user.expect(model, reference)


@right(1, 2, 3)
def classes_under_a_mask(user: User) -> None:
    """No false refusal: the losses of padding, which is a class, are multiplied by 0."""
    model, samples = tagger(), [sample | {"real": torch.ones(len(sample["x"])).double()} for sample in ragged()]
    reference = copy.deepcopy(model)

    @loss(weigh=lambda batch: batch["real"].sum())
    def real(model: nn.Module, batch: Sample) -> tuple[Tensor, Tensor]:
        each = flat(model, batch, "y", reduction="none").view_as(batch["real"])
        return (each * batch["real"]).sum(), batch["real"].sum()

    user.update(model, user.part(samples), real)
    each_target(reference, samples)
    user.expect(model, reference)


@right(1, 2)
def dropout_and_random_state(user: User) -> None:
    """What compares weights draws nothing: the same masks as without."""
    model, samples = nn.Sequential(tagger(), nn.Dropout(0.5)), ragged()
    states: list[dict[str, Tensor]] = []
    for counted in (COUNTED["weigh"], by_weigh):
        model.zero_grad()
        torch.manual_seed(7)
        user.update(model, user.part(samples), counted, batching=Padded({"y": -1}))
        states.append([torch.get_rng_state(), *(each.grad.clone() for each in model.parameters())])
    user.expect_equal(
        dict(enumerate(map(torch.Tensor.double, states[1]))), dict(enumerate(map(torch.Tensor.double, states[0])))
    )


@right(1, 2)
def classes_that_look_like_a_padded_key(user: User) -> None:
    """No false refusal: the class of each sample is the first entry of a key, and two entries at most are padded."""
    drawn = torch.Generator().manual_seed(4)
    lengths = (1, 2) * 4
    samples = [
        {"x": torch.randint(CLASSES, (length,), generator=drawn), "flags": torch.ones(length), "class": torch.tensor(1)}
        for length in lengths
    ]
    samples = [sample | {"flags": sample["flags"].long()} for sample in samples]
    model = nn.Embedding(CLASSES, 3).double()
    reference = copy.deepcopy(model)

    @loss(weigh=lambda batch: len(batch["x"]))
    def of_samples(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch["x"][:, 0]), batch["class"], reduction="sum"), len(batch["x"])

    user.update(model, user.part(samples), of_samples)
    F.cross_entropy(reference(torch.stack([sample["x"][0] for sample in samples])), torch.ones(8).long()).backward()
    user.expect(model, reference)
