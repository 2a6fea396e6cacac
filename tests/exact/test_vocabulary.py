"""A head that sums its cross-entropy gives every wrapper the exact gradient."""

import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

from megabatch.losses import chunked_cross_entropy, token_loss
from tests.exact import harness, models
from tests.exact.cells import Cell
from tests.exact.launch import of_ranks
from tests.exact.wrappers import Wrapped, mesh_of
from tests.tiers import some

WRAPPED = {  # with the ranks
    "plain": 1, "ddp": 2, "ddp-find-unused": 2, "ddp-static-graph": 2, "ddp-bucket-view": 2, "fsdp2": 3, "hsdp": 2,
    "replicate": 2, "fsdp1": 2, "fsdp1-grad-op": 2,
}  # fmt: skip
HEAD_APART = "head-apart"  # a head that is not tied, in a unit of FSDP2 with the last norm, whose output is cast
CASES = ("C1", "short-tail", "empty-update")


class HeadRun(harness.CellRun):
    """A cell with a head of its own."""

    def _new_model(self, dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(12)
        config = models.gpt2().config.to_dict() | {"tie_word_embeddings": False}
        return GPT2LMHeadModel(GPT2Config(**config)).to(dtype)

    def _wrapped(self, model: nn.Module) -> Wrapped:
        mesh, policy = mesh_of(self.cell.wrapper, self.cell.world), MixedPrecisionPolicy(output_dtype=torch.float64)
        for unit in (*model.transformer.h, [model.transformer.ln_f, model.lm_head]):
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)


def run_job(name: str) -> dict[str, Any]:
    """The job "wrapper:case:world:sync": the cell's row, and how often a head has summed."""
    wrapper, case, world, sync = name.split(":")
    kind = HeadRun if wrapper == HEAD_APART else harness.CellRun
    wrapper = "fsdp2" if wrapper == HEAD_APART else wrapper
    values = ("float64", wrapper, world, sync, case, "list", "library", "two-samples", "forward_backward", "no-clip")
    cross_entropy_sum, calls = chunked_cross_entropy.cross_entropy_sum, []

    def counting(*args: Any) -> Tensor:
        calls.append(args)
        return cross_entropy_sum(*args)

    with (
        warnings.catch_warnings(),
        patch.object(token_loss, "chunk_tokens", lambda *_: 2),
        patch.object(chunked_cross_entropy, "cross_entropy_sum", counting),
    ):
        warnings.simplefilter("ignore")  # torch's own, about gloo and about one rank
        row = harness.run(kind(Cell.parse(":".join(values))))
    return row | {"num_summed": len(calls)}


JOBS = [
    f"{wrapper}:{case}:{world}:{sync}"
    for wrapper, world in {**WRAPPED, HEAD_APART: 2}.items()
    for case in CASES
    for sync in (("last", "every") if world > 1 else ("auto",))
]
results = of_ranks("tests.exact.test_vocabulary:run_job", JOBS)


@pytest.mark.slow
@pytest.mark.parametrize("job", some(JOBS, 5))
def test_exact_without_logits(results, job: str) -> None:
    for value in results(job):
        assert value["gradient"] <= 1e-12, value["parameter"]
        assert not value["wrong"], value["wrong"]
        assert value["num_summed"] > 0
