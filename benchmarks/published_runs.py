"""Published runs of others and what the plan predicts of them: the rows of `benchmarks.published`.

Each run states its model, devices, sharding and microbatches, so that the plan can simulate it. What a source does not
state is assumed, and `SOURCES` says what. The plan knows nothing of a run beyond these settings; `Device.efficiency`
alone is fitted, to the runs that are marked.
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from multiprocessing import get_context
from statistics import median
from typing import Any, cast

from rich import box
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from megabatch import Term
from megabatch.simulate import Simulated, device_named
from megabatch.train.config import Config
from megabatch.train.config.byte_sizes import GIB
from megabatch.train.model.architecture import silence
from megabatch.train.model.build import divide
from megabatch.train.parallel.wrap import WrapperChoice
from megabatch.train.plan.grid import Choice
from megabatch.train.plan.request import PlanRequest
from megabatch.train.plan.search import NO, judge_memory, reserved_bytes
from megabatch.train.plan.simulation import build_simulator
from megabatch.train.runtime.console import Console

PROCESSES = 2  # each takes a core and half a GiB
OUT_OF_MEMORY = "out of memory"
COMPILED = "layers as transformers computes them, which are compiled there"
LEFT = ("run", "layout", "memory", "bound by")  # columns of text


@dataclass(frozen=True)
class Source:
    """A publication, and what it does not state."""

    name: str
    url: str
    assumed: str = "nothing"
    is_reserved: bool = False  # it states, or seems to, the memory that torch's allocator holds, not what tensors take


SOURCES = {
    "kempner": Source(
        "KempnerForge, mfu_scaling of 2026-04 (four H200 a node)",
        "https://github.com/KempnerInstitute/KempnerForge/blob/main/benchmarks/mfu_scaling/mfu_scaling.md",
        "layers as transformers computes them, which are compiled there but for 13B with FSDP 8; from its code: "
        "embeddings are whole on each rank, the root is freed after the forward, logits are kept until the next ones",
    ),
    "mpt": Source(
        "LLM Foundry, MPT training benchmarks",
        "https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md",
        "GPT-2's layers in MPT's sizes",
    ),
    "fms": Source(
        "IBM and Meta, Maximizing training throughput using PyTorch FSDP, 2024-03",
        "https://pytorch.org/blog/maximizing-training/",
        COMPILED,
    ),
    "titan": Source(
        "torchtitan, Llama 2 on 64 A100, 2024",
        "https://github.com/pytorch/torchtitan/blob/main/docs/performance.md",
        COMPILED,
    ),
    "titan3d": Source(
        "torchtitan, Llama 3.1 405B on 512 H100 with 96 GB, 2024-12",
        "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md",
        "as many microbatches as ranks of the pipeline, two stages a rank where it is interleaved; float8 products, "
        "asynchronous tensor parallelism and sharded logits are not simulated, so that only the order is compared",
    ),
    "29425": Source(
        "memory table of huggingface/transformers 29425, and accelerate's page on gradient synchronization, 2024-03",
        "https://github.com/huggingface/transformers/issues/29425",
        "2,048 tokens, recomputed activations, bfloat16 states, foreach AdamW; that its memory is the allocator's",
        is_reserved=True,
    ),
}


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, vocabulary: int = 128256) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": mlp, "vocab_size": vocabulary,
    }  # fmt: skip


def _mpt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "n_embd": hidden, "n_layer": layers, "n_head": heads, "vocab_size": 50368,
        "activation_function": "gelu", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip


MODELS = {
    "Llama 3 8B": _llama(4096, 32, 32, 8, 14336),
    "Llama 3 13B": _llama(5120, 40, 40, 8, 17920),
    "Llama 3 70B": _llama(8192, 80, 64, 8, 28672),
    "Llama 3 405B": _llama(16384, 126, 128, 8, 53248),
    "Llama 2 7B": _llama(4096, 32, 32, 32, 11008, 32000),
    "Llama 2 13B": _llama(5120, 40, 40, 40, 13824, 32000),
    "CodeLlama 34B": _llama(8192, 48, 64, 8, 22016, 32000),
    "Mixtral 8x7B": {
        **_llama(4096, 32, 32, 8, 14336, 32000), "model_type": "mixtral", "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "MPT 125M": _mpt(768, 12, 12),
    "MPT 350M": _mpt(1024, 24, 16),
    "MPT 760M": _mpt(1536, 24, 12),
    "MPT 1B": _mpt(2048, 24, 16),
    "MPT 3B": _mpt(2560, 32, 20),
    "MPT 7B": _mpt(4096, 32, 32),
    "MPT 13B": _mpt(5120, 40, 40),
    "MPT 30B": _mpt(7168, 48, 56),
    "MPT 70B": _mpt(8192, 80, 64),
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """One run: its settings, and what was measured."""

    source: str
    model: str
    device: str
    world: int
    length_tokens: int
    micro_batch_size: int
    num_microbatches: int
    gib: float | str | None = None  # of a GPU, or `OUT_OF_MEMORY`
    tokens_per_second: float | None = None  # of a GPU
    recompute: bool = True
    sync: str = "every"
    dtype: str = "mixed"  # float32 weights and bfloat16 layers, or "bfloat16"
    tp: int = 1
    replicas: int = 1
    pp: int = 1
    schedule: str = "1F1B"
    ranks_per_node: int = 8
    has_whole_logits: bool = False  # the loss takes the logits of a microbatch at once
    eight_bit: bool = False  # states of the optimizer
    is_fitted: bool = False  # `Device.efficiency` was chosen by it
    is_ranked_only: bool = False  # it has what a plan cannot simulate, as has the run that it is compared with

    @property
    def dp_degree(self) -> int:
        """Ranks with samples of their own."""
        return self.world // (self.tp * self.pp)


def _kempner(
    model: str, world: int, tp: int, size: int, number: int, gib: float, step: float, *, is_fitted: bool = False
) -> Published:
    """Return a run of KempnerForge, whose table has seconds per update."""
    return Published(
        "kempner", model, "h200", world, 4096, size, number, gib, size * number * 4096 / tp / step, sync="last", tp=tp,
        dtype="bfloat16", ranks_per_node=4, has_whole_logits=True, is_fitted=is_fitted,
    )  # fmt: skip


def _mpt_run(
    model: str, device: str, world: int, length: int, size: int, number: int, rate: float, recompute: bool, **more: Any
) -> Published:
    return Published(
        "mpt", f"MPT {model}", device, world, length, size, number, None, rate, recompute=recompute, **more
    )


def _pipeline_run(schedule: str, rate: float) -> Published:
    return Published(
        "titan3d", "Llama 3 405B", "h100-80g", 512, 8192, 4, 8, None, rate, sync="last", tp=8, pp=8, schedule=schedule,
        is_ranked_only=True,
    )  # fmt: skip


def _report(model: str, number: int, sync: str, gib: float | str, **more: Any) -> Published:
    return Published("29425", model, "a100-80g", 8, 2048, 1, number, gib, sync=sync, dtype="bfloat16", **more)


RUNS = (
    _kempner("Llama 3 8B", 1, 1, 2, 4, 80.7, 3.13, is_fitted=True),
    _kempner("Llama 3 8B", 2, 1, 2, 4, 62.4, 3.50, is_fitted=True),
    _kempner("Llama 3 8B", 4, 1, 4, 2, 61.1, 3.36),
    _kempner("Llama 3 13B", 8, 1, 4, 4, 88.5, 14.81),
    _kempner("Llama 3 8B", 2, 2, 4, 2, 57.8, 2.49),
    _kempner("Llama 3 8B", 4, 4, 4, 2, 39.4, 1.30, is_fitted=True),
    _kempner("Llama 3 8B", 4, 2, 4, 2, 45.9, 2.52),
    _kempner("Llama 3 8B", 8, 4, 4, 2, 32.7, 1.48),
    _kempner("Llama 3 13B", 8, 4, 4, 4, 45.1, 4.79),
    _kempner("Llama 3 70B", 32, 4, 2, 4, 93.2, 14.85),
    _mpt_run("125M", "a100-80g", 8, 2048, 40, 2, 142830, False, is_fitted=True),
    _mpt_run("350M", "a100-80g", 8, 2048, 32, 2, 58782, False),
    _mpt_run("760M", "a100-80g", 8, 16384, 3, 2, 14274, False),
    _mpt_run("1B", "a100-80g", 8, 2048, 14, 4, 20513, False),
    _mpt_run("7B", "a100-80g", 8, 2048, 6, 2, 4641, False, is_fitted=True),
    _mpt_run("7B", "a100-80g", 8, 8192, 8, 2, 3206, True),
    _mpt_run("13B", "a100-80g", 8, 1024, 40, 3, 2330, True, is_fitted=True),
    _mpt_run("30B", "a100-80g", 8, 2048, 3, 21, 916, True),
    _mpt_run("1B", "a100-40g", 128, 2048, 10, 1, 18647, False, dtype="bfloat16"),
    _mpt_run("70B", "a100-40g", 64, 2048, 2, 1, 276, True, dtype="bfloat16"),
    _mpt_run("3B", "a100-40g", 128, 2048, 6, 1, 9538, False, dtype="bfloat16"),
    _mpt_run("1B", "h100-80g", 64, 2048, 20, 1, 44402, False, is_fitted=True),
    _mpt_run("3B", "h100-80g", 64, 2048, 6, 3, 22525, False),
    _mpt_run("7B", "h100-80g", 8, 4096, 16, 2, 8611, True, is_fitted=True),
    _mpt_run("13B", "h100-80g", 64, 2048, 2, 1, 4800, False),
    _mpt_run("30B", "h100-80g", 32, 2048, 14, 3, 2308, True),
    Published(
        "fms", "Llama 2 7B", "a100-80g", 128, 4096, 2, 1, None, 3700, recompute=False, replicas=16
    ),
    Published("fms", "CodeLlama 34B", "a100-80g", 128, 4096, 2, 1, None, 700),
    Published("titan", "Llama 2 13B", "a100-80g", 64, 4096, 2, 1, None, 2162, recompute=False),
    _pipeline_run("1F1B", 100),
    _pipeline_run("Interleaved1F1B", 128),
    _report("CodeLlama 34B", 1, "every", 55),
    _report("CodeLlama 34B", 2, "last", OUT_OF_MEMORY),
    _report("CodeLlama 34B", 16, "every", 55),
    _report("Mixtral 8x7B", 1, "every", 69),
    _report("Mixtral 8x7B", 2, "last", OUT_OF_MEMORY),
    _report("Mixtral 8x7B", 16, "every", 69),
    _report("Mixtral 8x7B", 16, "every", 66, eight_bit=True),
)  # fmt: skip


def whole_logits(model: Any, microbatch: Mapping[str, Tensor]) -> Term:
    """Return the cross-entropy of all logits at once, with labels that the data has shifted.

    The trainer's variable keeps the logits until the next forward has made others.
    """
    logits, labels = model(input_ids=microbatch["input_ids"]).logits, microbatch["labels"]
    model.kept_logits = logits  # [B, T, V]
    total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return Term(total, (labels != -100).sum())


def divide_as_kempner(
    model: nn.Module, config: Config, wrapper: WrapperChoice, mesh: DeviceMesh, stages: None
) -> list[str]:
    """Divide a model as KempnerForge does: its embedding is not cut, and FSDP2 frees the root after the forward too."""
    if config.parallel.tp > 1:
        transformer = cast(PreTrainedModel, model)
        transformer.set_input_embeddings(nn.Sequential(transformer.get_input_embeddings()))  # no longer the model's own
    words = divide(model, config, wrapper, mesh, stages)
    cast(FSDPModule, model).set_reshard_after_forward(True, recurse=False)
    return words


@dataclass(frozen=True)
class Predicted:
    """One run, as the plan predicts it."""

    run: Published
    fits: str
    gib: float  # as the source counts it
    tokens_per_second: float
    bound: str

    @property
    def memory_ratio(self) -> float | None:
        """Predicted memory over published."""
        return self.gib / self.run.gib if isinstance(self.run.gib, float | int) else None

    @property
    def speed_ratio(self) -> float | None:
        """Predicted tokens per second over published."""
        published = self.run.tokens_per_second
        return None if published is None else self.tokens_per_second / published


def predict(run: Published) -> Predicted:
    """Simulate a run. Takes 5 to 60 seconds of a core."""
    with silence():
        found, limit_bytes = simulate_published(run)
        needed_bytes = reserved_bytes(found)
        fits, _ = judge_memory(found, limit_bytes, needed_bytes)
        num_bytes = needed_bytes if SOURCES[run.source].is_reserved else found.peak_bytes
    tokens = run.micro_batch_size * run.num_microbatches * run.length_tokens * run.dp_degree / run.world
    return Predicted(run, fits, num_bytes / GIB, tokens / found.seconds, found.bound)


def simulate_published(run: Published) -> tuple[Simulated, int]:
    """Return the simulation of a run, and the bytes that a GPU has for it."""
    device = replace(device_named(run.device), ranks_per_node=run.ranks_per_node)
    request = PlanRequest(run.world, device, device.memory_bytes)
    simulator = build_simulator(recipe_of(run), request, Console(enabled=False, loss_digits=4))
    if run.source == "kempner":
        simulator = replace(simulator, divide=divide_as_kempner)
    is_fused = run.source != "29425"
    choice = Choice(
        run.micro_batch_size, run.num_microbatches, run.sync, reshard=run.pp == 1, recompute=run.recompute,
        fused=is_fused,
    )  # fmt: skip
    return simulator.simulate(choice), request.limit_bytes


def recipe_of(run: Published) -> Config:
    """Return the recipe of a run."""
    is_mixed = run.dtype == "mixed"
    model: dict[str, Any] = {
        "config": {**MODELS[run.model], **_positions(run)},
        "dtype": "float32" if is_mixed else run.dtype,
        **({"compute_dtype": "bfloat16"} if is_mixed else {}),
    }
    own = {"function": "bitsandbytes.optim:AdamW8bit"} if run.eight_bit else {}
    keys: dict[str, Any] = {
        "model": model,
        "data": {"path": "none", "max_sample_tokens": run.length_tokens},
        "update": {
            "global_batch_size": run.micro_batch_size * run.num_microbatches * run.dp_degree,
            "micro_batch_size": run.micro_batch_size,
            **({} if is_mixed or SOURCES[run.source].is_reserved else {"accumulate_dtype": "float32"}),
        },
        "optim": own if is_mixed else {"master": None, "state_dtype": None, **own},
        "parallel": {
            **({"wrapper": "fsdp2"} if run.world > 1 or run.source == "kempner" else {}),
            **({"tp": run.tp, "sequence_parallel": True} if run.tp > 1 else {}),
            **({"pp": run.pp, "schedule": run.schedule} if run.pp > 1 else {}),
            **({"dp_replicate": run.replicas, "dp_shard": run.world // run.replicas} if run.replicas > 1 else {}),
        },
        "loss": {"function": f"{__name__}:whole_logits"} if run.has_whole_logits else {},
        "run": {"folder": "none"},
    }
    return Config.model_validate(keys)


def _positions(run: Published) -> dict[str, int]:
    key = "n_positions" if MODELS[run.model]["model_type"] == "gpt2" else "max_position_embeddings"
    return {key: run.length_tokens}


def predict_all(runs: Iterable[Published] = RUNS) -> Iterator[Predicted]:
    """Yield every run, in order, as it is done."""
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as processes:
        yield from processes.map(predict, runs)


def as_dict(row: Predicted) -> dict[str, Any]:
    """Return a row with its ratios, for JSON."""
    return {**asdict(row), "memory_ratio": row.memory_ratio, "speed_ratio": row.speed_ratio}


def table_of(rows: Iterable[Predicted]) -> Table:
    """Return the predicted numbers beside the published ones."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in LEFT[:-1]:
        table.add_column(name, no_wrap=True)
    for name in ("GPUs", "GiB", "published", "ratio", "tokens/s", "published", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(LEFT[-1], no_wrap=True)
    for row in rows:
        run = row.run
        published = "" if run.gib is None else run.gib if isinstance(run.gib, str) else f"{run.gib:,.1f}"
        rate = "" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}"
        gib = OUT_OF_MEMORY if row.fits == NO else f"{row.gib:,.1f}"
        mark, kind = " *" if run.is_fitted else "", "reserved" if SOURCES[run.source].is_reserved else "allocated"
        table.add_row(
            f"{run.source} {run.model}{mark}", layout_of(run), kind, f"{run.world} {run.device}", gib, published,
            _ratio(row.memory_ratio), f"{row.tokens_per_second:,.0f}", rate, _ratio(row.speed_ratio), row.bound,
        )  # fmt: skip
    return table


