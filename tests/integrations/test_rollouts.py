"""TRL's GRPO and RLOO with MegabatchTrainer in front: the gradient of TRL's rollouts is that of plain torch, uncut."""

import shutil
from pathlib import Path

import pytest
import torch

import megabatch
from megabatch import PlanError
from megabatch.integrations.rollouts import Rollouts
from tests.exact.launch import Run, launch_all, of_ranks, values
from tests.integrations.rollout_users import CASES

REFUSED = {
    "entropy": "PlanError: MegabatchTrainer cannot keep GRPOTrainer's entropy_coef: it is a mean over the tokens",
    "quantile": "PlanError: MegabatchTrainer cannot keep GRPOTrainer's top_entropy_quantile: its threshold couples",
}
ON_TWO = ["dapo, two generations", "bnpo", "rloo, reused"]
PAIRS = [(1, job) for job in CASES] + [(2, job) for job in ON_TWO]
ALLOWED = 1e-5  # TRL computes log-probabilities in float32, and sums them over a sequence in RLOO
PLANTED = {  # what is replaced, by what, and the case that shows it
    "tokens counted as rows": ("return tokens if self._is_over_tokens else", "return", "dapo"),
    "TRL's own divisor": ("microbatch[COUNT] * shares", "microbatch[COUNT]", "dapo, two generations"),
    "short completions": ("int(position[-1]) + 1 for", "int(position[-1]) for", "grpo"),
}  # fmt: skip

results = of_ranks(
    "tests.integrations.rollout_users:run_job",
    {world: [job for ranks, job in PAIRS if ranks == world] for world in (1, 2)},
)


@pytest.mark.full
@pytest.mark.parametrize(("world", "job"), PAIRS)
def test_an_update_is_exact_and_so_are_its_metrics(results, world, job):
    for found in results(job, world):
        if job in REFUSED:
            assert found["refused"].startswith(REFUSED[job])
        else:
            assert found.get("refused") is None
            assert found["uneven"]
            assert len(found["errors"]) == 3
            assert max(found["errors"]) <= ALLOWED, found
            assert found["metrics"] == {}


@pytest.mark.full
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_caught(name, tmp_path):
    text, planted, job = PLANTED[name]
    library = Path(megabatch.__file__).parent
    shutil.copytree(library, tmp_path / "megabatch", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "megabatch" / "integrations" / "rollouts.py"
    source = file.read_text()
    assert source.count(text) == 1
    file.write_text(source.replace(text, planted))
    run = Run(1, [job], tmp_path / "run", [str(tmp_path)])
    (found,) = launch_all("tests.integrations.rollout_users:run_job", [run], tmp_path)
    for told in values(found[job]):
        assert told.get("refused", "").startswith("LossContractError") or max(told["errors"]) > 100 * ALLOWED, told


class _Trainer:
    """The attributes of a trainer that `Rollouts` reads, for a batch that TRL would hand on."""

    loss_type = "dapo"

    def __init__(self, **inputs: object) -> None:
        self.inputs, self._step, self._buffered_inputs = inputs, 0, object()

    def _prepare_inputs(self, batch: object) -> object:
        return self.inputs


def test_a_rollout_with_images_is_refused():
    ids = torch.ones(2, 3, dtype=torch.long)
    rollout = dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"), ids)
    (rows,) = Rollouts(_Trainer(**rollout), "GRPOTrainer").take([[{}], [{}]])
    assert len(rows) == 4
    assert rows[0]["num_items_in_batch"] == 3
    with pytest.raises(megabatch.PlanError, match=r"cannot split the 'num_images' of a GRPOTrainer rollout into rows"):
        Rollouts(_Trainer(**rollout, num_images=[1, 1]), "GRPOTrainer").take([[{}]])


@pytest.mark.parametrize("extra", [{}, {"token_type_ids": torch.ones(3, 9)}])
def test_a_row_is_a_copy_as_long_as_its_microbatch(extra: dict[str, torch.Tensor]) -> None:
    """A limit on tokens is a hard one: no microbatch has more columns than its longest row says."""
    mask = (torch.arange(5) < torch.tensor([[4], [0], [1]])).long()
    rollout = {"prompt_ids": torch.ones(3, 4).long(), "prompt_mask": torch.ones(3, 4).long(), "completion_ids": mask,
               "completion_mask": mask, **extra}  # fmt: skip
    rollouts = Rollouts(_Trainer(**rollout), "GRPOTrainer")
    ((first, *rest),) = rollouts.take([[{}]])
    for row in (first, *rest):
        found = rollouts.collate([row])
        assert rollouts.length(row) == found["prompt_ids"].shape[1] + found["completion_ids"].shape[1]
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in first.values())


def test_a_rollout_that_has_no_rows_is_refused() -> None:
    ids = torch.ones(2, 3, dtype=torch.long)
    rollout = dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"), ids)
    for odd in (torch.tensor(0.5), torch.ones(3)):
        with pytest.raises(PlanError, match="into rows"):
            Rollouts(_Trainer(**rollout, odd=odd), "GRPOTrainer").take([[{}]])
