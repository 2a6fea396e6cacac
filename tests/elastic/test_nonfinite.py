"""An update that is not finite leaves nothing behind."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import megabatch
from megabatch.batching.deferred import Deferred
from megabatch.train.callbacks.nonfinite import SkipNonfinite
from megabatch.train.config import Config
from megabatch.train.config.parallel_layout import layout_of
from megabatch.train.context import Callbacks
from megabatch.train.data.updates import NumUpdates
from megabatch.train.loop import make_update
from megabatch.train.model.build import build
from megabatch.train.model.optimizer import build_learner
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks
from tests.exact.launch import of_ranks
from tests.tiers import some
from tests.train.contexts import context_of

CPU = torch.device("cpu")
BAD = {"late": (10,), "one": (6,), "all of a rank": (0, 2, 4, 6, 8, 10), "three": (1, 2, 9)}
NUM_SAMPLES, NUM_UPDATES, BAD_UPDATE = 12, 3, 1
MAX_NORM = 0.5
LAYOUTS: dict[str, dict[str, Any]] = {"plain": {}, "hsdp": {"wrapper": "fsdp2", "dp_replicate": 2, "dp_shard": 2}}


class Regression(nn.Module):
    """Two layers, a buffer that every forward moves, and dropout that drops nothing."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.inner = nn.Linear(3, 4, dtype=dtype)
            self.outer = nn.Linear(4, 1, dtype=dtype)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros((), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().sum()
        return self.outer(torch.tanh(self.inner(x))).squeeze(-1)  # [B]


def float32_model() -> Regression:
    return Regression(torch.float32)


def float64_model() -> Regression:
    return Regression(torch.float64)


@megabatch.loss(weigh=lambda microbatch: len(microbatch["y"]))
def loss(model: nn.Module, microbatch: Any) -> tuple[Tensor, int]:
    """Squares; a sample with a spike adds 0 whose gradient is infinite, one with an offset adds that."""
    found = model(microbatch["x"])
    spikes = (found - found.detach())[microbatch["spike"] > 0]
    return (found - microbatch["y"]).square().sum() + spikes.sqrt().sum() + microbatch["offset"].sum(), len(
        microbatch["y"]
    )


def samples(update: int, dtype: torch.dtype, fault: str, bad: tuple[int, ...]) -> list[dict[str, Tensor]]:
    """The samples of an update over all ranks, those of ``bad`` at fault."""
    draw = torch.Generator().manual_seed(update)
    x, y = (
        torch.randn(NUM_SAMPLES, 3, generator=draw, dtype=dtype),
        torch.randn(NUM_SAMPLES, generator=draw, dtype=dtype),
    )
    spike, offset = torch.zeros(2, NUM_SAMPLES, dtype=dtype)
    for index in bad:
        if fault == "nan":
            x[index, 1] = float("nan")
        spike[index] = fault == "spike"
        offset[index] = 1e308 if fault == "sum" else 0.0  # finite, and two of them are not
    return [
        {"x": x[index], "y": y[index], "spike": spike[index], "offset": offset[index]} for index in range(NUM_SAMPLES)
    ]


def config_of(wrapper: str, dtype: str, max_norm: float | None) -> Config:
    """A recipe of the model."""
    return Config.model_validate({
        "model": {"function": f"{__name__}:{dtype}_model", "dtype": dtype},
        "update": {"global_batch_size": NUM_SAMPLES, "micro_batch_size": 2, "max_norm": max_norm,
                   "on_nonfinite": "skip_update"},
        "optim": {"name": "SGD", "lr": 0.1, "options": {"momentum": 0.9}, "schedule": "linear", "decay_steps": 5},
        "run": {"folder": tempfile.mkdtemp()},
        "parallel": LAYOUTS.get(wrapper, {"wrapper": wrapper}),
    })  # fmt: skip


def whole(model: nn.Module) -> dict[str, list[float]]:
    """Parameters and buffers, as they are on one process."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: getattr(each, "full_tensor", lambda each=each: each)().detach().flatten().tolist()
        for name, each in tensors.items()
    }


def job(name: str) -> dict[str, Any]:
    """The weights after some updates, of which the second has samples at fault, and what was said of it."""
    fault, who, wrapper, dtype, clipped = name.split(":")
    size = dist.get_world_size() if dist.is_initialized() else 1
    config = config_of(wrapper, dtype, MAX_NORM if clipped == "clipped" else None)
    ranks = Ranks(dist.get_rank() if size > 1 else 0, size, CPU, layout_of(config.parallel, size))
    parallel_model = build(config, ranks, Console(enabled=False, loss_digits=4), None, None)
    learner = build_learner(parallel_model, config, NumUpdates(5, 5), None)
    context = context_of(learner, loss, ranks=ranks, config=config, parallel_model=parallel_model)
    context.callbacks = Callbacks([SkipNonfinite(context)])
    (log,) = context.logs
    rows: list[Any] = []
    for update in range(NUM_UPDATES):
        bad = BAD[who] if update == BAD_UPDATE else ()
        mine = range(NUM_SAMPLES)[ranks.dp_rank :: ranks.dp_degree]
        batch = samples(update, getattr(torch, dtype), fault, bad)
        own: Any = [batch[index] for index in mine]
        if who == "late":
            own = Deferred(own.__getitem__, [3] * len(own), look_ahead=0)
        context.updates.names = [f"{update}:{index}" for index in mine]
        make_update(context, own)
        row, lr = context.row, learner.optimizer.param_groups[0]["lr"]
        rows.append([context.update.num_samples, row.get("skipped_samples", 0), row.get("num_samples") == 0, lr])
    return {"rows": rows, "state": whole(parallel_model.base), "skipped": log.rows(), "step": learner.step,
            "folder": str(Path(config.run.folder))}  # fmt: skip


ON_ONE = [
    *(f"{fault}:{who}:plain:float64:{clip}" for fault in ("nan", "spike") for who in BAD
      for clip in ("clipped", "free")),
    "nan:three:plain:float32:clipped", "sum:three:plain:float64:free",
]  # fmt: skip
ON_TWO = [
    *(f"{fault}:{wrapper}:float64:{clip}" for wrapper in ("ddp", "fsdp2") for fault, clip in [
        ("nan:one", "free"), ("nan:all of a rank", "clipped"), ("spike:three", "clipped"), ("nan:late", "free"),
    ]),
    "nan:three:fsdp2:float32:clipped",
]  # fmt: skip
ON_FOUR = ["nan:one:hsdp:float64:clipped"]
ALL = [(world, name) for world, names in ((1, ON_ONE), (2, ON_TWO), (4, ON_FOUR)) for name in names]
TOLERANCE = {"float64": 1e-12, "float32": 2e-6}
found = of_ranks("tests.elastic.test_nonfinite:job", {1: ON_ONE, 2: ON_TWO, 4: ON_FOUR})


def plain(dtype: str, *, clipped: bool) -> tuple[Regression, list[float]]:
    """Plain torch on the updates without a fault; and the learning rates that each update left."""
    model = Regression(getattr(torch, dtype))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.SGD(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=0.1, momentum=0.9
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - 0.9 * step / 5)
    rates: list[float] = []
    for update in range(NUM_UPDATES):
        if update != BAD_UPDATE:
            good = samples(update, getattr(torch, dtype), "", ())
            optimizer.zero_grad()
            x, y = torch.stack([each["x"] for each in good]), torch.stack([each["y"] for each in good])
            (model(x) - y).square().mean().backward()
            if clipped:
                torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return model, rates


@pytest.mark.parametrize(("world", "name"), some(ALL, 3))
def test_weights_are_those_of_plain_torch_on_the_other_updates(found, world, name):
    *_, dtype, clip = name.split(":")
    model, rates = plain(dtype, clipped=clip == "clipped")
    for told in found(name, world):
        for key, expected in model.named_parameters():
            error = (torch.tensor(told["state"][key], dtype=expected.dtype) - expected.detach().flatten()).abs().max()
            assert error <= TOLERANCE[dtype] * expected.detach().abs().max(), key
        assert [row[3] for row in told["rows"]] == pytest.approx(rates, rel=1e-12)
        assert [row[1] for row in told["rows"]] == [0, NUM_SAMPLES, 0]
        assert [row[2] for row in told["rows"]] == [False, True, False]
        assert told["step"] == NUM_UPDATES


@pytest.mark.parametrize(("world", "name"), some(ALL, 3))
def test_what_was_left_out_is_written_down_by_name(found, world, name):
    fault = name.split(":")[0]
    main, *others = (told["skipped"] for told in found(name, world))
    assert others == [[]] * (world - 1)
    (row,) = main
    assert row["samples"] == sorted(f"{BAD_UPDATE}:{index}" for index in range(NUM_SAMPLES))
    assert row["step"] == BAD_UPDATE + 1
    reason = (
        "the loss is finite but the norm of the gradient" if fault == "spike" else "the loss is not finite on data rank"
    )
    assert row["reason"].startswith(reason)


@pytest.mark.parametrize("name", some(ON_ONE, 3))
def test_buffers_have_seen_the_other_updates_only(found, name):
    *_, dtype, clip = name.split(":")
    model, _ = plain(dtype, clipped=clip == "clipped")
    assert found(name, 1)[0]["state"]["seen"] == pytest.approx([float(model.seen)], rel=1e-5)
