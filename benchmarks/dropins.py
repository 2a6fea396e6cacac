"""Other libraries' loops before and after megabatch: gradient error, lines changed and CPU seconds of an update.

    python -m benchmarks.dropins --write               # writes the result, a row at a time
    python -m benchmarks.dropins --table               # only writes the table of docs/integrations.md, from the result
    python -m benchmarks.dropins --only "DPO|KTO" --measure errors

Errors: a small GPT-2 in float64 on samples of uneven length, 4 microbatches of 4 samples an update, a learning rate of
zero. The reference is plain torch with all samples of the update at once. The error is the largest of all updates.
Seconds: a wider GPT-2 in float32, 32 samples an update, one thread; the median CPU time between optimizer steps. Each
loop before is at its fastest of 1, 2, 4 and 8 samples a microbatch. torchtitan and torchtune run in environments of
their own (TITAN_PYTHON, TUNE_PYTHON), on the data of their tests, and are not timed.
"""

import argparse
import contextlib
import difflib
import inspect
import io
import itertools
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

from benchmarks import result
from megabatch import GradientAccumulator, losses
from megabatch.batching.samples import pad_right

VOCABULARY, LONGEST, BETA, PACKED = 60, 200, 0.1, 64
CAP = {"max_microbatch_tokens": 512}
SIZES = (1, 2, 4, 8)  # samples of a microbatch, before
IGNORED = -100
PAGE = result.ROOT / "docs" / "integrations.md"
START, END = "<!-- dropins: python -m benchmarks.dropins --table -->\n", "<!-- end of dropins -->"
NESTED = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(result.ROOT)}
Samples = list[dict[str, Any]]
Gradient = dict[str, Tensor]


@dataclass(frozen=True)
class Scale:
    """Sizes of the model and of the updates."""

    dtype: torch.dtype
    width: int
    update: int  # samples
    num_updates: int


ERRORS, SECONDS = Scale(torch.float64, 64, 16, 4), Scale(torch.float32, 96, 32, 6)


@dataclass
class Job:
    """One run of a loop."""

    scale: Scale
    size: int  # samples of a microbatch
    model: nn.Module
    reference: nn.Module  # of DPO and KTO
    data: Samples
    folder: str

    @property
    def steps(self) -> int:
        return self.scale.update // self.size


