"""Direct preference optimization: functions with docstrings before those without. megabatch train recipes/dpo.toml

A pair is one sample, so that no cut parts chosen from rejected, and the weight is a number of pairs. The trap: the mean
over the pairs of a microbatch, averaged; and tokens as the weight, which makes long pairs count more.
"""

import ast
import copy
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import megabatch

BETA, OFFSET = 0.1, 3  # bytes come after the special tokens; 0 is the padding


class Pairs(nn.Module):
    def __init__(self, **sizes):
        super().__init__()
        self.policy = LlamaForCausalLM(LlamaConfig(vocab_size=256 + OFFSET, **sizes))
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)

    def forward(self, chosen, rejected, prompt_tokens):  # [B, T], [B, T'], [B] to [B]
        policy = [log_prob(self.policy, tokens, prompt_tokens) for tokens in (chosen, rejected)]
        with torch.no_grad():
            reference = [log_prob(self.reference, tokens, prompt_tokens) for tokens in (chosen, rejected)]
        return BETA * ((policy[0] - reference[0]) - (policy[1] - reference[1]))


def log_prob(model, tokens, prompt_tokens):  # of each whole response: [B]
    of_token = model(tokens).logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)  # [B, T - 1]
    is_response = torch.arange(1, tokens.shape[1], device=tokens.device) >= prompt_tokens[:, None]
    return (of_token * (is_response & (tokens[:, 1:] != 0))).sum(1)


@megabatch.loss(weigh=lambda microbatch: len(microbatch["chosen"]))
def loss(model, microbatch):
    return -nn.functional.logsigmoid(model(**microbatch)).sum(), len(microbatch["chosen"])


def data(files, max_tokens):
    samples = []
    for path in sorted(Path(ast.__file__).parent.glob(files)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and node.body[1:]:
                prompt = f"def {node.name}({ast.unparse(node.args)}):\n"
                bodies = (ast.unparse(body) for body in (node.body, node.body[1:]))
                pair = [torch.tensor(list((prompt + body).encode()[:max_tokens])) + OFFSET for body in bodies]
                if len(prompt.encode()) < max_tokens // 2:
                    told = torch.tensor(len(prompt.encode()))
                    samples.append({"chosen": pair[0], "rejected": pair[1], "prompt_tokens": told})
    return samples
