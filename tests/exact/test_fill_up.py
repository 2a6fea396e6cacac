"""A rank with fewer microbatches than another cuts its own smaller: exact, and no dummy without need."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import megabatch
from megabatch import GradientAccumulator, losses
from tests.comm.counting import Collectives
from tests.exact import harness, models, oracle
from tests.exact.launch import of_ranks
from tests.exact.wrappers import parameters_of, wrap
from tests.tiers import some

CAP = 40  # padded tokens of a microbatch
SAMPLES = {  # of each rank, which differ in number and in length
    "uneven": lambda rank: 4 + 5 * rank,
    "one": lambda rank: 1 if rank == 0 else 9 + rank,
    "none": lambda rank: 0 if rank == 0 else 8 + 3 * rank,
}
LIMITS = {"tokens": {"max_microbatch_tokens": CAP}, "samples": {"micro_batch_size": 2}}
WAYS = ("call", "calls", "open", "evaluate", "own collate")


def samples_of(rank: int, case: str, call: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(100 * call + rank)
    lengths = torch.randint(3, 20, (SAMPLES[case](rank),), generator=generator).tolist()
    ids = [torch.randint(0, models.VOCABULARY, (length,), generator=generator) for length in lengths]
    return [{"input_ids": each, "labels": each} for each in ids]


def reference(world: int, case: str, calls: int) -> tuple[nn.Module, float]:
    """The gradient and the loss of all samples at once, by plain torch."""
    model = models.gpt2()
    samples = [each for call in range(calls) for rank in range(world) for each in samples_of(rank, case, call)]
    batch = oracle.collate(samples)
    logits, labels = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = total / (labels != -100).sum()
    loss.backward()
    return model, float(loss.detach())


def unweighed(model: nn.Module, microbatch: dict[str, Tensor]) -> Any:
    return losses.next_token(model, microbatch)


def run_job(name: str) -> dict[str, Any]:
    """The job "wrapper:way:case:limit:world:"."""
    wrapper, way, case, limit, *_ = name.split(":")
    rank, world = dist.get_rank(), dist.get_world_size()
    collate = (lambda samples: oracle.collate(samples)) if way == "own collate" else None
    model = wrap(models.gpt2(), wrapper)
    gradient = GradientAccumulator(model, collate=collate, **LIMITS[limit])
    calls = 2 if way in ("calls", "open") else 1
    expected, loss = reference(world, case, calls)
    dummies: list[int] = []
    if way == "evaluate":
        found = float(gradient.evaluate(samples_of(rank, case), losses.next_token)["loss"])
        return {"error": abs(found - loss) / loss, "dummies": [_dummies(gradient, samples_of(rank, case))]}
    if way == "open":
        gradient.open()
    for call in range(calls):
        batch = samples_of(rank, case, call)
        gradient.forward_backward(batch, unweighed if way == "own collate" else losses.next_token)
        dummies.append(_dummies(gradient, batch))
    update = gradient.finalize()
    gradients = harness.full_gradients(parameters_of(model))
    error, _ = oracle.worst_error(gradients, {key: each.grad for key, each in expected.named_parameters()})
    return {"error": max(error, abs(float(update.loss) - loss) / loss), "dummies": dummies}


def _dummies(gradient: GradientAccumulator, batch: list[Any]) -> int:
    """Dummy microbatches of the last call beside those that too few samples make necessary."""
    assert gradient.last_plan is not None
    cut = gradient.last_plan.microbatches
    assert sorted(row for rows in cut for row in rows) == list(range(len(batch)))
    return sum(not rows for rows in cut) - max(0, len(cut) - len(batch))


def run_counted(name: str) -> dict[str, Any]:
    """The job "wrapper:world:": the collectives of an update that fills up, and of one whose plan has dummies."""
    wrapper, *_ = name.split(":")
    batch, tables, filled = samples_of(dist.get_rank(), "uneven"), [], []
    for has_plan in (False, True):
        gradient = GradientAccumulator(wrap(models.gpt2(), wrapper), micro_batch_size=2)
        plan = gradient.plan(batch) if has_plan else None
        with Collectives() as collectives:
            gradient.forward_backward(batch, losses.next_token, plan=plan)
            gradient.finalize()
        tables.append(collectives.table())
        filled.append(_dummies(gradient, batch))
    return {"same": tables[0] == tables[1], "dummies": filled}


def run_kept(name: str) -> dict[str, Any]:
    """The job "why:world:": microbatches that are not cut again, since their weight would be another."""
    why, *_ = name.split(":")
    rank = dist.get_rank()
    batch = [{name: ids[:3] for name, ids in sample.items()} for sample in samples_of(rank, "uneven")]

    def weigh(microbatch: Any) -> float:
        return float(len(microbatch["input_ids"])) if why == "collate" else 1.0  # one for each microbatch

    @megabatch.loss(weigh=weigh)
    def loss_fn(model: nn.Module, microbatch: Any) -> Any:
        rows = len(microbatch["input_ids"])
        total = losses.next_token(model, microbatch)[0]
        return total, float(rows) if why == "collate" else 1.0

    collate = (lambda samples: oracle.collate(samples)) if why == "collate" else None
    gradient = GradientAccumulator(models.gpt2(), micro_batch_size=2, collate=collate)
    planned = gradient.plan(batch).num_microbatches
    gradient.forward_backward(batch, loss_fn)
    assert gradient.finalize().finite
    assert gradient.last_plan is not None
    return {"planned": planned, "real": sum(bool(rows) for rows in gradient.last_plan.microbatches)}


JOBS = [
    f"{wrapper}:{way}:{case}:{limit}:{world}:"
    for wrapper in ("plain", "ddp", "fsdp2")
    for way in WAYS
    for case in SAMPLES
    for limit in LIMITS
    for world in (1, 2, 3, 4)
    if (world > 1 or case == "uneven") and (case != "none" or way not in ("evaluate", "own collate"))
]
results = of_ranks("tests.exact.test_fill_up:run_job", JOBS)
COUNTED = ["plain:2:", "ddp:2:", "fsdp2:2:", "fsdp2:3:"]
counted = of_ranks("tests.exact.test_fill_up:run_counted", COUNTED)
KEPT = ["collate:2:", "weight:2:"]
kept = of_ranks("tests.exact.test_fill_up:run_kept", KEPT)


@pytest.mark.slow
@pytest.mark.parametrize("job", some(JOBS, 9))
def test_a_rank_that_fills_up_has_the_gradient_of_the_update(results, job: str) -> None:
    for value in results(job):
        assert value["error"] <= 1e-12
        assert not any(value["dummies"])


@pytest.mark.slow
@pytest.mark.parametrize("job", COUNTED)
def test_filling_up_takes_no_more_collectives(counted, job: str) -> None:
    values = counted(job)
    assert all(value["same"] for value in values)
    assert values[0]["dummies"][0] == 0 < values[0]["dummies"][1]


@pytest.mark.slow
@pytest.mark.parametrize("job", KEPT)
def test_microbatches_that_would_weigh_otherwise_are_not_cut_again(kept, job: str) -> None:
    for value in kept(job):
        assert value["real"] == value["planned"]