class Recorder:
    """The gradient, or the CPU time, at each optimizer step of any loop."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.gradients, self.times = model, list[Gradient](), list[float]()

    def __call__(self, *_: Any) -> None:
        self.times.append(time.process_time())
        if next(self.model.parameters()).dtype is torch.float64:
            self.gradients.append(gradient(self.model))


def gradient(model: nn.Module) -> Gradient:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def error(found: Gradient, expected: Gradient) -> float:
    """Return the relative error of the whole gradient."""
    off = torch.stack([(found[name] - each).norm() for name, each in expected.items()]).norm()
    return float(off / torch.stack([each.norm() for each in expected.values()]).norm())


def gpt2(scale: Scale, kind: type[nn.Module] = GPT2LMHeadModel, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=512, n_embd=scale.width, n_layer=2, n_head=4, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=1, eos_token_id=1, pad_token_id=0, num_labels=1,
    )  # fmt: skip
    return kind(config).to(scale.dtype)


# Data: of 2 to 200 tokens, most of them short.


def lengths(number: int) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return [int(each) for each in torch.empty(number).log_normal_(3.0, 1.0, generator=generator).clamp(2, LONGEST)]


def tokens(number: int) -> Samples:
    generator = torch.Generator().manual_seed(2)
    made = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths(number)]
    return [{"input_ids": ids, "labels": ids} for ids in made]


def words(seed: int, number: int) -> str:
    from tests.integrations.trl_users import text

    return text(seed, number)


def texts(number: int) -> Samples:
    return [{"text": words(index, length)} for index, length in enumerate(lengths(number))]


def long_texts(number: int) -> Samples:
    """Enough for so many full rows."""
    return texts(4 * number)


def chats(number: int) -> Samples:
    return [{"messages": [{"role": "user", "content": words(index, 2 + index % 9)},
                          {"role": "assistant", "content": words(500 + index, length)}]}
            for index, length in enumerate(lengths(number))]  # fmt: skip


def pairs(number: int) -> Samples:
    return [{"prompt": words(index, 2 + index % 9), "chosen": " " + words(500 + index, length),
             "rejected": " " + words(900 + index, 2 + (length + 7 * index) % 50)}
            for index, length in enumerate(lengths(number))]  # fmt: skip


def ratings(number: int) -> Samples:
    return [{"prompt": row["prompt"], "completion": row["chosen"], "label": index % 3 > 0}
            for index, row in enumerate(pairs(number))]  # fmt: skip


# The losses of an update in plain torch.


def documents(batch: dict[str, Tensor]) -> Samples:
    """The samples of a collated batch, without padding; those of a packed row apart."""
    if "position_ids" in batch:
        ids, labels, starts = batch["input_ids"][0], batch["labels"][0], batch["position_ids"][0] == 0
        cuts = torch.nonzero(starts).flatten().tolist()[1:]
        return [{"input_ids": i, "labels": each} for i, each in zip(ids.tensor_split(cuts), labels.tensor_split(cuts),
                                                                    strict=True)]  # fmt: skip
    each_row = zip(batch["input_ids"], batch["labels"], strict=True)
    return [{"input_ids": ids, "labels": labels} for ids, labels in each_row]


def next_token(model: nn.Module, reference: nn.Module, batch: Any) -> Tensor:
    return mean_loss(model, pad_right(documents(batch)))


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    logits, labels = model(batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def log_ratios(model: nn.Module, reference: nn.Module, batch: Any) -> Tensor:
    """Return log p of each completion, above the reference's."""
    ids, mask = batch["input_ids"], batch["completion_mask"][:, 1:]

    def sums(each: nn.Module) -> Tensor:
        logs = each(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return (logs * mask).sum(1)

    with torch.no_grad():
        expected = sums(reference)
    return sums(model) - expected


def dpo(model: nn.Module, reference: nn.Module, batch: Any) -> Tensor:
    chosen, rejected = log_ratios(model, reference, batch).chunk(2)
    return -logsigmoid(BETA * (chosen - rejected)).mean()


def kto(model: nn.Module, reference: nn.Module, batch: Any) -> Tensor:
    signs = torch.where(batch["label"], -1, 1)
    return torch.sigmoid(signs * BETA * log_ratios(model, reference, batch)).mean()


def reward(model: nn.Module, reference: nn.Module, batch: Any) -> Tensor:
    chosen, rejected = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0].chunk(2)
    return -logsigmoid(chosen - rejected).mean()


# The loops: the bodies of a pair differ by the lines that you change.


def settings(job: Job) -> dict[str, Any]:
    return {
        "output_dir": job.folder, "per_device_train_batch_size": job.size, "gradient_accumulation_steps": job.steps,
        "max_steps": job.scale.num_updates, "learning_rate": 0.0, "optim": "sgd", "max_grad_norm": 0.0, "bf16": False,
        "train_sampling_strategy": "sequential", "gradient_checkpointing": False, "report_to": [],
        "save_strategy": "no", "use_cpu": True, "dataloader_pin_memory": False, "disable_tqdm": True,
        "logging_strategy": "no",
    }  # fmt: skip


def trainer(job: Job) -> None:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(**settings(job))
    Trainer(job.model, args, train_dataset=job.data, data_collator=pad_right).train()


def exact_trainer(job: Job) -> None:
    from transformers import TrainingArguments

    from megabatch.integrations.transformers import MegabatchTrainer

    args = TrainingArguments(**settings(job))
    MegabatchTrainer(job.model, args, train_dataset=job.data, data_collator=pad_right, **CAP).train()


def own_trainer(job: Job) -> None:
    from transformers import Trainer, TrainingArguments

    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            return mean_loss(model, inputs)

    args = TrainingArguments(**settings(job))
    Own(job.model, args, train_dataset=job.data, data_collator=pad_right).train()


def exact_own_trainer(job: Job) -> None:
    from transformers import TrainingArguments

    from megabatch.integrations.transformers import MegabatchTrainer

    class Own(MegabatchTrainer):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            return mean_loss(model, inputs)

    args = TrainingArguments(**settings(job))
    Own(job.model, args, train_dataset=job.data, data_collator=pad_right, **CAP).train()


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} <eos>{% endgeneration %}"
    "{% else %}{{ m.content }} {% endif %}{% endfor %}"
)


