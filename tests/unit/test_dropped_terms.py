"""`losses.next_token` refuses a model whose own loss has another term, at no cost where the answer is known."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.utils.logging import get_logger, warning_once

from megabatch import GradientAccumulator, LossContractError, losses
from megabatch.experts import next_token_with_balance
from megabatch.integrations.transformers import MegabatchTrainer
from tests.exact.launch import of_ranks
from tests.integrations.trainers import Recorder, arguments
from tests.integrations.users import padded_texts

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def gpt2(kind: type[GPT2LMHeadModel] = GPT2LMHeadModel, **settings: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return kind(GPT2Config(vocab_size=32, n_embd=16, n_head=2, n_layer=1, n_positions=32, **settings)).double()


class WithPenalty(GPT2LMHeadModel):
    """A z-loss that the config does not name."""

    only_in_training = False

    def forward(self, *inputs: Any, labels: Tensor | None = None, **named: Any) -> Any:
        output = super().forward(*inputs, labels=labels, **named)
        if labels is not None and (self.training or not self.only_in_training):
            output.loss = output.loss + 1e-4 * output.logits.logsumexp(-1).square().mean()
        return output


class WithPenaltyInTraining(WithPenalty):
    only_in_training = True


class Plain(nn.Module):
    """A model of another library, whose loss is a mean, a sum or smoothed."""

    def __init__(self, reduction: str = "mean", smoothing: float = 0.0, penalty: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.settings = {"reduction": reduction, "label_smoothing": smoothing}
        self.penalty = penalty
        self.double()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(F.dropout(self.embed(input_ids), 0.1, self.training))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **self.settings)
            loss = loss + self.penalty * self.head.weight.square().sum()
        return SimpleNamespace(logits=logits, loss=loss)


class WithoutLabels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids))


def bamba(coefficient: float) -> nn.Module:
    torch.manual_seed(0)
    return BambaForCausalLM(
        BambaConfig(
            **SIZES, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=4, mamba_chunk_size=4,
            attn_layer_indices=[0], z_loss_coefficient=coefficient,
        )
    )  # fmt: skip


def smoothed() -> nn.Module:
    model = gpt2()
    model.loss_function = lambda logits, labels, **_: F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1
    )
    return model


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1))


def texts(*lengths: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 32, (length,), generator=generator) for length in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def run(model: nn.Module, loss_fn: Any = losses.next_token, batch: Any = None) -> GradientAccumulator:
    gradient = GradientAccumulator(model, micro_batch_size=2)
    gradient.forward_backward(batch or texts(5, 3, 1), loss_fn)
    gradient.finalize()
    return gradient


DROPPED: dict[str, Callable[[], nn.Module]] = {
    "bamba": lambda: bamba(0.01),
    "subclass": lambda: gpt2(WithPenalty),
    "in training": lambda: gpt2(WithPenaltyInTraining),
    "smoothed": smoothed,
    "penalty": lambda: Plain(penalty=0.1),
    "smoothed, plain": lambda: Plain(smoothing=0.1),
}
KEPT: dict[str, Callable[[], nn.Module]] = {
    "bamba": lambda: bamba(0.0),
    "softcap": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=1.0)),
    "mean": Plain,
    "sum": lambda: Plain("sum"),
    "no labels": WithoutLabels,
    "bfloat16": lambda: gpt2(type("Subclass", (GPT2LMHeadModel,), {})).bfloat16(),
    "evaluating": lambda: gpt2(WithPenaltyInTraining).eval(),
}


@pytest.mark.parametrize("name", DROPPED)
def test_a_term_of_the_models_own_loss_is_refused(name):
    with pytest.raises(LossContractError, match=r"next_token would drop the rest.*give a loss of your own") as caught:
        run(DROPPED[name]().train())
    assert "\n" not in str(caught.value)
    assert ("z_loss_coefficient=0.01" in str(caught.value)) == (name == "bamba")


@pytest.mark.parametrize("name", KEPT)
def test_a_loss_that_is_the_cross_entropy_is_accepted(name):
    run(KEPT[name]())


OF_TRAINER: dict[str, dict[str, Any]] = {
    "own loss": {}, "capped": {"max_microbatch_tokens": 40}, "loss_fn": {"loss_fn": losses.next_token},
}  # fmt: skip


def train(model: nn.Module, tmp_path: Path, **given: Any) -> Recorder:
    recorder = Recorder()
    MegabatchTrainer(
        model, arguments(str(tmp_path)), padded_texts, texts(5, 3, 7), callbacks=[recorder], **given
    ).train()
    return recorder


@pytest.mark.parametrize("way", OF_TRAINER)
def test_the_trainer_refuses_a_term_of_the_models_own_loss(tmp_path: Path, way: str) -> None:
    with pytest.raises(LossContractError, match=r"z_loss_coefficient=0\.01|the model's own loss is not the mean"):
        train(bamba(0.01), tmp_path, **OF_TRAINER[way])


@pytest.mark.parametrize("way", OF_TRAINER)
def test_the_trainer_is_exact_where_the_coefficient_is_zero(tmp_path: Path, way: str) -> None:
    (found,) = train(bamba(0.0), tmp_path, **OF_TRAINER[way]).gradients
    model, rows = bamba(0.0), texts(5, 3, 7)
    total = torch.stack([_sum_over_tokens(model, row["input_ids"]) for row in rows]).sum()
    (total / sum(len(row["input_ids"]) - 1 for row in rows)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        # Mamba's scan and norms are computed in float32.
        assert (found[name] - parameter.grad).norm() <= 1e-5 * max(1e-2, float(parameter.grad.norm())), name


def _sum_over_tokens(model: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="sum")


def test_a_refused_model_is_refused_again_and_accepted_with_targets_that_are_shifted():
    model = Plain(penalty=0.1)
    for _ in range(2):
        with pytest.raises(LossContractError):
            run(model)
    shifted = [{"input_ids": text["input_ids"], "shift_labels": text["labels"]} for text in texts(5, 3)]
    run(model, batch=shifted)


def test_the_router_loss_is_not_taken_for_another_term():
    model = mixtral()
    model.config.output_router_logits = True
    run(model, next_token_with_balance(0.01))


@pytest.mark.parametrize(("make", "trials"), [(gpt2, 0), (lambda: gpt2(type("Own", (GPT2LMHeadModel,), {})), 0),
                                              (Plain, 1), (lambda: gpt2(WithPenaltyInTraining).eval(), 1)])  # fmt: skip
def test_a_model_runs_once_more_at_most_and_nothing_of_it_changes(make, trials):
    model, calls = make(), []
    model.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    modes = [module.training for module in model.modules()]
    states = []
    for loss_fn in (lambda model, microbatch: (model(microbatch["input_ids"]).logits.sum(), 1), losses.next_token):
        calls.clear()
        torch.manual_seed(3)
        run(model, loss_fn)
        states.append(torch.get_rng_state())
        assert calls.count(True) == 2
    assert calls.count(False) == trials
    assert torch.equal(*states)
    assert [module.training for module in model.modules()] == modes
    calls.clear()
    run(model)
    assert calls == [True, True]


def test_reading_the_loss_of_a_model_prints_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """transformers warns of GPT2LMHeadModel, whose name has no kind of loss."""
    model, logger = gpt2(), get_logger("transformers")
    warning_once.cache_clear()
    logger.addHandler(caplog.handler)
    run(model)
    logger.removeHandler(caplog.handler)
    assert not caplog.messages
    assert model.loss_function.__name__ == "ForCausalLMLoss"


def wrapped(name: str) -> str:
    """What ranks of unequal rows say of a model."""
    wrapper, _, kind = name.partition(" ")
    model: Any = {"term": lambda: gpt2(WithPenalty), "kept": Plain}[kind]()
    if wrapper == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))
    else:
        model = DistributedDataParallel(model)
    batches = [texts(5, 3, 4), texts(1)]
    try:
        run(model, batch=batches[dist.get_rank()])
    except LossContractError as error:
        return str(error)
    return "kept"


results = of_ranks("tests.unit.test_dropped_terms:wrapped", {2: ["fsdp2 term", "fsdp2 kept", "ddp term", "ddp kept"]})


@pytest.mark.full
@pytest.mark.parametrize("wrapper", ["fsdp2", "ddp"])
def test_all_ranks_refuse_or_none(results, wrapper):
    assert all("would drop the rest" in said for said in results(f"{wrapper} term", 2))
    assert results(f"{wrapper} kept", 2) == ["kept", "kept"]
