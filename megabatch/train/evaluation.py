"""Evaluation: the exact loss on the held-out samples, over all ranks, and what the model writes after a prompt."""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers import ByT5Tokenizer

from megabatch import losses, plan
from megabatch.batch import IGNORED_LABEL, pad_right, to_device
from megabatch.train.config import UpdateConfig
from megabatch.train.data import Sample, lengths_of
from megabatch.train.model import reshard
from megabatch.train.ranks import Ranks

PROMPT_TOKENS = 240  # the shortest prompts say too little, long ones take long
NEW_TOKENS = 200
TEMPERATURE = 0.8  # the likeliest byte of a young model is a space, and then another one


@torch.no_grad()
def held_out_loss(model: nn.Module, samples: Sequence[Sample], update: UpdateConfig, ranks: Ranks) -> dict[str, float]:
    """The mean loss of the samples' target tokens, and how many these are, as a row of the metrics; collective.

    Every rank runs the same number of forwards, as a sharded model must: where the plan has a stand-in, any sample
    goes through the model and is not counted.
    """
    total, weight = 0.0, 0.0
    own = plan(
        lengths_of(samples),
        dp_degree=ranks.size,
        micro_batch_size=update.micro_batch_size,
        max_microbatch_tokens=update.max_microbatch_tokens,
    )[ranks.rank]
    model.eval()
    for rows in own.microbatches:
        taken: list[Mapping[str, Tensor]] = [samples[own.samples[row]] for row in rows] or [samples[0]]
        term = losses.next_token(model, to_device(pad_right(taken), ranks.device))
        if rows:
            total, weight = total + float(term.total), weight + float(term.weight)
    model.train()
    reshard(model)
    total, weight = ranks.sum([total, weight])
    return {"eval_loss": total / weight if weight else 0.0, "num_target_tokens": int(weight)}


def prompt_of(sample: Sample) -> Tensor:
    """The tokens that are not trained on: everything before the first label."""
    learned = (sample["labels"] != IGNORED_LABEL).nonzero()
    return sample["input_ids"][: int(learned[0]) if len(learned) else None]  # [T]


def sample_completion(
    model: nn.Module, samples: Sequence[Sample], tokenizer: ByT5Tokenizer, device: torch.device
) -> tuple[str, str]:
    """A held-out prompt and what the model makes of it, as text; collective. Empty without a held-out prompt."""
    prompt = choose_prompt(samples)
    if prompt is None:
        return "", ""
    completion = complete(model, prompt, cast(int, tokenizer.eos_token_id), device)
    return cast(str, tokenizer.decode(prompt)), cast(str, tokenizer.decode(completion, skip_special_tokens=True))


def choose_prompt(samples: Sequence[Sample]) -> Tensor | None:
    """The held-out prompt whose length is nearest to one that is quick to read."""
    prompts = [prompt for prompt in map(prompt_of, samples) if len(prompt)]
    return min(prompts, key=lambda prompt: abs(len(prompt) - PROMPT_TOKENS), default=None)


@torch.no_grad()
def complete(model: nn.Module, prompt: Tensor, eos_token_id: int, device: torch.device) -> Tensor:
    """Tokens drawn one by one with a fixed seed, up to the end or `NEW_TOKENS`; collective, the same on every rank.

    Every rank runs the same number of forwards, whatever it draws: what comes after the end is cut off at last.
    """
    tokens = prompt.to(device)[None]  # [1, T]
    positions: int = getattr(model.config, "max_position_embeddings", len(prompt) + NEW_TOKENS)
    generator = torch.Generator().manual_seed(0)
    model.eval()
    for _ in range(min(NEW_TOKENS, positions - len(prompt))):
        logits = model(tokens).logits[0, -1].double().cpu()  # [V]
        drawn = torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)  # [1]
        tokens = torch.cat([tokens, drawn.to(device)[None]], dim=1)
    model.train()
    reshard(model)
    completion = tokens[0, len(prompt) :].cpu()
    ends = (completion == eos_token_id).nonzero()
    return completion[: int(ends[0]) if len(ends) else None]