def of_trl(name: str, job: Job, given: dict[str, Any]) -> tuple[type[Any], dict[str, Any]]:
    """A trainer of TRL and its arguments."""
    import trl
    from datasets import Dataset

    from tests.integrations.trl_users import tokenizer

    processing = tokenizer()
    processing.chat_template = TEMPLATE
    reference = {"ref_model": job.reference} if name in ("DPO", "KTO") else {}
    args = getattr(trl, f"{name}Config")(**settings(job), **given)
    return getattr(trl, f"{name}Trainer"), {"model": job.model, "args": args, "processing_class": processing,
                                            "train_dataset": Dataset.from_list(job.data), **reference}  # fmt: skip


def of_tuned(name: str, given: dict[str, Any], job: Job) -> None:
    kind, arguments = of_trl(name, job, given)
    kind(**arguments).train()


def exact_of_tuned(name: str, given: dict[str, Any], job: Job) -> None:
    kind, arguments = of_trl(name, job, given)
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
    loader = DataLoader(job.data, job.scale.update, collate_fn=list)
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
    for _ in range(job.scale.num_updates):
        for _ in range(job.steps):
            batch = next(batches)
            loss = mean_loss(model, batch)
            (loss / job.steps).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def exact_nanogpt(job: Job) -> None:
    model, optimizer = job.model, torch.optim.SGD(job.model.parameters(), lr=0.0)
    batches, accumulator = iter(DataLoader(job.data, job.size, collate_fn=pad_right)), GradientAccumulator(model)
    for _ in range(job.scale.num_updates):
        for index in range(job.steps):
            batch = next(batches)
            targets = (batch["labels"][:, 1:] != IGNORED).sum()
            with accumulator.microbatch(index, of=job.steps, mean_over=targets) as part:
                part.scale(mean_loss(model, batch)).backward()
        accumulator.finalize()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def padded(job: Job) -> Callable[[int], Any]:
    """The batch of a whole update, by its number."""
    size = job.scale.update
    return lambda index: pad_right(job.data[index * size : (index + 1) * size])


@dataclass(frozen=True)
class Row:
    """A loop, before and after."""

    library: str
    before: Callable[[Job], None]
    after: Callable[[Job], None]
    data: Callable[[int], Samples] = tokens
    loss: Callable[[nn.Module, nn.Module, Any], Tensor] = next_token
    kind: type[nn.Module] = GPT2LMHeadModel
    sizes_after: tuple[int, ...] = (8,)  # of no effect where microbatches are cut by CAP
    diff: str = ""  # the first line of the page's diff that says what changes
    collate: Callable[[Job], Callable[[int], Any]] = padded

    @property
    def lines(self) -> tuple[int, int]:
        """Lines added and removed."""
        if self.diff:
            return lines_of_diff(self.diff)
        forms = [self.before, self.after]
        bodies = [inspect.getsource(each.func if isinstance(each, partial) else each) for each in forms]
        kept = [[line for line in body.splitlines()[1:] if line.strip() and '"""' not in line] for body in bodies]
        return count(list(difflib.ndiff(*kept)))


def count(lines: list[str]) -> tuple[int, int]:
    """Added and removed, blank ones left out."""
    kept = [line for line in lines if line[:3] not in ("+++", "---") and line[1:].strip()]
    signs = [line[0] for line in kept]
    return signs.count("+"), signs.count("-")


def lines_of_diff(first: str) -> tuple[int, int]:
    """Count the lines added and removed in the diff of a page that begins with this line."""
    pages = "".join((result.ROOT / "docs" / name).read_text() for name in ("integrations.md", "coming-from.md"))
    (block,) = re.findall(rf"^```diff\n({re.escape(first)}\n.*?)^```", pages, re.DOTALL | re.MULTILINE)
    return count(block.splitlines())


def trl_row(name: str, data: Callable[[int], Samples], loss: Any, kind: Any = GPT2LMHeadModel, **given: Any) -> Row:
    """A trainer of TRL; its samples are tokenized and padded by the trainer's own code."""

    def collate(job: Job) -> Callable[[int], Any]:
        trainer_type, arguments = of_trl(name, job, given)
        made = trainer_type(**arguments)
        rows = list(made._remove_unused_columns(made.train_dataset, "training"))
        pad, size = made._get_collator_with_removed_columns(made.data_collator, "training"), job.scale.update
        return lambda index: pad(rows[index * size : (index + 1) * size])

    forms = (partial(of_tuned, name, given), partial(exact_of_tuned, name, given))
    return Row("trl", *forms, data, loss, kind, collate=collate)


