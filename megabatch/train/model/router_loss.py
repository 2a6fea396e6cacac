"""Router: the router loss of a mixture of experts, where the recipe or the model's config asks for one."""

from typing import Any

from torch import nn

from megabatch import losses
from megabatch.errors import MegabatchError
from megabatch.experts import config_coefficient, has_experts, next_token_with_balance, with_tokens
from megabatch.losses import LossFunction
from megabatch.train.config import Config
from megabatch.train.data.updates import Updates
from megabatch.train.model.build import ParallelModel

KEY = "loss.router_loss"


def train_with_router(loss_fn: LossFunction, config: Config, laid: ParallelModel, updates: Updates) -> LossFunction:
    """The loss that a run minimises; what is to be said of its router loss is added to ``laid.words``.

    An evaluation goes on with ``loss_fn``: what is held out is compared by its cross-entropy.
    """
    coefficient = router_coefficient(config, laid.base, loss_fn)
    laid.words.extend(router_words(config, laid.base, coefficient))
    if config.loss.router_loss == "off" and is_asked_by(laid.base):
        leave_out(laid.base)
    if coefficient is not None:
        updates.change = with_tokens
    return with_router_loss(loss_fn, coefficient)


def router_coefficient(config: Config, model: nn.Module, loss_fn: object) -> float | None:
    """The coefficient of the router loss that ``loss_fn`` gets; None: no router loss. Raises `MegabatchError`."""
    asked = config.loss.router_loss
    if asked == "off" or (asked == "auto" and (loss_fn is not losses.next_token or not is_asked_by(model))):
        return None
    said = f"{KEY} is {asked!r}" if asked != "auto" else "model.config.output_router_logits is true"
    if loss_fn is not losses.next_token:
        raise MegabatchError(
            f"{said} and loss.function is {config.loss.function!r}, which has the terms that it returns; leave one out "
            "(a loss of your own can add experts.sequence_balance)"
        )
    if not has_experts(model):
        raise MegabatchError(f"{said} and the model has no experts; leave it out")
    others = {
        "update.one_row": config.update.one_row,  # whose rows are no sequences
        "checkpoint.partial": config.checkpoint.partial,  # in which an update is several calls
        **{f"parallel.{axis}": getattr(config.parallel, axis) > 1 for axis in ("cp", "tp", "pp")},
    }
    for key in (key for key, is_set in others.items() if is_set):
        raise MegabatchError(f"{said} and {key} is set, with which it is not computed; leave one of them out")
    coefficient = config_coefficient(model) if asked == "auto" else asked
    if coefficient is None:
        raise MegabatchError(f"{said} and the config has no router_aux_loss_coef; set {KEY} to a number")
    return float(coefficient)


def with_router_loss(loss_fn: LossFunction, coefficient: float | None) -> LossFunction:
    """The loss, with the router loss beside it."""
    return loss_fn if coefficient is None else next_token_with_balance(coefficient)


def router_words(config: Config, model: nn.Module, coefficient: float | None) -> list[str]:
    """What is said at the start: a line, or none of a model that has no router loss."""
    if coefficient is not None:
        return [f"router loss: {coefficient:g} ({KEY}) times the balance of experts, the mean over sequences"]
    default = config_coefficient(model)
    if not default or not has_experts(model):
        return []
    return [f"no router loss, although the model has experts; {KEY} = {default:g} adds that of its config"]


def leave_out(model: nn.Module) -> None:
    """Let a model whose config asks for router logits return none, and no router loss."""
    text_config(model).output_router_logits = False


def is_asked_by(model: nn.Module) -> bool:
    """Whether the model's config asks for its router loss."""
    return bool(getattr(text_config(model), "output_router_logits", False)) and has_experts(model)


def text_config(model: nn.Module) -> Any:
    """The config of a model of transformers, or of its part for text; None of any other model."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config
