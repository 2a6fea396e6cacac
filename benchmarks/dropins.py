"""Other libraries' loops before and after megabatch: gradient error, lines changed and seconds of an update.

    python -m benchmarks.dropins --write               # measures, and writes the result, a row at a time
    python -m benchmarks.dropins --table               # writes the table of docs/benchmarks.md, from the result
    python -m benchmarks.dropins --only "DPO|KTO"

Errors: a small GPT-2 in float64 on samples of uneven length, 4 microbatches of 4 samples an update, a learning rate of
zero. The reference is plain torch, or TRL's own loss, with all samples of the update at once. The error is the largest
of all updates.

Seconds: a wider GPT-2 in float32, 32 samples an update, one thread; the median time between optimizer steps. The
microbatches of each loop have 1, 2, 4 or 8 samples, whichever needs the least CPU time, or 512 tokens where megabatch
cuts them. torchtitan and torchtune run in environments of their own (TITAN_PYTHON, TUNE_PYTHON), on the data and the
models of `tests.integrations.titan_runs` and `tune_runs`.
"""

import argparse
import contextlib
import difflib
import inspect
import io
import itertools
import json
import logging
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

from benchmarks import result
from megabatch import GradientAccumulator, losses
from megabatch.core.right_padding import pad_right
from tests.exact import oracle
from tests.integrations.test_torchtitan import run_titan
from tests.integrations.test_torchtune import find_recipe, patched, run_tune
from tests.integrations.trl_users import text, tokenizer, uncut

IGNORED = -100
SMALL, LARGE = 16, 32  # samples of an update: for errors, and for seconds
UPDATES, WIDTHS = {SMALL: 4, LARGE: 6}, {SMALL: 64, LARGE: 96}
CAP = {"max_microbatch_tokens": 512}
SIZES = (1, 2, 4, 8)  # samples of a microbatch
PAGE = result.ROOT / "docs" / "benchmarks.md"
START, END = "<!-- dropins: python -m benchmarks.dropins --table -->\n", "<!-- end of dropins -->"
Samples = list[dict[str, Any]]
Gradient = dict[str, Tensor]
Make = Callable[..., tuple[type[Any], dict[str, Any]]]  # a trainer and its arguments, of a job


@dataclass
class Job:
    """One run of a loop, and the gradient and the time at each of its optimizer steps."""

    size: int  # samples of a microbatch
    update: int  # samples
    data: Samples
    model: nn.Module
    reference: nn.Module  # of DPO and KTO
    folder: str
    gradients: list[Gradient] = field(default_factory=list[Gradient])
    times: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])  # CPU and wall

    @property
    def steps(self) -> int:
        return self.update // self.size

    @property
    def num_updates(self) -> int:
        return UPDATES[self.update]

    def note(self, *_: Any) -> None:
        self.times.append((time.process_time(), time.perf_counter()))
        if self.update == SMALL:
            self.gradients.append(gradient(self.model))