ROWS = {
    "Trainer": Row("transformers", trainer, exact_trainer),
    "Trainer, your own `compute_loss`": Row("transformers", own_trainer, exact_own_trainer),
    "TRL SFT, text": trl_row("SFT", texts, next_token),
    "TRL SFT, chat": trl_row("SFT", chats, next_token, assistant_only_loss=True),
    "TRL SFT, packed": trl_row("SFT", long_texts, next_token, packing=True, max_length=PACKED),
    "TRL DPO": trl_row("DPO", pairs, dpo, beta=BETA),
    "TRL Reward": trl_row("Reward", pairs, reward, GPT2ForSequenceClassification),
    "TRL KTO": trl_row("KTO", ratings, kto, beta=BETA, loss_type="apo_zero_unpaired"),
    "Accelerate": Row("accelerate", accelerated, learned),
    "Lightning": Row("lightning", lightning, exact_lightning),
    "nanoGPT": Row("torch", nanogpt, exact_nanogpt, sizes_after=SIZES, diff="+gradient = GradientAccumulator(model)"),
}  # fmt: skip


def run(row: Row, loop: Callable[[Job], None], scale: Scale, size: int) -> tuple[Recorder, Job]:
    with tempfile.TemporaryDirectory() as folder:
        data = row.data(scale.update * scale.num_updates)
        job = Job(scale, size, gpt2(scale, row.kind), gpt2(scale, seed=1), data, folder)
        recorder = Recorder(job.model)
        handle = register_optimizer_step_pre_hook(recorder)
        try:
            loop(job)
        finally:
            handle.remove()
    return recorder, job


def worst_error(row: Row, loop: Callable[[Job], None]) -> float:
    """Of all updates."""
    recorder, job = run(row, loop, ERRORS, 4)
    model, batch_of = gpt2(ERRORS, row.kind), row.collate(job)
    expected = []
    for index in range(ERRORS.num_updates):
        model.zero_grad()
        row.loss(model, job.reference, batch_of(index)).backward()
        expected.append(gradient(model))
    return max(error(*pair) for pair in zip(recorder.gradients, expected, strict=True))


def seconds(row: Row, loop: Callable[[Job], None], sizes: tuple[int, ...]) -> dict[int, float]:
    """CPU seconds of an update, by samples of a microbatch. The first update is left out."""
    found = {}
    for size in sizes:
        times = run(row, loop, SECONDS, size)[0].times
        found[size] = statistics.median(end - start for start, end in itertools.pairwise(times))
    return found


def measure_errors(row: Row) -> dict[str, Any]:
    added, removed = row.lines
    return {"lines_added": added, "lines_removed": removed, "error_before": worst_error(row, row.before),
            "error_after": worst_error(row, row.after)}  # fmt: skip


def measure_seconds(row: Row) -> dict[str, Any]:
    before, after = seconds(row, row.before, SIZES), seconds(row, row.after, row.sizes_after)
    return {
        "cpu_seconds_before": min(before.values()), "best_size_before": min(before, key=before.__getitem__),
        "cpu_seconds_after": min(after.values()), "cpu_seconds_before_by_size": before,
        "cpu_seconds_after_by_size": after,
    }  # fmt: skip


