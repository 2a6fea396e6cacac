"""GRPO on sums: a small Llama of bytes learns "7+8=" by a program's rewards. python examples/grpo.py (a minute)

`python examples/grpo.py token-mean runs/grpo` also writes the rewards, and `megabatch report runs/grpo` draws them.

The model first imitates some sums, of which it then gets a third right. GRPO goes on from there: answers are compared
with others to the same question, the ratio to the policy that gave them is clipped, and a KL term keeps the policy near
the imitator. An update has more and more calls. The weights of both terms are told before the first, so gradients are
divided before backward and reduced once. Old and reference log-probabilities come from the cut of the backward: the
ratio of an answer's first update is exactly 1.
"""

import copy
import json
import random
import sys
from functools import partial
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import megabatch

PAD, END, LONGEST = 0, ord("\n"), 4  # tokens are bytes; an answer is at most so long, with its end
CLIP, KL, GROUP, PROMPTS = 0.2, 0.02, 16, 16  # answers to a question, and questions of a call


def new_model():
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": 128, "pad_token_id": PAD, "bos_token_id": None, "eos_token_id": END}
    return LlamaForCausalLM(LlamaConfig(**sizes, **tokens, max_position_embeddings=32))


def encode(text):
    return torch.tensor(list(text.encode()))


def question(numbers):
    return f"{numbers.randrange(20)}+{numbers.randrange(20)}="


def solution(question):
    a, b = question.removesuffix("=").split("+")
    return f"{int(a) + int(b)}\n"


# Losses. Each aggregation gives the divisor of a sample's tokens and the weight of a microbatch, from is_answer [B, T].

AGGREGATIONS = {
    "token-mean": lambda is_answer: (1, is_answer.sum()),
    "sequence-mean": lambda is_answer: (is_answer.sum(1, keepdim=True).clamp(min=1), len(is_answer)),
    "constant": lambda is_answer: (1, LONGEST * len(is_answer)),
}


def log_probs(model, microbatch):  # of the tokens after the first: [B, T - 1]
    ids = microbatch["input_ids"]
    return model(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]


def grpo_loss(aggregation, model, microbatch):
    is_answer, advantage = microbatch["is_answer"][:, 1:], microbatch["advantage"][:, None]
    divisor, weight = AGGREGATIONS[aggregation](is_answer)
    new = log_probs(model, microbatch)
    ratio, back = ((new - microbatch["old"]) * is_answer).exp(), (microbatch["reference"] - new) * is_answer
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    far = back.exp() - back - 1  # an estimate of the KL divergence that is never negative
    moved = ((ratio != 1) & is_answer).sum()
    return {
        "policy": (-(gain * is_answer / divisor).sum(), weight),
        "kl": (KL * far.sum(), is_answer.sum()),
        "moved": (moved.to(new.dtype), is_answer.sum()),  # a metric: it carries no gradient
    }


def weights_of(aggregation, samples):
    """The weights of samples in all calls, as the loss will count them."""
    counts = [AGGREGATIONS[aggregation](sample["is_answer"][None, 1:])[1] for sample in samples]
    return {"policy": sum(map(int, counts)), "kl": sum(int(sample["is_answer"][1:].sum()) for sample in samples)}


# Rollouts


def answers(model, questions, **options):
    """The bytes of an answer to each question, with their end."""
    width = max(map(len, questions))
    ids = torch.stack([torch.nn.functional.pad(encode(each), (width - len(each), 0), value=PAD) for each in questions])
    settings = GenerationConfig(max_new_tokens=LONGEST, pad_token_id=PAD, eos_token_id=END, **options)
    found = model.generate(ids, attention_mask=(ids != PAD).long(), generation_config=settings)[:, width:].tolist()
    return [row[: row.index(END) + 1] if END in row else row for row in found]


def roll_out(model, questions):
    """Samples of GROUP answers to each question, and the share of answers that are right."""
    asked = [each for each in questions for _ in range(GROUP)]
    given = answers(model, asked, do_sample=True, top_k=0)
    rewards = torch.tensor([float(bytes(row).decode() == solution(q)) for q, row in zip(asked, given, strict=True)])
    advantages = torch.layer_norm(rewards.view(-1, GROUP), [GROUP]).flatten()  # against its own group
    samples = [
        {"input_ids": torch.cat([encode(q), torch.tensor(row)]), "advantage": advantage,
         "is_answer": torch.tensor([False] * len(q) + [True] * len(row))}
        for q, row, advantage in zip(asked, given, advantages, strict=True)
    ]  # fmt: skip
    return samples, float(rewards.mean())


# Training


def imitate(model, gradient, numbers, num_updates):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(num_updates):
        questions = [question(numbers) for _ in range(64)]
        texts = [(encode(q), encode(solution(q))) for q in questions]
        batch = [{"input_ids": torch.cat(pair), "labels": torch.cat([torch.full_like(pair[0], -100), pair[1]])}
                 for pair in texts]  # fmt: skip
        gradient.forward_backward(batch, megabatch.losses.next_token)
        gradient.finalize(max_norm=1.0)
        optimizer.step()


def main(aggregation="token-mean", folder=None, num_imitations=150, num_updates=120):
    rows = None
    if folder is not None:
        Path(folder).mkdir(parents=True)
        rows = (Path(folder) / "metrics.jsonl").open("w", buffering=1)  # each line as soon as it is there
    torch.manual_seed(0)
    numbers, model = random.Random(0), new_model()
    gradient = megabatch.GradientAccumulator(model, max_microbatch_tokens=2048)
    imitate(model, gradient, numbers, num_imitations)
    reference = copy.deepcopy(model)
    of_reference = megabatch.GradientAccumulator(reference, max_microbatch_tokens=2048)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.0)
    loss = partial(grpo_loss, aggregation)
    held_out = [f"{a}+{b}=" for a in range(20) for b in range(20)]
    for step in range(num_updates):
        calls, right = [], []
        for _ in range(1 + step // 40):
            samples, share = roll_out(model, [question(numbers) for _ in range(PROMPTS)])
            old = gradient.forward(samples, log_probs)
            plan = gradient.last_plan
            references = of_reference.forward(samples, log_probs, plan=plan)
            scores = zip(samples, old, references, strict=True)
            calls.append(([sample | {"old": a, "reference": b} for sample, a, b in scores], plan))
            right.append(share)
        told = weights_of(aggregation, [sample for samples, _ in calls for sample in samples])
        for epoch in range(2):
            gradient.open(weights=told)
            for samples, plan in calls:
                gradient.forward_backward(samples, loss, plan=plan)
            update = gradient.finalize(max_norm=1.0)
            assert update.finite
            assert epoch or not update.terms["moved"]
            optimizer.step()
        share, far = sum(right) / len(right), update.terms["kl"] / KL
        if rows is not None:
            terms = {f"loss_{name}": float(update.terms[name]) for name in ("policy", "kl")}
            row = {"step": step + 1, "loss": float(update.loss), "reward": share, "grad_norm": float(update.grad_norm)}
            rows.write(json.dumps(row | terms) + "\n")
        print(f"update {step}  {len(calls)} calls  {share:.1%} right  kl {far:.3f}")
    greedy = answers(model, held_out, do_sample=False)
    solved = sum(bytes(row).decode() == solution(q) for q, row in zip(held_out, greedy, strict=True))
    print(f"{solved} of {len(held_out)} sums right")


if __name__ == "__main__":
    main(*sys.argv[1:])
