"""``shapes=``: microbatches of few shapes, chosen in the first call and tried on the model there.

Tokens without a label fill a microbatch up. They are neutral where no other token sees them, and where the loss leaves
them out. So the model must be one of transformers', without experts and statistics of a batch, the loss one of
`LOSSES`, and the first call compares the gradient of a filled microbatch with that of the same samples one by one.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.autotune.measure import MeasuredModel
from megabatch.autotune.shapes_planner import ShapesPlanner
from megabatch.autotune.tuner import restoring
from megabatch.batching.packed_row import OneRow
from megabatch.batching.padding import EXPERTS, Padding, find_mixing_causes, is_causal, with_config
from megabatch.batching.samples import IGNORED_LABEL, Batch, to_dense_tensor
from megabatch.engine import random_state
from megabatch.engine.call import MicrobatchPlanner, first_failure
from megabatch.engine.update import OpenUpdate
from megabatch.errors import PlanError, require_count
from megabatch.losses.contract import is_own
from megabatch.losses.ready_made import classification, next_token
from megabatch.planning.plan import check_lengths
from megabatch.planning.shapes import Shape, choose_shapes
from megabatch.torch_private import forward_hooks, forward_pre_hooks
from megabatch.wrappers.base import Wrapper, local

LOSSES = (next_token, classification)  # known to leave out labels of -100
NUM_TRIED = 8  # tokens of the samples of a trial
STATISTICS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)  # fmt: skip
FLOAT32 = torch.finfo(torch.float32).eps  # the coarsest trial that sees what code of the user's does
KNOWN_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
KNOWN_CODE = ("torch.", "transformers.", "peft.", "accelerate.", "megabatch.", "builtins.", "abc.", "typing.")
Gradients = list[Tensor | None]


class FewShapes:
    """Chooses the shapes of microbatches in the first call that has a sample, and tries them on the model.

    Args:
        count: The number of shapes.
        model: The model that the loss gets.
        wrapper: The wrapper of that model.
        planner: Of the accumulator.
        wide: Accumulates its gradients.
        padding: Padding values that the user has given.

    Raises `PlanError` for settings and models with which tokens that fill up would not be known to be neutral.
    """

    def __init__(
        self, count: object, model: Any, wrapper: Wrapper, planner: MicrobatchPlanner, wide: Any,
        padding: Mapping[str, float] | None,
    ) -> None:  # fmt: skip
        self.count = require_count("shapes", count)
        self.shapes: tuple[Shape, ...] = ()  # once they are chosen
        self.is_settled = False  # chosen, the same on all ranks, and tried
        self._wrapper, self._subject = wrapper, MeasuredModel(model, wrapper, wide)
        if problem := _problem_of_settings(planner, padding):
            raise PlanError(f"shapes={self.count} and {problem}; leave one of the two out")
        if problem := _problem_of_wrapper(wrapper) or _problem_of_model(wrapper.models[0]):
            raise PlanError(f"shapes={self.count} and {problem}; leave shapes= out")

    def check(self, loss_fn: object) -> None:
        """Raise `PlanError` for a loss that may count tokens without a label."""
        if not _is_known(loss_fn):
            raise PlanError(
                "shapes= fills microbatches up with tokens without a label, and only losses.next_token and "
                "losses.classification are known to leave them out; give one of these, or leave shapes= out"
            )

    def planner_of(self, planner: MicrobatchPlanner, fn: object) -> MicrobatchPlanner:
        """Return the planner of a call without a backward, which fills up for a known loss only."""
        return planner if _is_known(fn) or not isinstance(planner, ShapesPlanner) else planner.free

    def state(self) -> list[list[int]]:
        """Return the chosen shapes; none before the choice."""
        return [list(each) for each in self.shapes]

    def load(self, planner: MicrobatchPlanner, state: Sequence[Sequence[int]]) -> MicrobatchPlanner:
        """Return the planner with shapes that were chosen before. The next call compares them between ranks."""
        if any(len(each) != 2 or min(each) < 1 for each in state):
            raise PlanError(f"the state has shapes={state}; expected pairs of rows and tokens, of a state_dict()")
        self.shapes = tuple((int(rows), int(tokens)) for rows, tokens in state)
        self.is_settled = False
        free = planner.free if isinstance(planner, ShapesPlanner) else planner
        return ShapesPlanner.of(free, self.shapes) if self.shapes else free

    def fitted(
        self, planner: MicrobatchPlanner, batch: Batch, loss_fn: Any, opened: OpenUpdate | None,
        run: Callable[[MicrobatchPlanner, list[dict[str, Tensor]]], Gradients],
    ) -> MicrobatchPlanner:  # fmt: skip
        """Return the planner with the shapes for later calls, the same on all ranks. Collective.

        Args:
            planner: As it is.
            batch: This rank's samples.
            loss_fn: The loss of the call.
            opened: The open update. If it has gradients, it was loaded, and its model was tried before it was saved.
            run: Runs an update and returns its gradient.
        """
        ranks, failure, lengths, sample = self._wrapper.ranks, None, list[int](), None
        is_begun = opened is not None and opened.num_microbatches > 0
        try:
            self.check(loss_fn)
            if is_begun and not self.shapes:
                raise PlanError(
                    "shapes= and an open update that was saved without them, beside which the model cannot be tried; "
                    "finalize() that update before, or leave shapes= out"
                )
            samples = planner.samples(batch)
            lengths = samples.lengths
            if lengths:
                sample = _short(samples.one(max(range(len(samples)), key=lengths.__getitem__)))
        except Exception as error:  # the user's data may raise anything; the other ranks must know
            failure = error
        failed, known, of_ranks, offers = zip(
            *ranks.exchange_objects((failure is not None, self.shapes, lengths, sample)), strict=True
        )
        if any(failed):
            raise first_failure(ranks, failure)
        if len(set(known)) > 1:
            raise PlanError("shapes= are not the same on all ranks; load one state_dict() on all of them, or on none")
        if not any(of_ranks):
            return planner
        if not self.shapes:
            free = ShapesPlanner.of(planner, ())
            rows, tokens = free.limits
            every = [length for each in of_ranks for length in each]
            check_lengths(every, tokens)
            self.shapes = choose_shapes(
                every, self.count, num_samples=max(map(len, of_ranks)), max_rows=rows, max_tokens=tokens,
                cost=planner.known_cost, packed=free.is_packed,
            )  # fmt: skip
            self.shapes = ranks.exchange_objects(self.shapes)[0]  # limits and costs may be each rank's own
        if not is_begun:
            self._try(planner, next(each for each in offers if each is not None), opened, run)
        self.is_settled = True
        return ShapesPlanner.of(planner, self.shapes)

    def _try(
        self, planner: MicrobatchPlanner, sample: dict[str, Tensor], opened: OpenUpdate | None,
        run: Callable[[MicrobatchPlanner, list[dict[str, Tensor]]], Gradients],
    ) -> None:  # fmt: skip
        """Raise `PlanError` if two samples have another gradient in a microbatch that is filled up than one by one."""
        wrapper, ranks = self._wrapper, self._wrapper.ranks
        num, most = len(sample["input_ids"]), planner.padding and planner.padding.most_positions
        num = min(num, most // 2) if most and not isinstance(planner.collate, OneRow) else num
        sample = {name: value[:num] if value.ndim else value for name, value in sample.items()}
        shorter = {name: value[: max(1, num - 3)] if value.ndim else value for name, value in sample.items()}
        alone = replace(
            ShapesPlanner.of(planner, ()).free, micro_batch_size=1, max_microbatch_tokens=None, fit=None, learned=None
        )
        shape = (1, 4 * num) if isinstance(planner.collate, OneRow) else (3, 2 * num)
        filled = ShapesPlanner.of(replace(alone, micro_batch_size=3), [shape])
        precision = _Precision()
        with restoring(self._subject, opened, "leave shapes= out"), torch.compiler.set_stance("force_eager"), precision:
            before, modules = random_state.note(wrapper.device), list(wrapper.models[0].modules())
            expected = run(alone, [sample, shorter])
            draws = float(not random_state.note(wrapper.device).same_as(before))
            draws = max(drawn for (drawn,) in ranks.exchange_numbers([draws]))
            if draws:  # dropout, which is not compared
                for model in wrapper.models:
                    model.eval()
                expected = run(alone, [sample, shorter])
            # Copies: the buckets of DDP may be the memory of both.
            expected = [None if each is None else each.detach().clone() for each in expected]
            found = run(filled, [sample, shorter])
        changes = any(a is not b for a, b in zip_longest(modules, wrapper.models[0].modules()))
        eps, changed = map(max, zip(*ranks.exchange_numbers([precision.eps, float(changes)]), strict=True))
        if changed:
            raise PlanError(
                "shapes= tries the model on a few tokens, and its forward replaces modules then; make the model anew, "
                "and leave shapes= out"
            )
        own = _own_code(wrapper.models[0])
        if own and (draws or eps > FLOAT32):
            raise PlanError(
                f"shapes= fills microbatches up with tokens without a label, and {own} is code of your own, of which "
                "only a trial in float32 or float64 and without dropout tells whether it reads them; leave shapes= out"
            )
        # Models of transformers may compute parts in float32.
        total, moved = _difference(found, expected, eps if own else max(eps, FLOAT32))
        totals, every = zip(*ranks.exchange_numbers([total, float(moved)]), strict=True)
        if not all(map(math.isfinite, totals)):
            raise PlanError(
                "shapes= tries the first tokens of a sample, and their gradient is not finite; mend the model or the "
                "samples"
            )
        if any(every):
            raise PlanError(
                "shapes= fills microbatches up with tokens without a label, and the gradient of this model changes "
                "with them (a mean over positions, perhaps, or a mask that it does not read); leave shapes= out"
            )
        if not any(totals):
            raise PlanError(
                f"shapes= tries the first {NUM_TRIED} tokens of a sample, and their gradient is zero; give the first "
                "call a sample with targets among them, or leave shapes= out"
            )


def _is_known(loss_fn: object) -> bool:
    """Return True for a loss that leaves out labels of -100, inside of the trainer's own code too."""
    while loss_fn not in LOSSES and is_own(loss_fn) and hasattr(loss_fn, "__wrapped__"):
        loss_fn = cast(Any, loss_fn).__wrapped__
    return loss_fn in LOSSES


