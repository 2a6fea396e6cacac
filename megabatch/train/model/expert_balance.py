"""The balance of experts in a recipe: a router loss beside the cross-entropy, or biases that follow the load.

The keys are those of [model.experts], and loss.router_loss, which stands for model.experts.router_loss.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from pydantic import ValidationError
from torch import nn, optim

from megabatch import GradientAccumulator, losses
from megabatch.errors import MegabatchError
from megabatch.losses import LossFunction
from megabatch.train.config import Config, ExpertsConfig, LossConfig
from megabatch.train.config.contradictions import given
from megabatch.train.data.updates import Updates
from megabatch.train.model.build import ParallelModel

# Axes over which a sample, or the model, is cut.
AXES = ("parallel.cp", "parallel.tp", "parallel.pp")


def experts_of(config: Config) -> ExpertsConfig:
    """Return the table [model.experts]. Raises `MegabatchError` for an unknown key or value."""
    try:
        experts = ExpertsConfig.model_validate(config.model.experts or {})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"][:1]))
        raise MegabatchError(
            f"model.experts.{key} is {(config.model.experts or {}).get(key)!r} ({first['msg']}); "
            f"the keys are {', '.join(ExpertsConfig.model_fields)}"
        ) from None
    if config.loss.router_loss == LossConfig().router_loss:
        return experts
    if "router_loss" in experts.model_fields_set:
        raise MegabatchError("loss.router_loss and model.experts.router_loss are set, which are one; leave one out")
    return experts.model_copy(update={"router_loss": config.loss.router_loss})


def train_with_router(
    loss_fn: LossFunction, config: Config, parallel_model: ParallelModel, updates: Updates
) -> LossFunction:
    """Return the loss that a run minimises, and add a description of its router loss to ``parallel_model.words``.

    An evaluation uses ``loss_fn``: it compares the cross-entropy.
    """
    experts, base = experts_of(config), parallel_model.base
    check_bias(experts, config, base)
    coefficient = router_coefficient(config, base, loss_fn)
    parallel_model.words.extend(router_words(config, base, coefficient))
    if experts.router_loss == "off" and is_asked_by(base):
        text_config(base).output_router_logits = False
    if experts.bias_rate is not None:
        parallel_model.words.append(f"expert biases move by {experts.bias_rate:g} an update, towards an even load")
        if not config.update.one_row:
            updates.change = with_mask
    elif coefficient is not None:
        from megabatch.experts import with_tokens

        updates.change = with_tokens
    return with_router_loss(loss_fn, coefficient, experts.scores)


def check_bias(experts: ExpertsConfig, config: Config, model: nn.Module) -> None:
    if experts.bias_rate is None:
        if "bias_name" in experts.model_fields_set:
            raise MegabatchError("model.experts.bias_name is set and model.experts.bias_rate is not; leave it out")
        return
    said = f"model.experts.bias_rate is {experts.bias_rate:g}"
    if not any(isinstance(getattr(module, experts.bias_name, None), torch.Tensor) for module in model.modules()):
        raise MegabatchError(
            f"{said} and no module of the model has a tensor {experts.bias_name!r}; set model.experts.bias_name, or "
            "leave bias_rate out"
        )
    keys = ("data.pack_tokens", *AXES)
    for setting in given(config, keys):
        raise MegabatchError(f"{said} and {setting}, which does not count tokens; leave one of them out")


def router_coefficient(config: Config, model: nn.Module, loss_fn: object) -> float | None:
    """Return the coefficient of the router loss, or None for none. Raises `MegabatchError`."""
    stated = experts_of(config).router_loss
    if stated == "off" or (stated == "auto" and (loss_fn is not losses.next_token or not is_asked_by(model))):
        return None
    key = router_key(config)
    said = f"{key} is {stated!r}" if stated != "auto" else "model.config.output_router_logits is true"
    if loss_fn is not losses.next_token:
        raise MegabatchError(
            f"{said} and loss.function is {config.loss.function!r}, which has the terms that it returns; leave one out "
            "(a loss of your own can add experts.sequence_balance)"
        )
    if not names_experts(model):
        raise MegabatchError(f"{said} and the model has no experts; leave it out")
    for setting in given(config, ("update.one_row", *AXES)):
        raise MegabatchError(f"{said} and {setting}, with which it is not computed; leave one of them out")
    from megabatch.experts import config_coefficient

    coefficient = config_coefficient(model) if stated == "auto" else stated
    if coefficient is None:
        raise MegabatchError(f"{said} and the config has no router_aux_loss_coef; set {key} to a number")
    return float(coefficient)


def router_key(config: Config) -> str:
    return "model.experts.router_loss" if "router_loss" in (config.model.experts or {}) else "loss.router_loss"


def with_router_loss(loss_fn: LossFunction, coefficient: float | None, scores: str = "softmax") -> LossFunction:
    if coefficient is None:
        return loss_fn
    from megabatch.experts import next_token_with_balance

    return next_token_with_balance(coefficient, scores=scores)


def router_words(config: Config, model: nn.Module, coefficient: float | None) -> list[str]:
    """Return the line about the router loss, if the model has experts."""
    key = router_key(config)
    if coefficient is not None:
        return [f"router loss: {coefficient:g} ({key}) times the balance of experts, the mean over sequences"]
    if not names_experts(model) or experts_of(config).bias_rate is not None:
        return []
    from megabatch.experts import config_coefficient

    default = config_coefficient(model)
    if not default:
        return []
    return [f"no router loss, although the model has experts; {key} = {default:g} adds that of its config"]


def with_mask(sample: Any) -> Any:
    """Add an attention mask of ones to a sample of text, which padding continues with zeros."""
    if not isinstance(sample, Mapping) or "input_ids" not in sample or "attention_mask" in sample:
        return sample
    named = cast(Mapping[str, Any], sample)
    return {**named, "attention_mask": torch.ones(len(named["input_ids"]), dtype=torch.int64)}


def move_biases(gradient: GradientAccumulator, optimizer: optim.Optimizer, config: Config) -> None:
    """Move expert biases after each step of the optimizer, if the recipe asks for it. Collective."""
    experts = experts_of(config)
    if experts.bias_rate is None:
        return
    from megabatch.experts import ExpertBias

    bias = ExpertBias(gradient, rate=experts.bias_rate, name=experts.bias_name)

    def move(*_: Any) -> None:
        bias.update()

    optimizer.register_step_post_hook(move)


def is_asked_by(model: nn.Module) -> bool:
    """Return True if the model's config asks for its router loss."""
    return bool(getattr(text_config(model), "output_router_logits", False)) and names_experts(model)


def names_experts(model: nn.Module) -> bool:
    """Return True if the model's config names experts. `megabatch.experts` takes a second to import."""
    if not any("expert" in key for key in vars(text_config(model) or object)):
        return False
    from megabatch.experts import has_experts

    return has_experts(model)


def text_config(model: nn.Module) -> Any:
    """Return the config of a model of transformers, or of its part for text; None for any other model."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config
