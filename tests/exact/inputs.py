"""Input mutations: what users do wrong or oddly, one row each.

A row does what the user does, on every rank. Either the gradient is that of the uncut batch in plain torch, or one
line refuses the row on every rank. What is expected imports nothing of the library, with one exception: models that
cast to float32 run in `Float64WithoutDropout` on both sides, which only keeps their arithmetic in float64.
"""

import copy
import functools
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megabatch import (
    GradientAccumulator,
    Learner,
    LossContractError,
    MegabatchError,
    PlanError,
    UpdateSampler,
    loss,
    losses,
)
from megabatch.double import Float64WithoutDropout
from tests.exact import oracle
from tests.exact.tiny import PAD, VOCABULARY, tiny
from tests.exact.wrappers import Wrapped, parameters_of, whole, wrap

Sample = dict[str, Tensor]
ALL, SEVERAL = (1, 2, 3), (2, 3)
SHARES = {1: (8,), 2: (5, 3), 3: (5, 0, 3)}  # samples of each rank, by world: uneven, and none at all on one rank


class User:
    """One rank of one row: its part of the samples, and how far off its gradients are."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.error, self.parameter = -1.0, "nothing was compared"

    def part(self, samples: Sequence[Any]) -> list[Any]:
        """This rank's of 8 samples."""
        start = sum(SHARES[self.world][: self.rank])
        return list(samples[start : start + SHARES[self.world][self.rank]])

    def rows(self, batch: Sample) -> Any:
        """The same of a batch of 8 rows; no batch where there are none."""
        chosen = self.part(range(8))
        return {key: value[chosen] for key, value in batch.items()} if chosen else []

    def accumulator(self, model: Wrapped, **options: Any) -> GradientAccumulator:
        bounded = "micro_batch_size" in options or "max_microbatch_tokens" in options
        return GradientAccumulator(model, **(options if bounded else {"micro_batch_size": 2} | options))

    def update(self, model: Wrapped, batch: Any, loss_fn: Any, *, max_norm: float | None = None, **options: Any) -> Any:
        """One update of one call."""
        accumulator = self.accumulator(model, **options)
        accumulator.forward_backward(batch, loss_fn)
        return accumulator.finalize(max_norm=max_norm)

    def expect(self, model: Wrapped, reference: nn.Module) -> None:
        """The model's gradients are the reference's."""
        found = {name: each.grad for name, each in parameters_of(model).items()}
        named = dict(reference.named_parameters())
        found = whole(model, found, {name: each.shape for name, each in named.items()})
        self.expect_equal(found, {name: each.grad for name, each in named.items()})

    def expect_equal(self, found: dict[str, Any], expected: dict[str, Any]) -> None:
        assert found.keys() == expected.keys(), "other parameters"
        for name, each in expected.items():
            near_nothing = each is not None and float(each.norm()) < 1e-14  # the bias of keys: rounding alone
            if not near_nothing:
                error = oracle.relative_error(found[name], each)
                if error > self.error:
                    self.error, self.parameter = error, name


@dataclass(frozen=True)
class Row:
    """What a user does, on how many ranks, and what is to come of it."""

    act: Callable[[User], None]
    worlds: tuple[int, ...]
    refused: type[MegabatchError] | None = None  # None: the gradient is right
    fragment: str = ""  # of the error: what to change


ROWS: dict[str, Row] = {}


def right(*worlds: int, **variants: Any) -> Callable[..., Any]:
    return _rows(variants, worlds, None, "")


def refused(error: type[MegabatchError], fragment: str, *worlds: int, **variants: Any) -> Callable[..., Any]:
    return _rows(variants, worlds, error, fragment)


def _rows(variants: dict[str, Any], worlds: tuple[int, ...], *expected: Any) -> Callable[..., Any]:
    """Add the function to the table: once, or once for each variant, which it is given."""

    def add(act: Callable[..., None]) -> Callable[..., None]:
        for name, variant in variants.items() or [("", None)]:
            acting = functools.partial(act, variant=variant) if variants else act
            title = f"{act.__name__}-{name}" if name else act.__name__
            assert title not in ROWS
            ROWS[title] = Row(acting, worlds or (1,), *expected)
        return act

    return add


def run_job(job: str) -> dict[str, Any]:
    """The job "row:world" on one rank: how far off its gradients are, or what was raised."""
    name, world = job.rsplit(":", 1)
    row, user = ROWS[name], User(dist.get_rank(), int(world))
    if user.world == 1:
        dist.destroy_process_group()
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row.act(user)
        return {"error": user.error, "parameter": user.parameter}
    except Exception as error:
        kinds = [each.__name__ for each in type(error).__mro__]
        return {"raised": kinds, "text": str(error), "traceback": traceback.format_exc()[-1500:]}
    finally:
        torch.set_default_device(None)
        if dist.is_initialized():
            dist.destroy_process_group()  # a rank that waits for one that has raised is to hear of it


# Regression on numbers: most rows need no more.


def regressor() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def numbers(seed: int = 2, size: int = 8) -> Sample:
    drawn = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, width, generator=drawn).double() for name, width in (("x", 4), ("labels", 1))}


def as_samples(batch: Sample) -> list[Sample]:
    return [{key: value[row] for key, value in batch.items()} for row in range(len(next(iter(batch.values()))))]


def mean_square(model: Callable[[Tensor], Tensor], *batches: Sample) -> None:
    """Leaves the gradient of the mean over all rows of all batches in the model."""
    batch = {key: torch.cat([each[key] for each in batches]) for key in batches[0]}
    F.mse_loss(model(batch["x"]), batch["labels"]).backward()


def _squares(model: Any, batch: Sample) -> tuple[Tensor, int]:
    return F.mse_loss(model(batch["x"]), batch["labels"], reduction="sum"), len(batch["x"])


# Text: padding, masks and labels.

LENGTHS = (3, 9, 5, 7, 4, 8, 6, 2)


