"""Smoke test of a model on a few tokens, before a run begins."""

from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from megabatch.engine import check_packing_isolation, equal_but_rounding
from megabatch.errors import MegabatchError
from megabatch.pipeline import Pipeline, evaluate
from megabatch.train.config import ModelConfig
from megabatch.train.model.architecture import refused
from megabatch.train.model.silence import quiet
from megabatch.train.model.wrap import reshard


def try_forward(model: nn.Module, config: ModelConfig, device: torch.device) -> None:
    """Raise `MegabatchError` if the model does not run, or a token sees the next one; on all ranks of the model."""
    vocab_size = vocab_size_of(model)
    try:
        one, other = (logits_of(model, torch.tensor([[0, last % vocab_size]], device=device)) for last in (0, 1))
    except Exception as error:  # layers raise anything for sizes that do not fit
        raise refused(config, error) from None
    if not bool(torch.isfinite(one).all()):
        key = "model.config" if config.name is None else f"model.name = {config.name!r}"
        raise MegabatchError(f"the model of {key} gives logits that are not finite; choose weights that are whole")
    if not equal_but_rounding(one[:, 0], other[:, 0]):
        key = "model.config" if config.name is None else f"model.name = {config.name!r}"
        raise MegabatchError(
            f"the model of {key} is not causal: a token's output changes with the token after it; "
            "choose a causal language model (for an encoder's family, set is_decoder = true)"
        )


def check_documents(model: nn.Module, device: torch.device) -> tuple[bool, str]:
    """Return true if packed documents do not see each other, and the finding in words; on all ranks of the model."""
    attention = getattr(config_of(model), "_attn_implementation", None)
    logits, vocab_size = partial(logits_of, model), vocab_size_of(model)
    crossing = [
        num_rows for num_rows in (1, 2) if not check_packing_isolation(logits, vocab_size, device, num_rows=num_rows)
    ]
    if not crossing:
        return True, f"documents are isolated by their position_ids ({attention})"
    rows = "" if 1 in crossing else " in a microbatch of several rows (update.micro_batch_size = 1 has one)"
    return False, (
        f"attention crosses documents: those of a packed row see each other{rows} ({attention}); "
        "set model.attention to another backend, or leave data.pack_tokens out"
    )


def vocab_size_of(model: nn.Module) -> int:
    return config_of(model).get_text_config().vocab_size


def config_of(model: nn.Module) -> PreTrainedConfig:
    """Return the config of a model, or of a pipeline's stages."""
    return next(each.config for each in model.modules() if isinstance(each, PreTrainedModel))


@torch.no_grad()
def logits_of(model: nn.Module, tokens: Tensor, **inputs: Tensor) -> Tensor:
    """Return logits [B, T, V] for tokens [B, T], without dropout and compiler; the model's mode stays."""
    was_training = model.training
    model.eval()
    try:
        with quiet(), torch.compiler.set_stance("force_eager"):
            if isinstance(model, Pipeline):
                return logits_through(model, {"input_ids": tokens, **inputs})
            return cast(Any, model)(input_ids=tokens, **inputs).logits
    finally:
        model.train(was_training)
        reshard(model)


def logits_through(model: Pipeline, inputs: dict[str, Tensor]) -> Tensor:
    """Return the logits of a pipeline, on all of its ranks; collective."""
    found: list[Tensor] = []

    def keep(last_stage: Any, microbatch: Any) -> tuple[Tensor, float]:
        found.append(last_stage(**microbatch).logits)
        return found[0].new_zeros(()), 0.0

    evaluate(model, [inputs], keep)
    expected = cast(Tensor, model.output(**inputs))
    logits = found[0].contiguous() if found else torch.empty_like(expected, device=inputs["input_ids"].device)
    dist.broadcast(logits, group=model.group, group_src=model.last_rank)
    return logits
