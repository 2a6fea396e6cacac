"""Code of Trainer users under MegabatchTrainer: losses, collators, loaders, hooks. Jobs of two launches."""

import contextlib
import itertools
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DataCollatorWithFlattening,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForSequenceClassification,
    PretrainedConfig,
    Seq2SeqTrainer,
)

from megabatch.integrations.transformers import MegabatchTrainer
from tests.exact import models, oracle
from tests.exact.foreign import as_torchrun
from tests.integrations.trainers import ACCUMULATED, PER_DEVICE, Recorder, arguments, without_wrapper

PAD = 3  # a token that is not 0
LENGTHS = [5, 5, 7, 4, 9, 6, 3, 8, 5, 7, 4, 6]
LABELS = [0, 0, 1, 0, 2, 1, 2, 1, 0, 2, 1, 1]  # the first two share class and length
WEIGHTS = torch.tensor([1.0, 5.0, 2.0], dtype=torch.float64)


class Tiny(nn.Module):
    """Logits of a class for each row, of its tokens' mean."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 8)
        self.head = nn.Linear(8, outputs)
        self.config = PretrainedConfig()
        self.seen: list[Any] = []  # what it was fed
        self.double()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, y: Tensor | None = None) -> dict[str, Tensor]:
        if self.training:
            self.seen.append(input_ids.tolist())
        is_there = (input_ids != PAD)[..., None].double()
        logits = self.head((self.embed(input_ids) * is_there).sum(1) / is_there.sum(1))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def samples(**changed: list[Any]) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    columns = {"labels": LABELS} | changed
    return [
        {"input_ids": torch.randint(4, 32, (length,), generator=generator)}
        | {name: values[index] for name, values in columns.items()}
        for index, length in enumerate(LENGTHS)
    ]


def padded(chosen: list[dict[str, Any]]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([each["input_ids"] for each in chosen], batch_first=True, padding_value=PAD)
    return {"input_ids": ids} | {
        name: torch.tensor([s[name] for s in chosen]) for name in chosen[0] if name != "input_ids"
    }


def texts() -> list[dict[str, Any]]:
    """Samples of a language model: labels are the tokens, a prompt is no target."""
    made = []
    for index, each in enumerate(samples()):
        labels = each["input_ids"].clone()
        labels[: index % 3] = -100
        made.append({"input_ids": each["input_ids"], "labels": labels})
    return made


def padded_texts(chosen: list[dict[str, Any]], to: int | None = None, labels_of_pads: int = -100) -> dict[str, Tensor]:
    longest = to or max(len(each["input_ids"]) for each in chosen)
    fills = {"input_ids": PAD, "labels": labels_of_pads}
    found = {name: torch.stack([F.pad(each[name], (0, longest - len(each[name])), value=fill) for each in chosen])
             for name, fill in fills.items()}  # fmt: skip
    mask = torch.stack([torch.arange(longest) < len(each["input_ids"]) for each in chosen]).long()
    return found | {"attention_mask": mask}


def bart() -> nn.Module:
    torch.manual_seed(0)
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder")
             for name, size in {"layers": 1, "attention_heads": 2, "ffn_dim": 16}.items()}  # fmt: skip
    config = BartConfig(vocab_size=32, d_model=16, dropout=0.0, pad_token_id=PAD, **sizes)
    return BartForConditionalGeneration(config).double()


def gpt2() -> nn.Module:
    model = models.gpt2(torch.float64)  # whose norms stay in float64
    model.config.use_cache = False
    return model


def crossing() -> nn.Module:
    """A model whose eager attention lets the samples of a row see each other."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_local_experts=2, num_experts_per_tok=1, use_cache=False,
    )  # fmt: skip
    return GptOssForCausalLM(config)


