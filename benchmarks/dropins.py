"""Loops of other libraries, and the same with exact updates: the error of the gradient, and seconds per update.

The error: a small GPT-2 in float64 on samples of uneven length; each update's gradient, as the optimizer gets it at a
rate of zero, against plain torch's of the same samples at once. The seconds: those of `benchmarks.speed` on GSM8K, or
on the standard library where there is no file of it; medians of runs in turns. python -m benchmarks.dropins [--write]
"""

import argparse
import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from benchmarks import result
from benchmarks.speed import data
from benchmarks.speed.__main__ import GSM8K, Cell
from benchmarks.speed.setting import FULL, QUICK, Setting
from megabatch import losses
from megabatch.batching.samples import pad_right
from megabatch.integrations.accelerate import learner
from megabatch.integrations.lightning import ExactUpdates
from megabatch.integrations.transformers import MegabatchTrainer

SIZE, ACCUMULATED, NUM_UPDATES, VOCABULARY = 4, 4, 4, 64
CUT = {"max_microbatch_tokens": 256}
Gradients = list[dict[str, Tensor]]  # of each update
Samples = list[dict[str, Tensor]]


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=256, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


def samples() -> Samples:
    """Of 2 to 200 tokens, most of them short."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.empty(SIZE * ACCUMULATED * NUM_UPDATES).log_normal_(3.0, 1.0, generator=generator).clamp(2, 200)
    made = [torch.randint(VOCABULARY, (int(length),), generator=generator) for length in lengths]
    return [{"input_ids": ids, "labels": ids} for ids in made]


def exact() -> Gradients:
    """By plain torch: the samples of each update at once, one division."""
    model, found = gpt2(), []
    for start in range(0, len(samples()), SIZE * ACCUMULATED):
        batch = pad_right(samples()[start : start + SIZE * ACCUMULATED])
        logits, labels = model(batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
        model.zero_grad()
        nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        found.append(gradients(model))
    return found


def gradients(model: nn.Module) -> dict[str, Tensor]:
    named = {name.removeprefix("model."): each.grad for name, each in model.named_parameters()}
    return {name: grad.clone() for name, grad in named.items() if grad is not None}


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of the whole gradient, relative."""
    off = torch.stack([(found[name] - each).norm() for name, each in expected.items()]).norm()
    return float(off / torch.stack([each.norm() for each in expected.values()]).norm())


class Kept(TrainerCallback):
    def __init__(self, found: Gradients) -> None:
        self.found = found

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        self.found.append(gradients(model))


