"""Evaluate the exact loss and the metrics of whole sets, over all ranks, and stop early by one of them."""

import contextlib
import difflib
import math
import zlib
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megabatch import CostModel, Plan, Term, losses, plan
from megabatch.batching import Padding, context_parallel, sample_length, to_device
from megabatch.errors import LossContractError, MegabatchError, PlanError
from megabatch.losses import LossFunction, loss_hooks, terms_of
from megabatch.planning import deal_microbatches
from megabatch.train.config import HELD_OUT, EvalConfig, UpdateConfig
from megabatch.train.context import BestEvaluation, Callback, RunContext
from megabatch.train.data.load import OWN
from megabatch.train.model.build import in_precision
from megabatch.train.parallel.wrap import is_pipeline, reshard
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.files import Row
from megabatch.train.runtime.plugins import Event, blamed, load_function
from megabatch.train.runtime.ranks import Ranks

# The return value of a collate function.
Microbatch = Any
# By name of a term, its total and its weight over a set.
Sums = dict[str, tuple[float, float]]

# Name of the term that a loss returns by itself.
PAIR_NAME = "loss"
# Names that a metric cannot have, because rows of token losses have them.
OF_TOKENS = ("accuracy", "perplexity")
# A pipeline runs so many microbatches for each stage at once: its stages wait for a fifth of the time at most.
PER_STAGE = 4
# Half a GiB in bfloat16, two and a half with what is computed of them.
MOST_LOGITS = 2**28
# The largest number of which float64 has the power of e.
LARGEST_EXPONENT = 709


class Evaluation(Callback):
    """Evaluate every set at the start, every ``eval.every`` updates and at the end. Collective.

    It evaluates the moving average of the weights, if the recipe asks for one.
    """

    def __init__(self, context: RunContext) -> None:
        config = context.config
        self.every = config.eval.every
        loss_fn = load_function(config.loss.function, "loss.function")
        in_own_precision = partial(
            in_precision, config=config.model, parallel_model=context.model, device=context.ranks.device
        )
        self._terms = build_terms(config.eval, loss_fn, in_own_precision)
        name = config.eval.function
        self._own = None if name is None else load_function(name, "eval.function")
        # Step of the last evaluation.
        self._step: int | None = None

    def start(self, context: RunContext) -> None:
        """Evaluate a new run before its first update."""
        if context.is_new:
            self.evaluate(context)

    def after_update(self, context: RunContext) -> None:
        self.evaluate(context)

    def end(self, context: RunContext) -> None:
        """Evaluate the last weights, unless a signal has stopped the run."""
        in_turn = self.every is not None and context.step % self.every == 0
        if self._step != context.step and not (in_turn or context.is_stopped):
            self.evaluate(context)

    def evaluate(self, context: RunContext) -> None:
        """Evaluate every set, then the user's own evaluation, and tell the callbacks of each."""
        self._step, fit = context.step, context.learner.gradient.fit
        tokens, update_row = None if fit is None else fit.max_microbatch_tokens, context.row
        with context.evaluated_weights(), context.model.losses():
            event = replace(context.event(), row={})
            update, ranks, console = context.config.update, context.ranks, context.console
            for row in evaluate(event, self._terms, self._own, update, ranks, console, chosen_tokens=tokens):
                context.row = row
                for callback in context.callbacks.after_evaluation:
                    callback.after_evaluation(context)
        context.row = update_row


