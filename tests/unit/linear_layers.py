"""Models and losses that use linear layers in every way: plainly, twice, hooked, replaced, inside of torch.func."""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

NUM_SAMPLES = 8  # a power of two: the same bits in any order
ROWS = {"x": torch.randint(-3, 4, (NUM_SAMPLES, 3, 4), generator=torch.Generator().manual_seed(3)).double()}


class Net(nn.Module):
    """Two layers, integer weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.double()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu_(self.first(x)))


class Twice(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.second(self.first(x)))


class Watched(Net):
    """Its modules are looked at, its weights are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(lambda _module, _inputs, output: 2 * output)


class Functional(Net):
    """The weights are used past their layers too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(x, self.first.weight) + self.second.weight.sum()


class Replaced(Net):
    """A layer whose forward is somebody else's."""

    def __init__(self) -> None:
        super().__init__()
        self.first.forward = lambda x: F.linear(x, self.first.weight, self.first.bias) * 3


class Turned(Net):
    """Inputs that are not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.transpose(0, 1)).repeat(1, 1, 2)[..., ::2])


class OneByOne(Net):
    """Inputs of one dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([super(OneByOne, self).forward(row) for row in x.flatten(0, 1)])


class Again(Net):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)


class AgainTwice(Twice):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Copied(Net):
    """What autograd saves comes back as a copy."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
            return super().forward(x)


class Parts(Net):
    """Some microbatches are empty, and some do not use a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x)[:0].sum() + (self.first(x) if x.sum() > 0 else x)


def total_of(model: nn.Module, microbatch: Any) -> Tensor:
    return (model(microbatch["x"]) ** 2).sum()


def penalised(model: nn.Module, microbatch: Any) -> Tensor:
    """With the square of a gradient for the inputs, and of one for a weight."""
    x = microbatch["x"].requires_grad_()
    outputs = model(x).sum()
    of_x, of_weight = torch.autograd.grad(outputs, [x, model.second.weight], create_graph=True)
    return total_of(model, {"x": x.detach()}) + (of_x**2).sum() + (of_weight**2).sum() * 0.0


def looks_inside(model: nn.Module, microbatch: Any) -> Tensor:
    """Backwards that are not for the model's parameters, in between."""
    x = microbatch["x"].clone().requires_grad_()
    scale = torch.autograd.grad(model(x).sum(), x)[0].sum().sign().detach()
    model(x).sum().backward(inputs=[x])
    return total_of(model, microbatch) * scale


def with_torch_func(model: nn.Module, microbatch: Any) -> Tensor:
    x = microbatch["x"]
    torch.func.grad(lambda each: model(each).sum())(x)
    torch.func.vmap(model)(x)
    with forward_ad.dual_level(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
        model(forward_ad.make_dual(x, torch.ones_like(x)))
    return total_of(model, microbatch)
