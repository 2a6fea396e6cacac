"""`split_parameters`: the matrices of hidden layers, which are for Muon, and all other parameters."""

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
    outside = [each for each in modules if isinstance(each, nn.Embedding)]
    base = getattr(model, "base_model", None)
    if isinstance(base, nn.Module):
        inside = {id(each) for each in base.modules()}
        outside += [each for each in modules if id(each) not in inside]
    else:
        with_matrix = [each for each in modules if any(one.ndim == 2 for one in each.parameters(recurse=False))]
        outside += with_matrix[-1:]
    left = {id(each) for module in outside for each in module.parameters(recurse=False)}
    trained = [each for each in model.parameters() if each.requires_grad]
    matrices = [each for each in trained if each.ndim == 2 and id(each) not in left]
    taken = {id(each) for each in matrices}
    return matrices, [each for each in trained if id(each) not in taken]