@dataclass(frozen=True)
class Terms:
    """The sums of a set, as a function (model, microbatch) -> {name: (total, weight)}."""

    loss: LossFunction
    metrics: LossFunction | None = None  # in which no gradient is looked for
    of_tokens: bool = False  # the loss is the mean over target tokens, of which there is a perplexity
    title: str = "eval.metrics"  # of the metrics, in messages

    def __call__(self, model: Any, microbatch: Microbatch) -> dict[str, Term]:
        terms = terms_of(self.loss(model, microbatch))
        return {**terms, **self._metrics(model, microbatch, terms)}

    def of_all(self, model: nn.Module, microbatches: Sequence[Microbatch]) -> list[dict[str, Term]]:
        """Return the terms of each microbatch. A pipeline runs several at once, the loss and the metrics apart."""
        if not is_pipeline(model):
            return [self(model, microbatch) for microbatch in microbatches]
        from megabatch.pipeline import evaluate as evaluate_pipeline

        losses_of_parts = evaluate_pipeline(model, microbatches, self.loss)
        if self.metrics is None:
            return losses_of_parts
        metrics = partial(self._metrics, taken=losses_of_parts[0])
        try:
            added = evaluate_pipeline(model, microbatches, metrics)
        except (PlanError, LossContractError) as error:
            raise MegabatchError(f"{self.title}: {str(error).replace('the loss', 'it')}") from None
        return [{**terms, **more} for terms, more in zip(losses_of_parts, added, strict=True)]

    def _metrics(self, model: Any, microbatch: Microbatch, taken: Collection[str]) -> dict[str, Term]:
        if self.metrics is None:
            return {}
        try:
            with torch.no_grad(), blamed(self.title):
                metrics = terms_of(self.metrics(model, microbatch))
        except LossContractError as error:
            raise MegabatchError(f"{self.title}: {str(error).replace('the loss', 'what it returns')}") from None
        taken = {PAIR_NAME, *(OF_TOKENS if self.of_tokens else ()), *taken}
        for name in sorted(metrics.keys() & taken):
            raise MegabatchError(f"{self.title} returns {name!r}, which is there already; give it another name")
        return metrics


def build_terms(
    config: EvalConfig,
    loss_fn: LossFunction,
    in_own_precision: Callable[[LossFunction], LossFunction] = lambda function: function,
) -> Terms:
    """Return the terms of the loss and of eval.metrics, each computed in the precision of the recipe."""
    of_tokens = loss_fn is losses.next_token
    loss = in_own_precision(next_token_terms if of_tokens else loss_fn)
    if config.metrics is None:
        return Terms(loss, None, of_tokens)
    metrics = in_own_precision(load_function(config.metrics, "eval.metrics"))
    return Terms(loss, metrics, of_tokens, f"eval.metrics {config.metrics!r}")


def next_token_terms(model: Any, microbatch: Microbatch) -> dict[str, Term]:
    """Return the loss `losses.next_token` and the number of targets that the model finds likeliest, in one forward."""
    outputs: list[Tensor] = []

    def remember(*inputs: Any, **named: Any) -> Tensor:
        output = model(*inputs, **named)
        outputs.append(output if isinstance(output, Tensor) else output.logits)
        # Alone: a router loss beside it is trained on and not evaluated.
        return outputs[0]

    loss = losses.next_token(cast(nn.Module, remember), microbatch)
    logits = outputs[0]  # [B, T, V]
    targets = losses.next_targets(microbatch)  # [B, T - 1], or [B, T] of a stretch
    is_correct = logits[:, : targets.shape[1]].argmax(-1) == targets
    return {PAIR_NAME: loss, "accuracy": Term(is_correct.sum(), loss.weight)}


def evaluate(
    event: Event, terms: Terms, custom: Callable[..., Any] | None, update: UpdateConfig, ranks: Ranks, console: Console,
    *, chosen_tokens: int | None = None,
) -> list[Row]:  # fmt: skip
    """Return a row for each of the event's sets, then one for the user's ``custom`` evaluation. Collective."""
    run = partial(evaluate_set, event.model, terms, chosen_tokens=chosen_tokens)
    rows = [
        {"step": event.step, **run(samples, update, ranks, console, name=name)} for name, samples in event.sets.items()
    ]
    return rows if custom is None else [*rows, {"step": event.step, "set": OWN, **own_values(custom, event, update)}]


def evaluate_set(
    model: nn.Module, terms_fn: LossFunction, samples: Sequence[Any], update: UpdateConfig, ranks: Ranks,
    console: Console, *, name: str = "held-out", chosen_tokens: int | None = None,
) -> Row:  # fmt: skip
    """Return the loss and the metrics of a set, each a sum over all of its samples and ranks by a sum. Collective.

    Returns {"set", "eval_loss", "eval_<term>", ...}: of several terms with a gradient, eval_loss is the sum, as in
    training. A quotient without weight is None. The model is in evaluation mode for that long and draws, if it does,
    the same at every evaluation; nothing else is changed. ``chosen_tokens``: what a microbatch holds where ``update``
    leaves it open; a sample that is longer goes alone. Where all logits are made, fewer tokens are taken at once.
    """
    terms = terms_fn if isinstance(terms_fn, Terms) else Terms(terms_fn)
    with evaluating(model, name, ranks.device, eager=update.shapes is not None):
        limit = most_tokens(model) if terms.of_tokens else None
        share = split_set(samples, update, ranks, chosen_tokens, limit)
        sums, loss_names = sum_terms(model, terms, samples, share, ranks, console, name)
    return row_of(name, terms, sums, loss_names)


