"""SharedPrefix: samples that begin alike are computed as a tree, their common prefix once.

A tree is a row of the model: the prefix, then the rest of each of its samples, its branches. Positions go on from the
prefix in every branch, and a mask hides branches from each other. Logits are gathered back to samples, so that a loss
sees the rows that it knows. `batching.packing_check` tries the model.

A mask hides pairs of positions and computes them all the same. Long branches therefore cost more in a tree than apart,
and the cut chooses by the cost model which samples share one.
"""

import contextlib
import inspect
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from megabatch.core.samples import Batching, Microbatch, Samples
from megabatch.errors import LossContractError, PlanError
from megabatch.inspection.model_facts import IDS, MASK, POSITIONS, text_config_of, with_config
from megabatch.inspection.odd_values import to_dense_tensor
from megabatch.inspection.tree import to_device
from megabatch.planning.partition import plan_share
from megabatch.planning.plan import CostModel, Plan
from megabatch.torch_private.autograd import count_writes
from megabatch.torch_private.module_members import forward_hooks

# Share of the cost of a tree's samples apart; a prediction is not better than that.
LEAST_SAVING = 0.05
# The hooks of these packages hand no hidden states on.
KNOWN_HOOKS = ("megabatch", "torch", "transformers", "accelerate", "peft")
# Inputs of the model that a tree leaves as they are.
HANDED_ON = {IDS, "use_cache", "return_dict"}
# By the tokens of a microbatch on its device: its trees, None where there are none, and the writes to it so far.
_TREES = WeakTensorKeyDictionary()