def classifier() -> nn.Module:
    """A decoder, which finds the last token of a row by its pad token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_labels=3,
        pad_token_id=PAD, bos_token_id=1, eos_token_id=2, use_cache=False,
    )  # fmt: skip
    return LlamaForSequenceClassification(config).double()


def scores(model: nn.Module, inputs: Any) -> Tensor:
    return model(input_ids=inputs["input_ids"])["logits"]


def weighted(model, inputs):
    return F.cross_entropy(scores(model, inputs), inputs["labels"], weight=WEIGHTS)


def by_length(model, inputs):
    each = F.cross_entropy(scores(model, inputs), inputs["labels"], reduction="none")
    lengths = (inputs["input_ids"] != PAD).sum(1)
    return (each * lengths).sum() / lengths.sum()


def pairwise(model, inputs):
    ranks = scores(model, inputs)[:, 0]
    differ = inputs["labels"][:, None] > inputs["labels"][None]
    return (-F.logsigmoid(ranks[:, None] - ranks[None]) * differ).sum() / len(ranks)


def focal(model, inputs):
    likely = -F.cross_entropy(scores(model, inputs), inputs["labels"], reduction="none")
    return (-((1 - likely.exp()) ** 2) * likely).mean()


def squared(model, inputs):
    return F.mse_loss(scores(model, inputs)[:, 0], inputs["labels" if "labels" in inputs else "y"])


def squared_outputs(outputs, labels, num_items_in_batch=None):
    return F.mse_loss(outputs["logits"][:, 0], labels)


def next_tokens(model, inputs):
    given = {name: value for name, value in inputs.items() if name not in ("labels", "flat")}
    labels = inputs["labels"][:, 1:]
    return F.cross_entropy(model(**given).logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=-100)


def noisy(model, inputs):
    """One draw for all rows, of three generators."""
    return squared(model, inputs) * (1 + 0.5 * (torch.randn(1).item() + np.random.rand() + random.random()))


def variational(model, inputs):
    """A draw for each row."""
    mean, spread = scores(model, inputs).chunk(2, 1)
    code = mean + spread * torch.randn_like(mean) + torch.rand(len(mean), 1, dtype=mean.dtype)
    return code.square().mean()


def noisy_weighted(model, inputs):
    return weighted(model, inputs) * (1 + torch.rand(()).item())


CALLS = itertools.count()


def unseeded(model, inputs):
    """As with a generator that no seed reaches."""
    return squared(model, inputs) * (1 + next(CALLS) % 7)


def numpy_rows(model, inputs):
    return (scores(model, inputs)[:, 0] * torch.tensor(np.random.rand(len(inputs["input_ids"])))).mean()


def not_a_number(model, inputs):
    return weighted(model, inputs) * float("nan")


def standardized(model, inputs):
    """NaN for a row alone, which has no spread."""
    ranks = scores(model, inputs)[:, 0]
    return F.mse_loss((ranks - ranks.mean()) / ranks.std(), inputs["labels"])


@dataclass(frozen=True)
class Case:
    """The model and trainer of a user, and the loss of an uncut update (None: it draws, and is not compared)."""

    loss: Callable[..., Tensor] | None
    model: Callable[[], nn.Module] = Tiny
    data: Callable[[], list[Any]] = samples
    collate: Callable[..., Any] = padded
    uncut: Callable[..., Any] | None = None  # collates the whole update; None: `collate`
    own: bool = True  # compute_loss is overridden with the loss
    settings: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    members: dict[str, Any] = field(default_factory=dict)
    per_device: int = PER_DEVICE
    compared: bool = True
    bases: tuple[type[Any], ...] = (MegabatchTrainer,)


def collated_loader(self) -> DataLoader:
    """As most write it: batches that are collated, each as wide as its longest row."""
    world, rank = self.args.world_size, self.args.process_index
    chosen = [each for index, each in enumerate(self.train_dataset) if index // PER_DEVICE % world == rank]
    return DataLoader(chosen, batch_size=PER_DEVICE, collate_fn=self.data_collator)


def listed_loader(self) -> DataLoader:
    return DataLoader(self.train_dataset, batch_size=PER_DEVICE, collate_fn=list)


def tensor_loader(self) -> DataLoader:
    return DataLoader(
        self.train_dataset, batch_size=PER_DEVICE, collate_fn=lambda chosen: list(padded(chosen).values())
    )


def masks_labels(inputs: Any) -> Any:
    """Tokens above 20 are no targets."""
    inputs = {**inputs}
    inputs["labels"] = torch.where(inputs["labels"] > 20, -100, inputs["labels"])
    return inputs


def masking(self, inputs):
    return masks_labels(MegabatchTrainer._prepare_inputs(self, inputs))


SCALE = [1.0]


@contextlib.contextmanager
def tripled():
    SCALE[0] = 3.0
    try:
        yield
    finally:
        SCALE[0] = 1.0


def scaled(model, inputs):
    return squared(model, inputs) * SCALE[0]


def reads_inputs(self, model, inputs, num_items_in_batch=None):
    inputs["input_ids"].clamp_(max=30)
    return MegabatchTrainer.training_step(self, model, inputs, num_items_in_batch)


def replaces_inputs(self, model, inputs, num_items_in_batch=None):
    return MegabatchTrainer.training_step(self, model, list(inputs), num_items_in_batch)


def own_step(self, model, inputs, num_items_in_batch=None):
    return torch.zeros(())


def timed_step(self, model, inputs, num_items_in_batch=None):
    return MegabatchTrainer.training_step(self, model, inputs, num_items_in_batch)


def one_alone(chosen: list[Any]) -> dict[str, Tensor]:
    (only,) = chosen
    return {name: torch.as_tensor(value)[None] for name, value in only.items()}


def first_alone(chosen: list[Any]) -> dict[str, Tensor]:
    return one_alone(chosen[:1])


def flat(chosen: list[Any]) -> dict[str, Tensor]:
    return DataCollatorWithFlattening(return_tensors="pt")(
        [{name: value.tolist() for name, value in each.items()} for each in chosen]
    )


def drawn_texts(chosen: list[Any]) -> dict[str, Tensor]:
    """As a masked language model's: what is a target is drawn."""
    found = padded_texts(chosen)
    found["labels"] = torch.where(torch.rand(found["labels"].shape) < 0.5, found["labels"], -100)
    return found