@contextlib.contextmanager
def evaluating(model: nn.Module, seed: str, device: torch.device, *, eager: bool) -> Generator[None]:
    """Leave no trace of forwards: no gradient; modes, random numbers and shards as before.

    ``eager``: without the compiler, which would compile every shape.
    """
    modes = {module: module.training for module in model.modules()}
    devices = [device] if device.type == "cuda" else []
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.random.fork_rng(devices))
            if eager:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            torch.manual_seed(zlib.crc32(seed.encode()))
            model.eval()
            yield
    finally:
        for module, training in modes.items():
            module.training = training
        reshard(model)


def sum_terms(
    model: nn.Module, terms: Terms, samples: Sequence[Any], share: Plan, ranks: Ranks, console: Console, name: str
) -> tuple[Sums, set[str]]:
    """Return each term's sums over a set, and the names of the loss's terms; ``share``: this rank's part. Collective.

    Every rank runs the same number of forwards, as a sharded model must: where the plan has a dummy microbatch, any
    sample goes through the model and is not counted.
    """
    found_of: dict[str, list[Tensor]] = {}
    loss_names: set[str] = set()
    prepare, pad, cp = loss_hooks(terms.loss).prepare, Padding([model]), ranks.layout.cp
    at_once = PER_STAGE * model.num_stages if is_pipeline(model) else 1
    with console.progress(f"evaluating {name}", len(share.samples), "samples") as advance:
        for start in range(0, len(share.microbatches), at_once):
            several = share.microbatches[start : start + at_once]
            taken = ([samples[share.samples[row]] for row in rows] or [samples[0]] for rows in several)
            microbatches = [pad(batch) if prepare is None or cp > 1 else prepare(pad(batch)) for batch in taken]
            # A pipeline cuts those of a schedule step to one length.
            if cp > 1 and not is_pipeline(model):
                microbatches = [
                    context_parallel.stretch(microbatch, ranks.layout.cp_rank(ranks.rank), cp)
                    for microbatch in microbatches
                ]
            microbatches = [to_device(microbatch, ranks.device) for microbatch in microbatches]
            # Terms show a gradient only with it.
            with torch.set_grad_enabled(start == 0 and not terms.of_tokens):
                results = terms.of_all(model, microbatches)
            for rows, result in zip(several, results, strict=True):
                loss_names |= {term for term, (total, _) in result.items() if total.requires_grad}
                add(found_of, result, counted=bool(rows), device=ranks.device)
                advance(len(rows))
    return gather(found_of, loss_names, ranks)


def add(found_of: dict[str, list[Tensor]], terms: Mapping[str, Term], *, counted: bool, device: torch.device) -> None:
    """Append a microbatch's totals and weights, on the device, which is not waited for."""
    # mps has no float64.
    dtype = torch.float32 if device.type == "mps" else torch.float64
    for name, (total, weight) in terms.items():
        pair = [total.detach().to(device, dtype), torch.as_tensor(weight, device=device, dtype=dtype)]
        found_of.setdefault(name, []).extend([torch.stack(pair)] if counted else [])  # [total, weight]


def gather(found_of: Mapping[str, list[Tensor]], loss_names: set[str], ranks: Ranks) -> tuple[Sums, set[str]]:
    """Return the sums over all ranks that work on different tokens, the same on each and in any order. Collective."""
    counted = found_of if ranks.is_counted else {}
    parts = ranks.gather(
        ({name: torch.stack(pairs).tolist() if pairs else [] for name, pairs in counted.items()}, loss_names)
    )
    every = {name: [pair for pairs, _ in parts for pair in pairs.get(name, [])] for pairs, _ in parts for name in pairs}
    sums = {name: (rounded_sum(total for total, _ in pairs), rounded_sum(weight for _, weight in pairs))
            for name, pairs in every.items()}  # fmt: skip
    return sums, set[str]().union(*(names for _, names in parts))


