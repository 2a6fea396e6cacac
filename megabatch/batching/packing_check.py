"""Check that samples of one row, packed or branches of a tree, do not see each other, by a trial: no config says it."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megabatch.batching.packed_row import OneRow
from megabatch.batching.shared_prefix import Layout, SharedPrefix, is_eager
from megabatch.core.agreement import first_failure
from megabatch.core.mesh import DataRanks
from megabatch.core.wrapper import Wrapper
from megabatch.errors import MegabatchError, PlanError, in_one_line
from megabatch.inspection.error_kinds import is_out_of_memory
from megabatch.inspection.mixing_causes import find_mixing_causes
from megabatch.inspection.model_facts import IDS, POSITIONS, is_causal, list_configs
from megabatch.inspection.tree import to_device
from megabatch.torch_private.classes import is_dtensor, is_fsdp2
from megabatch.torch_private.module_members import is_compiled, original_of

NUM_FIRST, NUM_SECOND = 5, 6  # tokens of the two samples of a trial
LEAST_SHARE = 1 / 1000  # of the effect of a sample on the next one where nothing keeps them apart
NOISE = 16  # times a measured rounding
# Attention that goes by the place in a row, with an effect after thousands of tokens only.
BY_PLACE = ("attention_chunk_size", "attn_temperature_tuning")
WINDOWS = ("window", "window_size")  # ends of the names of windows in configs
Logits = Callable[..., Tensor]  # (tokens [B, T], position_ids=[B, T]) -> [B, T, V]


def check_packing(wrapper: Wrapper, collate: OneRow | SharedPrefix, limits: Sequence[int | None]) -> None:
    """Raise `PlanError` where the model does not keep the samples of a row apart; collective.

    ``limits`` are samples and tokens of a microbatch, each None where it is not given.
    """
    ranks, name = wrapper.ranks, type(collate).__name__
    if len(wrapper.models) > 1 or ranks.context_degree > 1 or ranks.pipeline_groups:
        raise PlanError(
            f"{name} is for one model whose sequences are whole and which is no Pipeline; give one model, or leave the "
            f"cp and pp axes or {name} out"
        )
    if isinstance(collate, SharedPrefix) and limits[1] is None:
        raise PlanError(
            "SharedPrefix is given without max_microbatch_tokens, by which trees are cut; give it as a number, not "
            '"auto"'
        )
    for cause, most_tokens in find_mixing_causes(wrapper.models[0]):
        if (limits[1] or math.inf) > most_tokens > 0:  # a short trial does not see it
            raise PlanError(
                f"{name} is given and {cause}, so that a long sample changes those beside it; give "
                f"max_microbatch_tokens={most_tokens}, or leave {name} out"
            )
    _check_on_all_ranks(wrapper.models[0], wrapper.device, ranks, collate)


def check_packing_isolation(logits: Logits, vocab_size: int, device: torch.device, *, num_rows: int = 1) -> bool:
    """Return true if a model keeps packed samples apart by their ``position_ids``.

    The second of two samples in a row must have the logits that it has alone. No config of a model says this, so the
    model runs on a few tokens. On a sharded model all ranks call it.

    Args:
        logits: Runs the model: ``logits(tokens, position_ids=positions)`` and ``logits(tokens)``, both without
            gradients and dropout. Tokens and positions have the shape [B, T], logits [B, T, V].
        vocab_size: Number of different tokens.
        device: Device of the tokens.
        num_rows: Rows of the trial: some attention keeps samples apart in one row only.
    """
    return equal_but_rounding(*_packed_and_alone(logits, _trial_tokens(num_rows, vocab_size, device)))


def equal_but_rounding(a: Tensor, b: Tensor) -> bool:
    """Return true if two logits differ by rounding only, which is far below the effect of a position or a token."""
    eps = max(torch.finfo(a.dtype).eps, torch.finfo(torch.float32).eps)  # norms compute in float32 at best
    scale = float(torch.maximum(a.abs().max(), b.abs().max()))
    return _distance(a, b) <= eps**0.5 * scale


def _check_on_all_ranks(
    model: nn.Module, device: torch.device, ranks: DataRanks, collate: OneRow | SharedPrefix
) -> None:
    """Run the trial; what it raises on one rank is raised on all."""
    failure, name = None, type(collate).__name__
    try:
        if isinstance(collate, SharedPrefix):
            _check_branches(model, device, collate)
        else:
            _check_isolated(model, device)
    except Exception as error:  # the model may raise anything
        if is_out_of_memory(error):  # error_broadcast tells the other ranks
            raise
        failure = error
        if not isinstance(error, MegabatchError):
            failure = PlanError(
                f"{name} tries the model on input_ids and position_ids, and it does not run ({in_one_line(error)}); "
                f"mend that, or leave {name} out"
            )
            failure.__cause__ = error
    if any(failed for (failed,) in ranks.exchange_numbers([float(failure is not None)])):
        raise first_failure(ranks, failure)


def _check_isolated(model: nn.Module, device: torch.device) -> None:
    """Raise `PlanError` where the second sample of a row depends on the first, or differs from itself alone.

    The effect of the first sample on the second is compared with its effect when positions run on, where nothing keeps
    the two apart. All rows have one shape, so that rounding is the same. Every rank runs the model equally often,
    since ranks may wait for each other inside it.
    """
    logits, vocab_size = _logits(model), _vocab_size(model, "OneRow")
    row = _trial_tokens(1, vocab_size, device)  # [1, T]
    other_row = torch.cat([(row[:, :NUM_FIRST] + 1) % vocab_size, row[:, NUM_FIRST:]], dim=1)  # another first sample
    running = torch.arange(NUM_FIRST + NUM_SECOND, device=device)[None]  # [1, T]
    packed, alone = _packed_and_alone(logits, row)
    effect = _distance(packed, logits(other_row, position_ids=_packed_positions(row))[:, NUM_FIRST:])
    pairs = torch.cat([row, row]), torch.cat([row, other_row])  # [2, T]
    rounding = _distance(*(logits(pair, position_ids=_packed_positions(pair))[0] for pair in pairs))
    full_effect = _distance(*(logits(tokens, position_ids=running)[:, NUM_FIRST:] for tokens in (row, other_row)))
    if not full_effect > 0:
        raise PlanError(
            "OneRow tries whether samples of a row see each other, and this model's output does not depend on earlier "
            "tokens, so that it says nothing (an output head of zeros?); leave OneRow out"
        )
    is_seen = effect > _largest_noise(model, full_effect, rounding, alone) or _hides_leaks(model, alone)
    if is_seen or not equal_but_rounding(packed, alone):
        raise PlanError(
            "OneRow is given and the model's attention, or a convolution, crosses samples: those in one row see each "
            "other; choose an attention that goes by position_ids (with use_cache = False, in transformers), or leave "
            "OneRow out"
        )


def _check_branches(model: nn.Module, device: torch.device, collate: SharedPrefix) -> None:
    """Raise `PlanError` where a tree of two samples has not their logits, and note the model's sliding window."""
    if original_of(model) is not model or is_compiled(model):
        raise PlanError("SharedPrefix is given a compiled model; compile its layers instead, or leave SharedPrefix out")
    logits, vocab_size, is_additive = _logits(model), _vocab_size(model, "SharedPrefix"), is_eager(model)
    if not is_causal(model):
        raise PlanError(
            "SharedPrefix is given a model that is not known to be causal, or one with experts; leave SharedPrefix out"
        )
    length = NUM_FIRST + NUM_SECOND
    layout = to_device(Layout.of([length, length], [0, NUM_FIRST], length), device)

    def tree(ids: Tensor, **named: Tensor) -> Tensor:
        inputs = layout.inputs(ids, additive=is_additive) | named
        return layout.gather(logits(inputs.pop(IDS), **inputs))

    rows = _trial_tokens(2, vocab_size, device)  # [2, T]
    rows[1, :NUM_FIRST] = rows[0, :NUM_FIRST]
    other_branch, other_prefix = rows.clone(), rows.clone()
    other_branch[0, NUM_FIRST:] += 1
    other_prefix[:, :NUM_FIRST] += 1
    running = torch.arange(layout.source.shape[1], device=device)[None]  # positions by the place in the row
    apart, together = logits(rows), tree(rows)
    # Each difference is that of the second branch, [NUM_SECOND, V].
    full_effect = _distance(apart[1, NUM_FIRST:], logits(other_prefix % vocab_size)[1, NUM_FIRST:])
    effect = _distance(together[1], tree(other_branch % vocab_size)[1])
    moved = _distance(together[1], tree(rows, **{POSITIONS: running})[1])
    if not full_effect > 0 or not moved > 0:
        raise PlanError(
            "SharedPrefix tries the model, whose output does not depend on earlier tokens or on position_ids, so that "
            "it says nothing; leave SharedPrefix out"
        )
    rounding = _distance(apart[1], logits(other_branch % vocab_size)[1])
    is_seen = effect > _largest_noise(model, full_effect, rounding, apart) or _hides_leaks(model, apart)
    if is_seen or not equal_but_rounding(apart, together):
        raise PlanError(
            "SharedPrefix is given and the model has other logits for samples with one prefix than for each alone (a "
            "window, a state, or positions by place, perhaps); leave SharedPrefix out"
        )
    settings = [pair for config in list_configs(model) for pair in vars(config).items()]
    windows = [value for name, value in settings if name.endswith(WINDOWS)]
    collate.longest_tree = min((window for window in windows if type(window) is int), default=None)


