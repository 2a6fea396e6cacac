"""``shapes=``: microbatches of few shapes, chosen in the first call from the lengths of its samples.

Tokens without a label fill a microbatch up. They are neutral where no other token sees them, and where the loss leaves
them out. So the model must be one of transformers', without code of the user's, experts and statistics of a batch, and
the loss one of `LOSSES`. `verify` compares the gradient.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn

from megabatch.autotune.shapes_planner import ShapesPlanner
from megabatch.batching.packed_row import OneRow
from megabatch.batching.padding import EXPERTS, Padding, find_mixing_causes, is_causal, with_config
from megabatch.batching.samples import IGNORED_LABEL, Batch, to_dense_tensor
from megabatch.engine.call import MicrobatchPlanner, first_failure
from megabatch.errors import PlanError, require_count
from megabatch.losses.contract import is_own
from megabatch.losses.ready_made import classification, next_token
from megabatch.planning.plan import check_lengths
from megabatch.planning.shapes import Shape, choose_shapes
from megabatch.torch_private import forward_hooks, forward_pre_hooks
from megabatch.wrappers.base import Wrapper

LOSSES = (next_token, classification)  # known to leave out labels of -100
STATISTICS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)  # fmt: skip
KNOWN_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
KNOWN_CODE = ("torch.", "transformers.", "peft.", "accelerate.", "megabatch.", "builtins.", "abc.", "typing.")


class FewShapes:
    """Chooses the shapes of microbatches in the first call that has a sample.

    Args:
        count: The number of shapes.
        wrapper: The wrapper of the model.
        planner: Of the accumulator.
        padding: Padding values that the user has given.

    Raises `PlanError` for settings and models with which tokens that fill up would not be known to be neutral.
    """

    def __init__(
        self, count: object, wrapper: Wrapper, planner: MicrobatchPlanner, padding: Mapping[str, float] | None
    ) -> None:
        self.count = require_count("shapes", count)
        self.shapes: tuple[Shape, ...] = ()  # once they are chosen
        self.is_settled = False  # chosen, and the same on all ranks
        self._ranks = wrapper.ranks
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

    def check_chosen(self) -> None:
        """Raise `PlanError` before the choice, which goes by the lengths of all ranks."""
        if not self.shapes:
            raise PlanError(
                "shapes= and the first forward_backward() chooses the shapes, from the lengths of all ranks; call it "
                "before plan(), or leave shapes= out"
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

    def fitted(self, planner: MicrobatchPlanner, batch: Batch, loss_fn: object) -> MicrobatchPlanner:
        """Return the planner with the shapes for later calls, the same on all ranks. Collective.

        Args:
            planner: As it is.
            batch: This rank's samples.
            loss_fn: The loss of the call.
        """
        ranks, failure, lengths = self._ranks, None, list[int]()
        try:
            self.check(loss_fn)
            samples = planner.samples(batch)
            lengths = samples.lengths
            if lengths:
                _check_sample(samples.one(max(range(len(samples)), key=lengths.__getitem__)))
        except Exception as error:  # the user's data may raise anything; the other ranks must know
            failure = error
        failed, known, of_ranks = zip(*ranks.exchange_objects((failure is not None, self.shapes, lengths)), strict=True)
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
        self.is_settled = True
        return ShapesPlanner.of(planner, self.shapes)


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
        return "several models, whose inputs may be filled up unlike"
    if wrapper.is_pipeline or wrapper.ranks.num_all > wrapper.ranks.degree:
        return "ranks along tp, cp or pp, which must split their samples alike and may have other limits"
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
    if (code := _own_code(model)) is not None:
        return f"{code}, code of your own that may read tokens without a label"
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


def _check_sample(sample: Mapping[str, Any]) -> None:
    """Raise `PlanError` for a sample that cannot be filled up along its tokens."""
    tensors = {name: to_dense_tensor(name, value) for name, value in sample.items()}
    num = len(tensors.get("input_ids", ()))
    if not num or any(value.ndim and len(value) != num for value in tensors.values()):
        raise PlanError(
            f"shapes= fills samples up along input_ids, and they have {', '.join(tensors)}, not all of one length; "
            "give a value for each token, or leave shapes= out"
        )
