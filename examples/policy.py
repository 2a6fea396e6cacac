"""A policy learns sums from a program's rewards; many calls make an update. python examples/policy.py (a minute)"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megabatch import GradientAccumulator, Learner

torch.manual_seed(0)
config = LlamaConfig(vocab_size=12, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)  # its words: ten digits, + and =
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
learner = Learner(model, optimizer, GradientAccumulator(model, micro_batch_size=256), max_norm=1.0)


def reinforce(model, rollouts):
    log_p = model(rollouts["tokens"]).logits[:, 3:5].log_softmax(-1).gather(2, rollouts["tokens"][:, 4:, None])
    return -(rollouts["advantage"] * log_p.sum((1, 2))).sum(), (rollouts["advantage"] != 0).sum()  # those that teach


while learner.step < 200:
    num_useful = 0.0
    while num_useful < 256:  # a group that is all right or all wrong teaches nothing: ask on
        tokens = torch.tensor([[a, 10, b, 11] for a, b in torch.randint(6, (32, 2))]).repeat_interleave(16, 0)
        for _ in range(2):
            with torch.no_grad():  # "4+3=" becomes "4+3=07"
                tokens = torch.cat([tokens, model(tokens).logits[:, -1].softmax(-1).multinomial(1)], 1)
        right = (10 * tokens[:, 4] + tokens[:, 5] == tokens[:, 0] + tokens[:, 2]).float().view(32, 16)
        rollouts = {"tokens": tokens, "advantage": torch.layer_norm(right, [16]).flatten()}  # against its own group
        num_useful += learner.forward_backward(rollouts, reinforce)["loss"].weight.item()
    print(f"update {learner.step}  {learner.optim_step().num_samples} rollouts  {right.mean():.1%} right")
