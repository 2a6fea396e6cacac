"""The optimizer is the one that was asked for, its schedule is the formula's, and it resumes bit for bit."""

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer

from megabatch import MegabatchError
from megabatch.errors import PlanError
from megabatch.optim import LowBits
from megabatch.train.callbacks.ema import Average
from megabatch.train.config import OptimConfig
from megabatch.train.data.updates import NumUpdates
from megabatch.train.model.build_accumulator import use_recipe_keys
from megabatch.train.model.optimizer import build_optimizer, decay_steps_of, groups_of, lr_factor, optim_of
from tests.exact.launch import Run, launch, launch_all
from tests.train.conftest import Bench
from tests.train.jobs import (
    OPTIMIZERS,
    WHOLE_ONLY,
    Tiny,
    average_job,
    config_of,
    lay,
    learner_of,
    move,
    resumes,
    text,
    whole,
)
from tests.unit.failures.table import line_of

Make = Callable[..., Optimizer]


def factors(decay_steps: int | None, num_updates: int, **optim: Any) -> list[float]:
    return [lr_factor(step, OptimConfig(**optim), decay_steps) for step in range(num_updates)]


def test_the_warmup_rises_to_the_peak() -> None:
    assert factors(9, 4, warmup_steps=3, schedule="linear")[:4] == [0.25, 0.5, 0.75, 1.0]


def test_a_cosine_ends_at_its_share_and_stays_there() -> None:
    found = factors(8, 12, schedule="cosine", final_lr_share=0.2)
    expected = [0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(8)]
    assert found == pytest.approx([*expected, 0.2, 0.2, 0.2, 0.2], abs=1e-15)


def test_a_line_falls_evenly_after_the_warmup() -> None:
    found = factors(6, 8, warmup_steps=2, schedule="linear", final_lr_share=0.0)
    assert found == pytest.approx([1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25, 0, 0])


def test_a_constant_stays() -> None:
    assert factors(None, 5, schedule="constant", warmup_steps=1) == [0.5, 1, 1, 1, 1]


def test_wsd_stays_and_falls_at_the_end() -> None:
    assert factors(10, 12, schedule="wsd", cooldown_steps=4, final_lr_share=0.0) == pytest.approx(
        [1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0]
    )
    tenth = factors(40, 41, schedule="wsd", final_lr_share=0.5)
    assert tenth[:37] == [1] * 37
    assert tenth[37:] == pytest.approx([0.875, 0.75, 0.625, 0.5])


def test_wsd_never_falls_before_the_warmup_is_over() -> None:
    found = factors(6, 7, schedule="wsd", warmup_steps=4, cooldown_steps=6, final_lr_share=0.0)
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 0.5, 0])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_a_stream_needs_decay_steps_for_a_schedule_with_an_end(schedule: str) -> None:
    endless = NumUpdates(None, 50)
    assert decay_steps_of(config_of(schedule=schedule), NumUpdates(7, 3)) == 7
    assert decay_steps_of(config_of(schedule=schedule, decay_steps=30), endless) == 30
    with pytest.raises(MegabatchError, match=f'^optim.schedule is "{schedule}".* set optim.decay_steps, or'):
        decay_steps_of(config_of(schedule=schedule), endless)


def test_a_fall_that_has_no_place_is_refused() -> None:
    with pytest.raises(MegabatchError, match=r'^optim.cooldown_steps is set and optim.schedule is "cosine"'):
        decay_steps_of(config_of(cooldown_steps=5), NumUpdates(9, 9))
    with pytest.raises(MegabatchError, match=r"^optim.cooldown_steps is 10 and .* after 9 updates"):
        decay_steps_of(config_of(schedule="wsd", cooldown_steps=10), NumUpdates(9, 9))


def test_matrices_decay_vectors_do_not_and_frozen_parameters_are_nowhere() -> None:
    model = Tiny()
    model.embed.requires_grad_(False)
    decaying, others = groups_of(model.parameters(), 0.3)
    assert {id(each) for each in decaying["params"]} == {id(model.head.weight), id(model.unused.weight)}
    assert decaying["weight_decay"] == 0.3
    assert {id(each) for each in others["params"]} == {
        id(each) for each in (model.norm.weight, model.norm.bias, model.unused.bias)
    }
    assert others["weight_decay"] == 0.0


