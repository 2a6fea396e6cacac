"""`Shapes`: microbatches of few shapes, chosen in the first call from the lengths of its samples.

Tokens without a label fill a microbatch up. They are neutral where no other token sees them, and where the loss leaves
them out. So the model must be one of transformers', without code of the user's, experts and statistics of a batch, and
the loss one that says it leaves them out. `verify` compares the gradient.
"""

import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from megabatch.autotune.shapes_planner import ShapesPlanner, check_loss
from megabatch.core.agreement import first_failure
from megabatch.core.call import MicrobatchPlanner
from megabatch.core.extension import Extension
from megabatch.core.samples import Batch
from megabatch.core.wrapper import Wrapper
from megabatch.errors import PlanError
from megabatch.inspection.mixing_causes import find_mixing_causes
from megabatch.inspection.model_facts import EXPERTS, ModelFacts, is_causal, with_config
from megabatch.inspection.odd_values import to_dense_tensor
from megabatch.planning.plan import check_lengths
from megabatch.planning.shapes import Shape, choose_shapes
from megabatch.torch_private.loss_nodes import IGNORED_LABEL
from megabatch.torch_private.module_members import forward_hooks, forward_pre_hooks

STATISTICS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)  # fmt: skip
KNOWN_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
KNOWN_CODE = ("torch.", "transformers.", "peft.", "accelerate.", "megabatch.", "builtins.", "abc.", "typing.")


class FewShapes(Extension):
    """Chooses the shapes of microbatches in the first call that has a sample.

    Args:
        count: The number of shapes.
        wrapper: The wrapper of the model.
        planner: Of the accumulator.

    Raises `PlanError` for settings and models with which tokens that fill up would not be known to be neutral.
    """

    def __init__(self, count: int, wrapper: Wrapper, planner: MicrobatchPlanner) -> None:
        self.count = count
        self.shapes: tuple[Shape, ...] = ()  # once they are chosen
        self.is_settled = False  # chosen, and the same on all ranks
        self._ranks = wrapper.ranks
        if problem := _problem_of_settings(planner):
            raise PlanError(f"Shapes({self.count}) and {problem}; leave one of the two out")
        if problem := _problem_of_wrapper(wrapper) or _problem_of_model(wrapper.models[0]):
            raise PlanError(f"Shapes({self.count}) and {problem}; leave Shapes out")

    def attach(self, gradient: Any) -> None:
        gradient.planner.check_goes_with(f"Shapes({self.count})")
        gradient.planner = ShapesPlanner.of(gradient.planner, ())

    def before_call(self, gradient: Any, batch: Batch, loss_fn: Any) -> None:
        """Choose the shapes in the first call that has a sample."""
        if not self.is_settled:
            gradient.tune(batch, loss_fn)  # the limit bounds the shapes
            gradient.planner = self.fitted(gradient.planner, batch, loss_fn)

    def check_call(self, gradient: Any, batch: Batch, prepared: object, loss_fn: Any) -> None:
        check_loss(loss_fn)

    def state_dict(self) -> dict[str, Any]:
        """Return the chosen shapes; none before the choice."""
        return {"shapes": [list(shape) for shape in self.shapes]}

    def load_state_dict(self, gradient: Any, state: dict[str, Any]) -> None:
        gradient.planner = self.load(gradient.planner, state.pop("shapes", []))

    def load(self, planner: MicrobatchPlanner, state: Sequence[Sequence[int]]) -> MicrobatchPlanner:
        """Return the planner with shapes that were chosen before. The next call compares them between ranks."""
        if any(len(shape) != 2 or min(shape) < 1 for shape in state):
            raise PlanError(f"the state has shapes={state}; expected pairs of rows and tokens, of a state_dict()")
        self.shapes = tuple((int(rows), int(tokens)) for rows, tokens in state)
        self.is_settled = False
        return ShapesPlanner.of(planner, self.shapes)

    def fitted(self, planner: MicrobatchPlanner, batch: Batch, loss_fn: object) -> MicrobatchPlanner:
        """Return the planner with the shapes for later calls, the same on all ranks. Collective.

        Args:
            planner: As it is.
            batch: This rank's samples.
            loss_fn: The loss of the call.
        """
        ranks, failure, lengths = self._ranks, None, list[int]()
        try:
            check_loss(loss_fn)
            samples = planner.samples(batch)
            lengths = samples.lengths
            if lengths:
                _check_sample(samples.one(max(range(len(samples)), key=lengths.__getitem__)))
        except Exception as error:  # the user's data may raise anything; the other ranks must know
            failure = error
        announced = failure is not None, self.shapes, lengths
        failed, shapes_of_ranks, lengths_of_ranks = zip(*ranks.exchange_objects(announced), strict=True)
        if any(failed):
            raise first_failure(ranks, failure)
        if len(set(shapes_of_ranks)) > 1:
            raise PlanError("Shapes are not the same on all ranks; load one state_dict() on all of them, or on none")
        if not any(lengths_of_ranks):
            return planner
        if not self.shapes:
            rows, tokens = planner.limits
            lengths = list(itertools.chain.from_iterable(lengths_of_ranks))
            check_lengths(lengths, tokens)
            self.shapes = choose_shapes(
                lengths, self.count, num_samples=max(map(len, lengths_of_ranks)), max_rows=rows, max_tokens=tokens,
                cost=planner.known_cost, packed=not planner.has_rows,
            )  # fmt: skip
            self.shapes = ranks.exchange_objects(self.shapes)[0]  # limits and costs may be each rank's own
        self.is_settled = True
        return ShapesPlanner.of(planner, self.shapes)