def rounded_sum(values: Iterable[float]) -> float:
    """Return the sum, rounded once, so that it does not depend on the order of the values."""
    numbers = list(values)
    try:
        return math.fsum(numbers)
    except (ValueError, OverflowError):
        return sum(numbers)


def row_of(name: str, terms: Terms, sums: Sums, loss_names: Collection[str]) -> Row:
    quotients = {term: total / weight if weight else None for term, (total, weight) in sums.items()}
    of_loss = [PAIR_NAME] if terms.of_tokens or not loss_names else sorted(loss_names)
    parts = [quotient for quotient in map(quotients.get, of_loss) if quotient is not None]
    row: Row = {"set": name, "eval_loss": sum(parts) if parts else None}
    if terms.of_tokens:
        loss = row["eval_loss"]
        row["eval_perplexity"] = math.exp(loss) if loss is not None and loss <= LARGEST_EXPONENT else None
        row["num_target_tokens"] = int(sums[PAIR_NAME][1]) if sums else 0
    return row | {f"eval_{term}": quotient for term, quotient in quotients.items() if term != PAIR_NAME}


def own_values(function: Callable[..., Any], event: Event, update: UpdateConfig) -> Row:
    """Return the numbers of the user's evaluation as columns. It runs as the sets do, without gradients."""
    title = f"eval.function {getattr(function, '__name__', function)!r}"
    with evaluating(event.model, OWN, event.device, eager=update.shapes is not None), blamed(title):
        values = function(event)
    if not isinstance(values, Mapping):
        raise MegabatchError(f"{title} returned a {type(values).__name__}; return a mapping of names to numbers")
    row: Row = {}
    for name, value in cast(Mapping[Any, Any], values).items():
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if not isinstance(name, str) or not isinstance(number, Real):
            raise MegabatchError(
                f"{title} returned {name!r}: a {type(value).__name__}; return a mapping of names to numbers"
            )
        row[f"eval_{name}"] = float(number)
    return row