def gradient(model: nn.Module) -> Gradient:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def gpt2(kind: type[nn.Module], update: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(
        vocab_size=60, n_positions=512, n_embd=WIDTHS[update], n_layer=2, n_head=4, use_cache=False, bos_token_id=1,
        eos_token_id=1, pad_token_id=0, num_labels=1, **dropouts,
    )  # fmt: skip
    return kind(config).to(torch.float64 if update == SMALL else torch.float32)


# Data: of 2 to 200 tokens, most of them short.


def lengths(number: int) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return [int(each) for each in torch.empty(number).log_normal_(3.0, 1.0, generator=generator).clamp(2, 200)]


def tokens(number: int) -> Samples:
    generator = torch.Generator().manual_seed(2)
    made = [torch.randint(3, 60, (length,), generator=generator) for length in lengths(number)]
    return [{"input_ids": ids, "labels": ids} for ids in made]


def texts(number: int, rows: int = 1) -> Samples:
    return [{"text": text(index, length)} for index, length in enumerate(lengths(rows * number))]


def pairs(number: int) -> Samples:
    return [{"prompt": text(index, 2 + index % 9), "chosen": " " + text(500 + index, length),
             "rejected": " " + text(900 + index, 2 + (length + 7 * index) % 50)}
            for index, length in enumerate(lengths(number))]  # fmt: skip


def chats(number: int) -> Samples:
    return [{"messages": [{"role": "user", "content": row["prompt"]},
                          {"role": "assistant", "content": row["chosen"].strip()}]}
            for row in pairs(number)]  # fmt: skip


def ratings(number: int) -> Samples:
    return [{"prompt": row["prompt"], "completion": row["chosen"], "label": index % 3 > 0}
            for index, row in enumerate(pairs(number))]  # fmt: skip


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    logits, labels = model(batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


# The loops. The bodies of a pair differ by the lines that you change.


def settings(job: Job) -> dict[str, Any]:
    return {
        "output_dir": job.folder, "per_device_train_batch_size": job.size, "gradient_accumulation_steps": job.steps,
        "max_steps": job.num_updates, "learning_rate": 0.0, "optim": "sgd", "max_grad_norm": 0.0, "bf16": False,
        "train_sampling_strategy": "sequential", "gradient_checkpointing": False, "report_to": [],
        "save_strategy": "no", "use_cpu": True, "dataloader_pin_memory": False, "disable_tqdm": True,
        "logging_strategy": "no",
    }  # fmt: skip


def of_transformers(job: Job, *, own_loss: bool = False) -> tuple[type[Any], dict[str, Any]]:
    """Trainer and its arguments."""
    from transformers import Trainer, TrainingArguments

    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            return mean_loss(model, inputs)

    given = {"model": job.model, "args": TrainingArguments(**settings(job)), "train_dataset": job.data}
    return Own if own_loss else Trainer, given | {"data_collator": pad_right}


def of_trl(name: str, given: dict[str, Any], job: Job) -> tuple[type[Any], dict[str, Any]]:
    """A trainer of TRL and its arguments."""
    import trl
    from datasets import Dataset

    processing = tokenizer()
    processing.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} <eos>{% endgeneration %}"
        "{% else %}{{ m.content }} {% endif %}{% endfor %}"
    )
    reference = {"ref_model": job.reference} if name in ("DPO", "KTO") else {}
    args = getattr(trl, f"{name}Config")(**settings(job), **given)
    return getattr(trl, f"{name}Trainer"), {"model": job.model, "args": args, "processing_class": processing,
                                            "train_dataset": Dataset.from_list(job.data), **reference}  # fmt: skip


def trained(make: Make, job: Job) -> None:
    kind, arguments = make(job)
    kind(**arguments).train()


def exactly_trained(make: Make, job: Job) -> None:
    kind, arguments = make(job)
    from megabatch.integrations.transformers import MegabatchTrainer

    class Exact(MegabatchTrainer, kind):
        pass

    Exact(**arguments, **CAP).train()