def targets_by_weight(self, microbatch):
    return WEIGHTS[microbatch["labels"]].sum()


NUMBERS = [0.5, -100.0, 2.0, -1.0, 3.0, -100.0, 1.5, 0.0, 2.5, -2.0, 1.0, 0.25]
GROUPED = sorted(LABELS)  # one class, then another: the first update has no class but 0

CASES: dict[str, Case] = {
    # what is right
    "classes": Case(None),
    "focal": Case(focal),
    "class weights, counted": Case(weighted, members={"count_targets": targets_by_weight}),
    "floats": Case(squared, lambda: Tiny(1), lambda: samples(labels=NUMBERS)),
    "no labels": Case(squared, lambda: Tiny(1), lambda: [{"input_ids": s["input_ids"], "y": s["labels"]}
                                                         for s in samples(labels=NUMBERS)]),
    "smoothed": Case(lambda m, b: F.cross_entropy(scores(m, b), b["labels"], label_smoothing=0.1), own=False,
                     settings={"label_smoothing_factor": 0.1}),
    "function": Case(squared, lambda: Tiny(1), lambda: samples(labels=NUMBERS), own=False,
                     arguments={"compute_loss_func": squared_outputs}),
    "pads": Case(None, classifier),
    "one row": Case(focal, collate=one_alone, uncut=padded, per_device=1),
    "first row": Case(focal, collate=first_alone, uncut=padded, per_device=1),
    "flat": Case(next_tokens, gpt2, texts, flat, padded_texts),
    "flat, default": Case(next_tokens, gpt2, texts, flat, padded_texts, own=False),
    "collated": Case(None, members={"get_train_dataloader": collated_loader}),
    "collated, capped": Case(None, members={"get_train_dataloader": collated_loader},
                             arguments={"max_microbatch_tokens": 12}),
    "collated texts": Case(next_tokens, gpt2, texts, padded_texts,
                           members={"get_train_dataloader": collated_loader}, own=False),
    "listed": Case(focal, members={"get_train_dataloader": listed_loader}),
    "sequence to sequence": Case(None, bart, texts, padded_texts, bases=(MegabatchTrainer, Seq2SeqTrainer)),
    "masking": Case(next_tokens, gpt2, texts, padded_texts, lambda s: masks_labels(padded_texts(s)),
                    members={"_prepare_inputs": masking}),
    "masking, default": Case(next_tokens, gpt2, texts, padded_texts, lambda s: masks_labels(padded_texts(s)),
                             members={"_prepare_inputs": masking}, own=False),
    "context": Case(scaled, lambda: Tiny(1), lambda: samples(labels=NUMBERS),
                    members={"compute_loss_context_manager": lambda self: tripled()}),
    "timed": Case(focal, members={"training_step": timed_step}),
    "unchecked": Case(focal, arguments={"check_loss": False}),
    # random numbers: nothing to compare with, and no mean is denied
    "noisy": Case(noisy, lambda: Tiny(1), lambda: samples(labels=NUMBERS), compared=False),
    "variational": Case(variational, lambda: Tiny(6), compared=False),
    "drawn collator": Case(next_tokens, gpt2, texts, drawn_texts, compared=False),
    # right or refused
    "max_length": Case(next_tokens, gpt2, texts, lambda s: padded_texts(s, 12, PAD), own=False),
    "max_length, own": Case(next_tokens, gpt2, texts, lambda s: padded_texts(s, 12, PAD)),
    # what is wrong
    "class weights": Case(weighted),
    "class weights, alone": Case(weighted, per_device=1),
    "class weights, sorted": Case(weighted, data=lambda: samples(labels=GROUPED), settings={"num_train_epochs": 2}),
    "class weights, collated": Case(weighted, members={"get_train_dataloader": collated_loader}),
    "length weights": Case(by_length),
    "pairwise": Case(pairwise),
    "noisy weights": Case(noisy_weighted),
    "unseeded": Case(unseeded, lambda: Tiny(1), lambda: samples(labels=NUMBERS)),
    "numpy rows": Case(numpy_rows),
    "nan": Case(not_a_number, compared=False),
    "nan alone": Case(standardized, lambda: Tiny(1), lambda: samples(labels=NUMBERS)),
    "count": Case(focal, members={"count_targets": lambda self, microbatch: 1}),
    "tensors": Case(focal, members={"get_train_dataloader": tensor_loader}),
    "reads inputs": Case(focal, members={"training_step": reads_inputs}),
    "replaces inputs": Case(focal, members={"training_step": replaces_inputs}),
    "flat, crossing": Case(None, crossing, texts, flat),
    "flat, crossing, own": Case(next_tokens, crossing, texts, flat),
    "own step": Case(focal, members={"training_step": own_step}),
}  # fmt: skip


