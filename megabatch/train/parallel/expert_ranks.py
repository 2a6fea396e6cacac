"""Experts dealt out over ranks that see different samples (expert parallelism, mesh axis "ep").

transformers cuts the experts of its models and sends tokens to them. Its plan says which parameters are of experts.
Importing this module raises `MegabatchError` where transformers is too old for that.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import all_to_all_single
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import __version__

from megabatch.errors import MegabatchError
from megabatch.train.parallel.wrap import NUM_EXPERTS, layers_of_experts, plan_of_experts, untested_kind

try:
    from transformers.distributed.expert_parallel import (
        EPImplementation,
        EPImplementationInterface,
        apply_expert_parallelism,
    )
except ImportError:
    raise MegabatchError(
        f"parallel.ep is above 1 and transformers {__version__} has no exchange of tokens that is tested; install "
        "transformers 5.23, or leave parallel.ep out"
    ) from None

# Their gradients are compared with those of one process.
FAMILIES = ("deepseek_v3", "gpt_oss", "mixtral", "olmoe", "qwen3_moe")
# Name in transformers of the even exchange of tokens in simulations.
EVEN = "megabatch_even"


def deal_experts(model: nn.Module, mesh: DeviceMesh, exchange: str) -> list[nn.Module]:
    """Give each rank along ``ep`` some of the experts of every layer.

    Args:
        model: A model of transformers; its parameters may be on the meta device, and are the same on every rank.
        mesh: Of all ranks, with the axes ``ep`` and ``tp``, the latter of one rank.
        exchange: Name of transformers' way to bring tokens to experts.

    Returns:
        The modules of experts, a layer each. Their parameters are DTensors over ``ep``.

    Raises:
        MegabatchError: The model has no experts that are tested, or a number that ``ep`` does not divide.
    """
    check_experts_of(model, mesh["ep"].size())
    plan = plan_of_experts(model)
    apply_expert_parallelism(cast(Any, model), mesh["ep"], mesh["tp"], plan, exchange)
    return layers_of_experts(model, plan)


def check_experts_of(model: nn.Module, num_ranks: int) -> None:
    if kind := untested_kind(model, FAMILIES):
        raise MegabatchError(
            f"parallel.ep is above 1 and the experts of a {kind} are not tested over ranks; leave parallel.ep out, or "
            f"take one of {', '.join(FAMILIES)}"
        )
    config: Any = model.config
    name = next(name for name in NUM_EXPERTS if name in config.to_dict())
    if (number := getattr(config, name)) % num_ranks:
        raise MegabatchError(
            f"parallel.ep is {num_ranks}, which does not divide model.config.{name} = {number}; set parallel.ep to a "
            "number that does"
        )


class EvenExchange(EPImplementation):
    """transformers' all-to-alls of fake tensors, whose contents choose no expert: each gets as many tokens."""

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts' outputs for each token: [N, D], [N, K], [N, K] -> [N, D]."""
        group, num_ranks = self.ep_mesh.get_group(), self.ep_mesh.size()
        expert_ids = top_k_index.reshape(-1)
        order = torch.argsort(expert_ids)
        to_send = hidden_states[order // top_k_index.shape[-1]]
        counts = torch.zeros(cast(int, self.num_local_experts) * num_ranks, dtype=torch.long)
        counts = counts.scatter_add_(0, expert_ids, torch.ones_like(expert_ids))
        all_to_all_single(torch.empty_like(counts), counts, group=group)
        share, more = divmod(len(order), num_ranks)
        sizes = [share + (rank < more) for rank in range(num_ranks)]
        rows = wait_tensor(all_to_all_single_autograd(to_send, sizes, sizes, group))
        local_ids = torch.zeros(len(rows), 1, dtype=torch.long)
        outputs = self.experts_forward(rows, local_ids, torch.ones_like(local_ids, dtype=rows.dtype))
        returned = all_to_all_single_autograd(outputs, sizes, sizes, group)
        of_tokens = torch.empty_like(returned)
        of_tokens[order] = returned
        weighted = of_tokens.view(*top_k_weights.shape, -1) * top_k_weights.unsqueeze(-1)
        return weighted.sum(dim=1)


EPImplementationInterface.register(EVEN, EvenExchange)