def accelerated(job: Job) -> None:
    """As Accelerate's guide to gradient accumulation says."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=job.steps)
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.0)
    loader = DataLoader(job.data, job.size, collate_fn=pad_right)
    model, optimizer, loader = accelerator.prepare(job.model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()


def learned(job: Job) -> None:
    from accelerate import Accelerator

    from megabatch.integrations.accelerate import learner

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.0)
    loader = DataLoader(job.data, job.update, collate_fn=list)
    model, optimizer = accelerator.prepare(job.model, optimizer)
    exact = learner(accelerator, model, optimizer, **CAP)
    for batch in loader:
        exact.forward_backward(batch, losses.next_token)
        exact.optim_step()


QUIET = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
         "enable_model_summary": False, "enable_progress_bar": False}  # fmt: skip


def lightning(job: Job) -> None:
    from lightning import pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    loader = DataLoader(job.data, job.size, collate_fn=pad_right)
    pl.Trainer(**QUIET, accumulate_grad_batches=job.steps).fit(Module(), loader)


def exact_lightning(job: Job) -> None:
    from lightning import pytorch as pl

    from megabatch.integrations.lightning import ExactUpdates

    class Module(ExactUpdates, pl.LightningModule):
        def __init__(self) -> None:
            super().__init__(losses.next_token, batches_per_update=job.steps, **CAP)
            self.model = job.model

        def forward(self, input_ids: Any) -> Any:
            return self.model(input_ids)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    loader = DataLoader(job.data, job.size, collate_fn=list)
    pl.Trainer(**QUIET).fit(Module(), loader)


def nanogpt(job: Job) -> None:
    """The loop of nanoGPT, whose loss is a mean over the targets of a microbatch."""
    model, optimizer = job.model, torch.optim.SGD(job.model.parameters(), lr=0.0)
    batches = iter(DataLoader(job.data, job.size, collate_fn=pad_right))
    for _ in range(job.num_updates):
        for _ in range(job.steps):
            (mean_loss(model, next(batches)) / job.steps).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def exact_nanogpt(job: Job) -> None:
    model, optimizer = job.model, torch.optim.SGD(job.model.parameters(), lr=0.0)
    batches, accumulator = iter(DataLoader(job.data, job.size, collate_fn=pad_right)), GradientAccumulator(model)
    for _ in range(job.num_updates):
        for index, batch in enumerate(itertools.islice(batches, job.steps)):
            targets = (batch["labels"][:, 1:] != IGNORED).sum()
            with accumulator.microbatch(index, of=job.steps, mean_over=targets) as part:
                part.scale(mean_loss(model, batch)).backward()
        accumulator.finalize()
        optimizer.step()


@dataclass(frozen=True)
class Row:
    """A loop, before and after."""

    before: Callable[[Job], None]
    after: Callable[[Job], None]
    data: Callable[[int], Samples] = tokens
    make: Make | None = None  # TRL's trainer, whose own loss of a whole update is the reference
    kind: type[nn.Module] = GPT2LMHeadModel
    sizes_after: tuple[int, ...] = (8,)  # of no effect where microbatches are cut by CAP
    diff: str = ""  # the first line of the page's diff that says what changes

    @property
    def lines(self) -> tuple[int, int]:
        """Lines added and removed."""
        if self.diff:
            return lines_of_diff(self.diff)
        forms = [each.func if isinstance(each, partial) else each for each in (self.before, self.after)]
        bodies = [inspect.getsource(each).splitlines()[1:] for each in forms]
        return count(difflib.ndiff(*([line for line in each if '"""' not in line] for each in bodies)))

    def run(self, loop: Callable[[Job], None], update: int, size: int) -> Job:
        with tempfile.TemporaryDirectory() as folder:
            data, models = self.data(update * UPDATES[update]), (gpt2(self.kind, update, seed) for seed in (0, 1))
            job = Job(size, update, data, *models, folder)
            handle = register_optimizer_step_pre_hook(job.note)
            try:
                loop(job)
            finally:
                handle.remove()
        return job

    def worst_error(self, loop: Callable[[Job], None]) -> float:
        """Return the largest of all updates."""
        job = self.run(loop, SMALL, 4)
        model = job.model = gpt2(self.kind, SMALL)
        trainer, rows = None, job.data
        if self.make is not None:
            kind, arguments = self.make(job)
            trainer = kind(**arguments)
            rows = list(trainer._remove_unused_columns(trainer.train_dataset, "training"))
        errors = list[float]()
        for index, found in enumerate(job.gradients):
            whole = rows[index * SMALL : (index + 1) * SMALL]
            model.zero_grad()
            if trainer is None:
                mean_loss(model, pad_right(whole)).backward()
            else:
                uncut(trainer, whole)
            errors.append(oracle.whole_error(found, gradient(model)))
        assert len(errors) == UPDATES[SMALL]
        return max(errors)


def count(lines: Iterable[str]) -> tuple[int, int]:
    """Added and removed, blank ones left out."""
    signs = [line[0] for line in lines if line[:3] not in ("+++", "---") and line[1:].strip()]
    return signs.count("+"), signs.count("-")


def lines_of_diff(first: str) -> tuple[int, int]:
    """Count the lines added and removed in the diff of a page that begins with this line."""
    pages = "".join((result.ROOT / "docs" / name).read_text() for name in ("integrations.md", "coming-from.md"))
    (block,) = re.findall(rf"^```diff\n({re.escape(first)}\n.*?)^```", pages, re.DOTALL | re.MULTILINE)
    return count(block.splitlines())


def trl(name: str, data: Callable[[int], Samples], kind: Any = GPT2LMHeadModel, **given: Any) -> Row:
    make = partial(of_trl, name, given)
    return Row(partial(trained, make), partial(exactly_trained, make), data, make, kind)


OWN = partial(of_transformers, own_loss=True)
ROWS = {
    "Trainer": Row(partial(trained, of_transformers), partial(exactly_trained, of_transformers)),
    "Trainer, your own `compute_loss`": Row(partial(trained, OWN), partial(exactly_trained, OWN)),
    "TRL SFT, text": trl("SFT", texts),
    "TRL SFT, chat": trl("SFT", chats, assistant_only_loss=True),
    "TRL SFT, packed": trl("SFT", partial(texts, rows=4), packing=True, max_length=64),
    "TRL DPO": trl("DPO", pairs),
    "TRL Reward": trl("Reward", pairs, GPT2ForSequenceClassification),
    "TRL KTO": trl("KTO", ratings, loss_type="apo_zero_unpaired"),
    "Accelerate": Row(accelerated, learned),
    "Lightning": Row(lightning, exact_lightning),
    "nanoGPT": Row(nanogpt, exact_nanogpt, sizes_after=SIZES, diff="+gradient = GradientAccumulator(model)"),
}


