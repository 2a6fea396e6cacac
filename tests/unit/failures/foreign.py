"""Models that other libraries reduce.

Neither DeepSpeed nor apex is installed for the tests; what DeepSpeed's engine is and leaves was read from a real one.
"""

from torch import nn

from tests.unit.failures.table import Failure, accumulator, linear

DEEPSPEED = "DeepSpeed … gradient_accumulation_steps"
ENGINE = "deepspeed.runtime.engine"


def of_library(module: str, name: str, *, own: bool = False) -> nn.Module:
    """A wrapper as that library's is seen from outside, or a class of one's own upon it."""
    kind = type(name, (nn.Module,), {"__module__": module})
    wrapper = (type("Own", (kind,), {"__module__": "own"}) if own else kind)()
    wrapper.module = linear()
    return wrapper


def with_hook_of(module: str, *, on_parameter: bool) -> nn.Module:
    """The attributes that DeepSpeed leaves on the model inside of its engine, with ZeRO and without."""

    def hook(*_: object) -> None:
        pass

    hook.__module__ = module
    model = nn.Sequential(linear(), linear())
    if on_parameter:
        model[1].weight.register_post_accumulate_grad_hook(hook)
    else:
        model.register_forward_pre_hook(hook)
    return model


def _refused(make, text: str) -> Failure:
    return Failure(text, lambda: accumulator(make()))


FAILURES = {
    "an engine": _refused(lambda: of_library(ENGINE, "DeepSpeedEngine"), "DeepSpeedEngine"),
    "a class upon an engine": _refused(lambda: of_library(ENGINE, "DeepSpeedEngine", own=True), "DeepSpeedEngine"),
    "the model of an engine": _refused(
        lambda: with_hook_of(ENGINE, on_parameter=False), f"the model has hooks of deepspeed; {DEEPSPEED}"
    ),
    "the model of an engine with ZeRO": _refused(
        lambda: with_hook_of("deepspeed.utils.nvtx", on_parameter=True),
        f"module '1' has hooks of deepspeed; {DEEPSPEED}",
    ),
    "a wrapper of apex inside": _refused(
        lambda: nn.Sequential(of_library("apex.parallel.distributed", "DistributedDataParallel")),
        "'0' … DistributedDataParallel",
    ),
}
