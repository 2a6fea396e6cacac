"""Several samples in one row of a microbatch: MegabatchTrainer is exact, or refuses a model that lets them meet."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening

from megabatch import LossContractError, losses
from megabatch.integrations.mean_loss import is_packed
from megabatch.integrations.transformers import MegabatchTrainer
from tests.integrations.trainers import OwnMean, Recorder, arguments, own_function
from tests.tiers import full_unless

VOCABULARY = 32
MORE = {
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_5_text": {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "olmo3": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **MORE.get(kind, {}),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)  # attention that is far from a mean
    return model.double() if kind == "gpt2" else model


def texts(*lengths: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def in_bins(samples: list[dict[str, Any]], size: int = 12) -> dict[str, Tensor]:
    """Fill rows with samples while they fit, and pad the rows."""
    rows: list[list[dict[str, Any]]] = [[]]
    for sample in samples:
        if sum(len(each["input_ids"]) for each in [*rows[-1], sample]) > size:
            rows.append([])
        rows[-1].append(sample)
    flat = [DataCollatorWithFlattening(return_tensors="pt")(row) for row in rows if row]
    fills = {"input_ids": 0, "labels": -100, "position_ids": 0}
    return {
        name: torch.cat([nn.functional.pad(row[name], (0, size - row[name].shape[1]), value=fill) for row in flat])
        for name, fill in fills.items()
    }


def in_chunks(samples: list[dict[str, Any]], size: int = 6) -> dict[str, Tensor]:
    """Join all samples and cut them into rows of one length, as the scripts of pretraining do."""
    ids = torch.tensor([token for sample in samples for token in sample["input_ids"]])
    rows = nn.functional.pad(ids, (0, -len(ids) % size), value=-100).view(-1, size)
    return {"input_ids": rows.clamp(min=0), "labels": rows}


def train(kind: str, tmp_path: Any, data: list[Any], *, base: Any = MegabatchTrainer, **given: Any) -> list[Any]:
    """Return the gradients of the updates."""
    recorder = Recorder()
    trainer = base(
        model=model_of(kind), args=arguments(str(tmp_path), remove_unused_columns=False), train_dataset=data,
        callbacks=[recorder], **{"data_collator": DataCollatorWithFlattening(return_tensors="pt"), **given},
    )  # fmt: skip
    try:
        trainer.train()
    except LossContractError as error:
        return [*recorder.gradients, str(error)]
    return recorder.gradients


def expected(kind: str, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    model = model_of(kind)
    rows = [torch.tensor(sample["input_ids"])[None] for sample in samples]
    total = sum(nn.functional.cross_entropy(model(row).logits[0, :-1], row[0, 1:], reduction="sum") for row in rows)
    (total / sum(row.shape[1] - 1 for row in rows)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


WAYS = {
    "default": {},
    "capped": {"max_microbatch_tokens": 24},
    "loss_fn": {"loss_fn": losses.next_token},
    "compute_loss": {"base": OwnMean},
    "compute_loss_func": {"compute_loss_func": own_function},
    "bins": {"data_collator": in_bins},
}


@pytest.mark.parametrize("kind", full_unless(["gpt_oss", "qwen3_5_text"], lambda number, _: number == 0))
@pytest.mark.parametrize("way", full_unless(WAYS, lambda _, way: way == "bins"))
def test_a_model_whose_samples_see_each_other_in_a_row_is_refused(kind, way, tmp_path):
    (refused,) = train(kind, tmp_path, texts(4, 8, 7, 9, 5, 6), **WAYS[way])
    assert "of 2 samples is no mean" in refused or "change each other's gradient: it is off by 0." in refused
    assert "\n" not in refused


@pytest.mark.full
def test_the_first_row_of_several_samples_is_tried_when_it_comes(tmp_path):
    updates = [12] * 18 + [4] * 6  # after the last update that tries the loss by its number
    *stepped, refused = train("gpt_oss", tmp_path, texts(*updates), data_collator=in_bins)
    assert len(stepped) == 3
    assert "change each other's gradient" in refused


@pytest.mark.full
def test_a_collator_that_joins_and_cuts_samples_is_refused(tmp_path):
    (refused,) = train("gpt2", tmp_path, texts(4, 8, 7, 9, 5, 6), data_collator=in_chunks)
    assert refused.startswith("the data collator lays ")


@pytest.mark.full
@pytest.mark.parametrize(("kind", "allowed"), [("gpt2", 1e-12), ("llama", 1e-6), ("olmo3", 1e-6)])
@pytest.mark.parametrize("way", ["default", "capped", "bins"])
def test_a_model_that_keeps_samples_apart_is_exact(kind, allowed, way, tmp_path):
    data = texts(4, 8, 7, 9, 5, 6)
    (gradients,) = train(kind, tmp_path, data, **WAYS[way])
    for name, gradient in expected(kind, data).items():
        assert (gradients[name] - gradient).norm() <= allowed * max(float(gradient.norm()), 1.0), name


def test_rows_of_several_samples_are_told_by_their_tensors():
    rows = torch.zeros(2, 6, dtype=torch.long)
    assert not is_packed({"input_ids": rows}, 2)
    assert not is_packed({"input_ids": rows[:1]}, 1)
    assert not is_packed({"pixel_values": torch.zeros(1, 3)}, 2)
    assert is_packed({"input_ids": rows}, 3)
    assert is_packed({"input_ids": rows.flatten()}, 2)
    assert is_packed({"inputs_embeds": rows[:1, :, None]}, 2)
    assert is_packed({"input_ids": rows, "cu_seqlens": torch.tensor([0, 6, 12])}, 2)
    assert is_packed({"input_ids": rows, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)}, 2)
    assert not is_packed({"input_ids": rows, "position_ids": torch.arange(6).expand(2, 6)}, 2)
    for padded in ([0, 1, 2, 3, 0, 0], [1, 1, 0, 1, 2, 3], [0, 0, 0, 1, 2, 3]):
        assert not is_packed({"input_ids": rows, "position_ids": torch.tensor([padded] * 2)}, 2)
    assert not is_packed({"input_ids": rows.repeat(2, 1)}, 2)  # pairs
    assert is_packed({"input_ids": rows.repeat(2, 1)[:3]}, 2)
