"""Mixtures of experts: a router loss that no cut changes, and expert biases that follow an update's whole load.

The router loss of Switch is a product of two means over the tokens of a batch, so that it depends on the cut. The same
product within each sequence is a sum over sequences, exact under every cut.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from megabatch.accumulator import GradientAccumulator
from megabatch.errors import MegabatchError, PlanError, require_positive
from megabatch.losses import HALF_TYPES
from megabatch.stages import Pipeline
from megabatch.update import OpenUpdate

SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": lambda logits: logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True),
}


def sequence_balance(
    router_logits: Tensor | Sequence[Tensor], attention_mask: Tensor, *, top_k: int, scores: str = "softmax"
) -> Tensor:
    """How unevenly each sequence loads the experts, summed over sequences and layers: a total, its weight is B.

    ``router_logits``: [B, T, E] or [B * T, E], or a sequence of those, one per layer. ``attention_mask`` [B, T]: 0 is
    padding, which is not looked at; a row of `rows.OneRow` would be taken for one sequence. ``scores``: "softmax", or
    "sigmoid" over its sum as DeepSeek-V3 has it.

    Of a sequence of n tokens in one layer it is ``sum over experts of f * p``, with f = E / (top_k * n) times the
    tokens that have the expert among their ``top_k``, and p the mean of its scores: 1 where the load is even, at most
    E / top_k. A sequence without tokens gives 0. Raises `PlanError` for shapes that do not fit.
    """
    if scores not in SCORES:
        raise PlanError(f"scores is {scores!r}; expected one of {', '.join(SCORES)}")
    layers = [router_logits] if isinstance(router_logits, Tensor) else list(router_logits)
    if not layers:
        raise PlanError("router_logits has no layers; ask the model for them (output_router_logits=True)")
    each = [_layer_balance(logits, attention_mask, top_k, SCORES[scores]) for logits in layers]
    return torch.stack([total.to(each[0].device) for total in each]).sum()


def _layer_balance(logits: Tensor, mask: Tensor, top_k: int, scores: Callable[[Tensor], Tensor]) -> Tensor:
    num_experts = logits.shape[-1]
    if logits.numel() != mask.numel() * num_experts or mask.ndim != 2:
        raise PlanError(
            f"router_logits has the shape {tuple(logits.shape)} and attention_mask {tuple(mask.shape)}; expected "
            "[B, T, experts] or [B * T, experts], and [B, T]"
        )
    logits = logits.view(*mask.shape, num_experts)  # [B, T, E]
    logits = logits.float() if logits.dtype in HALF_TYPES else logits
    kept = mask.to(logits).unsqueeze(-1)  # [B, T, 1]
    chosen = torch.zeros_like(logits).scatter(-1, logits.topk(top_k).indices, 1.0)  # [B, T, E]
    num_tokens = kept.sum(1).clamp(min=1)  # [B, 1]
    load = (chosen * kept).sum(1) * num_experts / (top_k * num_tokens)  # [B, E]
    return (load * (scores(logits) * kept).sum(1) / num_tokens).sum()


class ExpertBias:
    """Balances experts without a loss: an expert that had fewer tokens than the mean in an update is made likelier.

    Tokens are counted over the whole update, all microbatches and all ranks, where they were trained on: not in an
    evaluation, a forward without a backward, a stand-in, an update that was abandoned or not stepped, and once where
    activation checkpointing runs a forward twice. Padding is left out where the model is given its ``attention_mask``
    [B, T] by name. Where it is not, padding is counted, and the cut changes how much of it there is.

    Args:
        gradient: Whose updates are counted; its model has the routers.
        rate: What is added to a bias or taken from it in one update.
        name: Of the bias of a router, [experts], which is on every rank whole. Each module that has one is a router.
        chosen: Gives the experts that were chosen, [tokens, k], of what a router returned; by default the one tensor of
            integers in it.

    Raises `PlanError` where the model has no such bias, or is cut into the stages of a pipeline.
    """

    def __init__(
        self,
        gradient: GradientAccumulator,
        *,
        rate: float = 1e-3,
        name: str = "e_score_correction_bias",
        chosen: Callable[[Any], Any] | None = None,
    ) -> None:
        self._gradient, self._name, self._chosen = gradient, name, chosen or _integers
        self._rate = require_positive("rate", rate)
        if isinstance(gradient.model, Pipeline):
            raise PlanError(
                "ExpertBias cannot tell apart the microbatches of a Pipeline; give a model that is not cut into stages"
            )
        models = gradient.model if isinstance(gradient.model, list | tuple) else [gradient.model]
        modules = {
            f"{number}.{path}" if len(models) > 1 else path: module
            for number, model in enumerate(models)
            for path, module in cast(nn.Module, model).named_modules()
        }
        self._routers = {path: each for path, each in modules.items() if isinstance(getattr(each, name, None), Tensor)}
        if not self._routers:
            raise PlanError(f"no module of the model has a tensor {name!r}; say name=, that of the bias of its routers")
        self._counts = {path: self._nothing(path) for path in self._routers}  # [experts] each
        self._update: object = None  # the one that is counted
        self._mask: Tensor | None = None  # [B, T], of the forward that runs
        for model in models:
            cast(nn.Module, model).register_forward_pre_hook(self._note_mask, with_kwargs=True)
        for path, router in self._routers.items():
            router.register_forward_hook(partial(self._count, path))

    @torch.no_grad()
    def update(self) -> dict[str, Tensor]:
        """Move every bias by what the last update counted; once, after ``optimizer.step()``, on all ranks.

        Returns the tokens of each expert over all ranks, [experts] by the name of the router.
        """
        counts = torch.cat(list(self._counts.values()))
        for group in self._gradient.ranks.groups:
            dist.all_reduce(counts, group=group)
        sizes = [len(each) for each in self._counts.values()]
        loads = dict(zip(self._routers, counts.split(sizes), strict=True))
        for path, load in loads.items():
            bias = self._bias(path)
            bias += self._rate * (load.sum() - len(load) * load).sign().to(bias)
        self._restart(None)
        return loads

    def _bias(self, path: str) -> Tensor:
        bias = cast(Tensor, getattr(self._routers[path], self._name))
        if isinstance(bias, DTensor):
            raise PlanError(
                f"{self._name!r} of {path!r} is sharded; make it a buffer, or give it to fully_shard's ignored_params"
            )
        return bias

    def _nothing(self, path: str) -> Tensor:
        return torch.zeros_like(self._bias(path), dtype=torch.int64)

    def _restart(self, update: object) -> None:
        self._update = update
        self._counts = {path: self._nothing(path) for path in self._routers}

    def _note_mask(self, _model: nn.Module, _inputs: Any, named: dict[str, Any]) -> None:
        mask = named.get("attention_mask")
        self._mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def _count(self, path: str, _router: nn.Module, _inputs: Any, output: Any) -> None:
        """Note what a router chose, to be counted when its gradient comes.

        Of a forward that checkpointing runs twice, only one has a backward.
        """
        update, counts = self._gradient.open_update, self._gradient.is_counting
        if counts is None:
            return
        if update is not self._update:
            if update is not None and update.is_continued:
                raise PlanError(
                    "the update goes on from a saved state, in which the tokens that ExpertBias had counted are not; "
                    "finalize() before saving"
                )
            self._restart(update)  # what an update left that was never stepped is dropped
        if not counts or not torch.is_grad_enabled():
            return
        carriers = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not carriers:
            raise MegabatchError(
                f"router {path!r} returned nothing that carries a gradient, so its tokens are not trained on; unfreeze "
                "it, or rename its bias and leave it as it is"
            )
        counting = _Once(partial(self._add, path, update, self._loads(path, output)))
        for carrier in carriers:
            carrier.register_hook(counting)

    @torch.no_grad()
    def _loads(self, path: str, output: Any) -> Tensor:
        """Tokens of each expert, [experts]."""
        chosen = self._chosen(output)
        if not isinstance(chosen, Tensor) or chosen.ndim != 2:
            raise PlanError(
                f"router {path!r} did not tell which experts it chose; say chosen=, which gives [tokens, k]"
            )
        kept = torch.ones_like(chosen, dtype=torch.int64)  # [tokens, k]
        if self._mask is not None:
            if self._mask.numel() != len(chosen):
                raise PlanError(
                    f"router {path!r} saw {len(chosen)} tokens but attention_mask has the shape "
                    f"{tuple(self._mask.shape)}; give the mask of these tokens, or none"
                )
            kept *= (self._mask.reshape(-1, 1) != 0).to(kept)
        return self._nothing(path).scatter_add_(0, chosen.flatten(), kept.flatten())

    def _add(self, path: str, update: OpenUpdate | None, loads: Tensor) -> None:
        if update is not None and update is self._update:
            self._counts[path] += loads
            update.taking_back.append((f"router {path!r}", lambda: self._counts[path].sub_(loads)))


class _Once:
    """A hook that works the first time."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    def __call__(self, _gradient: Tensor) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()


def _integers(output: Any) -> Tensor | None:
    """The one tensor of integers in what a router returned."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    found = [leaf for leaf in leaves if not leaf.is_floating_point() and not leaf.is_complex() and leaf.ndim == 2]
    return found[0] if len(found) == 1 else None
