"""A contrastive loss over more samples than fit at once: docstrings find their code. python examples/two_towers.py"""

import ast
from pathlib import Path

import torch
import torch.nn.functional as F

from megabatch import GradientAccumulator, JointLoss, Learner


def encode(towers, microbatch):  # for every microbatch of 32: [B, T] to [B, C]; three bytes at a time
    threes = {name: ids[:, :-2] + 61 * ids[:, 1:-1] + 3721 * ids[:, 2:] for name, ids in microbatch.items()}
    return tuple(F.normalize(towers[name](threes[name] % 8192), dim=-1) for name in ("doc", "code"))


def contrast(docs, codes):  # for all 256, and the samples of other ranks, at once: [N, C] each
    return F.cross_entropy(docs @ codes.T / 0.1, torch.arange(len(docs)), reduction="sum"), len(docs)


nodes = [node for path in Path(ast.__file__).parent.glob("[a-d]*.py") for node in ast.walk(ast.parse(path.read_text()))]
texts = [(ast.get_docstring(node), ast.unparse(node.body[1:])) for node in nodes if isinstance(node, ast.FunctionDef)]
pairs = [{"doc": list(doc[:200].encode()), "code": list(code[:400].encode())} for doc, code in texts if doc and code]
torch.manual_seed(0)
towers = torch.nn.ModuleDict({name: torch.nn.EmbeddingBag(8192, 64, padding_idx=0) for name in ("doc", "code")})
optimizer = torch.optim.AdamW(towers.parameters(), lr=5e-3)
learner = Learner(towers, optimizer, GradientAccumulator(towers, micro_batch_size=32))
for rows in torch.randperm(512).repeat(10).split(256):
    learner.forward_backward([pairs[row] for row in rows], JointLoss(encode, contrast))
    print(f"loss {learner.optim_step().loss:.3f}")