def _largest_noise(model: nn.Module, full_effect: float, rounding: float, logits: Tensor) -> float:
    """Return the largest effect of a sample on the next one that may be rounding.

    Without experts it is zero: what attention leaves out adds nothing, and both forwards have one shape. The effect of
    a row on another, ``rounding``, is no more than rounding either (of a quantization by the whole microbatch, say).
    Experts sum in an order that depends on all tokens, which one trial may not show.
    """
    eps = torch.finfo(logits.dtype).eps
    noise = NOISE * rounding
    if any(name in type(module).__name__.lower() for module in model.modules() for name in ("expert", "moe")):
        noise = max(noise, NOISE * max(eps, torch.finfo(torch.float32).eps) * float(logits.abs().max()))
    return min(noise, max(LEAST_SHARE, eps**0.5 / 10) * full_effect)


def _hides_leaks(model: nn.Module, logits: Tensor) -> bool:
    """Return True if a short convolution may mix less than the logits' dtype shows, as that of a fresh LFM2 does."""
    return torch.finfo(logits.dtype).eps > torch.finfo(torch.float32).eps and any(
        isinstance(module, nn.Conv1d) and module.groups > 1 and module.padding == (module.kernel_size[0] - 1,)
        for module in model.modules()
    )


def _trial_tokens(num_rows: int, vocab_size: int, device: torch.device) -> Tensor:
    length = NUM_FIRST + NUM_SECOND
    return torch.arange(num_rows * length, device=device).view(num_rows, length) * 7 % vocab_size  # [B, T]


