"""What the gradient of an update is, by plain PyTorch and nothing else: one device, one batch, one division per term.

`sums(model, batch)` gives {name: (total, weight)}, as the losses of this folder do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Sums = Mapping[str, tuple[Tensor, Tensor]]
Sample = dict[str, Tensor]


@dataclass
class Answer:
    gradients: dict[str, Tensor | None]  # None where the update has no weight
    terms: dict[str, float]  # total / weight of every term, metrics too
    weights: dict[str, float]
    loss: float  # sum of the quotients that were differentiated


def collate(samples: Sequence[Sample]) -> Sample:
    """One batch, padded on the right: labels with -100, everything else with 0."""
    return {key: _pad([sample[key] for sample in samples], key) for key in samples[0]}


def _pad(tensors: Sequence[Tensor], key: str) -> Tensor:
    if tensors[0].dim() != 1:
        return torch.stack(list(tensors))
    fill = -100 if key == "labels" else 0
    return nn.utils.rnn.pad_sequence(list(tensors), batch_first=True, padding_value=fill)


def answer(model: nn.Module, sums: Callable[[nn.Module, Sample], Sums], samples: Sequence[Sample],
           divisor: float | None = None, divide_last: bool = False) -> Answer:  # fmt: skip
    """The gradient of sum(total) / sum(weight) of all samples at once; it is also left in p.grad.

    `divide_last` divides the gradient of one term's total instead, which rounds once where that gradient is integer.
    """
    model.zero_grad(set_to_none=True)
    if not samples:
        return Answer({name: None for name, _ in model.named_parameters()}, {}, {"loss": 0.0}, 0.0)
    found = sums(model, collate(samples))
    weights = {name: float(weight) for name, (_, weight) in found.items()}
    divisors = {name: divisor or weight for name, weight in weights.items()}
    quotients = {name: total / divisors[name] for name, (total, _) in found.items() if divisors[name]}
    loss = sum((q for q in quotients.values() if q.requires_grad), torch.zeros(()))
    if loss.requires_grad and divide_last:
        found["loss"][0].backward()
        for parameter in model.parameters():
            parameter.grad /= divisors["loss"]
    elif loss.requires_grad:
        loss.backward()
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    terms = {name: float(quotient.detach()) for name, quotient in quotients.items()}
    return Answer(gradients, terms, weights, float(loss.detach()))


def relative_error(found: Tensor | None, expected: Tensor | None) -> float:
    """0.0 only for equal bits; infinite where one of the two is missing.

    What nothing used has no gradient in plain PyTorch; zeros say the same.
    """
    if found is None or expected is None:
        same = found is expected or (found is not None and not found.any())
        return 0.0 if same else float("inf")
    if torch.equal(found, expected):
        return 0.0
    distance = torch.linalg.vector_norm(found.double() - expected.double())
    error = float(distance / torch.linalg.vector_norm(expected.double()))
    return error if error == error and error > 0 else float("inf")


def worst_error(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> tuple[float, str]:
    """The largest relative error of one parameter's gradient, and the parameter."""
    return max((relative_error(found[name], expected[name]), name) for name in expected)


def whole_error(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> float:
    """The relative error of all gradients taken as one vector."""
    if any(gradient is None for gradient in (*found.values(), *expected.values())):
        return worst_error(found, expected)[0]
    return relative_error(_flat(found), _flat(expected))


def _flat(gradients: Mapping[str, Tensor | None]) -> Tensor:
    return torch.cat([g.double().flatten() for _, g in sorted(gradients.items()) if g is not None])