def _problem_of_settings(planner: MicrobatchPlanner) -> str | None:
    batching = planner.batching
    if batching.shape_problem is not None:
        return batching.shape_problem
    if not batching.has_rows and planner.micro_batch_size is not None:
        return "OneRow with micro_batch_size, which says nothing about a row's tokens (give max_microbatch_tokens)"
    if planner.length is not None:
        return "length=, which may count other tokens than those that are filled up"
    if any(name.endswith("labels") and fill != IGNORED_LABEL for name, fill in batching.pad.fills.items()):
        return f"Padded with labels of another value than {IGNORED_LABEL}"
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
    if not is_causal(inner, with_experts=True) and not ModelFacts([model]).takes_mask:
        return f"{type(inner).__name__}, which is neither causal nor takes an attention_mask"
    text = config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config
    if getattr(config, "attention_type", None) == "block_sparse":
        return "block-sparse attention, which is another one for a few tokens"
    if (cause := next(find_mixing_causes(inner), None)) is not None:
        return cause[0]
    if any(getattr(part, name, None) for part in (config, text) for name in EXPERTS):
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
        attached: list[Any] = [*forward_hooks(module).values(), *forward_pre_hooks(module).values()]
        attached += [vars(module)["forward"]] if "forward" in vars(module) else []
        code += [inspect.unwrap(getattr(function, "func", function)) for function in attached]
    attention = getattr(getattr(with_config(model), "config", None), "_attn_implementation", None) or "eager"
    if attention not in KNOWN_ATTENTION:
        return f"the attention {attention!r}"
    of_users = (function for function in code if not f"{getattr(function, '__module__', '')}.".startswith(KNOWN_CODE))
    return next((getattr(function, "__name__", type(function).__name__) for function in of_users), None)


def _check_sample(sample: Mapping[str, Any]) -> None:
    """Raise `PlanError` for a sample that cannot be filled up along its tokens."""
    tensors = {name: to_dense_tensor(name, value) for name, value in sample.items()}
    num = len(tensors.get("input_ids", ()))
    if not num or any(value.ndim and len(value) != num for value in tensors.values()):
        raise PlanError(
            f"Shapes fills samples up along input_ids, and they have {', '.join(tensors)}, not all of one length; "
            "give a value for each token, or leave Shapes out"
        )