def test_a_learner_moves_as_plain_torch_does() -> None:
    """AdamW written out over the whole batch, each update's learning rate by hand; clipped by torch."""
    learner = learner_of("plain", schedule="linear", decay_steps=20, final_lr_share=0.0)
    model = Tiny()
    groups = [
        {"params": [each for each in model.parameters() if each.ndim == 2], "weight_decay": 0.1},
        {"params": [each for each in model.parameters() if each.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, betas=(0.9, 0.95), foreach=False, fused=False)
    for step, factor in enumerate([1 / 3, 2 / 3, 1, 17 / 18, 16 / 18]):
        move(learner, step)
        samples = [text(size, 100 * step + size) for size in (4, 9, 6)]
        total = torch.stack([sum_of_losses(model, sample) for sample in samples]).sum()
        (total / sum(int((sample["labels"][1:] != -100).sum()) for sample in samples)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for parameter in model.unused.parameters():  # reached by no sample: its gradient is zero
            parameter.grad = torch.zeros_like(parameter)
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * factor
        optimizer.step()
        optimizer.zero_grad()
    for found, expected in zip(learner.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-14)


def sum_of_losses(model: nn.Module, sample: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(sample["input_ids"][None])[0, :-1]  # [T - 1, V]
    return cross_entropy(logits, sample["labels"][1:], reduction="sum")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_adamw_is_fused_wherever_it_can_be(dtype: torch.dtype) -> None:
    assert build_optimizer(Tiny(dtype), OptimConfig()).param_groups[0]["fused"] is True
    assert build_optimizer(Tiny(dtype), OptimConfig(options={"fused": False})).param_groups[0]["fused"] is False
    assert build_optimizer(Tiny(dtype), OptimConfig(options={"foreach": True})).param_groups[0]["fused"] is None


@pytest.mark.usefixtures("group_of_one")
def test_adamw_is_fused_but_not_on_shards_of_a_cpu_whose_sizes_would_decide_its_bits() -> None:
    assert build_optimizer(Tiny(), OptimConfig()).param_groups[0]["fused"] is True
    model = lay(Tiny(), "fsdp2")
    assert not build_optimizer(model, OptimConfig()).param_groups[0]["fused"]
    assert not build_optimizer(model, OptimConfig(name="SGD")).param_groups[0]["fused"]
    for name in WHOLE_ONLY:
        with pytest.raises(MegabatchError, match=f"^optim.name is '{name}', and torch's .* parallel.wrapper = \"ddp\""):
            build_optimizer(model, OptimConfig(name=name))


def own(groups: list[dict[str, Any]], *, lr: float, lr_of_vectors: float) -> Optimizer:
    assert [sorted(group) for group in groups] == [["params", "weight_decay"]] * 2
    groups[1]["lr"] = lr_of_vectors
    return AdamW(groups, lr=lr)


def half(groups: list[dict[str, Any]], *, lr: float) -> Optimizer:
    return AdamW(groups[:1], lr=lr)


def nothing(groups: list[dict[str, Any]], *, lr: float) -> None:
    pass


def broken(groups: list[dict[str, Any]], *, lr: float) -> Optimizer:
    raise RuntimeError("no\nluck")


def test_a_function_of_ones_own_is_given_the_groups_the_rate_and_the_options() -> None:
    config = OptimConfig(function=f"{__name__}:own", lr=0.5, weight_decay=0.2, options={"lr_of_vectors": 0.25})
    groups = build_optimizer(Tiny(), config).param_groups
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.5, 0.2), (0.25, 0.0)]


def tensor_rate(groups: list[dict[str, Any]], *, lr: float, **options: Any) -> Optimizer:
    """A rate as compiled steps want it."""
    return torch.optim.AdamW(groups, lr=torch.tensor(lr), foreach=False, **options)


@pytest.mark.slow
def test_a_rate_that_is_a_tensor_is_written_as_a_number(bench: Bench) -> None:
    bench.train(optim__function=f"{__name__}:tensor_rate", run__max_steps=3)
    rates = [row["lr"] for row in bench.rows() if "lr" in row]
    assert rates == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2], rel=1e-6)


