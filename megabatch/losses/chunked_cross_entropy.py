"""Chunked cross-entropy: a language model's head sums its loss chunk by chunk and never holds all logits.

`losses.next_token` asks for it where logits are large. The model's own head does it inside the model's forward, where
every wrapper has the weight ready. Only heads whose output is known to leave the model untouched do so, and only where
nothing else would see it. Everywhere else there are logits.
"""

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch.errors import MegabatchError
from megabatch.losses import token_loss
from megabatch.losses.token_loss import HALF_TYPES
from megabatch.torch_private.autograd import is_transformed, keeps_graph
from megabatch.torch_private.classes import is_fsdp2
from megabatch.torch_private.fsdp2_groups import fsdp_policy
from megabatch.torch_private.loss_nodes import IGNORED_LABEL
from megabatch.torch_private.module_members import (
    forward_hooks,
    has_backward_hooks,
    has_global_forward_hooks,
    is_compiled,
)
from megabatch.torch_private.operations import FakeTensor

FAMILIES = {  # of transformers, whose forward returns what `lm_head` gives; a test builds and compares each
    f"transformers.models.{family}.modeling_{family}.{name}"
    for family, name in {
        "falcon": "FalconForCausalLM", "gemma": "GemmaForCausalLM", "glm4": "Glm4ForCausalLM",
        "gpt2": "GPT2LMHeadModel", "gpt_neox": "GPTNeoXForCausalLM", "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM", "olmo": "OlmoForCausalLM",
        "olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM", "opt": "OPTForCausalLM", "phi": "PhiForCausalLM",
        "phi3": "Phi3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM",
        "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "seed_oss": "SeedOssForCausalLM",
        "smollm3": "SmolLM3ForCausalLM", "stablelm": "StableLmForCausalLM", "starcoder2": "Starcoder2ForCausalLM",
    }.items()
}  # fmt: skip
WRAPPERS = {  # that hand on what the model inside of them returns
    "torch.nn.parallel.distributed.DistributedDataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
    "megabatch.simulate.replica.Replica",
}
LINEAR = "torch.nn.modules.linear.Linear"


@dataclass
class Summed:
    """The sum that the head has returned in place of logits; None where it has returned logits."""

    total: Tensor | None = None


@contextlib.contextmanager
def summing(model: Any, targets: Tensor) -> Generator[Summed]:
    """Let the model return a scalar in place of its logits while the context is open; the yielded sum tells if it has.

    The scalar is the summed cross-entropy of ``targets`` [B, T], -100 where there is none: entry t is the target of
    position t. For another number of positions the model returns logits. Raises `MegabatchError` where it returns
    anything else.
    """
    summed, causal_and_head = Summed(), _find_head(model)
    if causal_and_head is None:
        yield summed
        return
    causal, head = causal_and_head
    logits_of = head.forward

    def forward(hidden: Tensor) -> Tensor:
        if summed.total is not None or not _fits(hidden, head, targets, _cast_to(causal) | _cast_to(head)):
            return logits_of(hidden)
        summed.total = cross_entropy_sum(hidden, head.weight, head.bias, targets)
        return summed.total

    def check(_model: nn.Module, _inputs: Any, output: Any) -> None:
        if summed.total is not None and getattr(output, "logits", None) is not summed.total:
            raise MegabatchError(
                f"{type(causal).__name__} does not return what its lm_head gives, which losses.next_token had summed "
                "there; give a loss of your own that takes the model's logits"
            )

    cast(Any, head).forward = forward
    try:
        with causal.register_forward_hook(check, prepend=True):  # before a wrapper sees it
            yield summed
    finally:
        del head.forward


