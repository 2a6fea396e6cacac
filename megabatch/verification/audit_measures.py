"""Measurements of an audit: weights of target tokens from the gradient of logits, and sketches of gradients.

Cross-entropy of a target y with weight c leaves ``c * (softmax(logits) - onehot(y))`` in the gradient of the logits. So
that gradient tells the target and its weight, without the labels and without the code of the loss. The same holds for
losses of log-probabilities, such as policy gradients.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.torch_private.classes import is_dtensor, local_tensor
from megabatch.torch_private.dtensors import first_of_shard, num_replicas

# Bins of a sketch keep lengths and angles to 1 %. The signs are a larger prime, so that those of one bin differ.
NUM_BINS, NUM_SIGNS = 1 << 14, 1_048_583
# Numbers of logits that are read at once.
CHUNK_NUMBERS = 1 << 22
# Below this probability of all other classes, the target's own entry is rounded away.
CONFIDENT = 0.01
# Label smoothing is searched where the residual is larger.
ROUNDING, MAX_SMOOTHING = 1e-5, 0.9


class TokenWeights(NamedTuple):
    """Weights [targets] of the rows of flattened logits that losses reached, and the relative length of the rest."""

    weights: Tensor
    positions: Tensor
    residual: float
    smoothing: float


def measure_weights(gradient: Tensor, logits: Tensor) -> TokenWeights:
    """Return the weights of targets from the gradient of their logits.

    Args:
        gradient: d loss / d logits, (..., classes). Rows of zeros are no targets.
        logits: (..., classes), as they were when the loss read them.
    """
    d, logits = gradient.detach().flatten(0, -2), logits.detach().flatten(0, -2)  # [rows, classes]
    rows = max(1, CHUNK_NUMBERS // max(1, d.shape[-1]))
    weights, positions, smoothing = [torch.empty(0, dtype=torch.float64)], [torch.empty(0, dtype=torch.int64)], None
    wrong = total = 0.0
    for start in range(0, d.shape[0], rows):
        part = d[start : start + rows]
        used = (part != 0).any(-1).nonzero()[:, 0]
        if not used.numel():
            continue
        kind = torch.float64 if d.dtype is torch.float64 else torch.float32
        part, read = part[used].to(kind), logits[start : start + rows][used].to(kind)
        row_weights, errors, smoothing = _fit_rows(part, read.softmax(-1), smoothing)
        weights.append(row_weights.double().cpu())
        positions.append(used.cpu() + start)
        wrong += float(errors.double().square().sum())
        total += float(part.double().square().sum())
    residual = math.sqrt(wrong / total) if total else 0.0
    return TokenWeights(torch.cat(weights), torch.cat(positions), residual, smoothing or 0.0)


def _fit_rows(d: Tensor, p: Tensor, smoothing: float | None) -> tuple[Tensor, Tensor, float]:
    """Return weights [rows], what they leave of the gradient [rows, classes], and the label smoothing."""
    # The target's entry is as long as all others together.
    # It is the smallest of a row, or under a negative weight the largest.
    smallest, largest = d.min(-1), d.max(-1)
    y = torch.where(-smallest.values >= 0.999 * largest.values, smallest.indices, largest.indices)[:, None]
    wrong_classes = p.scatter(-1, y, 0.0)
    wrong_mass = wrong_classes.sum(-1, keepdim=True)
    if smoothing is None or not smoothing:
        # This is softmax - onehot, without cancellation.
        e = wrong_classes.scatter(-1, y, -wrong_mass)
        confident = wrong_mass < CONFIDENT
        along = torch.where(confident, wrong_classes, e)
        c = (d * along).sum(-1, keepdim=True) / (along * e).sum(-1, keepdim=True).clamp_min(torch.finfo(d.dtype).tiny)
        unexplained = d - c * e
        error = float(unexplained.norm() / d.norm())
        if smoothing is not None or error < ROUNDING:
            return c[:, 0], unexplained, 0.0
        guess = _smoothing_of(d.double(), e.double(), y)
        smoothed = _fit_smoothed(d, e, y, guess)
        if not 1e-3 < guess < MAX_SMOOTHING or float(smoothed[1].norm() / d.norm()) > error / 3:
            return c[:, 0], unexplained, 0.0
        return *smoothed, guess
    return *_fit_smoothed(d, wrong_classes.scatter(-1, y, -wrong_mass), y, smoothing), smoothing


def _fit_smoothed(d: Tensor, e: Tensor, y: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    shape = torch.full_like(e, -smoothing / e.shape[-1])
    e = e + shape.scatter_add(-1, y, torch.full_like(e[:, :1], smoothing))
    c = (d * e).sum(-1, keepdim=True) / (e * e).sum(-1, keepdim=True).clamp_min(torch.finfo(d.dtype).tiny)
    return c[:, 0], d - c * e


def _smoothing_of(d: Tensor, e: Tensor, y: Tensor) -> float:
    """Return the label smoothing s of all rows: d = c * (e + s * u) with u = onehot(y) - 1 / classes."""
    ee, de = (e * e).sum(-1), (d * e).sum(-1)
    eu = e.gather(-1, y)[:, 0] - e.mean(-1)
    du = d.gather(-1, y)[:, 0] - d.mean(-1)
    uu = 1 - 1 / e.shape[-1]
    determinant = ee * uu - eu * eu
    # Both are times the determinant.
    c, cs = uu * de - eu * du, ee * du - eu * de
    known = determinant > 1e-12 * ee
    return float((c * cs)[known].sum() / (c * c)[known].sum()) if known.any() else 0.0


class Sketcher:
    """Count sketches of a model's gradient: linear maps to `NUM_BINS` numbers that keep lengths and angles to 1 %.

    Number i of a parameter is added to bin i modulo `NUM_BINS` with a random sign. A sum of gradients has the sum of
    their sketches, so sketches tell how often a microbatch's gradient is in ``p.grad``. All ranks draw the same signs.
    """

    def __init__(self) -> None:
        self._signs: dict[torch.device, Tensor] = {}
        # The first sign of each parameter, and the parameter, which keeps its id.
        self._parameters: dict[int, tuple[int, Any]] = {}

    @property
    def parameters(self) -> list[Any]:
        """The parameters that were added, in order."""
        return [parameter for _, parameter in self._parameters.values()]

    def add_parameter(self, parameter: Any) -> None:
        """Give a parameter signs of its own, unless it has some."""
        self._parameters.setdefault(id(parameter), ((len(self._parameters) * 104_729) % NUM_SIGNS, parameter))

    def add_sketch(self, total: Tensor | None, parameter: Any, gradient: Any) -> Tensor:
        """Add the sketch of a parameter's gradient to ``total``, float64 [NUM_BINS]; None begins a new one.

        A DTensor adds this rank's part, so that the sum over ranks is the sketch of the whole gradient.

        Raises:
            ValueError: The DTensor's shards are no ranges of its rows.
        """
        place, share = 0, 1.0
        if is_dtensor(gradient):
            first = first_of_shard(gradient)
            if first is None:
                raise ValueError(f"gradients with the placements {gradient.placements}")
            place, share, gradient = first, 1 / num_replicas(gradient), local_tensor(gradient)
        flat = gradient.detach()
        flat = (flat.to_dense() if flat.is_sparse else flat).reshape(-1)
        if total is None:
            total = torch.zeros(NUM_BINS, dtype=torch.float64, device=flat.device)
        first_sign, _ = self._parameters[id(parameter)]
        for part, signs, bin in self._pieces(flat, place, first_sign):
            _fold(total, part * signs if share == 1 else part * signs * share, bin)
        return total

    def _pieces(self, flat: Tensor, place: int, first_sign: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yield ranges of numbers with their signs, which repeat, and the bin of the first."""
        signs = self._signs.get(flat.device)
        if signs is None:
            drawn = torch.randint(0, 2, (NUM_SIGNS,), generator=torch.Generator().manual_seed(0)) * 2 - 1
            signs = self._signs[flat.device] = drawn.to(flat.device, torch.float32)
        done = 0
        while done < flat.numel():
            index = (place + done + first_sign) % NUM_SIGNS
            size = min(flat.numel() - done, NUM_SIGNS - index)
            part = flat[done : done + size]
            part = part if part.dtype is torch.float64 else part.float()
            yield part, signs[index : index + size], (place + done) % NUM_BINS
            done += size


def _fold(total: Tensor, numbers: Tensor, bin: int) -> None:
    """Add numbers to bins in turn, from ``bin`` on."""
    head = min(numbers.numel(), NUM_BINS - bin)
    total[bin : bin + head] += numbers[:head]
    in_full_folds = (numbers.numel() - head) // NUM_BINS * NUM_BINS
    total += numbers[head : head + in_full_folds].view(-1, NUM_BINS).sum(0, dtype=torch.float64)
    tail = numbers[head + in_full_folds :]
    total[: tail.numel()] += tail
