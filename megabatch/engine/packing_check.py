"""Apart: whether the samples of one row see each other, which is tried, since no config says it."""

import contextlib
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from megabatch.batching.attention_mask import with_config
from megabatch.engine.call import first_failure
from megabatch.engine.oom_broadcast import is_out_of_memory
from megabatch.engine.step_in_backward import StepInBackward
from megabatch.errors import LossContractError, MegabatchError, PlanError, in_one_line
from megabatch.torch_private import hooks_after_grad, is_dtensor, is_fsdp2
from megabatch.wrappers.base import Wrapper
from megabatch.wrappers.mesh import DataRanks

NUM_FIRST, NUM_SECOND = 5, 6  # tokens of the two samples of a trial
LEAST_SHARE = 1 / 1000  # of what a sample does to the one behind it where nothing keeps them apart
BY_PLACE = ("attention_chunk_size", "attn_temperature_tuning")  # by the place in a row, seen thousands of tokens on
Run = Callable[..., Tensor]  # (tokens [1, T], position_ids=[1, T]) -> [1, T, V]


def check_packing(wrapper: Wrapper) -> None:
    """Raise `PlanError` where samples cannot lie in one row, or see each other there; collective."""
    ranks = wrapper.ranks
    if len(wrapper.models) > 1 or ranks.context_degree > 1 or ranks.pipeline_groups:
        raise PlanError(
            "OneRow is for one model whose sequences are whole and which is no Pipeline; give one model, or leave the "
            "cp and pp axes or OneRow out"
        )
    _try_on_all(wrapper.models[0], wrapper.device, ranks)


def _try_on_all(model: nn.Module, device: torch.device, ranks: DataRanks) -> None:
    """What the trial raises on one rank is raised on all."""
    failure = None
    try:
        _check_apart(model, device)
    except Exception as error:  # whatever its layers raise
        if is_out_of_memory(error):  # which is told by the alarm
            raise
        failure = error
        if not isinstance(error, MegabatchError):
            failure = PlanError(
                f"OneRow tries the model on input_ids and position_ids, and it does not run ({in_one_line(error)}); "
                "mend that, or leave OneRow out"
            )
            failure.__cause__ = error
    if any(failed for (failed,) in ranks.exchange([float(failure is not None)])):
        raise first_failure(ranks, failure)


