"""Short programs that `python -m tests.versions` runs under each version of torch, and what they measure.

`python -m tests.version_programs` prints JSON: by program, the largest relative error of a gradient beside plain torch
in float64, or what it raised.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megabatch import GradientAccumulator, loss, losses, verify
from tests.exact.launch import Result, launch

WORLD = 2
LENGTHS = (3, 9, 5, 12, 4, 7, 2, 6)  # tokens of the samples of an update
SYNCS = {"fsdp2": ("auto", "last", "every", "gather_once"), "hsdp": ("auto", "last", "every", "replica_last")}
MOST = 1e-12  # relative error of a gradient in float64
RECIPE = """
[model.config]
model_type = "llama"
vocab_size = 384
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
tie_word_embeddings = true

[data]
path = "{folder}/texts.jsonl"
text_field = "text"
max_sample_tokens = 32

[update]
global_batch_size = 8
max_microbatch_tokens = 512

[optim]
lr = 1e-2

[eval]
num_samples = 0

[run]
folder = "{folder}/run"
max_steps = 2
"""


class UsersError(Exception):
    """What a user's loss raises."""


class Routed(nn.Module):
    """A layer that is used by the samples that say so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rare, self.last = (nn.Linear(4, 4).double() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)  # [B, 4]
        if (x[:, 0] > 0).any():
            hidden = hidden + (x[:, :1] > 0) * self.rare(x)
        return self.last(hidden)


@loss(weigh=lambda microbatch: len(microbatch["x"]))
def squares(model: nn.Module, microbatch: dict[str, Tensor]) -> tuple[Tensor, int]:
    if microbatch["x"].max() > 90:
        raise UsersError("a bad sample")
    return model(microbatch["x"]).square().sum(), len(microbatch["x"])


def language_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 40)).double()


def texts() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(40, (length,), generator=generator) for length in LENGTHS]
    return [{"input_ids": row, "labels": row} for row in rows]


def uncut_texts() -> nn.Sequential:
    """Return the model with the gradient of the whole update, computed by plain torch."""
    model, total = language_model(), sum(length - 1 for length in LENGTHS)
    for row in texts():
        logits = model(row["input_ids"][None])[0, :-1]  # [T - 1, V]
        (nn.functional.cross_entropy(logits, row["labels"][1:], reduction="sum") / total).backward()
    return model


def routed_rows() -> Tensor:
    rows = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows[4:, 0] = -rows[4:, 0].abs()  # rank 1 never uses the rare layer
    rows[:4, 0] = rows[:4, 0].abs()
    return rows


def routed_model() -> Routed:
    torch.manual_seed(0)
    return Routed()


def uncut_rows() -> Routed:
    model, rows = routed_model(), routed_rows()
    (model(rows).square().sum() / len(rows)).backward()
    return model


def error_of(model: nn.Module, uncut: nn.Module) -> float:
    """Return the largest relative error of a parameter's gradient."""
    errors = [0.0]
    for parameter, expected in zip(model.parameters(), uncut.parameters(), strict=True):
        gradient: Any = parameter.grad
        if gradient is None:
            return float("inf")
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        errors.append(float((gradient - expected.grad).norm() / expected.grad.norm()))
    return max(errors)


