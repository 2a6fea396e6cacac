"""Updates whose microbatches have few shapes, beside plain torch: gradients, and the shapes that each rank has run."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator, MegabatchError, loss, losses
from megabatch.batching import Deferred, OneRow
from megabatch.errors import MicrobatchLimit
from megabatch.planners import Shapes, Tokens
from tests.exact import models, oracle
from tests.exact.test_compiled import Counting
from tests.unit.small import unseen

CAP, NUM_SHAPES = 64, 3
BOXED = {"box": torch.ones(1)[0]}
# Samples of each rank, update by update. Ranks have fewer microbatches than others, none, and a last sample that is
# longer than its rank's last microbatch. The first update has the longest of all.
LENGTHS = [
    [[3, 17, 8, 9, 30, 4, 5], [6, 6, 30], []],
    [[5, 2, 28, 11, 19, 21, 4, 4, 3, 2, 26], [], [29]],
    [[], [4, 7, 3, 25], [9]],
    [[9, 9, 9], [3, 9, 9, 12, 2, 3, 4, 5, 26, 27, 28, 29], [2, 30]],
]


def sums(model: nn.Module, batch: Mapping[str, Tensor]) -> oracle.Sums:
    logits, targets = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return {"loss": (total, (targets != -100).sum())}


def samples_of(lengths: list[int], seed: int) -> list[oracle.Sample]:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(1, models.VOCABULARY, (length,), generator=generator) for length in lengths]
    return [{"input_ids": each, "labels": each.where(torch.arange(len(each)) != 2, -100)} for each in ids]


def batch_of(kind: str, samples: list[oracle.Sample]) -> Any:
    lengths = [len(each["input_ids"]) for each in samples]
    if kind == "deferred":
        return Deferred(samples.__getitem__, lengths)
    if kind == "weighed":
        return Deferred(samples.__getitem__, lengths, [int((each["labels"][1:] != -100).sum()) for each in samples])
    if kind == "rows" and samples:  # padded by the user, to any length
        return oracle.collate(samples)
    return samples


def whole(gradient: Tensor | None) -> Tensor | None:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def new_model() -> Any:
    model = models.gpt2()
    model.config.use_cache = False
    return model


def wrapped(name: str, model: Any) -> Any:
    if name == "ddp":
        return DistributedDataParallel(model)
    if name == "static":
        return DistributedDataParallel(model, static_graph=True)
    return fully_shard(model) if name == "fsdp2" else model


class Run:
    """A model, its accumulator, and the shapes that its tokens have had since the choice."""

    def __init__(self, wrapper: str, kind: str, **settings: Any) -> None:
        self.plain, inner = new_model(), new_model()
        inner.load_state_dict(self.plain.state_dict())
        self.seen: set[tuple[int, ...]] = set()
        self.backend = Counting()
        if kind.startswith("compiled"):
            inner.transformer.forward = torch.compile(inner.transformer.forward, backend=self.backend, dynamic=False)
        else:  # dynamo would look at the set
            seen = unseen(lambda _, given: self.seen.add(tuple(given[0].shape)))
            inner.transformer.wte.register_forward_pre_hook(seen)
        self.model = wrapped(wrapper, inner)
        if kind.endswith("row"):
            settings["batching"] = OneRow()
        self.gradient = GradientAccumulator(self.model, **{"planner": Shapes(NUM_SHAPES, Tokens(CAP)), **settings})
        self.seen.clear()
        self.kind = kind

    def check(self, update: Any, of_ranks: list[list[oracle.Sample]]) -> float:
        """Return the worst error of the gradient and of the loss."""
        expected = oracle.answer(self.plain, sums, [each for of_rank in of_ranks for each in of_rank])
        found = {key.removeprefix("module."): whole(each.grad) for key, each in self.model.named_parameters()}
        return max(oracle.worst_error(found, expected.gradients)[0], abs(float(update.loss) - expected.loss))


def run_job(name: str) -> Any:
    """Return what a rank found of ``wrapper:kind:way``: errors, shapes that were run and chosen, graphs."""
    wrapper, kind, way = name.split(":")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if kind == "refused":
        return refused_job(wrapper, way, is_odd=rank == 1)
    torch._dynamo.reset()
    run = Run(wrapper, kind, **({"sync": "every"} if way == "every" else {}))
    gradient, errors = run.gradient, list[float]()
    for step, lengths in enumerate(LENGTHS):
        of_ranks = [samples_of(each, 10 * step + place) for place, each in enumerate(lengths)]
        if world < len(of_ranks):
            of_ranks = [[each for of_rank in of_ranks[place::world] for each in of_rank] for place in range(world)]
        own = of_ranks[rank]
        if way == "lowered" and step == 1:  # as after running out of memory
            gradient.lower_limit(MicrobatchLimit(2, CAP // 2))
        if way == "loaded" and step == 1:
            state = gradient.state_dict()
            gradient.load_state_dict({})
            gradient.load_state_dict(state)
        if way == "evaluated":
            expected = oracle.answer(run.plain, sums, [each for of_rank in of_ranks for each in of_rank]).loss
            found = gradient.evaluate(batch_of(kind, own), losses.next_token)
            assert abs(float(found["loss"]) - expected) <= 1e-12
        if way in ("opened", "told"):
            targets = sum(int((each["labels"][1:] != -100).sum()) for each in own)
            gradient.open(**({"weights": {"loss": targets}} if way == "told" else {}))
        calls = [own[2:], own[:2]] if way in ("opened", "told", "calls") else [own]
        for each in calls:
            plan = gradient.plan(batch_of(kind, each)) if way == "planned" and step else None
            gradient.forward_backward(batch_of(kind, each), losses.next_token, plan=plan)
        errors.append(run.check(gradient.finalize(), of_ranks))
    chosen = gradient.state_dict()["shapes"]
    return {"errors": errors, "seen": sorted(run.seen), "chosen": chosen, "graphs": run.backend.num_graphs}


def refused_job(wrapper: str, what: str, *, is_odd: bool) -> list[str]:
    """Return what a rank raises where only one rank is ``is_odd``, and that the next update is right."""
    batches = [samples_of([9, 30, 4], 0), samples_of([9, 5], 1)]
    raised: list[str] = []
    if what == "count":
        try:
            Run(wrapper, "list", planner=Shapes(2 if is_odd else 3, Tokens(CAP)))
        except MegabatchError as error:
            raised.append(str(error))
        return raised
    run = Run(wrapper, "list")
    for number, batch in enumerate([*batches, *batches]):
        loss_fn: Any = losses.next_token
        given: list[Any] = batch
        if is_odd and number in (0, 2):
            if what == "keys":
                given = [{**each, **BOXED} for each in batch]
            if what == "labels":
                given = [{**each, "labels": each["labels"].clamp(min=0).byte()} for each in batch]
            if what == "loss":
                loss_fn = loss(weigh=losses.next_token.weigh)(lambda model, microbatch: (0.0, 0))
        if is_odd and what == "state" and number == 0:
            run.gradient.load_state_dict({"shapes": [[2, 30], [1, 9]]})
        try:
            run.gradient.forward_backward(given, loss_fn)
        except MegabatchError as error:
            raised.append(str(error))
            run.gradient.discard()
            if what == "state":
                run.gradient.load_state_dict({})
            continue
        assert run.check(run.gradient.finalize(), [batch] * dist.get_world_size()) <= 1e-12
    return raised