CASES: list[tuple[dict[str, Any], str]] = [
    ({"name": "adamw"}, "optim.name is 'adamw', which torch.optim does not have; the nearest name is AdamW"),
    ({"name": "Optimizer"}, "optim.name is 'Optimizer', which torch.optim does not have; the nearest name is "),
    ({"name": "LBFGS"}, "optim.name is 'LBFGS', which cannot be used: it runs the loss many times a step;"),
    ({"name": "SparseAdam"}, "optim.name is 'SparseAdam', which cannot be used: it takes sparse gradients"),
    ({"name": "muon"}, "optim.name is 'muon', which torch.optim does not have; the nearest name is Muon"),
    (
        {"name": "Muon", "options": {"ns_step": 4}},
        "unknown key optim.options.ns_step for Muon; the nearest key is ns_s",
    ),
    ({"name": "Muon", "options": {"momentum": -1.0}}, "torch's Muon refuses its arguments (ValueError: momentum"),
    ({"name": "SGD", "betas": (0.8, 0.9)}, "optim.betas is set and SGD has none; leave optim.betas out"),
    ({"name": "Rprop", "weight_decay": 0.2}, "optim.weight_decay is set and Rprop has none; leave"),
    ({"options": {"epsilon": 1e-9}}, "unknown key optim.options.epsilon for AdamW; the nearest key is eps"),
    ({"options": {"lr": 1e-9}}, "optim.options.lr is not an option; set optim.lr"),
    ({"options": {"betas": [0.9, 0.9]}}, "optim.options.betas is not an option; set optim.betas"),
    ({"options": {"params": []}}, "optim.options.params is not an option; the trainer gives it: leave it out"),
    ({"options": {"eps": -1.0}}, "torch's AdamW refuses its arguments (ValueError: Invalid epsilon value: -1.0)"),
    ({"options": {"eps": "small"}}, "torch's AdamW refuses its arguments (TypeError: "),
    ({"options": {"differentiable": True}}, "torch's AdamW refuses its arguments (RuntimeError: "),
    ({"name": "SGD", "options": {"nesterov": True}}, "torch's SGD refuses its arguments (ValueError: Nesterov"),
    ({"function": f"{__name__}:own", "options": {"lr": 1.0}}, "optim.options.lr is not an option; set optim.lr"),
    (
        {"function": f"{__name__}:own", "name": "SGD"},
        f"optim.name is set and is not passed to optim.function '{__name__}:own'; put",
    ),
    ({"function": f"{__name__}:own"}, f"optim.function '{__name__}:own' raised TypeError: own() missing 1 required"),
    ({"function": f"{__name__}:broken"}, f"optim.function '{__name__}:broken' raised RuntimeError: no luck ("),
    ({"function": f"{__name__}:nothing"}, f"optim.function '{__name__}:nothing' returned a NoneType; return a torch."),
    ({"function": f"{__name__}:half"}, f"optim.function '{__name__}:half' made an optimizer of 3 of the 6 parameters"),
    ({"function": f"{__name__}:none"}, f"optim.function is '{__name__}:none' and {__name__} has no such name"),
]


@pytest.mark.parametrize(("optim", "line"), CASES)
def test_a_mistake_is_one_line(optim: dict[str, Any], line: str) -> None:
    assert line_of(lambda: build_optimizer(Tiny(), OptimConfig(**optim))).startswith(line)


def test_muon_has_hidden_matrices_and_adamw_the_rest() -> None:
    model = Tiny()  # its last matrix counts as the head
    config = OptimConfig(name="Muon", lr=0.5, adamw_lr=0.25, betas=(0.8, 0.9), weight_decay=0.2)
    matrices, decaying, vectors = build_optimizer(model, config).param_groups
    assert [id(each) for each in matrices["params"]] == [id(model.head.weight)]
    assert [id(each) for each in decaying["params"]] == [id(model.embed.weight), id(model.unused.weight)]
    assert len(vectors["params"]) == 3
    assert [group["lr"] for group in (matrices, decaying, vectors)] == [0.5, 0.25, 0.25]
    assert [group["weight_decay"] for group in (matrices, decaying, vectors)] == [0.2, 0.2, 0.0]
    assert decaying["betas"] == vectors["betas"] == (0.8, 0.9)
    rate = build_optimizer(model, OptimConfig(name="Muon", lr=0.5)).param_groups[1]["lr"]
    assert rate == 0.5  # the sizes of updates are alike


def give_gradients(*models: nn.Module) -> None:
    """Give the same random gradients to models of the same parameters."""
    draw = torch.Generator().manual_seed(1)
    for same in zip(*(model.parameters() for model in models), strict=True):
        gradient = torch.randn(same[0].shape, generator=draw).bfloat16()
        for parameter in same:
            parameter.grad = gradient.to(parameter.dtype)