def torchtitan(python: str, folder: Path) -> dict[str, Any]:
    """Two ranks of FSDP2; a model in float32."""
    environ = os.environ | NESTED | {"DUMP_FOLDER": str(folder), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environ["MASTER_PORT"] = str(20_000 + os.getpid() % 20_000)
    command = [python, "-m", "tests.integrations.titan_runs", str(folder / "runs.json")]
    ranks = [
        subprocess.Popen(
            command, cwd=result.ROOT, env=environ | {"RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.DEVNULL
        )
        for rank in "01"
    ]
    if max(rank.wait(900) for rank in ranks):
        raise SystemExit("a rank of torchtitan failed")
    errors = json.loads((folder / "runs.json").read_text())["errors"]
    added, removed = lines_of_diff("-from torchtitan.trainer import Trainer")
    return {"lines_added": added, "lines_removed": removed, "error_before": errors["titan"],
            "error_after": errors["last"]}  # fmt: skip


def torchtune(python: str, folder: Path) -> dict[str, Any]:
    from tests.integrations.test_torchtune import FIND, RECIPE, patched

    recipes = subprocess.run([python, "-c", FIND], cwd=folder, capture_output=True, text=True, check=True).stdout
    recipe, errors = Path(recipes.strip()) / RECIPE, []
    for each in (recipe, patched(recipe, folder)):
        command = [python, "-m", "tests.integrations.tune_runs", str(each), str(folder / "out.json")]
        subprocess.run(command, cwd=result.ROOT, env=os.environ | NESTED, check=True, capture_output=True)
        errors.append(max(json.loads((folder / "out.json").read_text())["errors"]))
    added, removed = lines_of_diff(f"--- a/recipes/{RECIPE}")
    return {"lines_added": added, "lines_removed": removed, "error_before": errors[0], "error_after": errors[1]}


NESTED_ROWS = {  # with the environment variable that names their Python, and what to install there
    "torchtitan": (torchtitan, "TITAN_PYTHON", "torch==2.13.0 triton torchtitan==0.3.0"),
    "torchtune": (torchtune, "TUNE_PYTHON", "torch==2.13.0 torchtune==0.6.1 torchao==0.15.0"),
}


def measure_nested(name: str) -> dict[str, Any]:
    function, variable, packages = NESTED_ROWS[name]
    python = os.environ.get(variable, sys.executable)
    if subprocess.run([python, "-c", f"import {name}"], capture_output=True, check=False).returncode:
        return {"not_installed": f"pip install {packages} in an environment of its own, {variable}=its python"}
    with tempfile.TemporaryDirectory() as folder:
        return function(python, Path(folder))


def cells(name: str, row: dict[str, Any]) -> list[str]:
    """Return a row of the table, empty where nothing is measured."""
    if "not_installed" in row:
        return [name, f"not installed: {row['not_installed']}", "", "", "", "", ""]
    errors = [f"{row[key]:.1e}" if key in row else "" for key in ("error_before", "error_after")]
    times = [f"{row[key]:.3f}" if key in row else "" for key in ("cpu_seconds_before", "cpu_seconds_after")]
    size = f"{row['best_size_before']}" if "best_size_before" in row else ""
    lines = f"+{row['lines_added']} -{row['lines_removed']}" if "lines_added" in row else ""
    return [name, lines, *errors, times[0], size, times[1]]


HEADER = ["loop", "lines", "error before", "error after", "CPU s before", "at samples a microbatch", "CPU s after"]


def store(path: Path, name: str, row: dict[str, Any]) -> None:
    """Add to what is known of a row."""
    found = json.loads(path.read_text()) if path.exists() else {"claim": str(__doc__).partition("\n")[0], "rows": {}}
    found["seconds"] = "CPU time of one thread: the machine was shared"
    known = found["rows"] | {name: found["rows"].get(name, {}) | row}
    found["rows"] = {each: known[each] for each in (*ROWS, *NESTED_ROWS) if each in known}
    result.write(path, found)


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
    parser.add_argument("--measure", choices=("errors", "seconds", "both"), default="both")
    asked = parser.parse_args()
    if asked.table:
        write_page()
        return
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    made = result.made_with(["transformers", "accelerate", "lightning", "trl"])
    path = result.dated("dropins")
    for name in [each for each in (*ROWS, *NESTED_ROWS) if re.search(asked.only, each)]:
        row: dict[str, Any] = {}
        if name in NESTED_ROWS:
            row = measure_nested(name)
        elif result.version(ROWS[name].library) is None:
            row = {"not_installed": f"pip install {ROWS[name].library}"}
        else:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                if asked.measure != "seconds":
                    row |= measure_errors(ROWS[name])
                if asked.measure != "errors":
                    row |= measure_seconds(ROWS[name])
        print("  ".join(cells(name, row)), flush=True)
        if asked.write:
            store(path, name, row | {f"made_with_{asked.measure}": made})


if __name__ == "__main__":
    main()
