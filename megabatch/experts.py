"""Mixtures of experts: a router loss that no cut changes, and expert biases that follow an update's whole load.

The router loss of Switch is a product of two means over the tokens of a batch, so that it depends on the cut. The same
product within each sequence is a sum over sequences, exact under every cut: `next_token_with_balance` has both terms.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megabatch import losses
from megabatch.core.contract import LossFunction, Term, loss
from megabatch.core.samples import Microbatch
from megabatch.core.update import OpenUpdate
from megabatch.errors import LossContractError, MegabatchError, PlanError, require_positive
from megabatch.gradient_accumulator import GradientAccumulator
from megabatch.inspection.model_facts import EXPERTS, MASK, with_config
from megabatch.inspection.padding_masks import note_padding
from megabatch.losses.token_loss import HALF_TYPES, next_token_beside
from megabatch.pipeline.stages import Pipeline
from megabatch.torch_private.operations import pytree

__all__ = [
    "ExpertBias", "config_coefficient", "has_experts", "next_token_with_balance", "sequence_balance", "with_tokens",
]  # fmt: skip

COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")  # what configs of transformers call it
TOKENS = "megabatch: tokens"  # in a microbatch: which positions are, [B, T]; not for the model

SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": lambda logits: logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True),
}


def sequence_balance(
    router_logits: Tensor | Sequence[Tensor],
    attention_mask: Tensor,
    *,
    top_k: int,
    scores: str = "softmax",
    pool_layers: bool = False,
) -> Tensor:
    """Return the load imbalance of the experts, summed over sequences and layers: a total whose weight is B.

    ``router_logits``: [B, T, E] or [B * T, E], or a sequence of those, one per layer. ``attention_mask`` [B, T]: 0
    marks padding, which is ignored. Do not use it with `OneRow`, whose row would count as one sequence. ``scores``:
    "softmax", or "sigmoid" divided by its sum, as in DeepSeek-V3.

    For a sequence of n tokens in one layer the value is ``sum over experts of f * p``. f is E / (top_k * n) times the
    number of tokens with the expert among their ``top_k``. p is the expert's mean score. An even load gives 1, the
    maximum is E / top_k, and a sequence without tokens gives 0. Raises `PlanError` for shapes that do not fit.

    ``pool_layers``: f and p are means over the tokens of all layers, with one product per sequence instead of one per
    layer. Times ``top_k`` this is `load_balancing_loss_func` of transformers for that sequence.
    """
    if scores not in SCORES:
        raise PlanError(f"scores is {scores!r}; expected one of {', '.join(SCORES)}")
    layers = [router_logits] if isinstance(router_logits, Tensor) else list(router_logits)
    if not layers:
        raise PlanError("router_logits has no layers; ask the model for them (output_router_logits=True)")
    loads, shares = zip(*(_means(logits, attention_mask, top_k, SCORES[scores]) for logits in layers), strict=True)
    device = layers[0].device  # of the first layer: others may be elsewhere
    load, share = (torch.stack([mean.to(device) for mean in means]) for means in (loads, shares))  # [layers, B, E]
    return (load.mean(0) * share.mean(0)).sum() if pool_layers else (load * share).sum()


def _means(logits: Tensor, mask: Tensor, top_k: int, scores: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the load of every expert in each sequence (1 if even), and its mean score: [B, E] each."""
    num_experts = logits.shape[-1]
    if logits.numel() != mask.numel() * num_experts or mask.ndim != 2:
        raise PlanError(
            f"router_logits has the shape {tuple(logits.shape)} and attention_mask {tuple(mask.shape)}; expected "
            "[B, T, experts] or [B * T, experts], and [B, T]"
        )
    logits = logits.view(*mask.shape, num_experts)  # [B, T, E]
    logits = logits.float() if logits.dtype in HALF_TYPES else logits
    weights = mask.to(logits).unsqueeze(-1)  # [B, T, 1]
    chosen = torch.zeros_like(logits).scatter(-1, logits.topk(top_k).indices, 1.0)  # [B, T, E]
    num_tokens = weights.sum(1).clamp(min=1)  # [B, 1]
    load = (chosen * weights).sum(1) * num_experts / (top_k * num_tokens)
    return load, (scores(logits) * weights).sum(1) / num_tokens