@contextlib.contextmanager
def watched(model: Any, num_microbatches: int) -> Generator[None]:
    """Surrounds a call: the loss must give the model what keeps the samples of a row apart, and nothing besides."""
    if not num_microbatches:
        yield
        return
    if _steps_in_backward(model):
        raise PlanError(
            "OneRow is given and an optimizer steps in backward, before it is known that the loss has called the "
            "model; leave one of them out"
        )
    is_called = False

    def check(model: nn.Module, placed: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        nonlocal is_called
        is_called = True
        _check_given(model, placed, named)

    handle = cast(nn.Module, model).register_forward_pre_hook(check, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
    if not is_called:
        raise LossContractError(
            "the loss does not call the model that it is given (a part of it, perhaps), so that nobody sees whether "
            "samples of a row are kept apart; call the model itself, or leave OneRow out"
        )


def _steps_in_backward(model: nn.Module) -> bool:
    hooks = map(hooks_after_grad, model.parameters())
    return any(isinstance(getattr(hook, "__self__", None), StepInBackward) for each in hooks for hook in each)


def _check_given(model: nn.Module, placed: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    if named.get("position_ids") is None:
        raise LossContractError(
            "the loss calls the model without position_ids, by which the samples of a row are kept apart; hand them on "
            "by name"
        )
    if len(placed) > 1 or any(named.get(name) is not None for name in ("attention_mask", "past_key_values")):
        raise LossContractError(
            "the loss gives the model an attention_mask, past_key_values, or more than the tokens by place, with which "
            "its attention does not go by position_ids; leave them out"
        )
    configs = _configs(model)
    asked = named.get("use_cache")
    makes_cache = any(getattr(each, "use_cache", False) for each in configs) if asked is None else asked
    if makes_cache and not any("flash" in str(getattr(each, "_attn_implementation", "")) for each in configs):
        raise LossContractError(
            "the model makes a cache, with which its attention does not go by position_ids; set "
            "model.config.use_cache = False"
        )


class PackedTrial(NamedTuple):
    """The logits of the second of two samples in a row, of two rows that differ in the first."""

    one: Tensor  # [1, NUM_SECOND, V]
    other: Tensor

    @property
    def difference(self) -> float:
        return float((self.one - self.other).abs().max())


def _check_apart(model: nn.Module, device: torch.device) -> None:
    """Raise `PlanError` where the second sample of a row depends on the first, or comes out otherwise than alone.

    What the first may do to the second is small beside what it does where positions run on, with which nothing keeps
    them apart. All rows have one shape, so that the second is computed by the same sums. Every rank runs the model as
    often, whatever it finds, since ranks may wait for each other inside.
    """
    run, vocab_size = _logits(model), _vocab_size(model)
    row = torch.arange(NUM_FIRST + NUM_SECOND, device=device) * 7 % vocab_size  # [T]
    other = torch.cat([(row[:NUM_FIRST] + 1) % vocab_size, row[NUM_FIRST:]])

    def tried(positions: Tensor) -> PackedTrial:
        return PackedTrial(*(run(each[None], position_ids=positions[None])[:, NUM_FIRST:] for each in (row, other)))

    running = torch.arange(NUM_FIRST + NUM_SECOND, device=device)  # [T]
    begun = tried(torch.cat([running[:NUM_FIRST], running[:NUM_SECOND]]))
    seen, alone = tried(running).difference, run(row[None, NUM_FIRST:])
    if not seen > 0:
        raise PlanError(
            "OneRow tries whether samples of a row see each other, and this model's output does not depend on earlier "
            "tokens, so that it says nothing (an output head of zeros?); leave OneRow out"
        )
    rounding = torch.finfo(alone.dtype).eps ** 0.5 / 10  # experts may sum in another order
    if begun.difference > max(LEAST_SHARE, rounding) * seen or not _are_close(begun.one, alone):
        raise PlanError(
            "OneRow is given and the model's attention crosses samples: those in one row see each other; choose an "
            "attention that goes by position_ids (with use_cache = False, in transformers), or leave OneRow out"
        )


def _are_close(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding in rows of another length; what a position does is far above it."""
    eps = max(torch.finfo(a.dtype).eps, torch.finfo(torch.float32).eps)  # norms compute in float32 at the best
    scale = float(torch.maximum(a.abs().max(), b.abs().max()))
    return float((a - b).abs().max()) <= eps**0.5 * scale


def _vocab_size(model: nn.Module) -> int:
    """Raises `PlanError` for a model that needs no trial to be refused."""
    configs = _configs(model)
    if not configs:
        raise PlanError("OneRow is given a model that is not one of transformers; leave it out")
    for name in BY_PLACE:
        if any(getattr(each, name, None) for each in configs):
            raise PlanError(
                f"OneRow is given and the model's config has {name}, by which attention goes by the place in a row and "
                "not by position_ids; leave OneRow out"
            )
    return int(configs[-1].vocab_size)


def _configs(model: nn.Module) -> list[Any]:
    """The model's own and that of its text, of transformers; none of another model."""
    config: Any = getattr(with_config(model), "config", None)
    return [config, config.get_text_config()] if callable(getattr(config, "get_text_config", None)) else []


def _logits(model: nn.Module) -> Run:
    """What the model says, without its dropout and not compiled; it is left as it was."""

    @torch.no_grad()
    def run(tokens: Tensor, **inputs: Tensor) -> Tensor:
        modes = {module: module.training for module in model.modules()}
        model.eval()
        try:
            with torch.compiler.set_stance("force_eager"):
                output: Any = model(input_ids=tokens, **inputs)
        finally:
            for module, mode in modes.items():
                module.training = mode
                if is_fsdp2(module):
                    module.reshard()  # which a forward without gradients may leave gathered
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        return logits.full_tensor() if is_dtensor(logits) else logits

    return run
