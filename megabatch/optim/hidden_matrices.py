"""`split_parameters`: the matrices of hidden layers, which are for Muon, and all other parameters."""

import itertools

from torch import nn


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trainable parameters for `torch.optim.Muon` and those for another optimizer.

    Muon is for the matrices of hidden layers. The others are vectors, tensors of more dimensions (convolutions, experts
    in one tensor), embeddings, and the head: what a transformers model has outside of its ``base_model``, or the last
    module with a matrix of any other model.

    Args:
        model: With or without shards of FSDP2; before DDP.

    Returns:
        Matrices [out, in], and the rest, each in the model's order.
    """
    modules = list(model.modules())
    outside: set[nn.Module] = {module for module in modules if isinstance(module, nn.Embedding)}
    base = getattr(model, "base_model", None)
    if isinstance(base, nn.Module):
        outside |= set(modules) - set(base.modules())
    else:
        outside.update(list(filter(_has_matrix, modules))[-1:])
    excluded = set(itertools.chain.from_iterable(module.parameters(recurse=False) for module in outside))
    matrices: list[nn.Parameter] = []
    other_parameters: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            is_hidden_matrix = parameter.ndim == 2 and parameter not in excluded
            (matrices if is_hidden_matrix else other_parameters).append(parameter)
    return matrices, other_parameters


def _has_matrix(module: nn.Module) -> bool:
    return any(parameter.ndim == 2 for parameter in module.parameters(recurse=False))
