"""A plan that is given again: in bfloat16 the log-probabilities before an update are those in it, bit by bit."""

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from megabatch import GradientAccumulator

LENGTHS = [17, 5, 40, 33, 9, 64, 21, 12, 48, 3, 28, 55, 7, 37, 15, 24]


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).bfloat16()


def batch() -> list[dict[str, Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(256, (length,), generator=drawn)} for length in LENGTHS]


def log_probs(model, microbatch) -> Tensor:
    """Return the log-probability of each token after the first: [B, T - 1]."""
    ids = microbatch["input_ids"]
    logits = model(ids).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def ratios(old: list[Tensor], **options) -> Tensor:
    """Ratios of the first call of an update to log-probabilities from before it, of all tokens."""
    found: list[Tensor] = []
    policy = model()
    gradient = GradientAccumulator(policy, max_microbatch_tokens=256)
    samples = [
        each | {"old": scores, "index": torch.tensor(row)}
        for row, (each, scores) in enumerate(zip(batch(), old, strict=True))
    ]

    def loss_fn(model, microbatch):
        new = log_probs(model, microbatch)
        lengths = [LENGTHS[row] - 1 for row in microbatch["index"].tolist()]
        for row, length in enumerate(lengths):
            found.append((new[row, :length] - microbatch["old"][row, :length]).exp().detach())
        return new.sum(), sum(lengths)

    gradient.forward_backward(samples, loss_fn, **options)
    return torch.cat(found)


def test_the_ratio_is_one_with_the_same_cut():
    policy = model()
    before = GradientAccumulator(policy, max_microbatch_tokens=256)
    old = before.forward(batch(), log_probs)
    same = ratios(old, plan=before.last_plan)
    assert len(same) == sum(LENGTHS) - len(LENGTHS)
    assert torch.equal(same, torch.ones_like(same))
    assert torch.equal(ratios(old), same), "the default is the same cut"


def test_another_cut_has_other_ratios():
    before = GradientAccumulator(model(), micro_batch_size=1)
    found = ratios(before.forward(batch(), log_probs))
    share = float((found != 1).double().mean())
    print(f"{share:.1%} of the tokens have a ratio other than 1 with another cut")
    assert 0.02 < share < 1, share
