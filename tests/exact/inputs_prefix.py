"""Input mutations of samples that begin alike, whose common prefix is computed once."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from megabatch import JointLoss, LossContractError, PlanError, loss, losses
from megabatch.batching import Deferred, SharedPrefix
from megabatch.planners import SameBits, Tokens
from tests.exact.inputs import Sample, User, refused, right

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
LLAMA = {**SIZES, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": None, "bos_token_id": None}
MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "num_local_experts": 2}
GPT2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": None}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MAMBA = {"vocab_size": 40, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1}
BLOOM = {"vocab_size": 40, "hidden_size": 16, "n_layer": 1, "n_head": 2}
PROMPTS, COMPLETIONS = (12, 9), (3, 1, 5, 2, 4, 2, 2, 6)  # tokens; four completions of each prompt
NUM_TOKENS = 4 * sum(PROMPTS) + sum(COMPLETIONS)
Wrap = Callable[[nn.Module], nn.Module]


class Norm(nn.Module):
    """An RMS norm that stays in float64."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def decoder(family: str = "llama", attention: str = "sdpa", **more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"gpt2": GPT2 | NO_DROPOUT, "mamba": MAMBA, "bloom": BLOOM}.get(family, LLAMA)
    config = AutoConfig.for_model(family, **{**sizes, **more})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm") and family != "mamba":
                setattr(module, name, Norm(len(child.weight)))
    return model.double()