def run_update(model: nn.Module, samples: list[dict[str, Tensor]], sync: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gradient = GradientAccumulator(model, max_microbatch_tokens=12, sync=sync)
    for _ in range(2):
        gradient.forward_backward(samples[: len(samples) // 2], losses.next_token)
        gradient.forward_backward(samples[len(samples) // 2 :], losses.next_token)
        gradient.finalize(max_norm=1e9)
        optimizer.step()


def loop(rank: int) -> dict[str, float]:
    model = language_model()
    run_update(model, texts(), "auto")
    return {"loop": error_of(model, uncut_texts())}


def check_by_verify(rank: int) -> dict[str, float]:
    report = verify(language_model(), losses.next_token, texts())
    return {"verify": report.worst}


def fsdp2(rank: int) -> dict[str, float]:
    errors = dict[str, float]()
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    for wrapper, syncs in SYNCS.items():
        for sync in syncs:
            model = language_model()
            for module in (model[1], model[3], model):
                fully_shard(module, mesh=mesh if wrapper == "hsdp" else None)
            run_update(model, texts()[rank::WORLD], sync)
            errors[f"{wrapper} {sync}"] = error_of(model, uncut_texts())
    return errors


def wide(rank: int) -> dict[str, float]:
    """Add bfloat16 gradients of integers in float32: every sum is exact."""
    errors = dict[str, float]()
    for sync in ("every", "last"):
        model = nn.Linear(4, 1, bias=False).bfloat16()
        nn.init.ones_(model.weight)
        uncut = nn.Linear(4, 1, bias=False)
        rows = torch.arange(1, 129.0)[:, None].repeat(1, 4).fmod(97)  # [B, 4]
        uncut(rows).sum().div(128).backward()
        fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        gradient = GradientAccumulator(model, micro_batch_size=1, sync=sync, accumulate_dtype=torch.float32)
        gradient.forward_backward({"x": rows[rank::WORLD].bfloat16()}, sums)
        gradient.finalize()
        expected = uncut.weight.grad.bfloat16().float()
        found = model.weight.grad.full_tensor().float()
        errors[f"accumulate_dtype {sync}"] = float((found - expected).norm() / expected.norm())
    return errors


@loss(weigh=lambda microbatch: len(microbatch["x"]))
def sums(model: nn.Module, microbatch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return model(microbatch["x"]).sum(), len(microbatch["x"])


def unused(rank: int) -> dict[str, float]:
    errors = dict[str, float]()
    for sync in ("last", "every"):
        model = routed_model()
        fully_shard(model)
        gradient = GradientAccumulator(model, micro_batch_size=2, sync=sync)
        gradient.forward_backward({"x": routed_rows()[4 * rank : 4 * rank + 4]}, squares)
        gradient.finalize()
        errors[f"unused {sync}"] = error_of(model, uncut_rows())
    return errors


def raises(rank: int) -> dict[str, float]:
    """Fail in the second microbatch on every rank, then discard the update and run another."""
    errors = dict[str, float]()
    rows = routed_rows()[4 * rank : 4 * rank + 4]
    bad = rows.clone()
    bad[3] = 100
    for sync in ("last", "every"):
        model = routed_model()
        fully_shard(model)
        gradient = GradientAccumulator(model, micro_batch_size=2, sync=sync)
        gradient.forward_backward({"x": rows}, squares)
        try:
            gradient.forward_backward({"x": bad}, squares)
        except UsersError:
            gradient.discard()
        gradient.forward_backward({"x": rows}, squares)
        gradient.finalize()
        errors[f"raises {sync}"] = error_of(model, uncut_rows())
    return errors


def pipeline(rank: int) -> dict[str, float]:
    from megabatch.pipeline import Pipeline

    def shape_of(width: int) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.empty(*x.shape, width, dtype=torch.float64, device="meta")

    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("dp", "pp"))
    errors = dict[str, float]()
    for schedule in ("1F1B", "GPipe"):
        stages, uncut = language_model(), uncut_texts()
        stage, expected = (stages[:2], uncut[:2]) if rank == 0 else (stages[2:], uncut[2:])
        model = Pipeline([stage], mesh, schedule=schedule, boundary=shape_of(16), output=shape_of(40))
        gradient = GradientAccumulator(model, micro_batch_size=2)
        for _ in range(2):
            gradient.forward_backward(texts(), losses.next_token)
            gradient.finalize()
        errors[f"pipeline {schedule}"] = error_of(stage, expected)
    return errors


def command(*arguments: str) -> str:
    """Run `megabatch` and return what it prints. Raises RuntimeError with the last line of its errors."""
    done = subprocess.run([sys.executable, "-m", "megabatch", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else str(done.returncode))
    return done.stdout


@contextlib.contextmanager
def written_recipe() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = (json.dumps({"text": f"some text {number}"}) for number in range(40))
        (folder / "texts.jsonl").write_text("\n".join(rows))
        (folder / "recipe.toml").write_text(RECIPE.format(folder=folder))
        yield folder


def plan(rank: int) -> dict[str, float]:
    """Plan a model with fewer key-value heads than heads under FSDP2, and as a pipeline."""
    with written_recipe() as folder:
        for keys in (["--parallel.wrapper=fsdp2"], ["--parallel.pp=2", "--model.config.tie_word_embeddings=false"]):
            command("plan", str(folder / "recipe.toml"), "--world=2", "--device=h100-80g", *keys)
    return {}


def recipe(rank: int) -> dict[str, float]:
    """Train a tied model for two updates, and export it: embedding and head are one tensor."""
    from safetensors import safe_open

    with written_recipe() as folder:
        command("train", str(folder / "recipe.toml"))
        command("export", str(folder / "run"), f"--to={folder / 'exported'}")
        names = list[str]()
        for path in (folder / "exported").glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                names += file.keys()
    heads = [name for name in names if "lm_head" in name or "embed_tokens" in name]
    if len(heads) != 1:
        raise AssertionError(f"a tied model was exported with {heads}")
    return {}


PROGRAMS: dict[str, tuple[Callable[[int], dict[str, float]], int]] = {  # and their numbers of ranks
    "loop": (loop, 1),
    "verify": (check_by_verify, 1),
    "plan": (plan, 1),
    "recipe": (recipe, 1),
    "fsdp2": (fsdp2, WORLD),
    "accumulate_dtype": (wide, WORLD),
    "raises": (raises, WORLD),
    "pipeline": (pipeline, WORLD),
    "unused": (unused, WORLD),  # the last, since torch may abort
}


def job(name: str) -> dict[str, float]:
    """Run a program on this rank; see exact/launch.py."""
    warnings.simplefilter("ignore")
    function, world = PROGRAMS[name]
    return function(dist.get_rank() if world > 1 else 0)


def summarize(ranks: list[Result]) -> dict[str, Any]:
    """Return the largest error of a program, or the last line of what a rank raised."""
    failures = [str(result["error"]).strip().splitlines()[-1][:300] for result in ranks if "error" in result]
    if failures:
        return {"failure": failures[0]}
    errors = [error for result in ranks for error in result["value"].values()]
    return {"error": max(errors)} if errors else {}


def main() -> None:
    names = sys.argv[1:] or list(PROGRAMS)
    answers = dict[str, object]()
    with tempfile.TemporaryDirectory() as folder:
        for world in (1, WORLD):
            of_world = [name for name in names if PROGRAMS[name][1] == world]
            if of_world:
                found = launch(world, f"{__spec__.name}:job", of_world, Path(folder, str(world)), timeout_seconds=3000)
                answers |= {name: summarize(ranks) for name, ranks in found.items()}
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
