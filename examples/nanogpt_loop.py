"""nanoGPT's training loop with exact updates; "# +" marks what is new. python examples/nanogpt_loop.py"""

import calendar
import inspect
import math

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from megabatch import GradientAccumulator  # +

gradient_accumulation_steps, batch_size, max_iters, grad_clip = 4, 8, 25, 1.0
learning_rate, min_lr, warmup_iters = 6e-3, 6e-4, 3
torch.manual_seed(0)
lines = [torch.tensor(list(line.encode()))[:64] for line in inspect.getsource(calendar).split("\n") if len(line) > 8]


def get_batch():
    """Lines of unequal length: targets after a line's end are -1, which nanoGPT's loss ignores."""
    chosen = [lines[i] for i in torch.randint(len(lines), (batch_size,)).tolist()]
    X = torch.nn.utils.rnn.pad_sequence([line[:-1] for line in chosen], batch_first=True)
    return X, torch.nn.utils.rnn.pad_sequence([line[1:] for line in chosen], batch_first=True, padding_value=-1)


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    return min_lr + 0.5 * (1 + math.cos(math.pi * it / max_iters)) * (learning_rate - min_lr)


class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.transformer = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))

    def forward(self, idx, targets):
        logits = self.transformer(idx).logits
        return logits, cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-1
        )  # a mean over its targets


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
scaler = torch.amp.GradScaler("cpu")
gradient = GradientAccumulator(model)  # + after DDP(model), if any
X, Y = get_batch()
for iter_num in range(max_iters):
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    for micro_step in range(gradient_accumulation_steps):
        # in place of model.require_backward_grad_sync = ...
        with gradient.microbatch(micro_step, of=gradient_accumulation_steps, mean_over=(Y != -1).sum()) as part:  # +
            logits, loss = model(X, Y)
            X, Y = get_batch()
            part.scale(loss, scaler).backward()  # + in place of scaler.scale(loss / gradient_accumulation_steps)
    update = gradient.finalize(max_norm=grad_clip or None)  # + in place of scaler.unscale_ and clip_grad_norm_
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(f"iter {iter_num}: loss {update.loss:.3f} over {update.weight:.0f} targets")