def layout_of(run: Published) -> str:
    """Return how a run is sharded and cut, in words."""
    degrees = {"replicas": run.replicas, "fsdp": run.dp_degree // run.replicas, "tp": run.tp, "pp": run.pp}
    mesh = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "1 rank"
    recompute = ", recomputed" if run.recompute else ""
    mesh += f" ({run.schedule})" if run.pp > 1 else ""
    return f"{mesh}, {run.num_microbatches} x ({run.micro_batch_size} x {run.length_tokens}){recompute}"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def summary(rows: list[Predicted]) -> list[str]:
    """Return the lines that sum up the ratios; fitted runs are counted apart."""
    whole = [row for row in rows if not row.run.is_ranked_only]
    speeds = {fitted: [row.speed_ratio for row in whole if row.run.is_fitted == fitted] for fitted in (True, False)}
    lines = [
        f"{name}: {_spread([each for each in ratios if each is not None])}"
        for name, ratios in (
            ("memory, allocated", [row.memory_ratio for row in rows if not SOURCES[row.run.source].is_reserved]),
            ("memory, reserved", [row.memory_ratio for row in rows if SOURCES[row.run.source].is_reserved]),
            ("tokens/s, runs that efficiencies are fitted to (*)", speeds[True]),
            ("tokens/s, the other runs", speeds[False]),
        )
    ]
    pairs = _pairs_of_layouts(rows)
    ranked = [_ranks_as_published(one, other) for one, other in pairs]
    apart = sum(not (one.run.is_fitted or other.run.is_fitted) for one, other in pairs)
    verdicts = [(row.run.gib == OUT_OF_MEMORY) == (row.fits == NO) for row in whole]
    return [
        *lines,
        f"the faster of two layouts: right in {sum(ranked)} of {len(pairs)} pairs, {apart} without a fitted run",
        f"fits or not: right in {sum(verdicts)} of {len(verdicts)}",
    ]


def _pairs_of_layouts(rows: list[Predicted]) -> list[tuple[Predicted, Predicted]]:
    """Return the pairs that a source has measured of one model and length on the same number of GPUs."""
    timed = [row for row in rows if row.run.tokens_per_second is not None]
    return [(one, other) for one, other in combinations(timed, 2) if _is_comparable(one.run, other.run)]


def _is_comparable(one: Published, other: Published) -> bool:
    keys = ("source", "model", "device", "world", "length_tokens")
    return all(getattr(one, key) == getattr(other, key) for key in keys)


def _ranks_as_published(one: Predicted, other: Predicted) -> bool:
    measured = (one.run.tokens_per_second or 0) > (other.run.tokens_per_second or 0)
    return (one.tokens_per_second > other.tokens_per_second) == measured


def _spread(ratios: list[float]) -> str:
    if not ratios:
        return "no run"
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}, median {median(ratios):.2f}"
    return f"{len(ratios)} runs, predicted over published {spread}"