class SharedPrefix(Batching):
    """Computes common prefixes once: ``GradientAccumulator(model, batching=SharedPrefix(), ...)``.

    It suits several completions of one prompt (GRPO) and pairs of one prompt (DPO). Microbatches are padded rows
    ``{name: [B, T, ...]}``, as without it, and the loss stays as it is: it calls the model itself, once or more, with
    ``microbatch["input_ids"]`` and no mask or positions, and reads logits [B, T, V]. Give ``max_microbatch_tokens``
    as a number. It limits the tokens that the model computes, while the logits are those of all rows.

    Samples are a list, or a mapping with samples in dim 0, on the CPU, with ``input_ids`` of T tokens each. Only
    samples of one call on one rank share a prefix: give completions of a prompt to one rank.

    The accumulator tries the model when it is made, and refuses one whose branches see each other. A causal model of
    transformers with "sdpa" or "eager" attention and without experts will do. Trees stay as short as its sliding
    window. With dropout in training mode, a call with a tree is refused.

    Args:
        group: Key of a number that samples of a group have in common. Only they share a prefix, and microbatches
            leave the key out. None compares all.
    """

    has_own_plan = True

    def __init__(self, group: str | None = None) -> None:
        super().__init__(self)
        self.group = group
        self.longest_tree: int | None = None  # tokens; a model's sliding window

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Pad the samples as `Padding` does, without their mask. Raises `PlanError` for a mask that hides a token."""
        rows = self.pad([{key: sample[key] for key in sample if key not in (MASK, self.group)} for sample in samples])
        if any(not bool(torch.as_tensor(sample.get(MASK, 1)).all()) for sample in samples) or POSITIONS in rows:
            raise PlanError(
                "a sample has an attention_mask with zeros, or position_ids, which a tree would replace; cut hidden "
                "tokens away and leave both out, or leave SharedPrefix out"
            )
        return rows

    def collate(self, samples: list[Any], rows: Sequence[int]) -> Microbatch:
        """Return samples as one microbatch."""
        return self(samples)

    def check_model(self, wrapper: Any, limits: tuple[int | None, int | None]) -> None:
        """Compare samples of one tree with each alone, on the model."""
        from megabatch.batching.packing_check import check_packing

        check_packing(wrapper, self, limits)

    def plan(
        self, samples: Samples, lengths: Sequence[int], limits: tuple[int | None, int | None], cost: CostModel | None
    ) -> Plan:
        """Return the plan of one rank: microbatches of trees, then those of samples that share nothing."""
        max_tokens = limits[1]
        assert max_tokens is not None  # or the accumulator was not made
        ids, price = self._tokens(samples), cost or CostModel()
        trees: list[_Tree] = []
        limit = min(max_tokens, self.longest_tree or max_tokens)
        for rows in self._groups(samples):
            trees += find_trees({row: ids[row] for row in rows}, price, limit)
        cut: list[tuple[int, ...]] = []
        for number in _cut([tree.num_tokens for tree in trees], max_tokens, cost):
            cut.append(tuple(chain.from_iterable(trees[tree].rows for tree in number)))
        alone = sorted(set(range(len(ids))).difference(*cut))
        for rows in _cut([min(len(ids[row]), max_tokens) for row in alone], max_tokens, cost):
            cut.append(tuple(alone[row] for row in rows))
        shared = [0] * len(ids)
        for tree in trees:
            for row in tree.rows[1:]:
                shared[row] = tree.prefix
        return Plan(tuple(cut), tuple(lengths), tuple(range(len(lengths))), shared=tuple(shared) if trees else ())

    def check_plan(self, samples: Samples, plan: Plan) -> None:
        """Raise `PlanError` if samples that share a prefix in ``plan`` begin otherwise here, or a tree is too long."""
        super().check_plan(samples, replace(plan, shared=()))
        if not plan.shared:
            return
        ids = self._tokens(samples)
        for rows in plan.microbatches:
            trees = Counter(plan.firsts_of(rows))
            for tree, length in zip(trees.values(), plan.row_lengths(rows), strict=True):
                if self.longest_tree is not None and tree > 1 and length > self.longest_tree:
                    raise PlanError(
                        f"plan has a tree of {length} tokens and the model a sliding window of {self.longest_tree}; "
                        "give a plan that was made for this model, or none"
                    )
            for row, first in zip(rows, plan.firsts_of(rows), strict=True):
                if row != first and not np.array_equal(ids[row][: plan.shared[row]], ids[first][: plan.shared[row]]):
                    raise PlanError(
                        f"plan is of another batch: samples {first} and {row} share {plan.shared[row]} tokens in it; "
                        "give it with the samples that it was made for, in their order"
                    )

    def check(self, samples: Samples, plan: Plan, hooks: Any) -> None:
        """Let the samples of a plan with trees note those of each microbatch."""
        if plan.shared:
            samples.batching = _Trees(self, samples.lengths, plan.shared)

    @contextlib.contextmanager
    def surround_call(self, model: Any, plan: Plan, num_microbatches: int) -> Generator[None]:
        """Run each microbatch that has trees as trees."""
        with self.pad.watched(), self.computing(model) if plan.shared else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def computing(self, model: Any) -> Generator[None]:
        """Run each microbatch that has trees as trees, while the context is open."""
        layout: Layout | None = None
        _refuse_dropout(model)

        def begin(_: nn.Module, placed: tuple[Any, ...], named: dict[str, Any]) -> Any:
            nonlocal layout
            layout = _layout_of(placed, named)
            if layout is None:
                return None
            _refuse_hooks(model)
            ids = placed[0] if placed else named[IDS]
            return (), {**named, **layout.inputs(ids, additive=is_eager(model))}

        def end(_: nn.Module, _placed: tuple[Any, ...], output: Any) -> Any:
            return None if layout is None else _gathered(layout, output)

        with (
            cast(nn.Module, model).register_forward_pre_hook(begin, with_kwargs=True, prepend=True),
            cast(nn.Module, model).register_forward_hook(end),
        ):
            yield

    def _tokens(self, samples: Samples) -> list[np.ndarray]:
        """Return the tokens of each sample. Raises `PlanError` for samples that have none."""
        ids = _gather_column(samples, IDS)
        for sample, (tokens, length) in enumerate(zip(ids, samples.lengths, strict=True)):
            if tokens.ndim != 1 or tokens.is_floating_point() or tokens.device.type != "cpu" or len(tokens) != length:
                raise PlanError(
                    f"sample {sample} has input_ids of {tokens.dtype}, shape {tuple(tokens.shape)}, on "
                    f"{tokens.device}, and the length {length}; SharedPrefix wants [T] of whole numbers on the CPU, "
                    "T its length"
                )
        return [tokens.long().numpy() for tokens in ids]

    def _groups(self, samples: Samples) -> list[list[int]]:
        """Return the samples that may share a prefix."""
        if self.group is None:
            return [list(range(len(samples)))]
        groups: dict[float, list[int]] = {}
        for row, value in enumerate(_gather_column(samples, self.group)):
            groups.setdefault(value.item(), []).append(row)
        return list(groups.values())


def _gather_column(samples: Samples, name: str) -> list[Tensor]:
    """Return one tensor of each sample. Raises `PlanError` for samples without it, and for a deferred batch."""
    if not samples.is_in_memory:
        raise PlanError(f"{name!r} of samples is compared, and Deferred loads samples later; give a list of them")
    column: list[Tensor] = []
    for row in range(len(samples)):
        sample = samples.one_view(row)
        if name not in sample:
            raise PlanError(f"a sample has no {name!r}, by which samples are compared; give it to all")
        column.append(to_dense_tensor(name, sample[name]))
    return column


class _Trees(Batching):
    """Collates the samples of one plan, and notes the trees of each microbatch.

    Args:
        origin: Collates the samples.
        lengths: Tokens of each sample.
        shared: Tokens that each sample shares with those before it.
    """

    def __init__(self, origin: SharedPrefix, lengths: Sequence[int], shared: Sequence[int]) -> None:
        super().__init__(origin, origin.pad)
        self._origin, self._lengths, self._shared = origin, lengths, shared

    @property
    def origin(self) -> Batching:
        """The batching of all calls."""
        return self._origin

    def collate(self, samples: list[Any], rows: Sequence[int]) -> Microbatch:
        """Return samples as one microbatch."""
        microbatch = self._origin.collate(samples, rows)
        ids: Tensor = microbatch[IDS]
        lengths, shared = ([values[row] for row in rows] for values in (self._lengths, self._shared))
        _TREES[ids] = Layout.of(lengths, shared, ids.shape[1]) if any(shared[1:]) else None, count_writes(ids)
        return microbatch

    def copied(self, microbatch: Microbatch, moved: Microbatch) -> Microbatch:
        """Return the copy of a microbatch, whose trees are noted, too."""
        copy = super().copied(microbatch, moved)
        ids: Tensor = copy[IDS]
        known: Any = _TREES.get(microbatch[IDS], (None, 0))
        _TREES[ids] = to_device(known[0], ids.device), count_writes(ids)
        return copy


class _Tree(NamedTuple):
    prefix: int  # tokens
    rows: list[int]  # samples
    num_tokens: int
    saved: float  # seconds


def find_trees(ids: Mapping[int, np.ndarray], cost: CostModel, max_tokens: int) -> list[_Tree]:
    """Return the trees that cost less than their samples apart.

    Sorted samples with a prefix in common are neighbors, so prefixes are nested. The longest come first. Each is
    compared with the longer ones inside of it: either these have trees of their own, or all share the shorter one.

    Args:
        ids: Tokens [T] of each sample, by its number.
        cost: Prices samples and trees.
        max_tokens: Most tokens of a tree.
    """
    order, lengths = sorted(ids, key=lambda row: ids[row].tobytes()), {row: len(tokens) for row, tokens in ids.items()}
    begins = [_common(ids[a], ids[b]) for a, b in pairwise(order)]
    nested: list[tuple[int, list[int], list[_Tree]]] = [(0, [], [])]  # prefixes, samples that have it, and their trees
    for row, shared in zip(order, [*begins, 0], strict=False):
        if shared > nested[-1][0]:
            nested.append((shared, [], []))
        nested[-1][1].append(row)
        while nested[-1][0] > shared:
            prefix, rows, inside = nested.pop()
            taken = set(chain.from_iterable(tree.rows for tree in inside))
            trees = inside + _grow(prefix, [row for row in rows if row not in taken], lengths, cost, max_tokens)
            joined = _grow(prefix, rows, lengths, cost, max_tokens) if inside else trees
            if nested[-1][0] < shared:
                nested.append((shared, [], []))
            nested[-1][1].extend(rows)
            nested[-1][2].extend(max(joined, trees, key=lambda candidate: sum(tree.saved for tree in candidate)))
    return nested[0][2]


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Return the number of tokens that two samples have in common at their beginning."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size


def _grow(prefix: int, rows: list[int], lengths: Mapping[int, int], cost: CostModel, max_tokens: int) -> list[_Tree]:
    """Return trees of samples with one prefix, those with short branches first. Samples may be left.

    Each tree takes as many branches as save most per branch: the prefix is saved again by each, and each is hidden from
    all that are there.
    """
    rows, trees = sorted(rows, key=lambda row: (lengths[row], row)), list[_Tree]()
    while rows:
        apart, size, best = 0.0, prefix, _Tree(prefix, [], 0, 0.0)
        for number, row in enumerate(rows, 1):
            size += lengths[row] - prefix
            if size > max_tokens:
                break
            apart += cost.sample_seconds(lengths[row])
            # A row of a causal model skips half of its pairs, and a mask skips none.
            saved = apart - cost.sample_seconds(size) - size * size * cost.seconds_per_pair
            if saved >= LEAST_SAVING * apart and saved * len(best.rows) >= best.saved * number and number > 1:
                best = _Tree(prefix, rows[:number], size, saved)
        if not best.rows:
            return trees
        trees.append(best)
        rows = rows[len(best.rows) :]
    return trees


def _cut(lengths: list[int], max_tokens: int, cost: CostModel | None) -> tuple[tuple[int, ...], ...]:
    return plan_share(lengths, None, max_tokens, cost).microbatches


class Layout(NamedTuple):
    """The trees of a microbatch: rows of S positions, computed for B samples of T tokens."""

    source: Tensor  # [R, S], the token of each position: sample * T + place in the sample
    branch: Tensor  # [R, S], 0 for a prefix, 1 and on for branches, -1 for padding
    position: Tensor  # [R, S]
    target: Tensor  # [B, T], the position of each token: row * S + column; of padding, that of the last token

    @classmethod
    def of(cls, lengths: Sequence[int], shared: Sequence[int], longest: int) -> "Layout":
        """Return the layout of samples of these lengths. One that shares nothing begins a row, as the first does."""
        rows: list[list[tuple[int, int]]] = []  # of each tree, its samples and what each shares
        for sample, prefix in enumerate(shared):
            if prefix and sample:
                rows[-1].append((sample, prefix))
            else:
                rows.append([(sample, 0)])
        width = max(sum(lengths[sample] - prefix for sample, prefix in row) for row in rows)
        source = np.zeros((len(rows), width), dtype=np.int64)
        branch, target = np.full_like(source, -1), np.zeros((len(lengths), longest), dtype=np.int64)
        for number, row in enumerate(rows):
            end = 0
            for index, (sample, prefix) in enumerate(row, 1):
                start, end = end, end + lengths[sample] - prefix
                source[number, start:end] = sample * longest + np.arange(prefix, lengths[sample])
                branch[number, start:end] = index
                target[sample, :prefix] = number * width + np.arange(prefix)
                target[sample, prefix : lengths[sample]] = number * width + np.arange(start, end)
                target[sample, lengths[sample] :] = target[sample, lengths[sample] - 1]
            branch[number, : row[-1][1]] = 0
        arrays = (source, branch, source % longest, target)
        return cls(*map(torch.from_numpy, arrays))

    def inputs(self, ids: Tensor, *, additive: bool) -> dict[str, Any]:
        """Return the inputs of the model for ``ids`` [B, T]. Its mask [R, 1, S, S] is boolean, or is added."""
        size = self.branch.shape[1]
        is_before = torch.ones(size, size, dtype=torch.bool, device=ids.device).tril()
        query_branch, key_branch = self.branch[:, :, None], self.branch[:, None, :]
        mask = (is_before & ((query_branch == key_branch) | (key_branch == 0)))[:, None]
        if additive:
            mask = torch.zeros(mask.shape, device=ids.device).masked_fill_(~mask, torch.finfo(torch.float32).min)
        return {IDS: ids.flatten()[self.source], POSITIONS: self.position, MASK: mask}

    def gather(self, logits: Tensor) -> Tensor:
        """Return logits [R, S, V] of positions as those of samples: [B, T, V]."""
        return logits.flatten(0, 1).index_select(0, self.target.flatten()).view(*self.target.shape, -1)


def _layout_of(placed: tuple[Any, ...], named: Mapping[str, Any]) -> Layout | None:
    """Return the trees of the tokens that the loss gives the model. Raises `LossContractError` for other inputs."""
    ids = placed[0] if placed else named.get(IDS)
    if not isinstance(ids, Tensor) or ids not in _TREES:
        raise LossContractError(
            'the loss gives the model other tokens than microbatch["input_ids"], whose shared prefixes are known; hand '
            "that very tensor on, or leave SharedPrefix out"
        )
    layout, num_writes = _TREES[ids]
    if count_writes(ids) != num_writes:
        raise LossContractError(
            'the loss writes to microbatch["input_ids"], whose shared prefixes are known; write to a copy, and leave '
            "SharedPrefix out"
        )
    other_inputs = [name for name, value in named.items() if value is not None and name not in HANDED_ON]
    if layout is not None and (other_inputs or len(placed) > 1):
        raise LossContractError(
            f"the loss gives the model {', '.join(other_inputs) or 'more than the tokens by place'}, which a tree "
            "would replace or not read; give it the tokens alone, or leave SharedPrefix out"
        )
    return layout


def _gathered(layout: Layout, output: Any) -> Any:
    """Return the output of a model with the logits of samples, and nothing else, in place of those of trees."""
    logits: Any = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if type(logits) is not Tensor or logits.shape[:2] != layout.source.shape:
        is_tensor = isinstance(logits, Tensor)
        returned = f"{type(logits).__name__} of shape {tuple(logits.shape)}" if is_tensor else "no logits"
        raise LossContractError(
            f"the model returns {returned} for trees of {tuple(layout.source.shape)} tokens; SharedPrefix wants whole "
            "logits [B, T, V], of which it gathers those of samples; return them, or leave SharedPrefix out"
        )
    gathered = layout.gather(logits)
    return gathered if isinstance(output, Tensor) else type(output)(logits=gathered)


def is_eager(model: Any) -> bool:
    """Return True if attention adds its mask, False if it takes a boolean one. Raises `PlanError` for other kinds."""
    config: Any = getattr(with_config(model), "config", None)
    kind = getattr(text_config_of(config), "_attn_implementation", None)
    if kind not in ("sdpa", "eager"):
        raise PlanError(
            f"SharedPrefix is given and the model's attention is {kind!r}, which takes no mask of trees; choose "
            'attn_implementation="sdpa" of a model of transformers, or leave SharedPrefix out'
        )
    return kind == "eager"


def _refuse_dropout(model: nn.Module) -> None:
    """Raise `PlanError` for a model that drops anything: samples would draw the same numbers for their prefix."""
    dropouts: list[str] = []
    for module in model.modules():
        if not module.training:
            continue
        if "Dropout" in type(module).__name__ and getattr(module, "p", 0):
            dropouts.append(type(module).__name__)
        # Models hand the rates of attention and layers on as numbers.
        rates = {name: rate for name, rate in vars(module).items() if type(rate) is float}
        dropouts += [name for name, rate in rates.items() if rate and "drop" in name]
    if dropouts:
        raise PlanError(
            f"samples share a prefix and the model has dropout ({dropouts[0]}), for which they would draw one number; "
            "set it to 0, call model.eval(), or leave SharedPrefix out"
        )


def _refuse_hooks(model: nn.Module) -> None:
    """Raise `LossContractError` for a forward hook of the user's in the model: it would see a prefix once."""
    for name, module in model.named_modules():
        for hook in forward_hooks(module).values():
            function: Any = inspect.unwrap(getattr(hook, "func", hook))
            if str(getattr(function, "__module__", "")).partition(".")[0] not in KNOWN_HOOKS:
                raise LossContractError(
                    f"samples share a prefix and {name or 'the model'} has the forward hook "
                    f"{getattr(function, '__qualname__', function)}, which would see the prefix once for all of them; "
                    "remove the hook, or leave SharedPrefix out"
                )