def texts(**others: Callable[[int, Tensor], Tensor]) -> list[Sample]:
    """Samples of other lengths, with what ``others`` make of the number and the tokens of each."""
    drawn = torch.Generator().manual_seed(4)
    made = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(1, 60, (length,), generator=drawn)
        made.append({"input_ids": ids} | {name: make(number, ids) for name, make in others.items()})
    return made


def its_class(number: int, ids: Tensor) -> Tensor:
    return torch.tensor(number % 3)


def ones(number: int, ids: Tensor) -> Tensor:
    return torch.ones_like(ids)


def itself(number: int, ids: Tensor) -> Tensor:
    return ids.clone()


def padded(samples: Iterable[Sample], **fills: int) -> Sample:
    """One batch in plain torch; what ``fills`` does not name is padded with 0."""
    samples = list(samples)
    return {
        key: nn.utils.rnn.pad_sequence([s[key] for s in samples], batch_first=True, padding_value=fills.get(key, 0))
        if samples[0][key].ndim else torch.stack([s[key] for s in samples])
        for key in samples[0]
    }  # fmt: skip


def mean_cross_entropy(logits: Tensor, targets: Tensor) -> None:
    """Leaves the gradient of the mean over all targets."""
    F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-100).backward()


def mean_next_token(model: nn.Module, batch: Sample) -> None:
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    mean_cross_entropy(model(**inputs).logits[:, :-1], batch["labels"][:, 1:])


@right(1, 2, 3, llama="llama", qwen3="qwen3", gpt2="gpt2")
def classifier_with_a_pad_token(user: User, variant: str) -> None:
    with Float64WithoutDropout():
        model = tiny(variant, "SequenceClassification", num_labels=3, pad_token_id=PAD)
        reference, samples = copy.deepcopy(model), texts(attention_mask=ones, labels=its_class)
        user.update(model, user.part(samples), losses.classification)
        batch = padded(samples, input_ids=PAD)
        labels = batch.pop("labels")
        mean_cross_entropy(reference(**batch).logits, labels)
        user.expect(model, reference)


@right(1)
def classifier_with_a_pad_token_and_no_mask(user: User) -> None:
    with Float64WithoutDropout():
        model = tiny("qwen3", "SequenceClassification", num_labels=3, pad_token_id=PAD)
        reference, samples = copy.deepcopy(model), texts(labels=its_class)
        user.update(model, user.part(samples), losses.classification)
        batch = padded(samples, input_ids=PAD)
        mask = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
        mean_cross_entropy(reference(batch["input_ids"], attention_mask=mask.long()).logits, batch["labels"])
        user.expect(model, reference)


@refused(PlanError, "pad_token_id", 1, 2, 3, llama="llama", gpt2="gpt2")
def classifier_without_a_pad_token(user: User, variant: str) -> None:
    model = tiny(variant, "SequenceClassification", num_labels=3, pad_token_id=None)
    samples = texts(attention_mask=ones, labels=its_class)
    user.update(model, user.part(samples), losses.classification)


@right(1, 2, 3)
def padding_of_an_own_key(user: User) -> None:
    """Numbers that the loss leaves out where they are -1."""
    model = regressor()
    reference = copy.deepcopy(model)

    @loss(weigh=lambda batch: (batch["goal"] >= 0).sum())
    def from_goals(model: nn.Module, batch: Sample) -> tuple[Tensor, Tensor]:
        kept = batch["goal"] >= 0
        return ((model(batch["x"]).squeeze(-1) - batch["goal"])[kept] ** 2).sum(), kept.sum()

    drawn = torch.Generator().manual_seed(5)
    samples = [
        {"x": torch.randn(n, 4, generator=drawn).double(), "goal": torch.rand(n, generator=drawn).double()}
        for n in LENGTHS
    ]
    user.update(model, user.part(samples), from_goals, padding={"goal": -1})
    x, goal = (torch.cat([s[key] for s in samples]) for key in ("x", "goal"))
    F.mse_loss(reference(x).squeeze(-1), goal).backward()
    user.expect(model, reference)


@right(1, 2, 3)
def shifted_labels_of_other_lengths(user: User) -> None:
    model = tiny("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    reference = copy.deepcopy(model)

    def shifted(number: int, ids: Tensor) -> Tensor:
        return torch.cat([ids[1:], torch.tensor([-100])])

    samples = texts(shift_labels=shifted)
    user.update(model, user.part(samples), losses.next_token)
    batch = padded(samples, shift_labels=-100)
    mean_cross_entropy(reference(batch["input_ids"]).logits, batch["shift_labels"])
    user.expect(model, reference)


@right(1, 2, 3, token_labels="token_labels", start_labels="start_labels")
def labels_of_another_name(user: User, variant: str) -> None:
    """A loss that leaves out -100 of labels that it calls otherwise."""
    model = nn.Sequential(nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY)).double()
    torch.manual_seed(1)
    nn.init.normal_(model[0].weight), nn.init.normal_(model[1].weight)
    nn.init.zeros_(model[1].bias)
    reference = copy.deepcopy(model)

    @loss(weigh=lambda batch: (batch[variant] != -100).sum())
    def tagged(model: nn.Module, batch: Sample) -> tuple[Tensor, Tensor]:
        logits = model(batch["input_ids"])
        total = F.cross_entropy(logits.flatten(0, 1), batch[variant].flatten(), ignore_index=-100, reduction="sum")
        return total, (batch[variant] != -100).sum()

    samples = texts(**{variant: itself})
    user.update(model, user.part(samples), tagged)
    batch = padded(samples, **{variant: -100})
    mean_cross_entropy(reference(batch["input_ids"]), batch[variant])
    user.expect(model, reference)