def _problem_of_settings(planner: MicrobatchPlanner, padding: Mapping[str, float] | None) -> str | None:
    collate = planner.collate
    if collate is not None and not isinstance(collate, OneRow):
        return "a collate function other than OneRow, which decides the shape itself"
    if isinstance(collate, OneRow) and collate.adds_lengths:
        return "OneRow(flash_attn_kwargs=True), whose ends of sequences have other shapes"
    if isinstance(collate, OneRow) and planner.micro_batch_size is not None:
        return "OneRow with micro_batch_size, which says nothing about a row's tokens (give max_microbatch_tokens)"
    if planner.length is not None:
        return "length=, which may count other tokens than those that are filled up"
    if any(name.endswith("labels") and fill != IGNORED_LABEL for name, fill in (padding or {}).items()):
        return f"padding= of labels that is not {IGNORED_LABEL}"
    return None


def _problem_of_wrapper(wrapper: Wrapper) -> str | None:
    if len(wrapper.models) > 1:
        return "several models, of which one is tried"
    if wrapper.is_pipeline or wrapper.ranks.num_all > wrapper.ranks.degree:
        return "ranks along tp, cp or pp, which must split their samples alike and may have other limits"
    if isinstance(wrapper.models[0], DistributedDataParallel) and wrapper.models[0].static_graph:
        return "DDP with static_graph=True, which keeps the graph of its first backward, that of a trial"
    return None


