"""The average is the formula's, wherever the weights lie, and comes and goes without a trace."""

import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn

from megabatch import MegabatchError
from megabatch.train.callbacks.ema import Average
from tests.exact.launch import Run, launch_all
from tests.train.jobs import Tiny, average_job, learner_of, move, whole


def walk(model: nn.Module, step: int) -> None:
    """A dummy microbatch for an optimizer: weights that are small changes apart."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=0.1)


def expected_average(dtype: torch.dtype, decay: float, num_updates: int) -> list[torch.Tensor]:
    """The sum written out, in float64, over weights as the model has them."""
    model = Tiny(dtype)
    average = [weight.double() for weight in whole(model.parameters())]
    for step in range(num_updates):
        walk(model, step)
        average = [
            decay * old + (1 - decay) * new.double() for old, new in zip(average, model.parameters(), strict=True)
        ]
    return [each.detach() for each in average]


@pytest.mark.parametrize(("dtype", "kept", "error"), [
    (torch.float64, torch.float64, 1e-14),
    (torch.float32, torch.float32, 1e-6),
    (torch.bfloat16, torch.float32, 1e-6),
])  # fmt: skip
def test_the_average_is_the_formulas_and_has_digits_enough(dtype: torch.dtype, kept: torch.dtype, error: float) -> None:
    model = Tiny(dtype)
    average = Average(model, 0.999)
    for step in range(30):
        walk(model, step)
        average.update()
    for found, expected in zip(average.state_dict().values(), expected_average(dtype, 0.999, 30), strict=True):
        assert found.dtype == kept
        assert (found.double() - expected).abs().max() < error


def test_frozen_parameters_have_none() -> None:
    model = Tiny()
    model.embed.requires_grad_(False)
    assert "embed.weight" not in Average(model, 0.9).state_dict()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_weights_come_back_bit_for_bit_whatever_happens(dtype: torch.dtype) -> None:
    model = Tiny(dtype)
    average = Average(model, 0.5)
    walk(model, 0)
    average.update()
    before, mean = whole(model.parameters()), whole(average.state_dict().values())
    with contextlib.suppress(KeyError), average.swapped():
        inside = whole(model.parameters())
        raise KeyError
    assert all(torch.equal(found, expected.to(dtype)) for found, expected in zip(inside, mean, strict=True))
    assert all(map(torch.equal, model.parameters(), before))
    assert all(map(torch.equal, average.state_dict().values(), mean))


def test_an_average_of_another_model_is_refused() -> None:
    state = Average(Tiny(), 0.5).state_dict()
    frozen = Tiny()
    frozen.embed.requires_grad_(False)
    with pytest.raises(MegabatchError, match=r"differ in the parameter embed\.weight; resume with"):
        Average(frozen, 0.5).load_state_dict(state)


def plain_logits() -> dict[str, list[float]]:
    """What the job must find, on one process: a model without a wrapper, whose average is kept by hand."""
    learner = learner_of("plain")
    averages = whole(learner.model.parameters())
    for step in range(3):
        move(learner, step)
        averages = [(old + new) / 2 for old, new in zip(averages, whole(learner.model.parameters()), strict=True)]
    mean = Tiny()
    with torch.no_grad():
        for parameter, value in zip(mean.parameters(), averages, strict=True):
            parameter.copy_(value)
        tokens = torch.arange(11)[None]
        now, inside = (model(tokens).flatten().tolist() for model in (learner.model, mean))
    return {"before": now, "inside": inside, "after": now}


def test_shards_show_the_average_inside_and_their_weights_after(group_of_one: None) -> None:
    found, expected = average_job("fsdp2"), plain_logits()
    for when, logits in expected.items():
        assert found[when] == pytest.approx(logits, abs=1e-13), when
    assert found["inside"] != pytest.approx(found["before"], abs=1e-4)


@pytest.mark.slow
def test_shards_of_two_and_three_ranks_agree_with_a_plain_model_on_as_many(tmp_path: Path) -> None:
    runs = [Run(world, ["plain", "fsdp2"], tmp_path / str(world)) for world in (2, 3)]
    for found in launch_all("tests.train.jobs:average_job", runs, tmp_path, timeout_seconds=120):
        plain, *others = [rank.get("value", rank) for ranks in found.values() for rank in ranks]
        assert plain["before"] == plain["after"] != plain["inside"]
        for other in others:
            assert {when: pytest.approx(logits, abs=1e-13) for when, logits in plain.items()} == other
