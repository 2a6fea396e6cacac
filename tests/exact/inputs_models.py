"""Input mutations of models, optimizers and ranks."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megabatch import MegabatchError, PlanError, loss, losses
from tests.exact.inputs import Sample, User, mean_square, numbers, refused, regressor, right, squares
from tests.exact.wrappers import wrap

# The model.


@refused(MegabatchError, "GradientAccumulator", 1, 2, half=torch.float16, bfloat16=torch.bfloat16)
def cast_after_the_accumulator_was_made(user: User, variant: torch.dtype) -> None:
    model = regressor().float()
    accumulator = user.accumulator(model)
    model.to(variant)
    batch = user.rows(numbers())
    batch = batch and {"x": batch["x"].to(variant), "labels": batch["labels"].float()}
    counted = loss(weigh=lambda batch: len(batch["x"]))
    accumulator.forward_backward(batch, counted(lambda m, b: squares(lambda x: m(x).float(), b)))
    accumulator.finalize()


class Embedded(nn.Module):
    """A sparse embedding, which only samples with an index of 0 or more use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.head = nn.Embedding(7, 4, sparse=True), nn.Linear(4, 1)

    def forward(self, index: Tensor) -> Tensor:
        used = index >= 0
        hidden = self.head.weight.new_ones(len(index), 4)
        if used.any():
            hidden = torch.where(used[:, None], self.embedding(index.clamp(min=0)), hidden)
        return self.head(hidden)


@right(2, 3)
def sparse_embedding_that_one_rank_does_not_use(user: User) -> None:
    model = Embedded().double()
    reference = copy.deepcopy(model)
    index = torch.tensor([1, 2, 3, 1, 6, -1, -1, -1])  # the last rank's are the last 3
    batch = {"index": index, "labels": numbers()["labels"]}
    user.update(model, user.rows(batch), losses.mse)
    F.mse_loss(reference(index), batch["labels"]).backward()
    for each in (model, reference):
        each.embedding.weight.grad = each.embedding.weight.grad.to_dense()
    user.expect(model, reference)


# Ranks.


class Branched(nn.Module):
    """A branch that only samples with images, or with a flag, take."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.text, self.image, self.head = nn.Linear(4, 5), nn.Linear(6, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor, images: Tensor | None = None) -> Tensor:
        hidden = self.text(x)
        return self.head(hidden if images is None else hidden + self.image(images))


@refused(MegabatchError, "find_unused_parameters", 2, 3)
def branch_that_some_ranks_do_not_take_under_ddp(user: User) -> None:
    model = DistributedDataParallel(Branched().double())
    takes = user.rank == 0

    @loss(weigh=lambda batch: len(batch["x"]))
    def some(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
        images = batch["x"].new_ones(len(batch["x"]), 6) if takes else None
        return squares(lambda x: model(x, images), batch)

    user.update(model, user.rows(numbers()), some)


@refused(PlanError, "keys", 2, 3)
def images_on_one_rank_under_fsdp2(user: User) -> None:
    model = Branched().double()
    fully_shard(model.image)
    fully_shard(model)
    batch = user.rows(numbers())
    if user.rank == 0:
        batch["images"] = torch.ones(len(batch["x"]), 6).double()
    counted = loss(weigh=lambda batch: len(batch["x"]))
    user.update(model, batch, counted(lambda m, b: squares(lambda x: m(x, b.get("images")), b)))


@refused(PlanError, "submodules", 2, 3, alone=False, beside_another=True)
def submodule_that_some_ranks_do_not_call_under_fsdp2(user: User, variant: bool) -> None:
    """The same keys everywhere, and control flow by their values: only the first rank has images."""
    model, other = Branched().double(), regressor()
    for each in (model.image, model.text, model, other):
        fully_shard(each)
    takes = user.rank == 0

    @loss(weigh=lambda batch: len(batch["x"]))
    def some(models: nn.Module, batch: Sample) -> tuple[Tensor, int]:
        images = batch["x"].new_ones(len(batch["x"]), 6) if takes else None
        return squares(lambda x: (models[0] if variant else models)(x, images), batch)

    user.update([model, other] if variant else model, user.rows(numbers()), some)


@right(2, 3)
def submodules_that_all_ranks_call_under_fsdp2(user: User) -> None:
    """No false refusal: one submodule is called once and the others twice, and a rank runs dummy microbatches."""
    model, batch = Branched().double(), numbers()
    reference = copy.deepcopy(model)
    for each in (model.image, model.text, model):
        fully_shard(each)

    @loss(weigh=lambda batch: len(batch["x"]))
    def twice(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
        return squares(lambda x: model(x) + model(x, x.new_ones(len(x), 6)), batch)

    user.update(model, user.rows(batch), twice)
    twice(reference, batch)[0].div(8).backward()
    user.expect(model, reference)


@refused(MegabatchError, "model.module", 2, 3)
def gradient_past_ddp(user: User) -> None:
    """A forward without gradients through DDP, and the forward with them past it."""
    model = DistributedDataParallel(regressor())

    @loss(weigh=lambda batch: len(batch["x"]))
    def past(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
        with torch.no_grad():
            model(batch["x"])
        return squares(model.module, batch)

    user.update(model, user.rows(numbers()), past)


@right(2, 3)
def teacher_forward_through_ddp(user: User) -> None:
    """No false refusal: the same forward without gradients, and the other through DDP too."""
    model, batch = DistributedDataParallel(regressor()), numbers()
    reference = copy.deepcopy(model.module)

    @loss(weigh=lambda batch: len(batch["x"]))
    def taught(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
        with torch.no_grad():
            teacher = model(batch["x"])
        return squares(model, batch | {"labels": batch["labels"] + teacher})

    user.update(model, user.rows(batch), taught)
    with torch.no_grad():
        labels = batch["labels"] + reference(batch["x"])
    mean_square(reference, batch | {"labels": labels})
    user.expect(model, reference)


@right(2, 3)
def plain_ranks_with_other_sync(user: User) -> None:
    """No false refusal: a plain model is summed once per update, whatever sync is."""
    model, batch = regressor(), numbers()
    reference = copy.deepcopy(model)
    user.update(model, user.rows(batch), losses.mse, sync="last" if user.rank else "every")
    mean_square(reference, batch)
    user.expect(model, reference)


@right(2, 3, plain="plain", ddp="ddp", fsdp2="fsdp2")
def no_samples_of_the_second_loss(user: User, variant: str) -> None:
    """The ranks after the first have samples of the first loss only, whose keys are others."""
    model, batch = regressor(), numbers()
    reference = copy.deepcopy(model)
    model = fully_shard(model) if variant == "fsdp2" else wrap(model, variant)
    accumulator = user.accumulator(model)

    @loss(weigh=lambda batch: len(batch["observed"]))
    def other(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
        return (model(batch["observed"]) ** 2).sum(), len(batch["observed"])

    accumulator.forward_backward(user.rows(batch), losses.mse)
    accumulator.forward_backward({"observed": numbers(3)["x"]} if user.rank == 0 else [], other)
    accumulator.finalize()
    total = F.mse_loss(reference(batch["x"]), batch["labels"], reduction="sum")
    ((total + (reference(numbers(3)["x"]) ** 2).sum()) / 16).backward()
    user.expect(model, reference)
