"""Input mutations of containers and kinds: shapes and keys that differ in one batch, and batches of other classes."""

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from megabatch import LossContractError, MegabatchError, PlanError, loss, losses
from megabatch.batching.deferred import Deferred
from megabatch.core.right_padding import pad_right
from megabatch.planners import SameBits, Tokens
from megabatch.verification.float64_copy import Float64WithoutDropout
from tests.exact.inputs import Sample, User, as_samples, mean_square, numbers, refused, regressor, right, squares
from tests.exact.inputs_models import Branched
from tests.exact.tiny import tiny
from tests.exact.wrappers import wrap

# Shapes: only the first dim of text is padded, and no two shapes of images share a microbatch.

SIZES = ((8, 8), (8, 16), (4, 4), (8, 8), (8, 16), (8, 8), (4, 4), (16, 8))


class Pooled(nn.Module):
    """A convolution that takes images of any size, and any number of them as channels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.conv(x.mean(1, keepdim=True))).mean((2, 3)))


def images(channels: tuple[int, ...] = (3,)) -> list[Sample]:
    drawn = torch.Generator().manual_seed(2)
    return [
        {
            "x": torch.randn(channels[number % len(channels)], *size, generator=drawn).double(),
            "labels": torch.randn(1, generator=drawn).double(),
        }
        for number, size in enumerate(SIZES)
    ]


def each_image(reference: nn.Module, samples: list[Sample]) -> None:
    """Leaves the gradient of the mean over samples, one by one."""
    for sample in samples:
        (squares(reference, {name: value[None] for name, value in sample.items()})[0] / len(samples)).backward()


LIMITS = {"rows": {"micro_batch_size": 3}, "tokens": {"max_microbatch_tokens": 9}, "one": {"micro_batch_size": 1}}


@right(1, 2, 3, **LIMITS)
def images_of_several_shapes(user: User, variant: dict[str, int]) -> None:
    model, samples = Pooled().double(), images()
    reference = copy.deepcopy(model)
    user.update(model, user.part(samples), losses.mse, **variant)
    each_image(reference, samples)
    user.expect(model, reference)


@right(2, 3, ddp="ddp", fsdp2="fsdp2")
def images_of_several_shapes_wrapped(user: User, variant: str) -> None:
    model, samples = Pooled().double(), images()
    reference = copy.deepcopy(model)
    model = fully_shard(model) if variant == "fsdp2" else wrap(model, variant)
    user.update(model, user.part(samples), losses.mse, micro_batch_size=3)
    each_image(reference, samples)
    user.expect(model, reference)


@right(1, 2, 3)
def images_of_several_channels(user: User) -> None:
    """Channels are no tokens: they are not padded with zeros."""
    model, samples = Pooled().double(), images((3, 1, 2))
    reference = copy.deepcopy(model)
    user.update(model, user.part(samples), losses.mse, micro_batch_size=3)
    each_image(reference, samples)
    user.expect(model, reference)


@right(1, 2, arrays=Tensor.numpy, lists=Tensor.tolist)
def images_that_are_no_tensors(user: User, variant: Any) -> None:
    model, samples = Pooled().double(), images()
    reference = copy.deepcopy(model)
    given = [{name: variant(value) for name, value in sample.items()} for sample in samples]

    @loss(weigh=lambda batch: len(batch["x"]))
    def of_doubles(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
        return squares(model, {name: value.double() for name, value in batch.items()})

    if variant is Tensor.tolist:
        samples = [{name: value.float().double() for name, value in sample.items()} for sample in samples]
    user.update(model, user.part(given), of_doubles, micro_batch_size=3, length=lambda sample: 1)
    each_image(reference, samples)
    user.expect(model, reference)


@refused(PlanError, "sizes", 1, 2)
def same_bits_of_several_shapes(user: User) -> None:
    user.update(Pooled(), user.part(images()), losses.mse, planner=SameBits(Tokens(64)))


@refused(PlanError, "cut them apart", 1)
def plan_of_other_shapes(user: User) -> None:
    """A plan of images of one shape, for as many of several."""
    accumulator = user.accumulator(Pooled().double(), micro_batch_size=8)
    plan = accumulator.plan([images()[0]] * 8)
    accumulator.forward_backward(images(), losses.mse, plan=plan)


# Keys.


@loss(weigh=lambda batch: len(batch["x"]))
def of_branches(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
    return squares(lambda x: model(x, batch.get("images")), batch)


def some_with_images() -> list[Sample]:
    samples = as_samples(numbers())
    for number in (0, 3, 4):
        samples[number]["images"] = torch.full((6,), number / 4).double()
    return samples


def each_branch(reference: nn.Module, samples: list[Sample]) -> None:
    for sample in samples:
        (of_branches(reference, {name: value[None] for name, value in sample.items()})[0] / 8).backward()


@right(1, 2, 3, plain="plain", unused="ddp-find-unused")
def keys_of_some_samples(user: User, variant: str) -> None:
    model, samples = Branched().double(), some_with_images()
    reference = copy.deepcopy(model)
    model = model if user.world == 1 else wrap(model, variant)
    user.update(model, user.part(samples), of_branches, micro_batch_size=8)
    each_branch(reference, samples)
    user.expect(model, reference)


@refused(PlanError, "keys", 2, 3)
def keys_of_some_samples_under_fsdp2(user: User) -> None:
    model = fully_shard(Branched().double())
    user.update(model, user.part(some_with_images()), of_branches)


@right(1, 2)
def keys_in_another_order(user: User) -> None:
    """One kind: they share microbatches."""
    model, samples = regressor(), as_samples(numbers())
    reference = copy.deepcopy(model)
    samples = [dict(reversed(list(each.items()))) if row % 2 else each for row, each in enumerate(samples)]
    accumulator = user.accumulator(model, micro_batch_size=8)
    accumulator.forward_backward(user.part(samples), losses.mse)
    accumulator.finalize()
    assert accumulator.last_plan.num_microbatches == 1
    mean_square(reference, numbers())
    user.expect(model, reference)


def patches_of_some() -> list[Sample]:
    """Texts of which some have an image of 16 patches, of which four are one token."""
    drawn = torch.Generator().manual_seed(2)
    samples = []
    for number, length in enumerate((3, 9, 5, 7, 4, 8, 6, 2)):
        ids = torch.randint(3, 59, (length,), generator=drawn)
        sample: Sample = {}
        if number % 3 == 1:
            ids = torch.cat([ids[:2], torch.tensor([61, 60, 60, 60, 60, 62]), ids[2:]])
            sample["pixel_values"] = torch.randn(16, 24, generator=drawn).double()
            sample["image_grid_thw"] = torch.tensor([[1, 4, 4]])
        labels = torch.where(ids < 60, ids, -100)
        samples.append({"input_ids": ids, "labels": labels, "mm_token_type_ids": (ids == 60).int(), **sample})
    return samples


def qwen_vl() -> nn.Module:
    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "model_type": "qwen2_vl_text", "pad_token_id": 0,
        "rope_scaling": {"rope_type": "default", "type": "mrope", "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    vision = {"depth": 1, "num_heads": 4, "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2,
              "in_channels": 3, "embed_dim": 32, "hidden_size": 32}  # fmt: skip
    return tiny("qwen2_vl", "ImageTextToText", text_config=text, vision_config=vision, image_token_id=60,
                video_token_id=63, vision_start_token_id=61, vision_end_token_id=62)  # fmt: skip


@right(1, 2, 3)
def patches_of_images_in_some_samples(user: User) -> None:
    with Float64WithoutDropout():
        model, samples = qwen_vl(), patches_of_some()
        reference = copy.deepcopy(model)
        user.update(model, user.part(samples), losses.next_token, micro_batch_size=4)
        total, count = torch.zeros((), dtype=torch.float64), 0
        for sample in samples:
            patches = {name: sample[name] for name in ("pixel_values", "image_grid_thw") if name in sample}
            batch = {name: value[None] for name, value in sample.items()} | patches
            targets = batch.pop("labels")[:, 1:]
            logits = reference(**batch, use_cache=False).logits[:, :-1]
            total = total + F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
            count += int((targets != -100).sum())
        (total / count).backward()
        user.expect(model, reference)


# Batches of other classes.


class Rows(Mapping[str, Any]):
    """A mapping as TensorDict is one: it counts and iterates over rows, and has no truth value."""

    def __init__(self, tensors: Sample) -> None:
        self.tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(as_samples(self.tensors))

    def __len__(self) -> int:
        first = next(iter(self.tensors.values()))
        return len(first) if first.ndim > 1 else 0

    def __bool__(self) -> bool:
        raise RuntimeError("converting to a boolean value is not permitted")

    def keys(self) -> Any:
        return self.tensors.keys()

    def items(self) -> Any:
        return self.tensors.items()

    def values(self) -> Any:
        return self.tensors.values()


@right(1, 2, 3, rows=True, samples=False)
def mapping_that_counts_rows(user: User, variant: bool) -> None:
    model, batch = regressor(), numbers()
    reference = copy.deepcopy(model)
    mine = user.rows(batch)
    given = Rows(mine) if variant and mine else [Rows(sample) for sample in user.part(as_samples(batch))]
    user.update(model, given, losses.mse)
    mean_square(reference, batch)
    user.expect(model, reference)


class Table:
    """As a pandas table: comparisons are by element, and have no truth value."""

    def __eq__(self, other: object) -> Any:
        return Table()

    def __bool__(self) -> bool:
        raise ValueError("the truth value of a Table is ambiguous")

    __hash__ = None


NO_MAPPINGS = {"array": numbers()["x"].numpy(), "tensor": numbers()["x"], "table": Table()}


@refused(PlanError, "expected a mapping of tensors", 1, 2, **NO_MAPPINGS)
def sample_that_is_no_mapping(user: User, variant: Any) -> None:
    rows = [variant] * 8 if isinstance(variant, Table) else list(variant)
    user.update(regressor(), user.part(rows), losses.mse)


@refused(PlanError, "of a sample is a", 1, 2, 3, dict=dict, rows=Rows)
def mapping_inside_of_a_sample(user: User, variant: Callable[[Sample], Any]) -> None:
    """torch makes an empty tensor of a mapping that iterates over rows and has none, as a nested TensorDict."""
    samples = [{**sample, "inner": variant({"x": sample["x"][0]})} for sample in as_samples(numbers())]
    user.update(regressor(), user.part(samples), losses.mse)


@refused(PlanError, "expected a mapping", 1, 2, array=numbers()["x"].numpy(), table=Table())
def batch_that_is_no_list(user: User, variant: Any) -> None:
    user.update(regressor(), variant, losses.mse)


@refused(PlanError, "length=", 1, 2)
def annotations_without_a_length(user: User) -> None:
    """Images whose targets are dicts, which the loss takes as a list."""
    samples = [{"target": {"boxes": torch.ones(2, 4)}, "x": sample["x"]} for sample in as_samples(numbers())]
    user.update(regressor(), user.part(samples), squares, collate=list)


@right(1, 2, 3)
def annotations_with_a_length(user: User) -> None:
    """The remedy."""
    model, batch = regressor(), numbers()
    reference = copy.deepcopy(model)
    samples = [{"target": {"label": each["labels"]}, "x": each["x"]} for each in as_samples(batch)]

    @loss(weigh=len)
    def of_list(model: nn.Module, samples: list[Any]) -> tuple[Tensor, int]:
        x = torch.stack([sample["x"] for sample in samples])
        return squares(model, {"x": x, "labels": torch.stack([sample["target"]["label"] for sample in samples])})

    user.update(model, user.part(samples), of_list, collate=list, length=lambda sample: 1)
    mean_square(reference, batch)
    user.expect(model, reference)


class Store:
    """The tensors of a graph."""


class Graph:
    """A batch of graphs: tensors behind attributes of a store of its own."""

    __slots__ = ("store",)

    def __init__(self, samples: list[Sample], **others: Any) -> None:
        self.store = Store()
        self.store.x = torch.stack([sample["x"] for sample in samples])
        vars(self.store).update(others)


def forces(model: nn.Module, graph: Graph) -> tuple[Tensor, int]:
    x = graph.store.x.requires_grad_()
    (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return force.square().sum(), len(x)


def mean_force(reference: nn.Module) -> None:
    x = numbers()["x"].clone().requires_grad_()
    (force,) = torch.autograd.grad(reference(x).sum(), x, create_graph=True)
    (force.square().sum() / 8).backward()
    reference[2].bias.grad = None  # no force depends on it


GRAPHS = {"graph": Graph, "in_a_dict": lambda samples: {"graphs": [Graph(samples)]}}


@right(1, 2, 3, **GRAPHS)
def positions_of_an_opaque_batch_that_carry_gradients(user: User, variant: Any) -> None:
    model = regressor()
    reference = copy.deepcopy(model)

    def opened(batch: Any) -> Graph:
        return batch["graphs"][0] if isinstance(batch, dict) else batch

    counted = loss(weigh=lambda batch: len(opened(batch).store.x))(lambda m, batch: forces(m, opened(batch)))
    user.update(model, user.part(as_samples(numbers())), counted, collate=variant, length=lambda sample: 1)
    model[2].bias.grad = None
    mean_force(reference)
    user.expect(model, reference)


@refused(LossContractError, "[model, ", 1, 2)
def head_behind_an_opaque_batch(user: User) -> None:
    """The batch refers to it, and nobody would drop, divide or reduce its gradient."""
    torch.manual_seed(1)
    head = nn.Linear(1, 1).double()

    def collate(samples: list[Sample]) -> Graph:
        return Graph(samples, head=head, parameters=list(head.parameters()))

    @loss(weigh=lambda graph: len(graph.store.x))
    def past(model: nn.Module, graph: Graph) -> tuple[Tensor, int]:
        return graph.store.head(model(graph.store.x)).square().sum(), len(graph.store.x)

    user.update(regressor(), user.part(as_samples(numbers())), past, collate=collate, length=lambda sample: 1)


# Iterators that end in the user's functions: the end of an iterator is not the end of the data.


def third_time(result: Any) -> Any:
    """Gives ``result`` of an argument twice, and then asks an iterator that has ended."""
    left = iter([0, 0])

    def run(given: Any) -> Any:
        next(left)
        return result(given)

    return run


def _stopped(where: str) -> tuple[Any, dict[str, Any], Any]:
    """A batch of a rank, options, and a loss, of which one asks an iterator that has ended."""
    samples = as_samples(numbers())
    stopping = {
        "collate": (samples, {"collate": third_time(pad_right)}, losses.mse),
        "uncounted_collate": (samples, {"collate": third_time(pad_right)}, squares),
        "length": (samples, {"length": third_time(lambda sample: 1)}, losses.mse),
        "deferred": (Deferred(third_time(samples.__getitem__), [4] * 8), {}, squares),
        "weigh": (samples, {}, loss(weigh=third_time(lambda batch: len(batch["x"])))(lambda m, b: squares(m, b))),
        "prepare": (
            samples,
            {},
            loss(weigh=lambda batch: len(batch["x"]), prepare=third_time(dict))(lambda m, b: squares(m, b)),
        ),
    }
    return stopping[where]


@refused(MegabatchError, "StopIteration", 1, collate="collate", uncounted_collate="uncounted_collate", length="length",
         deferred="deferred", weigh="weigh", prepare="prepare")  # fmt: skip
def iterator_that_ends_in_a_function(user: User, variant: str) -> None:
    batch, options, loss_fn = _stopped(variant)
    user.update(regressor(), batch, loss_fn, **options)


@refused(MegabatchError, "StopIteration", 2, collate="collate", weigh="weigh", length="length")
def iterator_that_ends_on_one_rank(user: User, variant: str) -> None:
    batch, options, loss_fn = _stopped(variant)
    if user.rank == 1:
        batch, options, loss_fn = (
            as_samples(numbers()),
            {"collate": pad_right} if "collate" in options else {},
            losses.mse,
        )
    user.update(regressor(), batch, loss_fn, **options)


@right(1, 2, 3)
def weigh_that_reads_what_has_changed_since_prepare(user: User) -> None:
    """A curriculum: the heaviest microbatch of the batch counts as before, and others do not."""
    model, batch, lowest = regressor(), numbers() | {"level": torch.tensor([9, 9, 0, 9, 0, 0, 9, 9])}, [0]
    reference, weighed = copy.deepcopy(model), list[int]()

    def count(batch: Sample) -> Tensor:
        weighed.append(lowest[0])
        return (batch["level"] >= lowest[0]).sum()

    @loss(weigh=count)
    def of_level(model: nn.Module, batch: Sample) -> tuple[Tensor, Tensor]:
        chosen = batch["level"] >= lowest[0]
        return ((model(batch["x"]) - batch["labels"])[chosen] ** 2).sum(), chosen.sum()

    accumulator, mine = user.accumulator(model), user.rows(batch)
    prepared = accumulator.prepare(mine, of_level)
    while mine and len(weighed) < (len(mine["x"]) + 1) // 2:  # the thread is at work
        time.sleep(0.001)
    lowest[0] = 5
    accumulator.forward_backward(prepared, of_level)
    accumulator.finalize()
    chosen = batch["level"] >= 5
    mean_square(reference, {name: batch[name][chosen] for name in ("x", "labels")})
    user.expect(model, reference)