def next_token_with_balance(
    coefficient: float | None = None, *, top_k: int | None = None, scores: str = "softmax"
) -> LossFunction:
    """`losses.next_token` and a router loss per sequence, for mixtures of experts: two terms, exact under every cut.

    - ``"next_token"``: the cross-entropy, over its targets.
    - ``"balance"``: ``coefficient * top_k * sequence_balance(..., pool_layers=True)``, over the sequences that have a
      token. For one sequence it is the router loss that transformers adds (``router_aux_loss_coef`` times
      `load_balancing_loss_func`). For several it is the mean of theirs, where transformers multiplies means over all
      tokens of whatever batch the model sees.

    The microbatch is that of `losses.next_token`, by names. A row is a sequence, also where documents are packed in
    it. Its ``attention_mask`` [B, T] says what is padding; without one every position counts. The model is asked for
    ``output_router_logits``; its own ``aux_loss`` is not used.

    Args:
        coefficient: None: ``router_aux_loss_coef`` (or ``aux_loss_coef``) of the model's config.
        top_k: Experts of a token. None: ``num_experts_per_tok`` of the model's config.
        scores: See `sequence_balance`.

    Make the loss once and give the same one to every call. Raises `PlanError` in a call where the config lacks one of
    these or the model returns no router logits, and `LossContractError` where those carry no gradient.
    """
    if coefficient is not None and not 0 <= coefficient < math.inf:
        raise PlanError(f"coefficient is {coefficient!r}; expected a finite number, not negative")

    @loss(weigh=_count_targets_and_sequences, prepare=note_padding)
    def next_token_with_balance(model: nn.Module, microbatch: Microbatch) -> dict[str, Term]:
        factor = _from_config(model, COEFFICIENTS, "coefficient") if coefficient is None else coefficient
        experts_per_token = int(_from_config(model, ("num_experts_per_tok",), "top_k") if top_k is None else top_k)
        next_token, router_logits = _forward(model, microbatch)
        sequences = _real_tokens(microbatch).to(router_logits[0].device)
        balance = sequence_balance(router_logits, sequences, top_k=experts_per_token, scores=scores, pool_layers=True)
        return {
            "next_token": next_token,
            "balance": Term(factor * experts_per_token * balance, _count_sequences(microbatch)),
        }

    return next_token_with_balance


def with_tokens(sample: Any) -> Any:
    """Add a mask of its tokens to a sample of text, which padding leaves false elsewhere; for data without a mask.

    `next_token_with_balance` reads it and the model does not get it, so that the model goes on without a mask.
    """
    if not isinstance(sample, Mapping) or "input_ids" not in sample or "attention_mask" in sample:
        return sample
    named = cast(Mapping[str, Any], sample)
    return {**named, TOKENS: torch.ones(len(named["input_ids"]), dtype=torch.bool)}


def has_experts(model: nn.Module) -> bool:
    """Return True if the config of a model of transformers, wrapped or not, names a number of experts."""
    return bool(_config_value(model, EXPERTS))


def config_coefficient(model: nn.Module) -> float | None:
    """Return the factor of the router loss that a model's config names, or None where it names none.

    `next_token_with_balance` uses it where it is given no coefficient: ``router_aux_loss_coef``, or ``aux_loss_coef``.
    """
    return _config_value(model, COEFFICIENTS)