def trainer_of(case: Case, folder: str, **changed: Any) -> tuple[MegabatchTrainer, Recorder]:
    members = dict(case.members)
    if case.loss is not None and case.own:
        loss = case.loss
        members["compute_loss"] = lambda self, model, inputs, return_outputs=False, num_items_in_batch=None: loss(
            model, inputs
        )
    recorder = Recorder()
    settings = {
        "per_device_train_batch_size": case.per_device,
        "gradient_accumulation_steps": PER_DEVICE * ACCUMULATED // case.per_device,
    }
    kind, args = type("Users", case.bases, members), arguments(folder, **settings | case.settings | changed)
    vars(args).update(generation_config=None, predict_with_generate=False)  # of Seq2SeqTrainingArguments
    trainer = kind(
        model=case.model(), args=args, train_dataset=case.data(),
        data_collator=case.collate, callbacks=[recorder], **case.arguments,
    )  # fmt: skip
    return trainer, recorder


def exactness(case: Case) -> dict[str, Any]:
    """Errors of every update's gradient against that of the loss of all its samples at once; or why it is refused."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, recorder = trainer_of(case, folder)
        try:
            trainer.train()
        except Exception as error:
            return {"refused": f"{type(error).__name__}: {error}"}
    size, errors = PER_DEVICE * ACCUMULATED * (dist.get_world_size() if dist.is_initialized() else 1), []
    chosen = case.data()
    for number, found in enumerate(recorder.gradients):
        model, update = case.model(), chosen[number * size : (number + 1) * size]
        inputs = (case.uncut or case.collate)(update)
        with tripled() if "compute_loss_context_manager" in case.members else contextlib.nullcontext():
            loss = model(**inputs)["loss"] if case.loss is None else case.loss(model, inputs)
        loss.backward()
        expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        errors.append(oracle.whole_error(without_wrapper(found), expected) if case.compared else 0.0)
    is_dropped = all(each is None for found in recorder.gradients for each in found.values())
    return {"errors": errors, "updates": -(-len(chosen) // size), "dropped": is_dropped}


class Metered(MegabatchTrainer):
    """Keeps metrics, as TRL's trainers do, and asks all ranks for them in its loss."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        self.metrics: dict[str, list[float]] = {"train": [], "eval": []}
        self.num_calls = 0
        super().__init__(*positional, **named)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.num_calls += 1
        loss = focal(model, inputs)
        mean = self.accelerator.gather(loss.detach()).mean()
        self.metrics["train" if self.model.training else "eval"].append(float(mean))
        self.log({"inside": float(mean)})
        return loss


