"""Dropout that follows the sample: one gradient, however the update is cut and on however many ranks it runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

from megabatch import GradientAccumulator, losses
from megabatch.train.model.keyed_dropout import KeyedDropout, SampleKeys, key_dropouts, keying, keys_of, with_keys
from megabatch.train.runtime.ranks import Ranks
from tests.train.contexts import ALONE
from tests.train.on_ranks import on_ranks

NUM_SAMPLES, SEED = 12, 3


def gpt2(**more: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "bos_token_id": 0}
    dropouts = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **dropouts, **more})).double()


def samples_of(update: int) -> list[dict[str, Tensor]]:
    """Samples of every length from 4 on, with their keys."""
    draw, add_key = torch.Generator().manual_seed(1), keying(SEED)
    found = []
    for number in range(NUM_SAMPLES):
        ids = torch.randint(2, 40, (4 + number,), generator=draw)
        found.append(add_key({"input_ids": ids, "labels": ids.clone()}, update, number))
    return found


def gradient_of(ranks: Ranks, micro_batch_size: int, update: int = 1, planted: str = "", **more: Any) -> list[Tensor]:
    """The gradient of one update, whose samples are dealt out in turn."""
    model = gpt2(**more)
    key_dropouts(model)
    keys = keys_of(model)
    assert keys is not None
    samples = samples_of(update)
    if planted == "leave out the sample":
        samples = [{**each, "dropout_key": samples[0]["dropout_key"] + index % micro_batch_size}
                   for index, each in enumerate(samples)]  # fmt: skip
    torch.manual_seed(ranks.rank + 100)  # of a generator, which is to draw nothing
    run = DistributedDataParallel(model) if ranks.size > 1 else model
    gradient = GradientAccumulator(run, micro_batch_size=micro_batch_size)
    gradient.forward_backward(samples[ranks.rank :: ranks.size], with_keys(losses.next_token, keys))
    gradient.finalize()
    return [each.grad for each in model.parameters() if each.grad is not None]


def error_of(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(one, other, strict=True))


def plain_gradient(update: int = 1) -> list[Tensor]:
    """Plain torch's, sample by sample: nothing is padded, and each mask is drawn alone."""
    model, total, weight = gpt2(), torch.zeros((), dtype=torch.float64), 0
    key_dropouts(model)
    keys = keys_of(model)
    assert keys is not None
    for sample in samples_of(update):
        keys.current, ids = sample["dropout_key"][None], sample["input_ids"]
        logits = model(input_ids=ids[None]).logits[0]  # [T, V]
        total = total + nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum")
        weight += len(ids) - 1
    (total / weight).backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("micro_batch_size", [1, 3, 8])
def test_no_cut_changes_the_gradient(micro_batch_size: int) -> None:
    assert error_of(gradient_of(ALONE, micro_batch_size), plain_gradient()) < 1e-12


def test_ranks_do_not_change_the_gradient(tmp_path: Path) -> None:
    for found in on_ranks(2, tmp_path, gradient_of, 3):
        assert error_of(found, plain_gradient()) < 1e-12


def test_no_size_of_a_dimension_changes_a_mask() -> None:
    """A module that drops attention weights [B, H, T, T]."""
    module = KeyedDropout(0.5, 0, SampleKeys())
    module.keys.current = torch.arange(4)
    assert torch.equal(module(torch.ones(4, 2, 9, 9))[:, :, :5, :5], module(torch.ones(4, 2, 5, 5)))


def test_a_key_that_leaves_out_the_sample_is_noticed() -> None:
    planted = {"planted": "leave out the sample"}
    assert error_of(gradient_of(ALONE, 8, **planted), gradient_of(ALONE, 3, **planted)) > 1e-3


def test_other_updates_layers_and_samples_have_other_masks() -> None:
    """Independent ones: each has its share of zeros, and any two agree as often as coins do."""
    ones, p, count = torch.ones(4, 64, 256), 0.3, 4 * 64 * 256
    masks = []
    for update, layer in ((1, 0), (2, 0), (1, 1)):
        keys = SampleKeys()
        keys.current = torch.stack([keying(SEED)({}, update, number)["dropout_key"] for number in range(4)])
        out = KeyedDropout(p, layer, keys)(ones)
        assert out.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)])
        masks.append(out == 0)
        assert abs(float(masks[-1].double().mean()) - p) < 4 * (p * (1 - p) / count) ** 0.5
    masks += [masks[0].roll(1, 0), masks[0].roll(1, 1), masks[0].roll(1, 2)]
    agree = p**2 + (1 - p) ** 2
    for other in masks[1:]:
        assert abs(float((masks[0] == other).double().mean()) - agree) < 5 * (agree * (1 - agree) / count) ** 0.5


def test_without_keys_it_is_torchs_dropout() -> None:
    module, x = KeyedDropout(0.5, 0, SampleKeys()), torch.randn(4, 8)
    torch.manual_seed(0)
    found = module(x)
    torch.manual_seed(0)
    assert torch.equal(found, nn.functional.dropout(x, 0.5))
    module.keys.current = torch.arange(3)  # of a model that joins samples and positions in dim 0
    assert module(x).shape == x.shape
    module.keys.current = torch.arange(4)
    assert torch.equal(module.eval()(x), x)
