"""Input mutations of batches: padding, masks, labels, shapes, and what becomes of a batch."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch import LossContractError, MegabatchError, PlanError, UpdateSampler, loss, losses
from megabatch.batching import Padded
from megabatch.verification.float64_copy import Float64WithoutDropout
from tests.exact.inputs import Sample, User, as_samples, mean_square, numbers, refused, regressor, right, squares
from tests.exact.tiny import PAD, VOCABULARY, tiny

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
    user.update(model, user.part(samples), from_goals, batching=Padded({"goal": -1}))
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
    """A batch of tokenizer(padding="max_length") and ``labels = input_ids.clone()``."""
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


@refused(MegabatchError, "labels", 1, 2, 3, numbers=torch.float64, counts=torch.int64)
def mse_of_other_lengths(user: User, variant: torch.dtype) -> None:
    samples = [{"x": torch.randn(n, 4).double(), "labels": torch.randn(n, 1).to(variant)} for n in LENGTHS]
    user.update(regressor(), user.part(samples), losses.mse)


@refused(LossContractError, "shape", 1, 2)
def classes_in_the_second_dim(user: User) -> None:
    """torch's own order of a segmentation, [B, C, H, W], with as many classes as columns."""
    batch = {"x": torch.randn(8, 1, 5, 3).double(), "labels": torch.randint(3, (8, 5, 3))}
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


@refused(PlanError, "dense", 1, jagged=torch.jagged, strided=torch.strided)
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


@refused(PlanError, "mapping", 1, 2, 3)
def samples_as_pairs(user: User) -> None:
    """Samples of a torch Dataset."""
    user.update(regressor(), user.part([(each["x"], each["labels"]) for each in as_samples(numbers())]), losses.mse)


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
        return squares(model, batch)

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

    loss_fn = losses.mse if variant else squares
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


@right(2, 3)
def sampler_that_is_not_told_its_rank(user: User) -> None:
    """The process group says whose share it is: else every rank would train on every sample."""
    model, batch = regressor(), numbers()
    reference = copy.deepcopy(model)
    (share,) = UpdateSampler([1] * 8, global_batch_size=8)
    user.update(model, [as_samples(batch)[index] for index in share], losses.mse)
    mean_square(reference, batch)
    user.expect(model, reference)
    assert len(share) < 8, "every rank has every sample"


# No false refusals.


@right(1, 2, 3)
def mask_of_bools_of_other_lengths(user: User) -> None:
    """False is what a mask is padded with."""
    model = nn.Embedding(VOCABULARY, 1).double()
    torch.manual_seed(1)
    nn.init.normal_(model.weight)
    reference = copy.deepcopy(model)

    @loss(weigh=lambda batch: batch["counts"].sum())
    def where_it_counts(model: nn.Module, batch: Sample) -> tuple[Tensor, Tensor]:
        return (model(batch["input_ids"]).squeeze(-1)[batch["counts"]] ** 2).sum(), batch["counts"].sum()

    samples = texts(counts=lambda number, ids: ids % 2 == 0)
    user.update(model, user.part(samples), where_it_counts)
    ids, counts = (torch.cat([sample[key] for sample in samples]) for key in ("input_ids", "counts"))
    (reference(ids[counts]) ** 2).mean().backward()
    user.expect(model, reference)


@right(1, 2, 3)
def labels_of_bools_of_one_length(user: User) -> None:
    torch.manual_seed(1)
    model, batch = nn.Linear(4, 3).double(), numbers() | {"labels": torch.arange(24).reshape(8, 3) % 5 < 2}
    reference = copy.deepcopy(model)

    @loss(weigh=lambda batch: batch["labels"].numel())
    def several_classes(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
        logits, labels = model(batch["x"]), batch["labels"]
        total = F.binary_cross_entropy_with_logits(logits, labels.double(), reduction="sum")
        return total, labels.numel()

    user.update(model, user.part(as_samples(batch)), several_classes)
    F.binary_cross_entropy_with_logits(reference(batch["x"]), batch["labels"].double()).backward()
    user.expect(model, reference)


@right(1, 2)
def numbers_as_labels_of_other_lengths(user: User) -> None:
    """A loss of the user's own leaves out -100."""
    model = regressor()
    reference = copy.deepcopy(model)

    @loss(weigh=lambda batch: (batch["labels"] != -100).sum())
    def series(model: nn.Module, batch: Sample) -> tuple[Tensor, Tensor]:
        real = batch["labels"] != -100
        return ((model(batch["x"]) - batch["labels"])[real] ** 2).sum(), real.sum()

    drawn = torch.Generator().manual_seed(5)
    samples = [
        {"x": torch.randn(n, 4, generator=drawn).double(), "labels": torch.rand(n, 1, generator=drawn).double()}
        for n in LENGTHS
    ]
    user.update(model, user.part(samples), series)
    mean_square(reference, *samples)
    user.expect(model, reference)


@right(1)
def embeddings_in_place_of_tokens(user: User) -> None:
    model = tiny("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    reference, ids = copy.deepcopy(model), torch.arange(40).reshape(8, 5) + 1
    batch = {"inputs_embeds": torch.randn(8, 5, 16).double(), "labels": ids}
    user.update(model, user.rows(batch), losses.next_token)
    mean_next_token(reference, batch)
    user.expect(model, reference)


@right(1, 2)
def checkpointed_language_model(user: User) -> None:
    model = tiny("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    reference, samples = copy.deepcopy(model), texts(labels=itself)
    model.gradient_checkpointing_enable()
    user.update(model, user.part(samples), losses.next_token)
    mean_next_token(reference, padded(samples, labels=-100))
    user.expect(model, reference)