def best(by_size: dict[Any, list[tuple[float, float]]]) -> dict[str, Any]:
    """Return the size of the least CPU time between two optimizer steps, and all medians."""
    medians = {
        int(size): [statistics.median(b - a for a, b in itertools.pairwise(each)) for each in zip(*times, strict=True)]
        for size, times in by_size.items()
    }
    size = min(medians, key=lambda each: medians[each][0])
    cpu, wall = medians[size]
    return {"size": size, "cpu_seconds": cpu, "wall_seconds": wall, "cpu_and_wall_by_size": medians}


def measure(row: Row) -> dict[str, Any]:
    forms = {"before": (row.before, SIZES), "after": (row.after, row.sizes_after)}
    return {"lines": row.lines} | {
        when: {"error": row.worst_error(loop)} | best({size: row.run(loop, LARGE, size).times for size in sizes})
        for when, (loop, sizes) in forms.items()
    }


def measure_titan() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        errors, times = run_titan(Path(folder))["errors"], run_titan(Path(folder), "seconds")
    return {"lines": lines_of_diff("-from torchtitan.trainer import Trainer")} | {
        when: {"error": errors[name]} | best(times[name]) for when, name in (("before", "titan"), ("after", "last"))
    }


def measure_tune() -> dict[str, Any]:
    row: dict[str, Any] = {"lines": count((result.ROOT / "examples/torchtune.diff").read_text().splitlines())}
    with tempfile.TemporaryDirectory() as folder:
        recipe = find_recipe(Path(folder))
        for when, each in (("before", recipe), ("after", patched(recipe, Path(folder)))):
            found, times = run_tune(each, Path(folder)), run_tune(each, Path(folder), "seconds")
            row[when] = {"error": max(found["errors"])} | best(times)
    return row


NESTED = {"torchtitan": measure_titan, "torchtune": measure_tune}
COLUMNS = {  # of the page, with a format
    "error before": "{:.1e}", "error after": "{:.1e}", "cpu_seconds before": "{:.3f}", "size before": "{}",
    "cpu_seconds after": "{:.3f}",
}  # fmt: skip
HEADER = ["loop", "lines", "error before", "error after", "CPU s before", "at samples a microbatch", "CPU s after"]


def cells(name: str, row: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    added, removed = row["lines"]
    values = [form.format(row[name.split()[1]][name.split()[0]]) for name, form in COLUMNS.items()]
    return [name, f"+{added} -{removed}", *values]


def write_page() -> None:
    """Between the two marks of the page."""
    path = max(result.RESULTS.glob("dropins_*.json"))
    lines = [HEADER, ["---"] * len(HEADER), *(cells(*each) for each in json.loads(path.read_text())["rows"].items())]
    before, _, rest = PAGE.read_text().partition(START)
    _, _, after = rest.partition(END)
    made = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    PAGE.write_text(f"{before}{START}\n{made}\n([result](../benchmarks/results/{path.name}))\n\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep the result, row by row")
    parser.add_argument("--table", action="store_true", help="only write the table of the page")
    parser.add_argument("--only", default="", help="rows whose name matches this")
    asked = parser.parse_args()
    if asked.table:
        write_page()
        return
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    path = result.dated("dropins")
    for name in [each for each in (*ROWS, *NESTED) if re.search(asked.only, each)]:
        made = result.made_with(["transformers", "accelerate", "lightning", "trl"])
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            row = NESTED[name]() if name in NESTED else measure(ROWS[name])
        print("  ".join(cells(name, row)), flush=True)
        if asked.write:
            known = json.loads(path.read_text())["rows"] if path.exists() else {}
            known[name] = row | {"made_with": made}
            rows = {each: known[each] for each in (*ROWS, *NESTED) if each in known}
            note = "medians of one thread on a shared machine: compare CPU seconds; wall seconds contain waiting"
            result.write(path, {"claim": str(__doc__).partition("\n")[0], "seconds": note, "rows": rows})


if __name__ == "__main__":
    main()
