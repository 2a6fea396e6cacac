"""The trainer: prepare a run, make update after update, and let callbacks do the rest."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from megabatch import MegabatchError, Plan
from megabatch.train.autotune.microbatch_limit import choose_limit, load_limit
from megabatch.train.callbacks.checkpointing import identity_of, restore
from megabatch.train.callbacks.order import load_callbacks, make_callbacks
from megabatch.train.checkpoints.retention import resumed_from
from megabatch.train.checkpoints.run_folder import check_run_folder, open_run_folder
from megabatch.train.config import Config
from megabatch.train.context import Callback, Callbacks, ForwardBackward, RunContext, read_values
from megabatch.train.data.load import load_data
from megabatch.train.data.updates import Updates
from megabatch.train.model.architecture import load_tokenizer, positions_for_stream, vocabulary_for_own
from megabatch.train.model.build import build, check_loss, in_precision
from megabatch.train.model.expert_balance import train_with_router
from megabatch.train.model.keyed_dropout import keying, keys_of, with_keys
from megabatch.train.model.optimizer import build_learner
from megabatch.train.replicas import Replica, check_callbacks, check_launch
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.heartbeat import Heartbeat
from megabatch.train.runtime.plugins import load_function
from megabatch.train.runtime.ranks import Ranks
from megabatch.train.runtime.shared_folder import ROWS, SharedFolder
from megabatch.train.runtime.signals import StopSignal

# Rows of faster updates are written together.
SECONDS_BETWEEN_WRITES = 0.25


def train(context: RunContext) -> None:
    """Run updates until the data, the step limit, a callback or a signal ends the run. Collective."""
    num_updates = context.updates.num_updates
    with context.console.logged_failure(), context.exits:
        if context.checkpoint is not None:
            restore(context, context.checkpoint)
            context.console.say(f"resumed from {context.checkpoint}")
        is_replica = context.config.parallel.replicas is not None
        if not is_replica:
            start_run(context)
        with context.console.bar(context.step, num_updates.of_run, num_updates.work):
            if is_replica:
                for _ in Replica(context, partial(start_run, context)).updates():
                    finish_update(context)
            else:
                meanwhile = partial(prepare_next, context) if context.updates.may_read_ahead else None
                for batch in remaining_updates(context):
                    make_update(context, batch, meanwhile)
        for callback in context.callbacks.end:
            callback.end(context)


def start_run(context: RunContext) -> None:
    """Take the run's folder, choose what the recipe leaves open, and start the callbacks. Collective."""
    config, is_new, shared = context.config, context.is_new, context.shared
    open_run_folder(context.folder, config, context.ranks, context.console, is_new=is_new, shared=shared)
    for log in context.logs if shared is None or not shared.is_joined else ():
        with nullcontext() if shared is None or not context.ranks.is_main else shared.turn(ROWS):
            warnings = log.cut(-1 if is_new else context.step)
        for line in warnings:
            context.console.warn(line)
    # With replicas, the limit is a number, and the plan is that of all replicas.
    if shared is None:
        context.limit = choose_limit(context.limit, context)
        context.plan = plan_of(context, context.updates.peek())
    for callback in context.callbacks.start:
        callback.start(context)


def make_update(context: RunContext, batch: Sequence[Any], meanwhile: Callable[[], None] | None = None) -> None:
    """Make one update of this rank's samples: forward and backward, the step, the callbacks. Collective.

    ``meanwhile`` is called once the device has the backward to compute, before the host waits for it.
    """
    context.batch, context.num_calls, context.row = batch, 0, {}
    for callback in context.callbacks.before_update:
        callback.before_update(context)
    if context.callbacks.around_backward:
        surround_backward(context, context.batch)
    else:
        context.forward_backward(context.batch)
    if meanwhile is not None:
        meanwhile()
    context.update = context.learner.optim_step()
    finish_update(context)


def finish_update(context: RunContext) -> None:
    """Do what follows an update that was stepped: the callbacks, and the rows. Collective."""
    assert context.update is not None
    context.values = read_values(context.update)
    context.heartbeat.last_stepped_at = time.monotonic()
    step = context.learner.step
    is_refused = not context.values["finite"] and context.config.update.on_nonfinite == "raise"
    # An update without targets is not finite either, and no problem.
    if is_refused and (problem := context.update.problem()) is not None:
        raise MegabatchError(f"update {step} was not stepped: {problem}; lower optim.lr or look at its samples")
    for callback in context.callbacks.after_update:
        if (callback.every and step % callback.every == 0) or context.is_over:
            callback.after_update(context)
    if time.perf_counter() >= context.next_write:
        context.write_logs()
        context.next_write = time.perf_counter() + SECONDS_BETWEEN_WRITES