def cross_entropy_sum(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """Return the sum of ``-log softmax(hidden @ weight.T + bias)[target]`` over targets that are not -100: a scalar.

    Args:
        hidden: [B, T, D]; under autocast matrices are multiplied in its dtype.
        weight: [V, D]
        bias: [V] or None
        targets: [B, T] or fewer positions of each row.

    Products are of the dtype of logits, softmax and sums at least of float32. Differentiable once.
    """
    labels = F.pad(targets, (0, hidden.shape[1] - targets.shape[1]), value=IGNORED_LABEL).flatten()  # [B * T]
    arguments = hidden.flatten(0, 1), weight, bias, labels
    if torch.is_grad_enabled():
        return cast(Tensor, _CrossEntropySum.apply(*arguments))
    return _summed(*arguments, wanted=(False, False, False)).total


class _CrossEntropySum(torch.autograd.Function):
    """Hidden states [N, D], weight [V, D], bias [V] or None and labels [N] to a scalar.

    The gradient of each chunk is made when its logits are there, so that no logits are computed twice.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        sums = _summed(hidden, weight, bias, labels, wanted=ctx.needs_input_grad[:3])
        ctx.save_for_backward(*sums.gradients)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        return sums.total

    @staticmethod
    def backward(ctx: Any, *factors: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise MegabatchError(
                "the loss was differentiated with create_graph=True, and losses.next_token has only a first "
                "derivative; give a loss of your own that takes the model's logits"
            )
        gradients = [
            _scaled(gradient, factors[0], dtype) if is_wanted and gradient is not None else None
            for gradient, dtype, is_wanted in zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad, strict=False)
        ]
        return (*gradients, None)


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale a gradient, in place where no other backward asks for it: a copy would be as large as the weight."""
    return (gradient * factor if keeps_graph() else gradient.mul_(factor)).to(dtype)


class _Sums:
    """The cross-entropy of chunks, and its gradients, as far as they are wanted."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, ...]) -> None:
        dtype = _dtype_of_products(hidden)
        wide = torch.float32 if dtype in HALF_TYPES else dtype
        self._dtype, self._wide = dtype, wide
        self._weight, self._bias = weight.to(dtype), None if bias is None else bias.to(dtype)  # [V, D], [V]
        self.total = torch.zeros((), dtype=wide, device=hidden.device)
        kinds = (hidden, dtype), (weight, wide), (bias, wide)
        self.gradients = [
            torch.zeros(tensor.shape, dtype=kind, device=tensor.device) if is_wanted and tensor is not None else None
            for (tensor, kind), is_wanted in zip(kinds, wanted, strict=True)
        ]

    def add(self, rows: Tensor | slice, hidden: Tensor, labels: Tensor) -> None:
        """Add positions ``rows`` of all, hidden states [n, D] and labels [n]."""
        inputs = hidden.to(self._dtype)
        is_target = labels != IGNORED_LABEL  # [n]
        index = torch.where(is_target, labels, 0).unsqueeze(1)  # [n, 1]
        log_probs = F.linear(inputs, self._weight, self._bias).to(self._wide).log_softmax(-1)  # [n, V]
        self.total -= torch.where(is_target, log_probs.gather(1, index).squeeze(1), 0.0).sum()
        if any(gradient is not None for gradient in self.gradients):
            probs = log_probs.exp_()  # [n, V]; less one at the target it is the gradient of logits
            probs.scatter_(1, index, probs.gather(1, index) - 1.0)
            self._add_gradients(rows, inputs, probs, is_target.unsqueeze(1))

    def _add_gradients(self, rows: Tensor | slice, inputs: Tensor, of_logits: Tensor, is_target: Tensor) -> None:
        to_hidden, to_weight, to_bias = self.gradients
        if to_bias is not None:
            to_bias += (of_logits * is_target).sum(0)
        of_logits = of_logits.to(self._dtype)
        if to_hidden is not None:
            to_hidden[rows] = (of_logits @ self._weight) * is_target
        if to_weight is not None and to_weight.dtype == of_logits.dtype:
            to_weight.addmm_(of_logits.T, inputs * is_target)
        elif to_weight is not None:
            to_weight += of_logits.T @ (inputs * is_target)


def _summed(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *, wanted: tuple[bool, ...]) -> _Sums:
    sums = _Sums(hidden, weight, bias, wanted)
    with torch.autocast(hidden.device.type, enabled=False):
        for rows in _chunks(labels, token_loss.chunk_tokens(*weight.shape)):
            try:
                sums.add(rows, hidden[rows], labels[rows])
            except RuntimeError as error:  # of an index, on the CPU; a device stops instead
                if "out of bounds" not in str(error):
                    raise
                raise token_loss.unknown_classes(labels, len(weight)) from None
    return sums


def _chunks(labels: Tensor, num_tokens: int) -> Iterator[Tensor | slice]:
    """Yield the positions with a target; on a device, which is not waited for, and without data, all positions."""
    if labels.device.type == "cpu" and not isinstance(labels, FakeTensor):
        positions = (labels != IGNORED_LABEL).nonzero().flatten()
        yield from positions.split(num_tokens) if len(positions) else ()
    else:
        for start in range(0, len(labels), num_tokens):
            yield slice(start, start + num_tokens)


def _is_cast(hidden: Tensor) -> bool:
    """Return True if autocast chooses the dtype of products. It leaves float64 alone."""
    return torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64


def _dtype_of_products(hidden: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype(hidden.device.type) if _is_cast(hidden) else hidden.dtype


def _fits(hidden: Any, head: nn.Linear, targets: Tensor, output_dtypes: set[torch.dtype]) -> bool:
    """Return True if the tensors are as `cross_entropy_sum` takes them."""
    bias = cast(Tensor | None, head.bias)
    if not _go_together([hidden, head.weight] if bias is None else [hidden, head.weight, bias], targets):
        return False
    if hidden.ndim != 3 or targets.ndim != 2 or hidden.shape[:2] != targets.shape:
        return False
    dtype = _dtype_of_products(hidden)
    return output_dtypes <= {torch.float32 if dtype in HALF_TYPES else dtype}  # or the total would be rounded


def _go_together(floats: list[Tensor], targets: Tensor) -> bool:
    """Return True for plain tensors on one device, of one dtype or cast to one."""
    if not all(type(tensor) in (Tensor, nn.Parameter, FakeTensor) for tensor in (*floats, targets)):
        return False
    if targets.dtype != torch.long or len({tensor.device for tensor in (*floats, targets)}) > 1:
        return False
    if not torch.amp.is_autocast_available(targets.device.type):
        return False
    dtypes = {tensor.dtype for tensor in floats}
    return len(dtypes) == 1 or (_is_cast(floats[0]) and torch.float64 not in dtypes)


def _find_head(model: Any) -> tuple[nn.Module, nn.Linear] | None:
    """Return the causal model and its head if nobody else sees or changes their outputs."""
    if torch.compiler.is_compiling() or is_transformed():
        return None
    if not isinstance(model, nn.Module) or has_global_forward_hooks():
        return None
    modules = [model]
    while _name_of(modules[-1]) in WRAPPERS:
        modules.append(cast(nn.Module, modules[-1].module))
    head = getattr(modules[-1], "lm_head", None)
    if _name_of(modules[-1]) not in FAMILIES or head is None or _name_of(head) != LINEAR:
        return None
    return (modules[-1], head) if all(map(_is_unseen, [*modules, head])) else None


def _name_of(module: nn.Module) -> str:
    """Return the full name of a module's class, without the class that FSDP2 puts before it."""
    kind = next(base for base in type(module).__mro__ if not (is_fsdp2(module) and _is_of_fsdp2(base)))
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_unseen(module: Any) -> bool:
    """Return True if no hook but FSDP2's sees a module's output and its forward is its class's own."""
    if "forward" in vars(module) or is_compiled(module):
        return False
    return all(map(_is_of_fsdp2, forward_hooks(module).values())) and not has_backward_hooks(module)


def _is_of_fsdp2(hook_or_class: Any) -> bool:
    return hook_or_class.__module__.startswith(("torch.distributed.fsdp", "torch.distributed._composable."))


def _cast_to(module: nn.Module) -> set[torch.dtype]:
    """Return the dtype that FSDP2 casts the output of a module to."""
    dtype = fsdp_policy(module).output_dtype if is_fsdp2(module) else None
    return set() if dtype is None else {dtype}
