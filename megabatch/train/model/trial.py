"""Trial: the model is run on a few tokens before a run begins, to see what its config does not say."""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from megabatch.errors import MegabatchError
from megabatch.pipeline import Pipeline, evaluate
from megabatch.train.config import ModelConfig
from megabatch.train.model.architecture import refused
from megabatch.train.model.quiet import quiet
from megabatch.train.model.wrap import reshard

NUM_FIRST, NUM_SECOND = 5, 6  # tokens of the probe's two documents


def try_forward(model: nn.Module, config: ModelConfig, device: torch.device) -> None:
    """Raise where sizes do not go together, or a token sees the next one; on every rank of a sharded model."""
    vocab_size = vocab_size_of(model)
    try:
        one, other = (logits_of(model, torch.tensor([[0, last % vocab_size]], device=device)) for last in (0, 1))
    except Exception as error:  # whatever its layers raise for what they cannot run
        raise refused(config, error) from None
    if not bool(torch.isfinite(one).all()):
        key = "model.config" if config.name is None else f"model.name = {config.name!r}"
        raise MegabatchError(f"the model of {key} gives logits that are not finite; choose weights that are whole")
    if not are_close(one[:, 0], other[:, 0]):
        key = "model.config" if config.name is None else f"model.name = {config.name!r}"
        raise MegabatchError(
            f"the model of {key} is not causal: a token's output changes with the token after it; "
            "choose a causal language model (for an encoder's family, set is_decoder = true)"
        )


def probe_isolation(model: nn.Module, device: torch.device) -> tuple[bool, str]:
    """Whether documents that are packed into a row are apart, and how, in words; on every rank of a sharded model.

    The second document of a row must come out as it does alone; in a row by itself, and in one of two rows.
    """
    attention = getattr(config_of(model), "_attn_implementation", None)
    crossing = [num_rows for num_rows in (1, 2) if crosses(model, num_rows, device)]
    if not crossing:
        return True, f"documents are isolated by their position_ids ({attention})"
    rows = "" if 1 in crossing else " in a microbatch of several rows (update.micro_batch_size = 1 has one)"
    return False, (
        f"attention crosses documents: those of a packed row see each other{rows} ({attention}); "
        "set model.attention to another backend, or leave data.pack_tokens out"
    )


def crosses(model: nn.Module, num_rows: int, device: torch.device) -> bool:
    """Whether the second document of packed rows comes out otherwise than alone."""
    lengths = (NUM_FIRST, NUM_SECOND)
    tokens = torch.arange(num_rows * sum(lengths), device=device) * 7 % vocab_size_of(model)
    rows = tokens.view(num_rows, sum(lengths))  # [B, T]
    positions = torch.cat([torch.arange(length, device=device) for length in lengths]).expand(num_rows, -1)
    packed = logits_of(model, rows, position_ids=positions)[:, NUM_FIRST:]
    return not are_close(packed, logits_of(model, rows[:, NUM_FIRST:]))


def vocab_size_of(model: nn.Module) -> int:
    return config_of(model).get_text_config().vocab_size


def config_of(model: nn.Module) -> PreTrainedConfig:
    """The config of a model, or of a pipeline's stages."""
    return next(each.config for each in model.modules() if isinstance(each, PreTrainedModel))


@torch.no_grad()
def logits_of(model: nn.Module, tokens: Tensor, **inputs: Tensor) -> Tensor:
    """The model's logits [B, T, V] for tokens [B, T], without its dropout and not compiled; it is left as it was."""
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
    """The logits of a pipeline, on all of its ranks; collective."""
    found: list[Tensor] = []

    def keep(last_stage: Any, microbatch: Any) -> tuple[Tensor, float]:
        found.append(last_stage(**microbatch).logits)
        return found[0].new_zeros(()), 0.0

    evaluate(model, [inputs], keep)
    expected = cast(Tensor, model.output(**inputs))
    logits = found[0].contiguous() if found else torch.empty_like(expected, device=inputs["input_ids"].device)
    dist.broadcast(logits, group=model.group, group_src=model.last_rank)
    return logits


def are_close(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding, which is far below what another token does to a logit."""
    eps = max(torch.finfo(a.dtype).eps, torch.finfo(torch.float32).eps)  # norms compute in float32 at the best
    scale = float(torch.maximum(a.abs().max(), b.abs().max()))
    return float((a - b).abs().max()) <= eps**0.5 * scale