def split_set(
    samples: Sequence[Any], update: UpdateConfig, ranks: Ranks, chosen_tokens: int | None, limit: int | None = None
) -> Plan:
    """Return this rank's microbatches of a set, as many as any other's. A pipeline fills all up to one shape.

    ``limit``: tokens of a microbatch, or one sample, at most.
    """
    lengths, rows, tokens = lengths_of(samples, update), update.micro_batch_size, update.max_microbatch_tokens
    # A sample that is longer than these limits runs alone and whole, without a graph.
    is_soft = tokens == "auto" or update.long_samples is not None or limit is not None
    if tokens == "auto":
        rows, tokens = (1, None) if chosen_tokens is None else (None, chosen_tokens)
    if tokens is not None and is_soft:
        tokens = min(tokens, limit or tokens)
        lengths = np.minimum(lengths, tokens).tolist()
    if limit is not None and rows is not None:
        rows = min(rows, max(1, limit // max(1, *lengths)))
    if ranks.layout.pp > 1 and tokens is not None:
        plan(lengths, max_microbatch_tokens=tokens)
        rows, tokens = tokens // max(1, *lengths, 1), None
    if update.same_bits:
        dealt = deal_microbatches(lengths, ranks.dp_degree, CostModel().seconds, max_rows=rows, max_tokens=tokens)
        groups = dealt[ranks.dp_rank]
        samples = [index for group in groups for index in group]
        places = {index: place for place, index in enumerate(samples)}
        microbatches = [tuple(places[index] for index in group) for group in groups]
        microbatches += [()] * (max(map(len, dealt)) - len(microbatches))
        return Plan(tuple(microbatches), tuple(lengths[index] for index in samples), tuple(samples))
    plans = plan(lengths, dp_degree=ranks.dp_degree, micro_batch_size=rows, max_microbatch_tokens=tokens)
    return plans[ranks.dp_rank]


def most_tokens(model: nn.Module) -> int | None:
    """Return the most tokens of a microbatch whose logits the model makes all at once; None without a vocabulary."""
    config = next((module.config for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    num_classes = None if config is None else getattr(config.get_text_config(), "vocab_size", None)
    return max(1, MOST_LOGITS // num_classes) if isinstance(num_classes, int) and num_classes > 0 else None


def lengths_of(samples: Sequence[Any], update: UpdateConfig) -> list[int]:
    """Return the tokens of each sample, or 1 each if only samples count and they are not in memory."""
    known = getattr(samples, "lengths", None)
    if known is not None:
        return list(map(int, known))
    if update.max_microbatch_tokens is None and not isinstance(samples, list):
        return [1] * len(samples)
    return [sample_length(sample) for sample in samples]


class EarlyStopping(Callback):
    """Tell the run its best evaluation, and stop it after ``eval.patience`` evaluations without a better one."""

    def __init__(self, context: RunContext) -> None:
        self._watch = context.positions["watch"] = BestLossTracker(context.config.eval, context.data.sets)
        context.best = BestEvaluation(self._watch.name)

    def start(self, context: RunContext) -> None:
        """Go on with what the checkpoint has."""
        self._tell(context)

    def after_evaluation(self, context: RunContext) -> None:
        if context.row["set"] == self._watch.name:
            self._watch.update(context.step, context.row["eval_loss"])
            self._tell(context)

    def _tell(self, context: RunContext) -> None:
        context.best = BestEvaluation(self._watch.name, self._watch.best, self._watch.best_step)
        if self._watch.should_stop:
            context.should_stop = True
            context.stop_reason = f"the watched loss has not fallen for {context.config.eval.patience} evaluations"


class BestLossTracker:
    """The loss on one set. `update` takes in each evaluation of it.

    An evaluation out of turn, at the end of a run, can be the best. A resumed run does not know it, as a run that was
    never stopped would not.

    Args:
        config: Says which set, and how patient to be.
        names: The sets that there are.
    """

    def __init__(self, config: EvalConfig, names: Collection[str]) -> None:
        self.name = choose_set(config, names)
        self._every, self._patience = config.every, config.patience
        # The lowest loss so far.
        self.best: float | None = None
        self.best_step: int | None = None
        # Evaluations since the lowest loss.
        self._num_worse = 0
        self._state = self._now()

    def update(self, step: int, loss: float | None) -> None:
        """Take in the loss after ``step`` updates. A loss that is no finite number is never the best."""
        is_best = loss is not None and math.isfinite(loss) and (self.best is None or loss < self.best)
        if is_best:
            self.best, self.best_step = loss, step
        self._num_worse = 0 if is_best else self._num_worse + 1
        if step == 0 or (self._every is not None and step % self._every == 0):
            self._state = self._now()

    @property
    def should_stop(self) -> bool:
        """True after as many evaluations without a better one as ``eval.patience`` says."""
        return self._patience is not None and self._num_worse >= self._patience

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, for JSON."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, or start again if that followed another set."""
        if state["set"] == self.name:
            self.best, self.best_step, self._num_worse = state["best"], state["best_step"], state["num_worse"]
            self._state = self._now()

    def _now(self) -> dict[str, Any]:
        return {"set": self.name, "best": self.best, "best_step": self.best_step, "num_worse": self._num_worse}


def choose_set(config: EvalConfig, names: Collection[str]) -> str | None:
    """Return the set to watch. Raises `MegabatchError` if it does not exist."""
    if config.watch is not None and config.watch not in names:
        near = difflib.get_close_matches(config.watch, names, n=1, cutoff=0.0)
        there = f"the nearest of the sets is {near[0]}" if near else "there is no set: see eval.num_samples, eval.sets"
        raise MegabatchError(f"eval.watch is {config.watch!r}, which is no evaluation set; {there}")
    if config.patience is not None and not names:
        raise MegabatchError("eval.patience is set and there is no evaluation set; set eval.num_samples or eval.sets")
    if config.patience is not None and config.every is None:
        raise MegabatchError("eval.patience is set and eval.every is not, so no evaluation comes in between; set both")
    return config.watch or (HELD_OUT if HELD_OUT in names else next(iter(names), None))