def _problem_of_model(model: nn.Module) -> str | None:
    inner: Any = with_config(model)
    config = getattr(inner, "config", None)
    of_library = any(kind.__module__.startswith("transformers.") for kind in type(inner).__mro__)
    if not of_library or config is None:
        return f"{type(inner).__name__}, which is no model of transformers, so that nothing is known of its padding"
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder-decoder, whose two lengths are not those of one shape"
    if not is_causal(inner, with_experts=True) and not Padding([model]).takes_mask:
        return f"{type(inner).__name__}, which is neither causal nor takes an attention_mask"
    text = config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config
    if getattr(config, "attention_type", None) == "block_sparse":
        return "block-sparse attention, which is another one for a few tokens"
    if (cause := next(find_mixing_causes(inner), None)) is not None:
        return cause[0]
    if any(getattr(each, name, None) for each in (config, text) for name in EXPERTS):
        return "experts, which tokens that fill up would load"
    for module in inner.modules():
        if isinstance(module, STATISTICS):
            return f"{type(module).__name__}, whose statistics tokens that fill up would enter"
    return None


def _own_code(model: nn.Module) -> str | None:
    """Return the name of code in the model that is not of known libraries; None if there is none."""
    code: list[Any] = [*{kind for module in model.modules() for kind in type(module).__mro__}]
    for module in model.modules():
        own: list[Any] = [*forward_hooks(module).values(), *forward_pre_hooks(module).values()]
        own += [vars(module)["forward"]] if "forward" in vars(module) else []
        code += [inspect.unwrap(getattr(each, "func", each)) for each in own]
    attention = getattr(getattr(with_config(model), "config", None), "_attn_implementation", None) or "eager"
    if attention not in KNOWN_ATTENTION:
        return f"the attention {attention!r}"
    of_users = (each for each in code if not f"{getattr(each, '__module__', '')}.".startswith(KNOWN_CODE))
    return next((getattr(each, "__name__", type(each).__name__) for each in of_users), None)