def prepare_next(context: RunContext) -> None:
    """Read the samples of the next update, and prepare them in a thread unless callbacks may change them."""
    begun = time.perf_counter()
    with context.heartbeat.reading_ahead(context.step + 2):
        samples = context.updates.read_ahead()
    # query() is True once the GPU has run out of work: only then does reading cost time.
    if context.ranks.device.type != "cuda" or torch.cuda.current_stream(context.ranks.device).query():
        context.reading_seconds += time.perf_counter() - begun
    if samples and not (context.callbacks.may_split or context.callbacks.may_change):
        early = context.learner.gradient.prepare(samples, context.loss_fn)
        context.updates.put_ahead(cast(Sequence[Any], early))


def surround_backward(context: RunContext, batch: Sequence[Any]) -> None:
    """Let the last callback make the gradient. It calls the one before it, and the first one calls the library."""
    forward_backward: ForwardBackward = context.forward_backward
    for callback in context.callbacks.around_backward:
        forward_backward = partial(call_around, callback, context, forward_backward)
    forward_backward(batch)
    if context.num_calls > 1 and not context.callbacks.may_split:
        raise MegabatchError(
            f"callbacks called forward_backward {context.num_calls} times in update {context.step + 1}; call it once "
            "in around_backward, with the whole batch"
        )


def call_around(
    callback: Callback, context: RunContext, forward_backward: ForwardBackward, samples: Sequence[Any]
) -> None:
    callback.around_backward(context, samples, forward_backward)


def remaining_updates(context: RunContext) -> Iterator[Sequence[Any]]:
    """Yield this rank's samples of each update until the run is over or a signal stops it. Collective."""
    stop, heartbeat, batches = context.stop, context.heartbeat, iter(context.updates)
    while not (context.is_over or context.is_stopped):
        heartbeat.wait_for_samples(context.step + 1)
        context.started = time.perf_counter()
        try:
            batch = next(batches, None)
        except MegabatchError:
            # A signal to a whole job also ends the processes that load samples.
            stop.check()
            raise
        if batch is None:
            return
        context.reading_seconds = time.perf_counter() - context.started
        stop.has_begun = True
        heartbeat.start_update(context.step + 1)
        context.seed = context.ranks.seed(context.config.run.seed, context.step + 1)
        context.expected_samples, context.epoch = context.updates.size, context.updates.epochs
        yield batch
        if not context.is_over:
            stop.agree(context.ranks)


def prepare_run(config: Config, ranks: Ranks, stop: StopSignal, heartbeat: Heartbeat) -> RunContext:
    """Read the data, build the model and make the callbacks. Collective.

    It writes nothing and finds what is wrong with the recipe.

    Raises:
        MegabatchError: The recipe, the data or the folder do not allow the run.
    """
    loss_digits = 10 if config.model.dtype == "float64" else 4
    console = Console(enabled=ranks.is_main, loss_digits=loss_digits, is_verbose=config.run.verbose)
    if config.parallel.replicas is not None:
        check_launch(config, ranks)
    check_run_folder(Path(config.run.folder), config, ranks)
    checkpoint = resumed_from(config.run, ranks, console)
    limit = load_limit(config, ranks, checkpoint)
    loss_fn = load_function(config.loss.function, "loss.function")
    own_callbacks = load_callbacks(config.run)
    if config.parallel.replicas is not None:
        check_callbacks(own_callbacks)
    tokenizer = load_tokenizer(config.model)
    data = load_data(config, tokenizer, ranks, console, positions_for_stream(config), vocabulary_for_own(config))
    updates = Updates(data, config, ranks)
    model = build(config, ranks, console, data.longest_tokens, tokenizer)
    if config.run.init_from is not None and checkpoint is None:
        from megabatch.train.checkpoints.export import load_initial_weights

        console.say(load_initial_weights(Path(config.run.init_from), model.base, model.left_out, ranks))
    check_loss(loss_fn, config, has_sets=bool(data.sets))
    loss_fn = train_with_router(loss_fn, config, model, updates)
    loss_fn = in_precision(loss_fn, config.model, model, ranks.device)
    if (keys := keys_of(model.base)) is not None:
        loss_fn, updates.add_key = with_keys(loss_fn, keys), keying(config.run.seed)
    learner = build_learner(model, config, updates.num_updates, None if limit is None else limit.fit)
    identity = identity_of(config, data, model, updates)
    context = RunContext(
        config=config, ranks=ranks, console=console, stop=stop, heartbeat=heartbeat, tokenizer=tokenizer, data=data,
        updates=updates, model=model, learner=learner, loss_fn=loss_fn, limit=limit, identity=identity,
        checkpoint=checkpoint, shared=None if config.parallel.replicas is None else SharedFolder(),
    )  # fmt: skip
    context.exits.callback(context.write_logs)
    context.callbacks = Callbacks(make_callbacks(context, own_callbacks))
    first = updates.peek()
    context.plan = plan_of(context, first if limit is None else [])
    return context


def plan_of(context: RunContext, samples: Sequence[Any]) -> Plan:
    """Return the plan of samples, or an empty one until the first update has chosen the shapes (update.shapes)."""
    gradient = context.learner.gradient
    is_open = context.config.update.shapes is not None and not gradient.state_dict()["shapes"]
    return gradient.plan([] if is_open else samples)