def _packed_and_alone(logits: Logits, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of second samples behind the first ones, and by themselves: both [B, NUM_SECOND, V]."""
    packed = logits(rows, position_ids=_packed_positions(rows))[:, NUM_FIRST:]
    return packed, logits(rows[:, NUM_FIRST:])


def _packed_positions(rows: Tensor) -> Tensor:
    positions = [torch.arange(length, device=rows.device) for length in (NUM_FIRST, NUM_SECOND)]
    return torch.cat(positions).expand(len(rows), -1)  # [B, T]


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def _vocab_size(model: nn.Module, collate: str) -> int:
    """Return the size of the vocabulary. Raise `PlanError` for a model that fails without a trial."""
    configs = list_configs(model)
    if not configs:
        raise PlanError(f"{collate} is given a model that is not one of transformers; leave it out")
    for name in BY_PLACE:
        if any(getattr(config, name, None) for config in configs):
            raise PlanError(
                f"{collate} is given and the model's config has {name}, by which attention goes by the place in a row "
                f"and not by position_ids; leave {collate} out"
            )
    return int(configs[-1].vocab_size)


def _logits(model: nn.Module) -> Logits:
    """Return a function that runs the model without dropout and compiler, and leaves its modes unchanged."""

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
                    module.reshard()  # a forward without gradients may leave it gathered
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        return logits.full_tensor() if is_dtensor(logits) else logits

    return run