def mean(model: Any, inputs: Any) -> Tensor:
    """What an own compute_loss usually returns: a mean over the microbatch."""
    logits, labels = model(inputs["input_ids"]).logits[:, :-1], inputs["labels"][:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def trained(kind: type[Trainer], found: Gradients, **given: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_train_batch_size=SIZE, gradient_accumulation_steps=ACCUMULATED, num_train_epochs=1,
            learning_rate=0.0, optim="sgd", max_grad_norm=0.0, train_sampling_strategy="sequential", report_to=[],
            save_strategy="no", use_cpu=True, dataloader_pin_memory=False, disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        kind(
            gpt2(), args, data_collator=pad_right, train_dataset=samples(), callbacks=[Kept(found)], **given
        ).train()  # fmt: skip


class MeanTrainer(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Tensor:
        return mean(model, inputs)


class ExactMeanTrainer(MegabatchTrainer):
    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Tensor:
        return mean(model, inputs)


def accumulated(found: Gradients) -> None:
    """As Accelerate's guide to gradient accumulation says."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(), SIZE, collate_fn=pad_right))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                found.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad()


def learned(found: Gradients) -> None:
    accelerator, model = Accelerator(cpu=True), gpt2()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    made = learner(accelerator, model, optimizer, **CUT)
    for batch in DataLoader(samples(), SIZE * ACCUMULATED, collate_fn=list):
        made.forward_backward(batch, losses.next_token)
        made.optim_step()
        found.append(gradients(model))


def lightning(is_exact: bool, found: Gradients) -> None:
    from lightning import pytorch as pl  # of the extra dev

    class Module(pl.LightningModule):
        model: GPT2LMHeadModel

        def forward(self, input_ids: Tensor) -> Any:
            return self.model(input_ids)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            found.append(gradients(self))

    class Usual(Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt2()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.model(**batch).loss

    class Exact(ExactUpdates, Module):
        def __init__(self) -> None:
            super().__init__(losses.next_token, batches_per_update=ACCUMULATED, **CUT)
            self.model = gpt2()

    more: dict[str, Any] = {} if is_exact else {"accumulate_grad_batches": ACCUMULATED}
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_model_summary=False, enable_progress_bar=False, **more,
    )  # fmt: skip
    trainer.fit(
        Exact() if is_exact else Usual(), DataLoader(samples(), SIZE, collate_fn=list if is_exact else pad_right)
    )


LOOPS: dict[str, tuple[Callable[[Gradients], None], Callable[[Gradients], None]]] = {
    "Trainer": (lambda found: trained(Trainer, found), lambda found: trained(MegabatchTrainer, found, **CUT)),
    "Trainer, compute_loss of one's own": (
        lambda found: trained(MeanTrainer, found),
        lambda found: trained(ExactMeanTrainer, found, **CUT),
    ),
    "Accelerate": (accumulated, learned),
    "Lightning": (lambda found: lightning(False, found), lambda found: lightning(True, found)),
}
CONTESTANTS = {
    "Trainer": ("hf", "hf_exact"),
    "Accelerate": ("accelerate", "accelerate_exact"),
    "Lightning": ("lightning", "lightning_exact"),
}


def worst_error(loop: Callable[[Gradients], None], expected: Gradients) -> float:
    """Of all updates."""
    found: Gradients = []
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        loop(found)
    return max(error(*pair) for pair in zip(found, expected, strict=True))


def timed(name: str, gsm8k: Path, repeats: int, setting: Setting) -> dict[str, dict[str, Any]]:
    """The rows of `benchmarks.speed` of every contestant, on one process."""
    samples = data.drawn(data.pool(name, FULL.max_microbatch_tokens, gsm8k, quick=setting == QUICK), setting)
    cells = {each: Cell(name, 1, each, setting, samples) for pair in CONTESTANTS.values() for each in pair}
    for _ in range(repeats):
        for cell in cells.values():
            cell.run()
    return {each: cell.row() for each, cell in cells.items()}


def line(name: str, row: dict[str, Any]) -> str:
    """Of the table."""
    seconds = f"{row['seconds_before']:12.2f}{row['seconds_after']:10.2f}" if "seconds_before" in row else ""
    return f"{name:36}{row['error_before']:14.1e}{row['error_after']:10.1e}{seconds}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dropins")
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gsm8k", type=Path, default=GSM8K, help="a JSON object a line: question, answer")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works; its times say nothing")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    made = result.made_with(["transformers", "accelerate", "lightning"])
    expected = exact()
    rows: dict[str, Any] = {
        name: {"error_before": worst_error(before, expected), "error_after": worst_error(after, expected)}
        for name, (before, after) in LOOPS.items()
    }
    data_set = "gsm8k" if asked.gsm8k.exists() else "stdlib"
    speed = timed(data_set, asked.gsm8k, asked.repeats, QUICK if asked.quick else FULL)
    for name, (before, after) in CONTESTANTS.items():
        rows[name] |= {"seconds_before": speed[before]["seconds_per_update"],
                       "seconds_after": speed[after]["seconds_per_update"]}  # fmt: skip
    print(f"error of the gradient, and seconds of an update on {data.NAMES[data_set]}")
    print(f"{'loop':36}{'error before':>14}{'after':>10}{'s before':>12}{'after':>10}")
    for name, row in rows.items():
        print(line(name, row))
    if asked.write:
        found = {"claim": str(__doc__).partition("\n")[0], "data": data_set, "rows": rows, "speed": speed}
        print(result.write(result.dated("dropins"), found | made))


if __name__ == "__main__":
    main()