def traces() -> dict[str, Any]:
    """Three samples on one rank or two, so that a rank may have none; what is there after the only update."""
    recorder, model, drawn = Recorder(), Tiny(), []
    data = samples()[:1] if dist.is_initialized() and dist.get_world_size() == 2 else samples()[:3]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Metered(
            model=model, args=arguments(folder), train_dataset=data, data_collator=padded, callbacks=[recorder]
        )
        own = trainer.training_step

        def step(*given: Any) -> Tensor:
            before = [torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()]
            found = own(*given)
            after = [torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()]
            drawn.append(not (torch.equal(before[0], after[0]) and before[1:] == after[1:]))
            return found

        trainer.training_step = step
        trainer.train()
    return {
        "eval": trainer.metrics["eval"], "train": len(trainer.metrics["train"]), "calls": trainer.num_calls,
        "seen": len(model.seen), "logged": sum("inside" in each for each in recorder.logged), "drawn": any(drawn),
        "log": "log" in vars(trainer), "updates": trainer.state.global_step,
    }  # fmt: skip


def others() -> dict[str, Any]:
    """Cases without training: evaluation with settings that are refused, and the knowledge of Accelerate's loaders."""
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(folder, accelerator_config={"split_batches": True}, remove_unused_columns=False)
        trainer = MegabatchTrainer(Tiny(), args, padded, samples(), samples())
        evaluated = trainer.evaluate()["eval_loss"]
        loader = trainer.get_train_dataloader()
        try:
            trainer.train()
            refused = "nothing"
        except Exception as error:
            refused = f"{type(error).__name__}: {error}"
    return {
        "evaluated": evaluated, "refused": refused,
        "loader": [loader.total_batch_size, loader.total_dataset_length],
    }  # fmt: skip


def run_job(name: str) -> Any:
    with as_torchrun():
        if name in ("traces", "others"):
            return {"traces": traces, "others": others}[name]()
        return exactness(CASES[name])
