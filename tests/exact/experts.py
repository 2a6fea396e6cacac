"""Mixtures of experts: a balance loss that is a sum over sequences, and expert biases that follow an update's load.

The model is plain torch in float64; so is what is expected, from the samples one by one.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator, experts, loss
from tests.exact import harness, oracle
from tests.exact.sparse import EXPERTS, TOP_K, VOCABULARY, SparseLM, sparse_lm

COEFFICIENT = 0.1
RATE = 0.01
Model = nn.Module


def samples(update: int, num: int) -> list[oracle.Sample]:
    """Samples of 1 to 12 tokens; the last has no target."""
    generator = torch.Generator().manual_seed(100 + update)
    lengths = torch.randint(1, 13, (num,), generator=generator).tolist()
    ids = [torch.randint(VOCABULARY, (length + 1,), generator=generator) for length in lengths]
    made = [{"input_ids": each, "labels": each.clone(), "attention_mask": torch.ones_like(each)} for each in ids]
    made[-1]["labels"][:] = -100
    return made


def shares(update: int) -> list[list[oracle.Sample]]:
    """By rank: uneven, and in every third update nothing for the last rank."""
    made = samples(update, 8)
    return [made, []] if update % 3 == 2 else [made[:2], made[2:]]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )


def weights(batch: oracle.Sample) -> dict[str, Any]:
    return {"loss": (batch["labels"][:, 1:] != -100).sum(), "balance": len(batch["labels"])}


@loss(weigh=weights)
def balanced(model: Model, batch: oracle.Sample) -> dict[str, Any]:
    """Per token, and per sequence."""
    logits, routers = model(batch["input_ids"], attention_mask=batch["attention_mask"])
    balance = experts.sequence_balance(routers, batch["attention_mask"], top_k=TOP_K, scores="sigmoid")
    counts = weights(batch)
    return {
        "loss": (cross_entropy(logits, batch["labels"]), counts["loss"]),
        "balance": (COEFFICIENT * balance, counts["balance"]),
    }


@loss(weigh=lambda batch: weights(batch)["loss"])
def unbalanced(model: Model, batch: oracle.Sample) -> tuple[Tensor, Tensor]:
    logits, _ = model(batch["input_ids"], attention_mask=batch["attention_mask"])
    return cross_entropy(logits, batch["labels"]), weights(batch)["loss"]


def balance_of_one(logits: Tensor) -> Tensor:
    """DeepSeek-V3's balance of one sequence in one layer, [T, E], expert by expert."""
    num_tokens, scores = len(logits), logits.sigmoid()
    chosen = scores.topk(TOP_K).indices
    total = logits.new_zeros(())
    for expert in range(EXPERTS):
        load = EXPERTS / (TOP_K * num_tokens) * float((chosen == expert).sum())
        total = total + load * sum(scores[t, expert] / scores[t].sum() for t in range(num_tokens)) / num_tokens
    return total


def expected_sums(model: Model, batch: oracle.Sample) -> dict[str, tuple[Tensor, Tensor]]:
    """The gradient of all samples, each run alone and without padding."""
    totals, counts = [], weights(batch)
    for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
        length = int(mask.sum())
        logits, routers = model(ids[None, :length])
        balance = torch.stack([balance_of_one(each) for each in routers]).sum()
        totals.append((cross_entropy(logits, labels[None, :length]), COEFFICIENT * balance))
    tokens, balances = (torch.stack(each).sum() for each in zip(*totals, strict=True))
    return {"loss": (tokens, counts["loss"]), "balance": (balances, torch.tensor(counts["balance"]))}


def wrap(model: SparseLM, wrapper: str) -> Model:
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    if wrapper in ("ep", "ep-fsdp2"):
        from tests.exact import expert_parallel  # imports this file

        mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "ep"))
        return expert_parallel.spread(model, mesh["ep"]) if wrapper == "ep" else expert_parallel.shard_sparse(model, 2)
    if wrapper == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        for module in [*model.blocks, model]:
            fully_shard(module, mesh=mesh)
    return model


def gradients(model: Model) -> dict[str, Tensor | None]:
    return harness.full_gradients({name.removeprefix("module."): each for name, each in model.named_parameters()})


def own(update: int) -> list[oracle.Sample]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return shares(update)[rank]


def balance_error(wrapper: str, micro_batch_size: str, dtype: str) -> float:
    """The largest relative error of a gradient; in float32, that of all over the uncut one's own."""
    precision = getattr(torch, dtype)
    model, reference = wrap(sparse_lm(dtype=precision), wrapper), sparse_lm()
    gradient = GradientAccumulator(model, micro_batch_size=int(micro_batch_size))
    worst = 0.0
    for update in range(3):
        gradient.forward_backward(own(update), balanced)
        assert gradient.finalize().finite
        everything = [sample for share in shares(update) for sample in share]
        expected = oracle.answer(reference, expected_sums, everything).gradients
        if dtype == "float64":
            worst = max(worst, oracle.worst_error(gradients(model), expected)[0])
            continue
        uncut = oracle.answer(sparse_lm(dtype=precision), balanced, everything).gradients
        worst = max(worst, oracle.whole_error(gradients(model), expected) / oracle.whole_error(uncut, expected))
    return worst