def _forward(model: nn.Module, microbatch: Microbatch) -> tuple[Term, Sequence[Tensor]]:
    """Return the term of the next token and the router logits, [B * T, E] per layer."""
    inputs = {name: value for name, value in microbatch.items() if name != TOKENS}
    term, output = next_token_beside(model, inputs, output_router_logits=True)
    router_logits = getattr(output, "router_logits", None)
    if not router_logits:
        raise PlanError(
            f"the model returned a {type(output).__name__} without router_logits; give one that returns them when it "
            "is called with output_router_logits=True, or losses.next_token"
        )
    if term.total.requires_grad and not any(router_logit.requires_grad for router_logit in router_logits):
        raise LossContractError(
            "router_logits carry no gradient, so the balance trains nothing; checkpoint activations with "
            "use_reentrant=False, unfreeze the routers or what is before them, or take losses.next_token"
        )
    return term, router_logits


def _real_tokens(microbatch: Microbatch) -> Tensor:
    """Return the mask of positions that are tokens, [B, T]."""
    for name in (TOKENS, MASK):
        if isinstance(mask := microbatch.get(name), Tensor):
            return mask
    return torch.ones_like(microbatch["labels" if "labels" in microbatch else "shift_labels"])


def _count_sequences(microbatch: Microbatch) -> Tensor:
    """Rows that have a token."""
    return (_real_tokens(microbatch) != 0).flatten(1).any(1).sum()


def _count_targets_and_sequences(microbatch: Microbatch) -> dict[str, Tensor]:
    return {"next_token": losses.count_targets(microbatch), "balance": _count_sequences(microbatch)}


def _from_config(model: nn.Module, names: Sequence[str], argument: str) -> float:
    value = _config_value(model, names)
    if value is None:
        raise PlanError(f"the config of {type(model).__name__} has no {names[0]}; say {argument}=")
    return value


def _config_value(model: nn.Module, names: Sequence[str]) -> float | None:
    """Return the first of ``names`` in the config of a transformers model, wrapped or not. None if there is none."""
    config: Any = getattr(with_config(model), "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return next((value for name in names if (value := getattr(text, name, None)) is not None), None)


class ExpertBias:
    """Balances experts without a loss: an expert that had fewer tokens than the mean in an update is made likelier.

    Tokens are counted over the whole update, all microbatches and all ranks, where they were trained on: not in an
    evaluation, a forward without a backward, a dummy microbatch, an update that was abandoned or not stepped, and
    once where activation checkpointing runs a forward twice. Padding is left out where the model is given its
    ``attention_mask`` [B, T] by name. Where it is not, padding is counted, and the cut changes how much of it there
    is.

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
        if gradient.cuts_samples:
            raise PlanError(
                "ExpertBias counts the tokens of each expert, and InsideSamples runs a token twice where two chunks "
                "meet; leave one of them out"
            )
        models = gradient.model if isinstance(gradient.model, list | tuple) else [gradient.model]
        modules = {
            f"{number}.{path}" if len(models) > 1 else path: module
            for number, model in enumerate(models)
            for path, module in cast(nn.Module, model).named_modules()
        }
        self._routers = {
            path: module for path, module in modules.items() if isinstance(getattr(module, name, None), Tensor)
        }
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
        sizes = [len(count) for count in self._counts.values()]
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
        if counts is None or not torch.is_grad_enabled():  # the latter in forward() and evaluate()
            return
        if update is not self._update:
            self._restart(update)  # what an update left that was never stepped is dropped
        if not counts:
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
        weights = torch.ones_like(chosen, dtype=torch.int64)  # [tokens, k]
        if self._mask is not None:
            if self._mask.numel() != len(chosen):
                raise PlanError(
                    f"router {path!r} saw {len(chosen)} tokens but attention_mask has the shape "
                    f"{tuple(self._mask.shape)}; give the mask of these tokens, or none"
                )
            weights *= (self._mask.reshape(-1, 1) != 0).to(weights)
        return self._nothing(path).scatter_add_(0, chosen.flatten(), weights.flatten())

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
    """Return the one tensor of integers in a router's output."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    choices = [leaf for leaf in leaves if not leaf.is_floating_point() and not leaf.is_complex() and leaf.ndim == 2]
    return choices[0] if len(choices) == 1 else None
