"""The callbacks of a run, in their order."""

from collections.abc import Sequence

from megabatch import JointLoss
from megabatch.errors import MegabatchError
from megabatch.train.callbacks.checkpointing import Checkpointing
from megabatch.train.callbacks.evaluation import EarlyStopping, Evaluation
from megabatch.train.callbacks.measured_dealing import MeasuredDealing
from megabatch.train.callbacks.messages import FinalMessages, MemoryCheck, PlanMessage, RandomCheck
from megabatch.train.config import RunConfig
from megabatch.train.config.batch_size import sizes_of
from megabatch.train.context import EVENTS, Callback, RunContext
from megabatch.train.model.optimizer import follow, rate_factor
from megabatch.train.records.metrics import Metrics
from megabatch.train.records.timing import LoadingCheck, Profiler, RankTiming, Timeline
from megabatch.train.records.update_logs import MicrobatchLog
from megabatch.train.runtime.plugins import blamed, load_function


def make_callbacks(context: RunContext, own_callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks that the recipe asks for, and the user's ``own_callbacks`` before evaluation.

    Callbacks that add columns to `RunContext.row` come before `Metrics`, which logs it. Those that split an update
    into several calls come first: the first callback is the innermost of `around_backward`.
    """
    config, ranks, callbacks = context.config, context.ranks, list[Callback]()
    is_replica = config.parallel.replicas is not None
    if context.checkpoint is not None and not is_replica:
        callbacks.append(RandomCheck())
    if config.run.profile_steps and ranks.is_main:
        callbacks.append(Profiler(context))
    if config.update.on_nonfinite != "raise":
        from megabatch.train.callbacks.nonfinite import SkipNonfinite

        callbacks.append(SkipNonfinite(context))
    if config.optim.lr_follows_batch is not None:
        callbacks.append(BatchLearningRate())
    if config.optim.ema_decay is not None:
        from megabatch.train.callbacks.ema import MovingAverage

        callbacks.append(MovingAverage(context))
    is_joint = isinstance(context.loss_fn, JointLoss)
    has_seconds = ranks.size > 1 and context.model.wrapper.name == "ddp" and ranks.layout.pp == 1 and not is_joint
    if has_seconds:
        callbacks.append(RankTiming(context))
    if ranks.dp_degree > 1 and (has_seconds or config.update.balance != "off" or config.update.cost is not None):
        callbacks.append(MeasuredDealing(context, has_seconds=has_seconds))
    if config.update.max_microbatch_tokens == "auto":
        callbacks.append(MemoryCheck())
    if config.advice.every is not None:
        from megabatch.train.callbacks.noise_scale import NoiseScale

        callbacks.append(NoiseScale(context))
    callbacks.append(Metrics(context))
    if not is_replica:
        callbacks.append(MicrobatchLog(context))
    if ranks.layout.pp == 1 and not is_joint and not is_replica:
        callbacks.append(Timeline(context))
    if config.run.check_hardware_every is not None:
        from megabatch.train.callbacks.hardware_check import HardwareCheck

        callbacks.append(HardwareCheck(context))
    if not config.data.num_workers and config.data.look_ahead is None and not is_replica:
        callbacks.append(LoadingCheck(context.updates))
    callbacks += [EarlyStopping(context), PlanMessage(), *own_callbacks]
    callbacks += [Evaluation(context), Checkpointing(context), FinalMessages()]
    if ranks.is_main:
        from megabatch.train.report.live import LivePage

        callbacks.append(LivePage())
    return callbacks


def load_callbacks(run: RunConfig) -> list[Callback]:
    """Return the user's callbacks: ``run.callbacks``, ``run.after_update`` and ``run.after_evaluation``."""
    callbacks = [load_callback(name) for name in run.callbacks]
    if run.after_update is not None:
        callbacks.append(listener("after_update", run.after_update))
    if run.after_evaluation is not None:
        callbacks.append(listener("after_evaluation", run.after_evaluation))
    return callbacks


def load_callback(name: str) -> Callback:
    """Return the callback that ``name`` makes. What it raises in an event becomes one line.

    Raises:
        MegabatchError: It names no class or function, or makes no `Callback`.
    """
    title, make = f"run.callbacks {name!r}", load_function(name, "run.callbacks")
    with blamed(title):
        callback = make()
    if not isinstance(callback, Callback):
        raise MegabatchError(
            f"{title} made a {type(callback).__name__}; name a subclass of megabatch.train.Callback, or a function "
            "that returns an instance of one"
        )
    # around_backward surrounds the library and other callbacks, whose errors are not its own.
    for event in EVENTS:
        if event != "around_backward" and getattr(type(callback), event) is not getattr(Callback, event):
            setattr(callback, event, blamed(title)(getattr(callback, event)))
    return callback


def listener(event: str, name: str) -> Callback:
    """Return a callback that calls the user's function ``run.after_update`` or ``run.after_evaluation``."""
    key = f"run.{event}"
    function = blamed(f"{key} {name!r}")(load_function(name, key))

    def listen(_: Callback, context: RunContext) -> None:
        function(context.event())

    return type("Listener", (Callback,), {event: listen})()


class BatchLearningRate(Callback):
    """Let the learning rate follow the samples of each update (``optim.lr_follows_batch``)."""

    def before_update(self, context: RunContext) -> None:
        config, learner = context.config, context.learner
        if learner.scheduler is not None:
            factor = rate_factor(config.optim, sizes_of(config.update), context.expected_samples)
            follow(learner.optimizer, learner.scheduler, factor)