@refused(PlanError, "labels", 1, 2, 3, bool=torch.bool, uint8=torch.uint8)
def ragged_labels_that_cannot_hold_the_fill(user: User, variant: torch.dtype) -> None:
    model = nn.Embedding(VOCABULARY, 1).double()

    @loss(weigh=lambda batch: batch["labels"].numel())
    def from_flags(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
        return ((model(batch["input_ids"]).squeeze(-1) - batch["labels"].double()) ** 2).sum(), batch["labels"].numel()

    user.update(model, user.part(texts(labels=lambda number, ids: (ids % 2).to(variant))), from_flags)


@right(1, 2)
def int32_classes(user: User) -> None:
    model, batch = nn.Linear(4, 3).double(), numbers()
    torch.manual_seed(1)
    nn.init.normal_(model.weight), nn.init.zeros_(model.bias)
    reference, labels = copy.deepcopy(model), torch.arange(8) % 3
    user.update(model, user.rows({"x": batch["x"], "labels": labels.int()}), losses.classification)
    mean_cross_entropy(reference(batch["x"]), labels)
    user.expect(model, reference)


@right(1)
def int32_tokens(user: User) -> None:
    model = tiny("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    reference, samples = copy.deepcopy(model), texts(labels=itself)
    as_int = [{key: value.int() for key, value in sample.items()} for sample in samples]
    user.update(model, user.part(as_int), losses.next_token)
    mean_next_token(reference, padded(samples, labels=-100))
    user.expect(model, reference)


def _max_length(model: str, *, targets_under_pads: bool, left: bool = False) -> tuple[nn.Module, Sample]:
    """What tokenizer(padding="max_length") and ``labels = input_ids.clone()`` give."""
    samples = texts(attention_mask=ones)
    batch = padded(samples)
    if left:
        batch = {
            key: torch.stack([torch.cat([row[n:], row[:n]]) for row, n in zip(value, LENGTHS, strict=True)])
            for key, value in batch.items()
        }
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    labels = batch["input_ids"].clone()
    batch["labels"] = labels if targets_under_pads else labels.masked_fill(batch["attention_mask"] == 0, -100)
    options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if model == "gpt2" else {}
    return tiny(model, **options), batch


@right(1, 2, 3, gpt2="gpt2", llama="llama")
def targets_under_the_mask(user: User, variant: str) -> None:
    with Float64WithoutDropout():
        model, batch = _max_length(variant, targets_under_pads=True)
        reference = copy.deepcopy(model)
        user.update(model, user.rows(batch), losses.next_token)
        mean_next_token(reference, batch)
        user.expect(model, reference)


@right(1, 2, 3)
def no_targets_under_the_mask(user: User) -> None:
    """The mask is left out, where torch is faster without one."""
    model, batch = _max_length("gpt2", targets_under_pads=False)
    reference, given = copy.deepcopy(model), set()
    model.register_forward_pre_hook(lambda _, args, kwargs: given.update(kwargs), with_kwargs=True)
    user.update(model, user.rows(batch), losses.next_token)
    assert "attention_mask" not in given, "the mask was given to the model"
    mean_next_token(reference, batch)
    user.expect(model, reference)


@right(1, 2)
def padded_on_the_left(user: User) -> None:
    model, batch = _max_length("gpt2", targets_under_pads=False, left=True)
    reference = copy.deepcopy(model)
    user.update(model, user.rows(batch), losses.next_token)
    mean_next_token(reference, batch)
    user.expect(model, reference)


@right(1, 2, 3)
def encoder_without_a_mask(user: User) -> None:
    model = tiny("bert", "SequenceClassification", num_labels=3, pad_token_id=0, hidden_dropout_prob=0.0,
                 attention_probs_dropout_prob=0.0)  # fmt: skip
    reference, samples = copy.deepcopy(model), texts(labels=its_class)
    user.update(model, user.part(samples), losses.classification)
    logits = torch.cat([reference(sample["input_ids"][None]).logits for sample in samples])  # each without padding
    mean_cross_entropy(logits, torch.stack([sample["labels"] for sample in samples]))
    user.expect(model, reference)


def _t5_samples() -> list[Sample]:
    samples = texts(decoder_input_ids=lambda number, ids: ids[: number % 3 + 1].clone())
    return [sample | {"labels": sample["decoder_input_ids"] + 1} for sample in samples]


@right(1, 2, 3)
def encoder_decoder_without_a_mask(user: User) -> None:
    with Float64WithoutDropout():
        model = tiny("t5", "Seq2SeqLM", dropout_rate=0.0)
        reference, samples = copy.deepcopy(model), _t5_samples()
        user.update(model, user.part(samples), losses.classification)
        logits = [
            reference(input_ids=s["input_ids"][None], decoder_input_ids=s["decoder_input_ids"][None]).logits[0]
            for s in samples
        ]
        mean_cross_entropy(torch.cat(logits), torch.cat([sample["labels"] for sample in samples]))
        user.expect(model, reference)


@refused(LossContractError, "decoder_input_ids", 1, 2)
def encoder_decoder_without_decoder_inputs(user: User) -> None:
    samples = [{"input_ids": s["input_ids"], "labels": s["labels"]} for s in _t5_samples()]
    user.update(tiny("t5", "Seq2SeqLM"), user.part(samples), losses.classification)


# Ready-made losses and shapes.


@refused(LossContractError, "labels", 1, 2)
def next_token_of_a_prompt_tuned_model(user: User) -> None:
    """Its logits begin with those of virtual tokens."""
    import peft

    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny("gpt2"), config).double()
    user.update(model, user.part(texts(labels=itself)), losses.next_token)


@refused(LossContractError, "classification", 1, 2)
def next_token_of_an_encoder_decoder(user: User) -> None:
    user.update(tiny("t5", "Seq2SeqLM"), user.part(_t5_samples()), losses.next_token)


@refused(LossContractError, "labels", 1, 2)
def next_token_of_a_vision_model(user: User) -> None:
    images = {"pixel_values": torch.randn(8, 3, 8, 8).double(), "labels": torch.arange(8) % 3}
    user.update(tiny("vit", "ImageClassification", num_labels=3), user.rows(images), losses.next_token)


@refused(LossContractError, "rout", 1, 2)
def next_token_of_experts_with_a_router_loss(user: User) -> None:
    model = tiny("mixtral", num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    with Float64WithoutDropout():
        user.update(model, user.part(texts(labels=itself)), losses.next_token)


@refused(LossContractError, "shape", 1, 2, 3)
def mse_of_a_column_and_a_row(user: User) -> None:
    batch = numbers()
    user.update(regressor(), user.rows(batch | {"labels": batch["labels"].squeeze(1)}), losses.mse)


@refused(MegabatchError, "labels", 1, 2, 3)
def mse_of_other_lengths(user: User) -> None:
    samples = [{"x": torch.randn(n, 4).double(), "labels": torch.randn(n, 1).double()} for n in LENGTHS]
    user.update(regressor(), user.part(samples), losses.mse)


@refused(LossContractError, "shape", 1, 2)
def classes_in_the_second_dim(user: User) -> None:
    """torch's own order of a segmentation, [B, C, H, W], with as many classes as columns."""
    batch = {"x": torch.randn(8, 1, 3, 3).double(), "labels": torch.randint(3, (8, 3, 3))}
    user.update(nn.Conv2d(1, 3, 3, padding=1).double(), user.rows(batch), losses.classification)


@refused(LossContractError, "shape", 1, 2)
def classes_as_probabilities(user: User) -> None:
    batch = {"x": numbers()["x"], "labels": torch.rand(8, 3).double().softmax(1)}
    user.update(nn.Linear(4, 3).double(), user.rows(batch), losses.classification)


@refused(MegabatchError, "labels", 1, 2, 3, next_token=losses.next_token, classification=losses.classification)
def no_labels(user: User, variant: Any) -> None:
    user.update(tiny("gpt2"), user.part(texts()), variant)


@refused(MegabatchError, "64", 1, 2)
def token_beyond_the_vocabulary(user: User) -> None:
    samples = texts(labels=itself)
    samples[-1]["input_ids"][0] = VOCABULARY
    user.update(tiny("gpt2"), user.part(samples), losses.next_token)


@refused(MegabatchError, "position", 1, 2)
def position_beyond_the_models(user: User) -> None:
    user.update(tiny("gpt2", n_positions=8), user.part(texts(labels=itself)), losses.next_token)


@refused(MegabatchError, "length 0", 1, 2)
def sample_without_tokens(user: User) -> None:
    samples = texts(labels=itself)
    samples[1] = {key: value[:0] for key, value in samples[1].items()}
    user.update(tiny("gpt2"), user.part(samples), losses.next_token)


@refused(PlanError, "dense", 1, 2, coo=lambda x: x.to_sparse(), csr=lambda x: x.to_sparse_csr())
def sparse_rows(user: User, variant: Callable[[Tensor], Tensor]) -> None:
    batch = user.rows(numbers())
    user.update(regressor(), batch | {"x": variant(batch["x"])}, losses.mse)


@refused(PlanError, "list of samples", 1, jagged=torch.jagged, strided=torch.strided)
def nested_rows(user: User, variant: torch.layout) -> None:
    rows = [torch.randn(n, 4).double() for n in LENGTHS]
    batch = {"x": torch.nested.nested_tensor(rows, layout=variant), "labels": torch.randn(8, 1).double()}
    user.update(regressor(), batch, losses.mse)


@refused(PlanError, "expected a tensor", 1, 2, 3, rows=False, samples=True)
def none_in_the_batch_of_the_last_rank(user: User, variant: bool) -> None:
    more = {"weights": None} if user.rank == user.world - 1 else {}
    batch = user.rows(numbers())
    if variant:
        batch = [sample | more for sample in user.part(as_samples(numbers()))]
    elif batch:
        batch |= more
    user.update(regressor(), batch, losses.mse)


@refused(PlanError, "9", 1, 2, 3)
def cap_below_the_longest_sample(user: User) -> None:
    user.update(tiny("gpt2"), user.part(texts(labels=itself)), losses.next_token, max_microbatch_tokens=8)


@right(1, 2)
def report_in_one_line(user: User) -> None:
    model, batch = regressor(), numbers()
    reference = copy.deepcopy(model)
    update = user.update(model, user.rows(batch), losses.mse)
    assert len(str(update).splitlines()) == 1, str(update)
    mean_square(reference, batch)
    user.expect(model, reference)


@right(1, 2, 3, rows=False, samples=True)
def tokens_of_images(user: User, variant: bool) -> None:
    """An image is one token, whatever its channels."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 3)).double()
    reference, images = copy.deepcopy(model), {"x": torch.randn(8, 3, 8, 8).double(), "labels": torch.arange(8) % 3}
    batch = user.part(as_samples(images)) if variant else user.rows(images)
    update = user.update(model, batch, losses.classification)
    assert int(update.num_tokens) == 8, f"{update.num_tokens} tokens of 8 images"
    mean_cross_entropy(reference(images["x"]), images["labels"])
    user.expect(model, reference)


# The batch and what becomes of it.


@right(1, 2, 3)
def loss_that_writes_to_its_microbatch(user: User) -> None:
    model, batch = regressor(), numbers()
    reference, mine = copy.deepcopy(model), user.rows(batch)
    given = copy.deepcopy(mine)

    @loss(weigh=lambda batch: len(batch["x"]))
    def writes(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
        batch["x"].mul_(0.5)
        return _squares(model, batch)

    user.update(model, mine, writes)
    assert not mine or torch.equal(mine["x"], given["x"]), "the user's batch was changed"
    mean_square(reference, batch | {"x": batch["x"] * 0.5})
    user.expect(model, reference)


@right(1, 2, 3, counted=True, uncounted=False)
def collate_that_fills_one_buffer(user: User, variant: bool) -> None:
    model, batch = regressor(), numbers()
    reference = copy.deepcopy(model)
    buffers = {"x": torch.empty(8, 4).double(), "labels": torch.empty(8, 1).double()}

    def fill(samples: list[Sample]) -> Sample:
        for row, sample in enumerate(samples):
            for key, value in sample.items():
                buffers[key][row] = value
        return {key: value[: len(samples)] for key, value in buffers.items()}

    loss_fn = losses.mse if variant else _squares
    user.update(model, user.part(as_samples(batch)), loss_fn, collate=fill)
    mean_square(reference, batch)
    user.expect(model, reference)


@right(1, 2)
def batch_of_inference_mode(user: User) -> None:
    model = regressor()
    reference = copy.deepcopy(model)
    with torch.inference_mode():
        batch = user.rows(numbers())
    user.update(model, batch, losses.mse)
    mean_square(reference, numbers())
    user.expect(model, reference)


@right(1, 2, 3)
def default_device_meta(user: User) -> None:
    model, batch = regressor(), numbers()
    reference, mine = copy.deepcopy(model), user.rows(batch)
    torch.set_default_device("meta")
    user.update(model, mine, losses.mse, max_norm=1e9)
    torch.set_default_device(None)
    mean_square(reference, batch)
    user.expect(model, reference)


@refused(PlanError, "dp_rank", 2, 3)
def sampler_that_is_not_told_its_rank(user: User) -> None:
    """Every rank would train on every sample."""
    UpdateSampler([1] * 8, global_batch_size=8)


# Losses that run a backward of their own.


class TwoParts(nn.Module):
    """A body and a head; given labels, the total with its gradients computed in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 1, bias=False)

    def forward(self, x: Tensor, labels: Tensor | None = None, divisor: float = 1.0) -> Tensor:
        hidden = torch.tanh(self.body(x))
        if labels is None:
            return self.head(hidden)
        return EagerSquares.apply(hidden, self.head.weight, labels, divisor)


class EagerSquares(torch.autograd.Function):
    """A head and its loss, differentiated in the forward; its backward does not look at grad_output."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, divisor: float) -> Tensor:
        inputs = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        with torch.enable_grad():
            total = ((inputs[0] @ inputs[1].T - labels) ** 2).sum() / divisor
            ctx.save_for_backward(*torch.autograd.grad(total, inputs))
        return total.detach()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return *ctx.saved_tensors, None, None


class HandedOn(torch.autograd.Function):
    """Passes a total on, with the gradient of its hidden states that is known already."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, total: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return total.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return *ctx.saved_tensors, None, None


def _in_chunks(model: TwoParts, batch: Sample, divisor: float) -> tuple[Tensor, int]:
    """As torchtitan's chunked cross-entropy: a backward for each chunk adds to the head's gradient."""
    hidden = torch.tanh(model.body(batch["x"]))
    apart, total = hidden.detach().requires_grad_(), hidden.new_zeros(())
    for part, labels in zip(apart.chunk(2), batch["labels"].chunk(2), strict=True):
        chunk = F.mse_loss(model.head(part), labels, reduction="sum") / divisor
        chunk.backward()
        total += chunk.detach()
    return HandedOn.apply(hidden, total, apart.grad), len(hidden)


def _eager(model: nn.Module, batch: Sample, divisor: float) -> tuple[Tensor, int]:
    return model(batch["x"], batch["labels"], divisor), len(batch["x"])


def two_parts() -> TwoParts:
    torch.manual_seed(1)
    return TwoParts().double()


@refused(LossContractError, "divisor", 1, 2, 3, in_chunks=_in_chunks, eager=_eager)
def own_backward(user: User, variant: Any) -> None:
    user.update(two_parts(), user.rows(numbers()), loss(weigh=lambda b: len(b["x"]))(lambda m, b: variant(m, b, 1.0)))


@refused(LossContractError, "divisor", 1, 2, in_chunks=_in_chunks, eager=_eager)
def own_backward_uncounted(user: User, variant: Any) -> None:
    user.update(two_parts(), user.rows(numbers()), lambda model, batch: variant(model, batch, 1.0))


def _given_the_divisor(user: User, inner: Any, wrapper: str) -> None:
    model, batch = two_parts(), numbers()
    reference = copy.deepcopy(model)

    @loss(weigh=lambda batch: len(batch["x"]))
    def divided(model: nn.Module, batch: Sample, divisor: float) -> tuple[Tensor, int]:
        return inner(model, batch, divisor)

    wrapped = fully_shard(model) if wrapper == "fsdp2" else wrap(model, wrapper)
    update = user.update(wrapped, user.rows(batch), divided)
    mean_square(reference, batch)
    expected = F.mse_loss(reference(batch["x"]), batch["labels"])
    assert abs(float(update.loss) / float(expected) - 1) < 1e-12, f"the loss is {update.loss}, expected {expected}"
    user.expect(wrapped, reference)


@right(1, 2, 3, in_chunks=_in_chunks, eager=_eager)
def own_backward_given_the_divisor(user: User, variant: Any) -> None:
    _given_the_divisor(user, variant, "plain")


@right(2, 3, ddp="ddp", fsdp2="fsdp2")
def own_backward_given_the_divisor_wrapped(user: User, variant: str) -> None:
    _given_the_divisor(user, _eager, variant)


@right(1, 2, 3)
def own_backward_given_the_divisor_in_two_calls(user: User) -> None:
    model, batch = two_parts(), numbers()
    reference = copy.deepcopy(model)

    @loss(weigh=lambda batch: len(batch["x"]))
    def divided(model: nn.Module, batch: Sample, divisor: float) -> tuple[Tensor, int]:
        return _eager(model, batch, divisor)

    accumulator = user.accumulator(model)
    accumulator.forward_backward(user.rows(batch), divided)
    accumulator.forward_backward(user.rows(numbers(3)), divided)
    accumulator.finalize()
    mean_square(reference, batch, numbers(3))
    user.expect(model, reference)


# What is trained and is not the model's.


def _outside(kind: str) -> tuple[nn.Module, Any, Any]:
    """The model, what is outside of it, and the loss of a batch."""
    torch.manual_seed(1)
    model = nn.Linear(4, 1).double()
    if kind == "head":
        model, head = nn.Linear(4, 3).double(), nn.Linear(3, 1).double()
        return model, head, lambda model, batch: _squares(lambda x: head(model(x)), batch)
    value = nn.Parameter(torch.tensor(0.7).double())
    if kind == "temperature":
        return model, value, lambda model, batch: _squares(lambda x: model(x) / value.exp(), batch)

    def learned(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
        total, weight = _squares(model, batch)
        return total * torch.exp(-value) + weight * value, weight

    return model, value, learned


@refused(LossContractError, "[model, ", 1, 2, 3, head="head", temperature="temperature", learned_weight="weight")
def trained_outside_of_the_model(user: User, variant: str) -> None:
    model, _, loss_fn = _outside(variant)
    user.update(model, user.rows(numbers()), loss(weigh=lambda batch: len(batch["x"]))(loss_fn))


@refused(LossContractError, "[model, ", 1, 2)
def trained_outside_of_the_model_uncounted(user: User) -> None:
    model, _, loss_fn = _outside("head")
    user.update(wrap(model, "ddp") if user.world > 1 else model, user.rows(numbers()), loss_fn)


@right(1, 2, 3)
def head_beside_the_model(user: User) -> None:
    """The remedy."""
    model, head, _ = _outside("head")
    references, batch = copy.deepcopy((model, head)), numbers()

    @loss(weigh=lambda batch: len(batch["x"]))
    def both(models: list[nn.Module], batch: Sample) -> tuple[Tensor, int]:
        return _squares(lambda x: models[1](models[0](x)), batch)

    user.update([model, head], user.rows(batch), both)
    mean_square(lambda x: references[1](references[0](x)), batch)
    for each, reference in zip((model, head), references, strict=True):
        user.expect(each, reference)


@right(1, 2, 3)
def frozen_teacher_outside_of_the_model(user: User) -> None:
    """No false refusal: what is outside and is not trained."""
    model, batch = regressor(), numbers()
    reference, teacher = copy.deepcopy(model), regressor().requires_grad_(False)
    distilled = loss(weigh=lambda b: len(b["x"]))(
        lambda model, b: _squares(model, b | {"labels": b["labels"] + teacher(b["x"])})
    )
    user.update(model, user.rows(batch), distilled)
    mean_square(reference, batch | {"labels": batch["labels"] + teacher(batch["x"])})
    user.expect(model, reference)


# Terms and totals.


def _with_unweighed_term(model: nn.Module, batch: Sample, scale: float) -> Any:
    outputs = model(batch["x"])
    term = scale * (outputs**4).sum()
    return {"main": _squares(model, batch), "rare": (term, 0)}


@refused(LossContractError, "'rare'", 1, 2, 3)
def term_without_weight_and_with_a_total(user: User) -> None:
    counted = loss(weigh=lambda batch: {"main": len(batch["x"]), "rare": 0})
    user.update(regressor(), user.rows(numbers()), counted(lambda m, b: _with_unweighed_term(m, b, 1.0)))


@right(1, 2, 3)
def term_without_weight_and_without_a_total(user: User) -> None:
    model, batch = regressor(), numbers()
    reference = copy.deepcopy(model)
    counted = loss(weigh=lambda batch: {"main": len(batch["x"]), "rare": 0})
    user.update(model, user.rows(batch), counted(lambda m, b: _with_unweighed_term(m, b, 0.0)))
    mean_square(reference, batch)
    user.expect(model, reference)


class Amplitude(nn.Module):
    """Complex weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(4, 1, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.weight.dtype) @ self.weight


@refused(LossContractError, "complex", 1, 2)
def complex_total(user: User) -> None:
    counted = loss(weigh=lambda batch: len(batch["x"]))
    user.update(Amplitude(), user.rows(numbers()), counted(lambda m, b: (m(b["x"]).sum(), len(b["x"]))))


@right(1, 2, 3)
def complex_model_clipped(user: User) -> None:
    model, batch = Amplitude(), numbers()
    reference = copy.deepcopy(model)
    counted = loss(weigh=lambda batch: len(batch["x"]))
    user.update(model, user.rows(batch), counted(lambda m, b: _squares(lambda x: m(x).abs(), b)), max_norm=0.01)
    mean_square(lambda x: reference(x).abs(), batch)
    nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    user.expect(model, reference)


# What happens between two calls of one update.


def _between(user: User, oddity: Callable[..., None]) -> None:
    """Two calls, with the oddity after the first."""
    model = regressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = user.accumulator(model)
    accumulator.forward_backward(user.rows(numbers()), losses.mse)
    oddity(accumulator, model, optimizer, user)
    accumulator.forward_backward(user.rows(numbers(3)), losses.mse)
    accumulator.finalize()


def _at_the_end(user: User, oddity: Callable[..., None]) -> None:
    """One call, with the oddity before the update is closed."""
    model = regressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = user.accumulator(model)
    accumulator.forward_backward(user.rows(numbers()), losses.mse)
    oddity(accumulator, model, optimizer, user)
    accumulator.finalize()


def _fails(model: nn.Module, batch: Sample) -> Any:
    raise ArithmeticError("a bad batch")


def caught_error(accumulator: Any, model: nn.Module, optimizer: Any, user: User) -> None:
    try:
        accumulator.forward_backward(numbers(4), _fails)
    except (ArithmeticError, MegabatchError):
        pass


def second_accumulator(accumulator: Any, model: nn.Module, optimizer: Any, user: User) -> None:
    user.accumulator(model).forward_backward(user.rows(numbers(5)), losses.mse)


def zero_grad_of_one_rank(accumulator: Any, model: nn.Module, optimizer: Any, user: User) -> None:
    if user.rank == 0:
        model.zero_grad()


def clipped_by_hand(accumulator: Any, model: nn.Module, optimizer: Any, user: User) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def written(accumulator: Any, model: nn.Module, optimizer: Any, user: User) -> None:
    model[0].weight.grad.mul_(2)


def replaced(accumulator: Any, model: nn.Module, optimizer: Any, user: User) -> None:
    model[0].weight.grad = torch.ones_like(model[0].weight)


ODDITIES: dict[str, Callable[..., None]] = {
    "second_accumulator": second_accumulator,
    "optimizer_zero_grad": lambda accumulator, model, optimizer, user: optimizer.zero_grad(),
    "zeros_by_zero_grad": lambda accumulator, model, optimizer, user: optimizer.zero_grad(set_to_none=False),
    "model_zero_grad": lambda accumulator, model, optimizer, user: model.zero_grad(),
    "optimizer_step": lambda accumulator, model, optimizer, user: optimizer.step(),
    "caught_error": caught_error,
    "gradient_written": written,
    "gradient_replaced": replaced,
    "own_backward": lambda accumulator, model, optimizer, user: mean_square(model, numbers(5)),
}


@refused(MegabatchError, "update", 1, 2, 3, **ODDITIES)
def between_calls(user: User, variant: Callable[..., None]) -> None:
    _between(user, variant)


@refused(MegabatchError, "frozen", 1, 2, 3)
def freezing_between_calls(user: User) -> None:
    _between(user, lambda accumulator, model, optimizer, user: model[0].requires_grad_(False))


@refused(MegabatchError, "update", 2, 3)
def zero_grad_on_one_rank_between_calls(user: User) -> None:
    _between(user, zero_grad_of_one_rank)


@refused(MegabatchError, "update", 1, 2, 3, optimizer_zero_grad=ODDITIES["optimizer_zero_grad"],
         second_accumulator=second_accumulator, clipped=clipped_by_hand, own_backward=ODDITIES["own_backward"])
def before_finalize(user: User, variant: Callable[..., None]) -> None:
    _at_the_end(user, variant)


@refused(MegabatchError, "copy", 1, 2)
def deepcopy_of_an_open_accumulator(user: User) -> None:
    _at_the_end(user, lambda accumulator, model, optimizer, user: copy.deepcopy(accumulator).finalize())


@refused(MegabatchError, "state_dict", 1)
def pickled_accumulator(user: User) -> None:
    pickle.dumps(user.accumulator(regressor()))


@right(1, 2, 3)
def state_kept_while_the_update_goes_on(user: User) -> None:
    """A try that is taken back."""
    model, batch = regressor(), numbers()
    reference, accumulator = copy.deepcopy(model), user.accumulator(model)
    accumulator.forward_backward(user.rows(batch), losses.mse)
    state = accumulator.state_dict()
    accumulator.forward_backward(user.rows(numbers(3)), losses.mse)
    accumulator.load_state_dict(state)
    accumulator.finalize()
    mean_square(reference, batch)
    user.expect(model, reference)


@right(1, 2, 3)
def zero_grad_between_updates(user: User) -> None:
    """No false refusal: two updates, two accumulators, zero_grad and a step between them."""
    model, batch = regressor(), numbers()
    first, second = user.accumulator(model), user.accumulator(model, micro_batch_size=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for accumulator in (first, second, first):
        reference = copy.deepcopy(model)
        reference.zero_grad()
        accumulator.forward_backward(user.rows(batch), losses.mse)
        accumulator.finalize()
        mean_square(reference, batch)
        user.expect(model, reference)
        optimizer.step()
        model.zero_grad(set_to_none=False)


@right(1, 2)
def caught_error_then_a_new_update(user: User) -> None:
    """No false refusal: the update is lost, and is begun again after finalize() said so."""
    model, batch = regressor(), numbers()
    reference, accumulator = copy.deepcopy(model), user.accumulator(model)
    accumulator.forward_backward(user.rows(batch), losses.mse)
    caught_error(accumulator, model, None, user)
    try:
        accumulator.finalize()
        raise AssertionError("finalize() closed an update that was lost")
    except MegabatchError:
        pass
    accumulator.forward_backward(user.rows(batch), losses.mse)
    accumulator.finalize()
    mean_square(reference, batch)
    user.expect(model, reference)


# What sees single microbatches.


@refused(MegabatchError, "hook", 1, 2, 3)
def tensor_hook(user: User) -> None:
    model = regressor()
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    user.update(model, user.rows(numbers()), losses.mse)


@refused(MegabatchError, "hook", 1, 2, 3)
def post_accumulate_hook(user: User) -> None:
    """torch's tutorial of an optimizer in backward."""
    model = regressor()

    def step(parameter: Tensor) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    model[0].weight.register_post_accumulate_grad_hook(step)
    user.update(model, user.rows(numbers()), losses.mse)


@refused(MegabatchError, "hook", 1, 2)
def tensor_hook_that_comes_late(user: User) -> None:
    model = regressor()
    accumulator = user.accumulator(model)
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    accumulator.forward_backward(user.rows(numbers()), losses.mse)
    accumulator.finalize()


@right(1, 2, 3)
def forward_hooks(user: User) -> None:
    """No false refusal: hooks of modules, and a hook of an activation."""
    model, batch = regressor(), numbers()
    reference = copy.deepcopy(model)
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    user.update(model, user.rows(batch), losses.mse)
    mean_square(lambda x: reference[1:](reference[0](x) * 2), batch)
    user.expect(model, reference)


class Positions(nn.Module):
    """Two parameters whose gradients torch gives one memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.position, self.kind = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(5, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x + (self.position[None] + self.kind[None])))


@right(1, 2, 3, one=8, two=4, six=1, clipped=2)
def gradients_that_share_memory(user: User, variant: int) -> None:
    model = Positions().double()
    reference, max_norm = copy.deepcopy(model), 0.01 if variant == 2 else None
    batch = {"x": torch.randn(8, 5, 4).double(), "labels": torch.randn(8, 5, 1).double()}
    user.update(model, user.rows(batch), losses.mse, max_norm=max_norm, micro_batch_size=variant)
    mean_square(reference, batch)
    if max_norm is not None:
        gradients = [each.grad.clone() for each in reference.parameters()]  # each on a memory of its own
        norm = torch.stack([each.norm() for each in gradients]).norm()
        for parameter, gradient in zip(reference.parameters(), gradients, strict=True):
            parameter.grad = gradient * (max_norm / (norm + 1e-6))
    user.expect(model, reference)


@right(1)
def one_microbatch_clipped_whose_gradients_share_memory(user: User) -> None:
    model = Positions().double()
    reference, batch = copy.deepcopy(model), {"x": torch.randn(8, 5, 4).double(), "labels": torch.randn(8, 5, 1).double()}
    user.update(model, batch, losses.mse, max_norm=0.01, micro_batch_size=8)
    mean_square(reference, batch)
    gradients = [each.grad.clone() for each in reference.parameters()]
    norm = torch.stack([each.norm() for each in gradients]).norm()
    for parameter, gradient in zip(reference.parameters(), gradients, strict=True):
        parameter.grad = gradient * (0.01 / (norm + 1e-6))
    user.expect(model, reference)


# Optimizers.


class OwnCount(torch.optim.Optimizer):
    """Divides by its number of steps, which it counts itself."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for parameter in self._trained():
            parameter.sub_(parameter.grad / self.steps)

    def _trained(self) -> list[Tensor]:
        return [each for group in self.param_groups for each in group["params"] if each.grad is not None]


class ByGlobalNorm(OwnCount):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        norm = torch.stack([each.grad.norm() for each in self._trained()]).norm()
        for parameter in self._trained():
            parameter.sub_(parameter.grad / norm)


@refused(PlanError, "step_in_backward", 1, own_count=OwnCount, global_norm=ByGlobalNorm)
def steps_in_backward(user: User, variant: type[torch.optim.Optimizer]) -> None:
    model = regressor()
    accumulator = user.accumulator(model)
    accumulator.step_in_backward(variant(model.parameters()))
    accumulator.forward_backward(numbers(), losses.mse)
    accumulator.finalize()


@right(1)
def adamw_steps_in_backward(user: User) -> None:
    model, batch = regressor(), numbers()
    reference = copy.deepcopy(model)
    accumulator, optimizer = user.accumulator(model), torch.optim.AdamW(reference.parameters(), lr=0.1)
    accumulator.step_in_backward(torch.optim.AdamW(model.parameters(), lr=0.1))
    for _ in range(2):
        accumulator.forward_backward(batch, losses.mse)
        accumulator.finalize()
        reference.zero_grad()
        mean_square(reference, batch)
        optimizer.step()
    user.expect_equal(dict(model.named_parameters()), dict(reference.named_parameters()))


@refused(PlanError, "ReduceLROnPlateau", 1)
def schedule_that_wants_a_metric(user: User) -> None:
    model = regressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    learner = Learner(model, optimizer, user.accumulator(model), scheduler=schedule)
    learner.forward_backward(numbers(), losses.mse)
    learner.optim_step()


# The model.


@refused(PlanError, "TorchScript", 1)
def scripted_model(user: User) -> None:
    user.update(torch.jit.script(regressor()), numbers(), losses.mse)


@refused(MegabatchError, "GradientAccumulator", 1, 2, half=torch.float16, bfloat16=torch.bfloat16)
def cast_after_the_accumulator_was_made(user: User, variant: torch.dtype) -> None:
    model = regressor().float()
    accumulator = user.accumulator(model, accumulate_dtype=torch.float32)
    model.to(variant)
    batch = user.rows(numbers())
    batch = batch and {"x": batch["x"].to(variant), "labels": batch["labels"].float()}
    counted = loss(weigh=lambda batch: len(batch["x"]))
    accumulator.forward_backward(batch, counted(lambda m, b: _squares(lambda x: m(x).float(), b)))
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
        return _squares(lambda x: model(x, images), batch)

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
    user.update(model, batch, counted(lambda m, b: _squares(lambda x: m(x, b.get("images")), b)))


@refused(MegabatchError, "no_grad", 2, 3)
def gradient_past_ddp(user: User) -> None:
    """A forward without gradients through DDP, and the forward with them past it."""
    model = DistributedDataParallel(regressor())

    @loss(weigh=lambda batch: len(batch["x"]))
    def past(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
        with torch.no_grad():
            model(batch["x"])
        return _squares(model.module, batch)

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
        return _squares(model, batch | {"labels": batch["labels"] + teacher})

    user.update(model, user.rows(batch), taught)
    with torch.no_grad():
        labels = batch["labels"] + reference(batch["x"])
    mean_square(reference, batch | {"labels": labels})
    user.expect(model, reference)


def other_seeds(model: nn.Module, rank: int) -> None:
    torch.manual_seed(rank)
    for parameter in model.parameters():
        nn.init.normal_(parameter)


def other_frozen_layers(model: nn.Module, rank: int) -> None:
    model[1 + rank % 2].requires_grad_(False)


def frozen_layers_of_other_sizes(model: nn.Module, rank: int) -> None:
    model[3 * (rank % 2)].requires_grad_(False)


def other_dtypes(model: nn.Module, rank: int) -> None:
    model.to(torch.float32 if rank else torch.float64)


@refused(PlanError, "rank", 2, 3, seeds=other_seeds, frozen=other_frozen_layers,
         frozen_sizes=frozen_layers_of_other_sizes, dtypes=other_dtypes)  # fmt: skip
def plain_ranks_with_other_models(user: User, variant: Callable[[nn.Module, int], None]) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)).double()
    variant(model, user.rank)
    dtype, batch = model[0].weight.dtype, user.rows(numbers())
    user.update(model, batch and {key: value.to(dtype) for key, value in batch.items()}, losses.mse)


@refused(PlanError, "sync", 2, 3, plain="plain", ddp="ddp")
def ranks_with_other_sync(user: User, variant: str) -> None:
    model = wrap(regressor(), variant)
    user.update(model, user.rows(numbers()), losses.mse, sync="last" if user.rank else "every")


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
