"""The report of a run at its end, and what the model writes after a prompt that it was not trained on."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from megabatch.batching import IGNORED_LABEL
from megabatch.train.callbacks.evaluation import evaluating
from megabatch.train.context import Callback, RunContext

PROMPT_TOKENS = 240  # the shortest prompts say too little, long ones take long
CANDIDATES = 64  # samples among which the prompt is looked for
NEW_TOKENS = 200
NEW_TOKENS_SLOW = 32  # where a forward takes long
SLOW_FROM_PARAMETERS = 200_000_000  # on a CPU
TEMPERATURE = 0.8  # the likeliest token of a young model is the commonest, again and again


class FinalReport(Callback):
    """Draw the report of a run that has come to its end, and let the model complete a held-out prompt. Collective."""

    def end(self, context: RunContext) -> None:
        """Write report.html, and say the completion."""
        if context.is_stopped:
            return
        for line in context.updates.skipped.words("the stream's last pass"):
            context.console.say(line)
        if context.ranks.is_main and context.plan.lengths:
            self._write(context)
        layout = context.ranks.layout
        if layout.cp > 1 or layout.pp > 1:  # a rank's model runs stretches of sequences, or is a part of one
            return
        samples, wanted = context.data.sets.get(context.best.set or "", []), context.config.eval.completion_tokens
        with context.evaluated_weights():
            model, device = context.model.run, context.ranks.device
            prompt, completion = sample_completion(model, samples, context.tokenizer, device, wanted)
        if prompt:
            context.console.say(completion_text(prompt, completion))

    def _write(self, context: RunContext) -> None:
        from megabatch.train.report.page import write_page

        context.flush_logs()
        write_page(context.folder, context.console)


def completion_text(prompt: str, completion: str) -> str:
    """Return a prompt of the held-out set and what the model makes of it."""
    return "\n".join([rule("a held-out prompt"), shown(prompt), rule("its completion"), shown(completion), rule("")])


def shown(text: str) -> str:
    """Return the text without characters that would steer a terminal."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else "\N{REPLACEMENT CHARACTER}" for each in text.rstrip()
    )


def rule(text: str) -> str:
    """Return a line across, with a heading in it."""
    return f"── {text} ".ljust(80, "─") if text else "─" * 80


def sample_completion(
    model: nn.Module, samples: Sequence[Any], tokenizer: Any, device: torch.device, wanted: int | None = None
) -> tuple[str, str]:
    """Return a prompt of the samples and the model's completion, as text, the same on every rank. Collective.

    Empty for a model that is none of transformers', without a tokenizer, and without a sample of tokens. The model's
    own prompt is what it does not learn of a sample; of a plain text it is the first third.

    ``wanted`` is the number of tokens to write. None: as many as do not take long.
    """
    prompt = None if wanted == 0 else choose_prompt(samples)
    if tokenizer is None or prompt is None or not isinstance(model, PreTrainedModel):
        return "", ""
    completion = complete(model, prompt, tokenizer.eos_token_id, len(tokenizer), device, wanted)
    return cast(str, tokenizer.decode(prompt)), cast(str, tokenizer.decode(completion, skip_special_tokens=True))


def choose_prompt(samples: Sequence[Any]) -> Tensor | None:
    """Return the prompt whose length is nearest to one that is quick to read."""
    few = [samples[index] for index in range(min(len(samples), CANDIDATES))]
    prompts = [prompt for prompt in map(prompt_of, few) if len(prompt)]
    return min(prompts, key=lambda prompt: abs(len(prompt) - PROMPT_TOKENS), default=None)


def prompt_of(sample: Any) -> Tensor:
    """Return the beginning of a sample: all before the first label, or a third of a text of which all is learned."""
    if not isinstance(sample, Mapping) or not {"input_ids", "labels"} <= sample.keys():
        return torch.tensor([], dtype=torch.int64)
    if torch.as_tensor(sample["labels"]).shape != torch.as_tensor(sample["input_ids"]).shape:  # a class, say
        return torch.tensor([], dtype=torch.int64)
    tokens, labels = first_document(cast(Mapping[str, Any], sample))  # [T], [T]
    learned = (labels != IGNORED_LABEL).nonzero()
    num_given = int(learned[0]) if len(learned) else len(tokens)
    if num_given > 1:
        return tokens[:num_given]
    return tokens[: min(-(-len(tokens) // 3), PROMPT_TOKENS)]  # [T]


def first_document(sample: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return tokens and labels of a sample, or of the first document of a packed row."""
    tokens, labels = torch.as_tensor(sample["input_ids"]), torch.as_tensor(sample["labels"])  # [T], [T]
    positions = torch.as_tensor(sample.get("position_ids", range(len(tokens))))  # [T]
    starts = (positions == 0).nonzero().flatten().tolist()
    end = starts[1] if len(starts) > 1 else len(tokens)
    return tokens[:end], labels[:end]


def complete(
    model: nn.Module,
    prompt: Tensor,
    eos_token_id: int | None,
    vocab_size: int,
    device: torch.device,
    wanted: int | None = None,
) -> Tensor:
    """Draw tokens one by one with a fixed seed, up to the end or `num_new_tokens`, alike on every rank. Collective.

    Only the first ``vocab_size`` are drawn, which the tokenizer knows; a model may have more. Every rank runs the
    same number of forwards, whatever it draws: what comes after the end is cut off at last.
    """
    tokens = prompt.to(device)[None]  # [1, T]
    generator = torch.Generator().manual_seed(0)
    with evaluating(model, "completion", device):
        for _ in range(num_new_tokens(model, len(prompt), device, wanted)):
            output = model(tokens)
            logits: Tensor = output if isinstance(output, Tensor) else output.logits  # [1, T, V]
            scores = torch.nan_to_num(logits[0, -1, :vocab_size].double().cpu() / TEMPERATURE)  # [V]
            drawn = torch.multinomial(scores.softmax(-1), 1, generator=generator)  # [1]
            tokens = torch.cat([tokens, drawn.to(device)[None]], dim=1)
    completion = tokens[0, len(prompt) :].cpu()
    ends = (completion == eos_token_id).nonzero() if eos_token_id is not None else []
    return completion[: int(ends[0]) if len(ends) else None]


def num_new_tokens(model: nn.Module, num_given: int, device: torch.device, wanted: int | None = None) -> int:
    """Return the number of tokens that are ``wanted``, or worth a forward each, and have a position."""
    is_large = sum(parameter.numel() for parameter in model.parameters()) > SLOW_FROM_PARAMETERS
    is_cut = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    is_slow = isinstance(model, FSDPModule) or is_cut or (is_large and device.type == "cpu")
    if wanted is None:
        wanted = NEW_TOKENS_SLOW if is_slow else NEW_TOKENS
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return wanted if positions is None else max(0, min(wanted, positions - num_given))
