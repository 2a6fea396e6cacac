"""Pairs of options, on one process: each gives the gradient of plain torch, or is refused in one line.

An option is a planner, a batching, an extension, a setting or a form of the call. The refused pairs are listed, so that
none can join them unseen.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megabatch import Extension, GradientAccumulator, JointLoss, MegabatchError, Planner, loss, losses
from megabatch.batching import Deferred, InsideSamples, OneRow, Padded, SharedPrefix
from megabatch.planners import Auto, Rows, Shapes, Tokens
from tests.exact.tiny import VOCABULARY, tiny

TOLERANCE = 1e-12
PREFIX = 3  # tokens that samples have in common
LENGTHS = (7, 12, 5, 9, 12, 6)
LIMIT = 24


class Alternating(Planner):
    def cut(self, lengths: Sequence[int], samples: Sequence[Any]) -> list[list[int]]:
        return [list(range(start, len(lengths), 4)) for start in range(min(4, len(lengths)))]


class Watching(Extension):
    def surround_steps(self, steps: Any, call: Any) -> Iterator[Any]:
        yield from steps


def call(gradient: GradientAccumulator, batch: Any, loss_fn: Any) -> None:
    gradient.forward_backward(batch, loss_fn)


def opened(gradient: GradientAccumulator, batch: Any, loss_fn: Any) -> None:
    gradient.open()
    gradient.forward_backward(batch[:4], loss_fn)
    gradient.forward_backward(batch[4:], loss_fn)


def told(gradient: GradientAccumulator, batch: Any, loss_fn: Any) -> None:
    gradient.open(weights=float(sum(length - 1 for length in LENGTHS)))
    gradient.forward_backward(batch[:4], loss_fn)
    gradient.forward_backward(batch[4:], loss_fn)


def of_loop(gradient: GradientAccumulator, batch: Any, loss_fn: Any) -> None:
    for index, sample in enumerate(batch):
        microbatch = {name: value[None] for name, value in sample.items()}
        with gradient.microbatch(index, of=len(batch), sum_over=len(sample["labels"]) - 1) as part:
            part.scale(losses.next_token(gradient.model, microbatch)[0]).backward()


def prepared(gradient: GradientAccumulator, batch: Any, loss_fn: Any) -> None:
    gradient.forward_backward(gradient.prepare(batch, loss_fn), loss_fn)


def planned(gradient: GradientAccumulator, batch: Any, loss_fn: Any) -> None:
    gradient.forward_backward(batch, loss_fn)
    gradient.discard()
    gradient.forward_backward(batch, loss_fn, plan=gradient.last_plan)


def evaluated(gradient: GradientAccumulator, batch: Any, loss_fn: Any) -> None:
    gradient.forward_backward(batch, loss_fn)
    gradient.evaluate(batch, loss_fn)
    gradient.forward(batch, lambda model, microbatch: model(microbatch["input_ids"]).logits)


def collate(samples: list[Any]) -> dict[str, Tensor]:
    pad: Callable[..., Tensor] = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True)
    ids, labels = ([sample[name] for sample in samples] for name in ("input_ids", "labels"))
    return {"input_ids": pad(ids), "labels": pad(labels, padding_value=-100)}


def encode(model: Any, microbatch: Any) -> Tensor:
    """Return the sum of the loss and the number of targets of each sample, [B, 2]."""
    rows = [
        {name: value[row : row + 1] for name, value in microbatch.items()} for row in range(len(microbatch["labels"]))
    ]
    sums = [losses.next_token(model, row) for row in rows]
    return torch.stack([torch.stack([total, torch.as_tensor(weight, dtype=total.dtype)]) for total, weight in sums])


def add_up(sums: Tensor) -> tuple[Tensor, float]:
    return sums[:, 0].sum(), float(sums[:, 1].detach().sum())


@loss(weigh=lambda microbatch: losses.count_targets(microbatch))
def with_divisor(model: Any, microbatch: Any, divisor: float) -> Any:
    total, weight = losses.next_token(model, microbatch)
    return total / divisor, weight


OPTIONS: dict[str, dict[str, Any]] = {  # settings of the accumulator; "call", "loss" and "batch" are those of the test
    "rows": {"limit": Rows},
    "tokens": {"limit": Tokens},
    "auto": {"limit": Auto},
    "planner": {"limit": Alternating},
    "shapes": {"around": functools.partial(Shapes, 2)},
    "measured cost": {"cost": "measure"},
    "own collate": {"collate": collate},
    "one row": {"batching": OneRow()},
    "shared prefix": {"batching": SharedPrefix()},
    "inside samples": {"batching": InsideSamples(), "tokens": 8},
    "deferred": {"batch": lambda batch: Deferred(batch.__getitem__, [len(each["input_ids"]) for each in batch])},
    "length": {"length": lambda sample: len(sample["labels"])},
    "padding": {"batching": Padded({"input_ids": 1})},
    "float64 sums": {"accumulate_dtype": torch.float64},
    "extension": {"extensions": Watching},
    "joint loss": {"loss": JointLoss(encode, add_up)},
    "divisor": {"loss": with_divisor},
    "open": {"call": opened},
    "told": {"call": told},
    "loop": {"call": of_loop},
    "prepare": {"call": prepared},
    "plan": {"call": planned},
    "evaluate": {"call": evaluated},
}
NEEDS_TOKENS = ("shapes", "shared prefix", "one row", "inside samples")


@functools.cache
def case() -> tuple[nn.Module, list[dict[str, Tensor]], list[Tensor]]:
    """A model, a batch whose samples begin alike, and the gradient of plain torch."""
    model = tiny("gpt_neox", attn_implementation="sdpa", use_cache=False)
    numbers = torch.Generator().manual_seed(0)
    prefix = torch.randint(VOCABULARY - 1, (PREFIX,), generator=numbers)
    batch: list[dict[str, Tensor]] = []
    for length in LENGTHS:
        rest = torch.randint(VOCABULARY - 1, (length - PREFIX,), generator=numbers)
        ids = torch.cat([prefix, rest])
        batch.append({"input_ids": ids, "labels": ids.clone()})
    reference = copy.deepcopy(model)
    total = sum(
        nn.functional.cross_entropy(
            reference(sample["input_ids"][None]).logits[0, :-1], sample["labels"][1:], reduction="sum"
        )
        for sample in batch
    )
    (total / sum(length - 1 for length in LENGTHS)).backward()  # pyright: ignore
    return model, batch, [parameter.grad for parameter in reference.parameters()]  # pyright: ignore


def run(names: Sequence[str]) -> str:
    """Return "exact", or the refusal of these options together. Raises `AssertionError` for a gradient that is off."""
    original, batch, expected = case()
    model = copy.deepcopy(original)
    options = {key: value for name in names for key, value in OPTIONS[name].items()}
    perform, loss_fn = options.pop("call", call), options.pop("loss", losses.next_token)
    make_batch = options.pop("batch", lambda samples: samples)
    usual = Tokens if any(name in NEEDS_TOKENS for name in names) else Rows
    limit, cost = options.pop("limit", usual), options.pop("cost", None)
    size = {Rows: 2, Tokens: options.pop("tokens", LIMIT)}.get(limit)
    around = options.pop("around", lambda limit: limit)
    if "extensions" in options:
        options["extensions"] = [options["extensions"]()]
    try:
        planner = around(limit() if size is None else limit(size, cost))
        gradient = GradientAccumulator(model, planner=planner, **options)
        for _ in range(2):  # a known loss takes another way than a new one
            perform(gradient, make_batch(batch), loss_fn)
            gradient.finalize()
    except MegabatchError as error:
        return str(error)
    for parameter, right in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None, "a parameter has no gradient"
        error = float((parameter.grad - right).norm() / right.norm().clamp(min=1e-30))
        assert error <= TOLERANCE, f"off by {error:.1e}"
    return "exact"


def clash(a: str, b: str) -> bool:
    """Two values of one setting, or a cost for a planner that takes none."""
    has_cost = "measured cost" in (a, b)
    return bool(OPTIONS[a].keys() & OPTIONS[b].keys()) or (has_cost and bool({"auto", "planner"} & {a, b}))


PAIRS = [pair for pair in combinations(OPTIONS, 2) if not clash(*pair)]


REFUSED_WITH: dict[str, list[str]] = {  # by the option that stands first above
    "rows": ["shared prefix", "inside samples"],
    "auto": ["shared prefix", "inside samples", "joint loss"],
    "planner": ["shapes", "shared prefix", "inside samples"],
    "shapes": ["own collate", "shared prefix", "inside samples", "length", "joint loss", "divisor", "loop"],
    "measured cost": ["one row", "inside samples"],
    "own collate": ["one row", "shared prefix", "inside samples", "padding"],
    "one row": ["joint loss", "evaluate"],
    "shared prefix": ["deferred", "joint loss", "divisor"],
    "inside samples": ["deferred", "joint loss", "divisor", "loop"],
    "joint loss": ["evaluate"],
    "divisor": ["evaluate"],
}
REFUSED = {(a, b) for a, others in REFUSED_WITH.items() for b in others}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_alone_is_exact(name: str) -> None:
    assert run([name]) == "exact"


@pytest.mark.parametrize(("a", "b"), PAIRS, ids=[f"{a}+{b}".replace(" ", "-") for a, b in PAIRS])
def test_a_pair_is_exact_or_refused(a: str, b: str) -> None:
    refusal = run([a, b])
    assert (refusal != "exact") == ((a, b) in REFUSED), refusal
    assert "\n" not in refusal
