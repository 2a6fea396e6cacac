"""GRPO, with either of its means: a policy learns to answer n with n ticks. python examples/grpo.py (a minute)

Answers to one prompt are compared with each other before an update is cut, so a group may lie in any microbatches. The
trap is the masked mean of a microbatch. By token the weight is the number of tokens; by sequence each is divided by its
own length, inside, and the weight is the number of sequences.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import megabatch

TICK, END, LENGTH = 8, 9, 10  # words: the numbers below TICK, a tick, the end; and how long an answer may be


def policy_loss(mean):
    def weigh(rollouts):
        return rollouts["is_answer"].sum() if mean == "token" else len(rollouts["tokens"])

    @megabatch.loss(weigh=weigh)
    def loss(model, rollouts):
        ratio = (log_probs(model, rollouts["tokens"]) - rollouts["log_probs"]).exp()  # [B, T]
        advantage, is_answer = rollouts["advantage"][:, None], rollouts["is_answer"]
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * is_answer
        return -(gain.sum() if mean == "token" else (gain.sum(1) / is_answer.sum(1)).sum()), weigh(rollouts)

    return loss


def log_probs(model, tokens):  # of the tokens after the first: [B, T]
    return model(tokens).logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)


@torch.no_grad()
def roll_out(model, prompts, group_size):  # [P] to P * group_size samples
    tokens = prompts.repeat_interleave(group_size)[:, None]
    for _ in range(LENGTH):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1].softmax(-1).multinomial(1)], 1)
    answers = tokens[:, 1:]
    is_answer = ((answers == END).cumsum(1) - (answers == END).long()) == 0  # up to the first end: [B, T]
    reward = -((answers == TICK) & is_answer).sum(1).sub(tokens[:, 0]).abs().float()
    advantage = torch.layer_norm(reward.view(-1, group_size), [group_size]).flatten()  # against its own group
    sample = {"tokens": tokens, "is_answer": is_answer, "log_probs": log_probs(model, tokens), "advantage": advantage}
    return sample, reward.mean()


def new_model():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=10, **sizes))


if __name__ == "__main__":
    torch.manual_seed(0)
    model = new_model()
    gradient = megabatch.GradientAccumulator(model, micro_batch_size=128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    learner = megabatch.Learner(model, optimizer, gradient, max_norm=1.0)
    while learner.step < 120:
        rollouts, reward = roll_out(model, torch.randint(1, TICK, (16,)), group_size=16)
        for _ in range(2):
            learner.forward_backward(rollouts, policy_loss("token"))
            learner.optim_step()
        print(f"update {learner.step}  reward {reward:.2f}")
