"""Ranks that hold different models or settings are all told so, in the same words, when they make their accumulator."""

import pytest

from tests.exact.launch import of_ranks
from tests.tiers import full_unless
from tests.unit.rank_agreement import ALIKE, MODELS

pytestmark = pytest.mark.slow
SEEN = {  # in the error on every rank, beside the numbers of the ranks
    "other seeds": "parameter '0.weight' has other weights on rank 0",
    "other seeds, bfloat16": "parameter '0.weight' has other weights on rank 0",
    "other seeds, complex": "parameter '0.weight' has other weights on rank 0",
    "permuted": "parameter '1.weight' has other weights on rank 0",
    "one bit, float64": "parameter '2.bias' has other weights on rank 0",
    "one bit, bfloat16": "parameter '2.bias' has other weights on rank 0",
    "other layers frozen": "parameter '0.weight' is (4, 4) torch.float64 frozen on rank 0, and ",
    "frozen parts of other size": "parameter '0.weight' is (4, 4) torch.float64 frozen on rank 0, and ",
    "another dtype": "parameter '0.weight' is (4, 4) torch.float64 trained on rank 0, and ",
    "another shape": "parameter 'weight' is (2, 4) torch.float32 trained on rank 0, and ",
    "a layer more": "a further parameter is missing on rank 0, and parameter '3.weight' is (1, 1) torch.float32",
    "another name": "parameter 'even.weight' is (1, 4) torch.float32 trained on rank 0, and parameter 'odd.weight' is",
    "a frozen part of other weights": "parameter '0.weight' has other weights on rank 0",
    "a frozen model of other weights": "model 1's parameter '0.weight' has other weights on rank 0",
    "the second model of other weights": "model 1's parameter '0.weight' has other weights on rank 0",
    "tensor parallel, other seeds": "parameter '0.weight' has other weights on rank 0",
    "DDP, other layers frozen": "parameter 'module.0.weight' is (4, 4) torch.float64 frozen on rank 0, and ",
    "FSDP2, other layers frozen": "parameter '0.weight' is (4, 4) torch.float64 frozen on rank 0, and ",
    "FSDP1, other layers frozen": "parameter '0.weight' is sharded torch.float64 frozen on rank 0",
    "sync": "sync is 'last' on rank 0, and sync is 'every' on rank",
    "sync, FSDP2": "sync is 'last' on rank 0, and sync is 'every' on rank",
    "accumulate_dtype": "accumulate_dtype is None on rank 0, and accumulate_dtype is torch.float32 on rank",
}


told = of_ranks("tests.unit.rank_agreement:run_job", dict.fromkeys((2, 3), MODELS))


@pytest.mark.parametrize("world", full_unless([2, 3], lambda _, world: world == 2))
@pytest.mark.parametrize("name", MODELS)
def test_all_ranks_are_told_the_same(told, name: str, world: int) -> None:
    found = told(name, world)
    assert found == found[:1] * world
    if name.startswith("alike"):
        assert found[0] == ALIKE
    else:
        assert SEEN[name] in found[0]
        assert f"on rank {world - 1}" in found[0]