def completions(*, prompt_targets: bool = False) -> list[Sample]:
    """Four completions of each of two prompts, and weights of tokens."""
    drawn = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 40, (length,), generator=drawn) for length in PROMPTS]
    found: list[Sample] = []
    for number, length in enumerate(COMPLETIONS):
        prompt = prompts[number // 4]
        ids = torch.cat([prompt, torch.randint(1, 40, (length,), generator=drawn)])
        labels = ids.clone()
        labels[: 0 if prompt_targets else len(prompt)] = -100
        weights = torch.rand(len(ids), generator=drawn, dtype=torch.float64) * (labels != -100)
        found.append({"input_ids": ids, "labels": labels, "weights": weights, "group": torch.tensor(number // 4)})
    return found


def log_probs(model: nn.Module, batch: Sample) -> Tensor:  # of each token after the first: [B, T - 1]
    ids = batch["input_ids"]
    return model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]


@loss(weigh=lambda batch: batch["weights"][:, 1:].sum())
def weighted(model: nn.Module, batch: Sample) -> tuple[Tensor, Tensor]:
    weights = batch["weights"][:, 1:]
    return -(log_probs(model, batch) * weights).sum(), weights.sum()


def apart(model: nn.Module, samples: Sequence[Sample]) -> list[Tensor]:
    """Log-probabilities of each sample alone, in plain torch."""
    return [log_probs(model, {"input_ids": each["input_ids"][None]})[0] for each in samples]


def expect_weighted(user: User, model: Any, reference: nn.Module, samples: Sequence[Sample]) -> None:
    weights = [each["weights"][1:] for each in samples]
    pairs = zip(apart(reference, samples), weights, strict=True)
    (-torch.stack([(scores * each).sum() for scores, each in pairs]).sum() / torch.cat(weights).sum()).backward()
    user.expect(model, reference)


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model)


WRAPS: dict[str, Any] = {
    "llama-plain": ("llama", lambda model: model), "llama-ddp": ("llama", DistributedDataParallel),
    "qwen3-fsdp2": ("qwen3", sharded), "gpt2-ddp": ("gpt2", DistributedDataParallel), "gpt2-fsdp2": ("gpt2", sharded),
}  # fmt: skip


@right(2, 3, **WRAPS)
def samples_that_begin_alike(user: User, variant: tuple[str, Wrap]) -> None:
    """Their tokens are counted, and computed less often; whatever the wrapper and the sharing of samples."""
    family, wrap = variant
    reference = decoder(family)
    seen: list[int] = []
    model = wrap(copy.deepcopy(reference).train())
    accumulator = user.accumulator(model, max_microbatch_tokens=40, batching=SharedPrefix(), sync="last")
    model.register_forward_pre_hook(
        lambda _, args, named: seen.append(named["input_ids"].numel() if "input_ids" in named else args[0].numel()),
        with_kwargs=True,
    )
    mine = user.part(completions())
    accumulator.forward_backward(mine, weighted)
    update = accumulator.finalize()
    assert update.num_tokens == NUM_TOKENS
    plan = accumulator.last_plan
    if mine:
        assert any(plan.shared)
        assert sum(seen[: len([rows for rows in plan.microbatches if rows])]) == plan.padded_tokens < plan.num_tokens
        assert max(map(plan.tokens_of, plan.microbatches)) <= 40
    expect_weighted(user, model, reference, completions())


@right(1, 2, 3, llama="llama", qwen3="qwen3", gpt2="gpt2", gpt_neox="gpt_neox", phi="phi")
def prompts_with_targets(user: User, variant: str) -> None:
    """A prompt's targets count once for each sample that begins with it."""
    reference = decoder(variant)
    model = copy.deepcopy(reference)
    samples = [
        {name: each[name] for name in ("input_ids", "labels", "group")} for each in completions(prompt_targets=True)
    ]
    user.update(model, user.part(samples), losses.next_token, max_microbatch_tokens=64, batching=SharedPrefix("group"))
    for each in samples:
        logits = reference(input_ids=each["input_ids"][None]).logits[0, :-1]
        (F.cross_entropy(logits, each["labels"][1:], reduction="sum") / (NUM_TOKENS - 8)).backward()
    user.expect(model, reference)


@right(eager="eager", sdpa="sdpa")
def attention_that_adds_its_mask(user: User, variant: str) -> None:
    reference = decoder("gpt2", variant)
    model = copy.deepcopy(reference)
    rows = [each | {"attention_mask": torch.ones_like(each["input_ids"])} for each in completions()]
    user.update(model, rows, weighted, max_microbatch_tokens=64, batching=SharedPrefix())
    expect_weighted(user, model, reference, rows)


@right(1, 2)
def a_batch_of_one_length(user: User) -> None:
    """Rows of a mapping, some of them equal, one of them the beginning of no other."""
    drawn = torch.Generator().manual_seed(2)
    ids = torch.randint(1, 40, (8, 16), generator=drawn)
    ids[:6, :11] = ids[0, :11]
    ids[3] = ids[2]
    batch = {"input_ids": ids, "weights": torch.rand(8, 16, generator=drawn, dtype=torch.float64)}
    reference = decoder()
    model = copy.deepcopy(reference)
    accumulator = user.accumulator(model, max_microbatch_tokens=48, batching=SharedPrefix())
    accumulator.forward_backward(user.rows(batch), weighted)
    accumulator.finalize()
    rows = [{name: each[row] for name, each in batch.items()} for row in range(8)]
    expect_weighted(user, model, reference, rows)


@right(2, plain=lambda model: model, ddp=DistributedDataParallel, fsdp2=sharded)
def groups_of_grpo_in_opened_calls(user: User, variant: Wrap) -> None:
    """Two calls and two terms; old scores come from the same trees, so that the first ratio is exactly 1."""
    reference = decoder()
    accumulator = user.accumulator(
        variant(copy.deepcopy(reference)), max_microbatch_tokens=64, batching=SharedPrefix(group="group")
    )
    advantages = torch.linspace(-1, 1, 8, dtype=torch.float64)
    samples = [each | {"gain": gain} for each, gain in zip(completions(), advantages, strict=True)]
    num_answers = sum(COMPLETIONS)

    def grpo(model: nn.Module, batch: Sample) -> Any:
        is_answer, new = batch["labels"][:, 1:] != -100, log_probs(model, batch)
        ratio = (new - batch["old"]).exp()
        assert bool((ratio[is_answer] == 1).all())
        gain = torch.minimum(ratio, ratio.clamp(0.8, 1.2)) * batch["gain"][:, None]
        return {"policy": (-(gain * is_answer).sum(), is_answer.sum()), "size": ((new * is_answer).sum(), len(new))}

    mine = user.part(samples)
    told = {"policy": sum(int((each["labels"] != -100).sum()) for each in mine), "size": len(mine)}
    accumulator.open(weights=told)
    for part in (mine[:4], mine[4:]):
        old = accumulator.forward(part, log_probs)
        plan = accumulator.last_plan
        assert len(part) < 2 or any(plan.shared)
        with_old = [each | {"old": scores} for each, scores in zip(part, old, strict=True)]
        accumulator.forward_backward(with_old, grpo, plan=plan)
    accumulator.finalize()
    for each, scores in zip(samples, apart(reference, samples), strict=True):
        answers = scores[-int((each["labels"] != -100).sum()) :]
        ((-each["gain"] * (answers - answers.detach()).exp()).sum() / num_answers + answers.sum() / 8).backward()
    user.expect(accumulator.model, reference)


@right(2, 3, plain=lambda model: model, ddp=DistributedDataParallel, fsdp2=sharded)
def pairs_of_dpo(user: User, variant: Wrap) -> None:
    """Chosen and rejected are samples; the loss couples them, wherever they are computed."""
    reference = decoder()
    model = variant(copy.deepcopy(reference))
    accumulator = user.accumulator(model, max_microbatch_tokens=48, batching=SharedPrefix())
    samples = completions()

    def encode(model: nn.Module, batch: Sample) -> Tensor:  # of each whole response: [B]
        return (log_probs(model, batch) * (batch["labels"][:, 1:] != -100)).sum(1)

    def dpo(scores: Tensor) -> tuple[Tensor, int]:
        return -F.logsigmoid(0.5 * (scores[::2] - scores[1::2])).sum(), len(scores) // 2

    accumulator.forward_backward(user.part(samples), JointLoss(encode, dpo))
    accumulator.finalize()
    scores = [
        each[(sample["labels"][1:] != -100)].sum()
        for each, sample in zip(apart(reference, samples), samples, strict=True)
    ]
    total, weight = dpo(torch.stack(scores))
    (total / weight).backward()
    user.expect(model, reference)


@right(1, 2)
def a_window_that_bounds_trees(user: User) -> None:
    """Longer than a small tree: trees stay within it, and are exact."""
    reference = decoder("mistral", sliding_window=18)
    model = copy.deepcopy(reference)
    accumulator = user.accumulator(model, max_microbatch_tokens=64, batching=SharedPrefix())
    mine = user.part(completions())
    accumulator.forward_backward(mine, weighted)
    accumulator.finalize()
    plan = accumulator.last_plan
    assert any(plan.shared)
    assert all(max(plan.row_lengths(rows)) <= 18 for rows in plan.microbatches if any(plan.shared[row] for row in rows))
    expect_weighted(user, model, reference, completions())


def shared(user: User, model: Any = None, loss_fn: Any = weighted, batch: Any = None, **options: Any) -> None:
    """One update of samples that begin alike, each rank with all of them."""
    options = {"max_microbatch_tokens": 64, "batching": SharedPrefix()} | options
    user.update(decoder() if model is None else model, completions() if batch is None else batch, loss_fn, **options)


def deaf(name: str) -> Any:
    """A model that does not hear of an input."""
    model = decoder()
    model.register_forward_pre_hook(
        lambda _, args, named: (args, {key: each for key, each in named.items() if key != name}), with_kwargs=True
    )
    return model


@refused(
    PlanError, "SharedPrefix", 1, 2,
    mask=lambda: deaf("attention_mask"), positions=lambda: deaf("position_ids"),
    window=lambda: decoder("mistral", sliding_window=4), state=lambda: decoder("mamba", "eager"),
    alibi=lambda: decoder("bloom", "eager"), experts=lambda: decoder("qwen3_moe", **MOE),
    flex=lambda: decoder("llama", "flex_attention"), dropout=lambda: decoder(attention_dropout=0.1).train(),
    dropped=lambda: decoder("gpt2", resid_pdrop=0.1).train(), plain=lambda: nn.Linear(2, 2),
    compiled=lambda: torch.compile(decoder(), backend="eager"),
    several=lambda: [decoder(), decoder()], chunks=lambda: decoder("llama4_text", attention_chunk_size=8, **MOE),
)  # fmt: skip
def models_whose_branches_may_see_each_other(user: User, variant: Callable[[], Any]) -> None:
    shared(user, variant())


@refused(PlanError, "as a number", 1, 2, rows={"micro_batch_size": 2}, auto={"max_microbatch_tokens": "auto"})
def trees_without_a_limit_of_tokens(user: User, variant: dict[str, Any]) -> None:
    user.update(decoder(), completions(), weighted, batching=SharedPrefix(), **variant)


@refused(PlanError, "or leave SameBits out", 1, 2)
def trees_of_the_same_bits(user: User) -> None:
    shared(user, planner=SameBits(Tokens(64)), max_microbatch_tokens=None)


def gives(**inputs: Callable[[Sample], Any]) -> Any:
    """A loss that gives the model other inputs."""

    def loss_fn(model: nn.Module, batch: Sample) -> Any:
        named = {"input_ids": batch["input_ids"]} | {name: make(batch) for name, make in inputs.items()}
        return model(**named).logits.sum(), 1

    return loss_fn


@refused(
    LossContractError, "leave SharedPrefix out", 1, 2,
    copied=gives(input_ids=lambda batch: batch["input_ids"].clone()),
    written=gives(input_ids=lambda batch: batch["input_ids"].fill_(1)),
    mask=gives(attention_mask=lambda batch: torch.ones_like(batch["input_ids"])),
    labels=gives(labels=lambda batch: batch["labels"]),
    positions=gives(position_ids=lambda batch: torch.arange(batch["input_ids"].shape[1])[None]),
    last=gives(logits_to_keep=lambda _: 1),
    tuple=gives(return_dict=lambda _: False),
)  # fmt: skip
def losses_that_change_what_a_tree_replaces(user: User, variant: Any) -> None:
    shared(user, loss_fn=variant)


def changed(**changes: Callable[[Sample], Any]) -> list[Sample]:
    return [each | {name: make(each) for name, make in changes.items()} for each in completions()]


@refused(
    PlanError, "SharedPrefix", 1, 2,
    hidden=changed(attention_mask=lambda each: torch.zeros_like(each["input_ids"])),
    positions=changed(position_ids=lambda each: torch.arange(len(each["input_ids"]))),
    floats=changed(input_ids=lambda each: each["input_ids"].double()),
)  # fmt: skip
def samples_that_no_tree_can_hold(user: User, variant: Any) -> None:
    shared(user, batch=variant)


@refused(PlanError, "compared", 1, 2,
         deferred=lambda: Deferred(completions().__getitem__, [len(each["input_ids"]) for each in completions()]),
         tokens=lambda: [{"labels": each["labels"]} for each in completions()])  # fmt: skip
def samples_without_tokens_to_compare(user: User, variant: Callable[[], Any]) -> None:
    shared(user, batch=variant())


@refused(PlanError, "are compared", 1, 2)
def a_group_that_no_sample_names(user: User) -> None:
    shared(user, batching=SharedPrefix(group="prompt"))


@refused(PlanError, "in their order", 1, 2)
def a_plan_of_samples_that_begin_otherwise(user: User) -> None:
    accumulator = user.accumulator(decoder(), max_microbatch_tokens=64, batching=SharedPrefix())
    plan = accumulator.plan(completions())
    other = changed(input_ids=lambda each: each["input_ids"].flip(0))
    accumulator.forward_backward(other, weighted, plan=plan)


@refused(PlanError, "that was made for this model", 1, 2)
def a_plan_of_trees_for_a_model_with_a_window(user: User) -> None:
    plan = user.accumulator(decoder(), max_microbatch_tokens=64, batching=SharedPrefix()).plan(completions())
    model = decoder("mistral", sliding_window=12)
    accumulator = user.accumulator(model, max_microbatch_tokens=64, batching=SharedPrefix())
    accumulator.forward_backward(completions(), weighted, plan=plan)


@right(1, 2)
def a_loss_that_finds_padding_by_the_pad_token(user: User) -> None:
    reference = decoder(pad_token_id=2)
    model = copy.deepcopy(reference)
    samples = [{"input_ids": each["input_ids"].clamp(min=3)} for each in completions()]

    def loss_fn(model: Any, batch: Sample) -> Any:
        logits, targets = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["input_ids"][:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=2, reduction="sum")
        return total, (targets != 2).sum()

    user.update(model, user.part(samples), loss_fn, max_microbatch_tokens=64, batching=SharedPrefix())
    for each in samples:
        (loss_fn(reference, {"input_ids": each["input_ids"][None]})[0] / (NUM_TOKENS - len(samples))).backward()
    user.expect(model, reference)


def reads_hidden_states(model: Any, batch: Sample) -> Any:
    """A loss with a penalty on what a forward hook of its own has seen."""
    seen: list[Tensor] = []
    handle = model.base_model.norm.register_forward_hook(lambda module, given, output: seen.append(output))
    total, weight = weighted(model, batch)
    handle.remove()
    return total + seen[0].square().sum(), weight


@refused(LossContractError, "has the forward hook", 1)
def a_loss_that_reads_hidden_states(user: User) -> None:
    shared(user, loss_fn=reads_hidden_states)


@refused(PlanError, "make another", 1, 2)
def a_plan_of_trees_for_rows(user: User) -> None:
    accumulator = user.accumulator(decoder(), max_microbatch_tokens=64)
    plan = user.accumulator(decoder(), max_microbatch_tokens=64, batching=SharedPrefix()).plan(completions())
    accumulator.forward_backward(completions(), weighted, plan=dataclasses.replace(plan))