def _short(sample: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the first tokens of a sample on the CPU, all with a label."""
    tensors = {name: to_dense_tensor(name, value).detach().cpu() for name, value in sample.items()}
    num = len(tensors.get("input_ids", ()))
    if not num or any(value.ndim and len(value) != num for value in tensors.values()):
        raise PlanError(
            f"shapes= fills samples up along input_ids, and they have {', '.join(tensors)}, not all of one length; "
            "give a value for each token, or leave shapes= out"
        )
    mask = tensors.get("attention_mask")
    start = int(mask.to(torch.bool).int().argmax()) if mask is not None and mask.ndim == 1 else 0  # after left padding
    tried = slice(start, start + NUM_TRIED)
    cut = {name: value[tried].clone() if value.ndim else value.clone() for name, value in tensors.items()}
    return {name: value.clamp(min=0) if name.endswith("labels") else value for name, value in cut.items()}


class _Precision:
    """The coarsest rounding of the outputs of modules that run meanwhile."""

    def __init__(self) -> None:
        self.eps = torch.finfo(torch.float64).eps

    def __enter__(self) -> None:
        self._handle = nn.modules.module.register_module_forward_hook(self._look)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _look(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            is_tf32 = output.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
            self.eps = max(self.eps, torch.finfo(torch.float16 if is_tf32 else output.dtype).eps)


@torch.no_grad()
def _difference(found: Gradients, expected: Gradients, eps: float) -> tuple[float, bool]:
    """Return the norm of a gradient on this rank, and whether another one differs by more than rounding."""
    norms = [0.0 if each is None else _norm(each) for each in expected]
    total = math.sqrt(sum(norm**2 for norm in norms))
    moved = not math.isfinite(total)
    for a, b, norm in zip(found, expected, norms, strict=True):
        if a is None or b is None:
            distance = 0.0 if a is None and b is None else _norm(a if b is None else b)
        else:
            distance = _norm(local(a).double() - local(b).double())
        # A gradient that is a sum of nothing, as that of a key's bias, is the rounding of larger ones.
        moved = moved or not distance <= eps**0.5 * norm + eps / 8 * total
    return total, moved


def _norm(tensor: Any) -> float:
    return float(torch.linalg.vector_norm(local(tensor).double()))