def loads(model: SparseLM, batch: Sequence[oracle.Sample]) -> list[Tensor]:
    """Tokens by expert, [E] for each router, from the samples one by one."""
    chosen: list[list[Tensor]] = [[] for _ in model.blocks]
    handles = [
        block.router.register_forward_hook(lambda _m, _i, output, into=into: into.append(output[2]))
        for block, into in zip(model.blocks, chosen, strict=True)
    ]
    with torch.no_grad():
        for sample in batch:
            model(sample["input_ids"][None])
    for handle in handles:
        handle.remove()
    return [torch.cat(each).flatten().bincount(minlength=EXPERTS) for each in chosen]


class BiasRun:
    """Updates by the library beside a reference whose biases are moved by the counts of the samples one by one."""

    def __init__(self, wrapper: str, repeat: bool | None) -> None:
        self.model, self.reference = wrap(sparse_lm(repeat), wrapper), sparse_lm()
        self.gradient = GradientAccumulator(self.model, micro_batch_size=2)
        self.bias = experts.ExpertBias(self.gradient, rate=RATE)
        self.optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.model, self.reference)]
        self.wrong: list[str] = []

    def step(self, name: str, calls: list[int], loss_fn: Callable[..., Any] = unbalanced) -> None:
        """An update of some calls, and everything that comes after one."""
        for call in calls:
            self.gradient.forward_backward(own(call), loss_fn)
        assert self.gradient.finalize().finite
        everything = [sample for call in calls for share in shares(call) for sample in share]
        self._step_reference(everything)
        self.optimizers[0].step()
        self._compare(name, self.bias.update())

    def _step_reference(self, everything: list[oracle.Sample]) -> None:
        self.loads = loads(self.reference, everything)
        moved = [(each.double().mean() - each).sign() for each in self.loads]
        oracle.answer(self.reference, lambda *given: {"loss": expected_sums(*given)["loss"]}, everything)
        self.optimizers[1].step()
        for block, sign in zip(self.reference.blocks, moved, strict=True):
            block.router.e_score_correction_bias += RATE * sign

    def _compare(self, name: str, counted: dict[str, Tensor]) -> None:
        if not all(torch.equal(*pair) for pair in zip(counted.values(), self.loads, strict=True)):
            self.wrong.append(f"{name}: counted {[each.tolist() for each in counted.values()]}, expected {self.loads}")
        for path, expected in self.reference.named_buffers():
            found = dict(self.model.named_buffers()).get(path, dict(self.model.named_buffers()).get(f"module.{path}"))
            if not torch.equal(found, expected):
                self.wrong.append(f"{name}: {path} is {found.tolist()}, expected {expected.tolist()}")

    def evaluate(self) -> None:
        """Forwards that train nothing."""
        batch = oracle.collate(samples(50, 3))
        with torch.no_grad():
            balanced(self.model, batch)
        self.model.eval()
        balanced(self.model, batch)
        self.model.train()

    def abandon(self) -> None:
        """An update whose second microbatch raises, on every rank."""
        calls: Iterator[int] = iter(range(100))

        def raising(model: Model, batch: oracle.Sample) -> Any:
            if next(calls) == 1:
                raise InterruptedError
            return unbalanced(model, batch)

        try:
            self.gradient.forward_backward(own(20), loss(weigh=unbalanced.weigh)(raising))
        except InterruptedError:
            return
        self.wrong.append("the loss did not raise")

    def leave_unstepped(self) -> None:
        """An update that comes to an end and is not stepped, as one that is not finite."""
        self.gradient.forward_backward(own(30), unbalanced)
        self.gradient.finalize()

    def look_aside(self) -> None:
        """An update whose loss runs the model twice more: without a gradient, and with one that is not used."""

        @loss(weigh=unbalanced.weigh)
        def looking(model: Model, batch: oracle.Sample) -> Any:
            with torch.no_grad():
                unbalanced(model, batch)
            unbalanced(model, batch)
            return unbalanced(model, batch)

        self.step("with forwards beside", [4], looking)


REPEATS = {"once": None, "repeated": False, "repeated-reentrant": True}


def bias_faults(wrapper: str, repeat: str) -> list[str]:
    """Differences from the biases of the uncut updates."""
    run = BiasRun(wrapper, REPEATS[repeat])
    run.step("one call", [0])
    run.evaluate()
    run.step("after an evaluation", [1])
    run.abandon()
    run.step("two calls, after one that was abandoned", [5, 3])
    run.leave_unstepped()
    run.step("nothing for a rank, after one that was not stepped", [2])
    run.look_aside()
    return run.wrong


def run_job(name: str) -> Any:
    """The job "balance/wrapper/micro_batch_size/dtype" or "bias/wrapper/repeat"."""
    kind, *rest = name.split("/")
    return {"balance": balance_error, "bias": bias_faults}[kind](*rest)