def test_muon_and_adamw_step_as_torchs_own() -> None:
    model, twin = Tiny(), Tiny()
    optimizer = build_optimizer(model, OptimConfig(name="Muon", lr=0.5, options={"fused": False}))
    others = [parameter for parameter in twin.parameters() if parameter is not twin.head.weight]
    matrices = [parameter for parameter in others if parameter.ndim == 2]
    vectors = [parameter for parameter in others if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    oracles = [
        torch.optim.Muon([twin.head.weight], lr=0.5, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        AdamW(groups, lr=0.5, betas=(0.9, 0.95)),
    ]
    for _ in range(3):
        give_gradients(model, twin)
        for stepped in (optimizer, *oracles):
            stepped.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert not torch.equal(twin.head.weight, Tiny().head.weight)


def test_low_bits_serve_muon_and_adamw() -> None:
    narrow, wide = Tiny(torch.bfloat16), Tiny(torch.bfloat16).float()
    optimizers = [build_optimizer(model, OptimConfig(name="Muon", lr=1e-4)) for model in (narrow, wide)]
    assert isinstance(optimizers[0], LowBits)
    for _ in range(5):
        give_gradients(narrow, wide)
        for optimizer in optimizers:
            optimizer.step()
    for parameter, expected in zip(narrow.parameters(), wide.parameters(), strict=True):
        assert torch.equal(optimizers[0].master_weight(parameter), expected)


@pytest.mark.usefixtures("group_of_one")
def test_low_bits_of_muon_are_refused_on_shards() -> None:
    model = lay(Tiny(torch.bfloat16), "fsdp2")
    with pytest.raises(PlanError, match="Muon cannot keep low bits of shards: Muon steps whole matrices; use DDP"):
        LowBits(torch.optim.Muon([model.head.weight]))


def test_muon_with_the_same_bits_on_a_cpu_does_not_fuse_adamw() -> None:
    config = config_of(name="Muon")
    same = config.model_copy(update={"update": config.update.model_copy(update={"same_bits": True})})
    for each, fused in ((config, True), (same, False)):
        groups = build_optimizer(Tiny(), optim_of(each, torch.device("cpu"))).param_groups
        assert [group["fused"] for group in groups[1:]] == [fused, fused]


def test_a_model_without_a_hidden_matrix_is_no_model_for_muon() -> None:
    model = Tiny()
    model.head.requires_grad_(False)
    with pytest.raises(MegabatchError, match=r"^optim.name is .Muon. and the model trains no matrix of a hidden layer"):
        build_optimizer(model, OptimConfig(name="Muon"))


def test_a_model_without_a_parameter_to_train_is_refused() -> None:
    with pytest.raises(MegabatchError, match="no parameter to train"):
        build_optimizer(Tiny().requires_grad_(False), OptimConfig())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_resumes_bit_for_bit(name: str) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        assert resumes("plain", dtype, name=name, **OPTIMIZERS[name]), dtype


@pytest.mark.slow
def test_every_optimizer_resumes_bit_for_bit_on_two_ranks(tmp_path: Path) -> None:
    names = [
        f"{name} {wrapper}"
        for name in OPTIMIZERS
        for wrapper in ("plain", "fsdp2")
        if wrapper == "plain" or name not in WHOLE_ONLY
    ]
    found = launch(2, "tests.train.jobs:resume_job", names, tmp_path, timeout_seconds=120)
    assert not failures(found)


def failures(found: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """The jobs that did not return true on every rank."""
    return {name: ranks for name, ranks in found.items() if not all(rank.get("value") is True for rank in ranks)}


@pytest.mark.parametrize(("words", "of_recipe"), [
    ("give max_microbatch_tokens= or micro_batch_size=, for shards give sync='last'",
     "give update.max_microbatch_tokens= or update.micro_batch_size=, for shards give update.sync='last'"),
    ("no_sync, update.sync and synchronize stay; memory_bytes is for",
     "no_sync, update.sync and synchronize stay; update.memory is for"),
    ("OneRow is given; leave OneRow out", "update.one_row is given; leave update.one_row out"),
])  # fmt: skip
def test_the_librarys_words_are_a_recipes(words: str, of_recipe: str) -> None:
    with pytest.raises(PlanError) as caught, use_recipe_keys():
        raise PlanError(words)
    assert str(caught.value) == of_recipe


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
    """The expected logits, on one process: a model without a wrapper, whose average is kept by hand."""
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
