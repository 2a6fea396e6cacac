"""A model whose matrices are cut over ranks has the plain model's gradient, weights, losses and checkpoints."""

import contextlib
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from transformers import AutoConfig, AutoModelForCausalLM

from megabatch import GradientAccumulator, MegabatchError, losses
from megabatch.train.config.parallel_layout import Layout
from megabatch.train.model.build import build
from megabatch.train.parallel.tensor_parallel import (
    FAMILIES,
    NO_BORDERS,
    Vocabulary,
    check_divisible,
    plain_terms,
    plan_of,
    spread,
    style_of,
    styles_of,
)
from megabatch.train.parallel.wrap import blocks_of
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks
from megabatch.verification.float64_copy import Float64WithoutDropout
from tests.exact.launch import launch
from tests.exact.oracle import answer, collate, relative_error, whole_error, worst_error
from tests.train.conftest import NO_DROPOUT, Bench
from tests.train.model_recipes import recipe

LENGTHS = ((9, 4, 13, 7), (5, 12, 3, 8, 6))  # of the samples of two calls
VOCABULARY = 61  # which two ranks do not divide
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": False,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 0,
    "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False,
}  # fmt: skip
MEMBER: dict[str, Any] = {  # of any family
    **SIZES, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 8,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "residual_dropout": 0.0, "embedding_dropout": 0.0,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SIZES),
    "tied": (
        "llama",
        {**SIZES, "tie_word_embeddings": True, "pad_token_id": 4, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2": ("qwen2", SIZES),
    "qwen3": ("qwen3", {**SIZES, "head_dim": 8}),
    "gpt2": ("gpt2", GPT2),
    "dropout": ("gpt2", {**GPT2, "resid_pdrop": 0.2, "embd_pdrop": 0.2}),
}


def new_model(family: str, dtype: torch.dtype) -> nn.Module:
    """The same weights at every call, none at 0 or 1; norms compute in the weights' type."""
    kind, keys = MODELS[family]
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **keys)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(exact_norm, module)
    return model.to(dtype)


def exact_norm(norm: Any, hidden: Tensor) -> Tensor:
    """RMSNorm without transformers' detour over float32."""
    return norm.weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon))


def samples(call: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(call)
    found = [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS[call]]
    return [{"input_ids": ids, "labels": ids.where(torch.arange(len(ids)) > len(ids) // 3, -100)} for ids in found]


def sums(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """The loss in plain torch."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    targets = batch["labels"][:, 1:].flatten()
    return {"loss": (F.cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum())}


def wrapped(model: nn.Module, wrapper: str, mesh: DeviceMesh) -> nn.Module:
    wrap = {"fsdp2": fully_shard, "replicate": replicate}.get(wrapper)
    if wrap is not None:
        data = mesh["dp_shard" if wrapper == "fsdp2" else "dp_replicate"]
        for block in blocks_of(model).values():
            wrap(block, mesh=data)
        wrap(model, mesh=data)
    return model


def run_job(name: str) -> Any:
    """The job "kind ..."."""
    kind, _, rest = name.partition(" ")
    return {"gradient": gradient_job, "family": family_job, "slope": slope_job, "weights": weights_job}[kind](rest)


def gradient_job(name: str) -> dict[str, Any]:
    """The error of the gradient of "family wrapper stream logits dtype sync"."""
    family, wrapper, sequence, cut, dtype, sync = name.split()
    axes = ("dp_shard" if wrapper == "fsdp2" else "dp_replicate", "tp")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=axes)
    model = new_model(family, getattr(torch, dtype))
    spread(model, mesh["tp"], sequence_parallel=sequence == "sequence", loss_parallel=cut == "cut")
    model = wrapped(model, wrapper, mesh)
    gradient = GradientAccumulator(model, mesh=mesh, micro_batch_size=2, sync=sync)
    rank, degree = mesh.get_local_rank(0), mesh.size(0)
    around = loss_parallel if cut == "cut" else contextlib.nullcontext
    cuts: list[list[list[dict[str, Tensor]]]] = []  # samples of the microbatches of the calls
    torch.manual_seed(11)
    for call in range(len(LENGTHS)):
        with around():
            gradient.forward_backward(samples(call)[rank::degree], plain_terms(losses.next_token))
            cuts.append([[samples(call)[row] for row in rows] for rows in gradient.last_plan.microbatches])
    update = gradient.finalize(max_norm=1e9)
    expected = reference(family, getattr(torch, dtype), [each for cut in cuts for each in cut])
    found = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    error, worst = worst_error(found, expected)
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in expected.values()]))
    return {
        "error": error,
        "parameter": worst,
        "whole": whole_error(found, expected),
        "norm": relative_error(update.grad_norm, norm),
        "placed": all(placed_alike(parameter) for parameter in model.parameters()),
    }


def reference(family: str, dtype: torch.dtype, microbatches: list[list[dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Plain torch's gradient of both calls; with dropout, cut as it was on the one data rank, to draw the same."""
    model = new_model(family, dtype)
    if family != "dropout":
        return answer(model, sums, [*samples(0), *samples(1)]).gradients
    torch.manual_seed(11)
    terms = [sums(model, collate(each))["loss"] for each in microbatches]
    (sum(total for total, _ in terms) / sum(int(weight) for _, weight in terms)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def family_job(name: str) -> dict[str, float]:
    """The errors of loss and gradients of "family stream logits", with a row that is padded, in float64."""
    family, sequence, cut = name.split()
    expected, loss = family_gradients(new_member(family), contextlib.nullcontext())
    model = new_member(family)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    spread(model, mesh, sequence_parallel=sequence == "sequence", loss_parallel=cut == "cut")
    found, its_loss = family_gradients(model, loss_parallel() if cut == "cut" else contextlib.nullcontext())
    errors = {each: relative_error(found[each], expected[each]) for each in expected}
    return {"loss": relative_error(its_loss, loss), **errors}


def new_member(family: str) -> nn.Module:
    """The same weights at every call, none at 0 or 1."""
    torch.manual_seed(5)
    config = AutoConfig.for_model(family, **(GPT2 if family == "gpt2" else MEMBER))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def family_gradients(model: nn.Module, around: Any) -> tuple[dict[str, Tensor], Tensor]:
    batch = collate(samples(0)[:3])  # of 9, 4 and 13 tokens
    mask = (batch["labels"] != -100).long()
    mask = mask.flip(1).cumsum(1).flip(1).clamp(max=1)  # a row's tokens up to its last target
    with around, Float64WithoutDropout():
        logits = model(input_ids=batch["input_ids"], attention_mask=mask).logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum")
        loss.backward()
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}, whole(loss.detach())


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_alike(parameter: Any) -> bool:
    """Return True if a gradient lies as its parameter does, so that an optimizer sends nothing."""
    return isinstance(parameter, DTensor) and parameter.grad.placements == parameter.placements


def slope_job(family: str) -> float:
    """By how much the gradient along a direction is not the loss's slope there, by differences; with dropout, which
    ranks must draw alike wherever they hold the same, and lengths that they do not divide."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = new_model(family, torch.float64)
    spread(model, mesh, sequence_parallel=True, loss_parallel=False)
    batches = [collate(samples(call)[:3]) for call in (0, 1)]  # of 13 and 12 tokens
    parameters = list(model.parameters())
    torch.manual_seed(1)  # the same direction on both ranks, of which each holds its part
    directions = [distribute_like(torch.randn(each.shape, dtype=each.dtype), each) for each in parameters]

    def loss_at(distance: float, *, differentiate: bool = False) -> float:
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.add_(direction, alpha=distance)
        torch.manual_seed(3)
        loss = sum((sums(model, batch)["loss"][0] for batch in batches), torch.zeros(()))
        if differentiate:
            loss.backward()
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.sub_(direction, alpha=distance)
        return float(loss.detach())

    loss_at(0.0, differentiate=True)
    slope = sum(float((whole(p.grad) * whole(d)).sum()) for p, d in zip(parameters, directions, strict=True))
    measured = (loss_at(1e-6) - loss_at(-1e-6)) / 2e-6
    return abs(slope - measured) / abs(slope)


def distribute_like(tensor: Tensor, parameter: Any) -> Tensor:
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)


def weights_job(name: str) -> list[str]:
    """The tensors of "family wrapper dp_replicate dp_shard tp" that do not have the bits of the plain model's."""
    family, wrapper, dp_replicate, dp_shard, tp = name.rsplit(maxsplit=4)
    layout = Layout(int(dp_replicate), int(dp_shard), tp=int(tp))
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), layout)
    config = recipe(family=family, wrapper=None if wrapper == "plain" else wrapper)
    parallel = config.parallel.model_copy(update={"tp": layout.tp})
    plain, here = (
        build(each, its, Console(enabled=False, loss_digits=4), 10, None).base
        for each, its in (
            (recipe(family=family), Ranks(0, 1, torch.device("cpu"))),
            (config.model_copy(update={"parallel": parallel}), ranks),
        )
    )
    expected = dict(plain.named_parameters())
    return [name for name, each in here.named_parameters() if not torch.equal(whole(each), expected[name])]


GRADIENTS = {  # ranks → "family wrapper stream logits dtype sync"
    2: [
        "llama plain whole whole float64 auto",
        "llama plain sequence cut float64 auto",
        "llama plain sequence cut float32 auto",
        "tied plain sequence whole float64 auto",
        "qwen2 plain sequence cut float64 auto",
        "qwen3 plain whole whole float64 auto",
        "qwen3 plain sequence cut float64 auto",
        "gpt2 plain whole whole float64 auto",
        "gpt2 plain sequence cut float64 auto",
        "dropout plain whole whole float64 auto",
    ],
    4: [
        "llama fsdp2 sequence cut float64 auto",
        "llama plain sequence whole float64 auto",
        "tied replicate sequence whole float64 auto",
        "qwen3 fsdp2 sequence cut float64 last",
        "gpt2 fsdp2 whole whole float64 last",
        "gpt2 fsdp2 sequence cut float32 auto",
    ],
}
SLOPES = {2: ["dropout", "gpt2"]}
WEIGHTS = {  # ranks → "family wrapper dp_replicate dp_shard tp"
    2: [f"{family} plain 1 1 2" for family in ("llama", "gpt2", "qwen2")],
    4: [*(f"{family} fsdp2 1 2 2" for family in ("tied llama", "gpt2")), "gpt2 replicate 2 1 2", "gpt2 fsdp2 2 2 1"],
}
MEMBERS = {2: [f"{family} {how}" for family in FAMILIES for how in ("whole whole", "sequence cut")]}
CELLS = {"gradient": GRADIENTS, "family": MEMBERS, "slope": SLOPES, "weights": WEIGHTS}
JOBS = [f"{kind} {name}" for kind, cells in CELLS.items() for names in cells.values() for name in names]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for ranks in (2, 4):
        jobs = [f"{kind} {name}" for kind, cells in CELLS.items() for name in cells.get(ranks, [])]
        found |= launch(ranks, "tests.train.test_tensor:run_job", jobs, tmp_path_factory.mktemp(f"tensor{ranks}"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_the_cut_model_is_the_plain_one(results: dict[str, list[dict[str, Any]]], job: str) -> None:
    kind, _, name = job.partition(" ")
    for result in results[job]:
        assert "error" not in result, result["error"]
        value = result["value"]
        if kind == "slope":
            assert value < 1e-6  # of differences
        elif kind == "weights":
            assert value == []
        elif kind == "family":
            assert max(value.values()) < 1e-12, max(value, key=lambda each: value[each])
        else:
            bound = 1e-12 if "float64" in name else 1e-6
            assert value["error"] < bound, value["parameter"]
            assert value["norm"] < bound
            assert value["placed"]


def test_the_samples_have_what_could_go_wrong() -> None:
    """The padding token among the inputs, a vocabulary and lengths that two ranks do not divide."""
    tokens = {int(token) for call in (0, 1) for sample in samples(call) for token in sample["input_ids"]}
    assert MODELS["tied"][1]["pad_token_id"] in tokens
    assert VOCABULARY % 2 == 1
    assert max(len(sample["input_ids"]) for sample in samples(0)) % 2 == 1


def model_of(kind: str, **keys: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **keys))


@pytest.mark.parametrize(
    ("kind", "keys", "line"),
    [
        ("llama", {**SIZES, "num_attention_heads": 6, "hidden_size": 24}, "num_attention_heads = 6"),
        ("llama", SIZES, "num_key_value_heads = 2"),
        ("qwen3", {**SIZES, "num_key_value_heads": 4, "intermediate_size": 26}, "intermediate_size = 26"),
        ("gpt2", {**GPT2, "n_head": 2}, "n_head = 2"),
        ("gpt2", {**GPT2, "n_inner": 30}, "n_inner = 30"),
    ],
)
def test_what_the_ranks_do_not_divide_is_named(kind: str, keys: dict[str, Any], line: str) -> None:
    with pytest.raises(MegabatchError, match=f"^parallel.tp is 4, which does not divide model.config.{line}; set"):
        check_divisible(model_of(kind, **keys), 4)


def test_a_model_without_a_plan_is_refused() -> None:
    for model, kind in ((nn.Linear(2, 2), "Linear"), (model_of("mixtral", **SIZES), "model of type mixtral")):
        with pytest.raises(MegabatchError, match=f"^parallel.tp is above 1 and no plan for a {kind} is known"):
            plan_of(model)


def test_a_norm_of_some_of_the_heads_that_the_plan_does_not_name_is_refused() -> None:
    """Its gradient would be that of this rank's heads."""
    model = model_of("cohere", **SIZES, use_qk_norm=True)
    with pytest.raises(MegabatchError, match=r"does not say how model.layers.0.self_attn.q_norm \(CohereLayerNorm\)"):
        styles_of(model, plan_of(model), False, False, NO_BORDERS)


def test_a_plan_may_name_the_input_embedding() -> None:
    """transformers 5.17 names it in the plan of Cohere."""
    model = model_of("cohere", **SIZES)
    plan = plan_of(model)
    unnamed = {name: entry for name, entry in plan.items() if "embed_tokens" not in name}
    named = {"model.embed_tokens": "embedding_rowwise", **unnamed}
    for sequence_parallel in (False, True):
        styles = styles_of(model, named, sequence_parallel, False, NO_BORDERS)
        assert repr(styles) == repr(styles_of(model, unnamed, sequence_parallel, False, NO_BORDERS))
        assert isinstance(styles["model.embed_tokens"], Vocabulary)
    with pytest.raises(MegabatchError, match="has the entry 'embedding_rowwise', which"):
        styles_of(model, {**named, "model.layers.*.mlp.up_proj": "embedding_rowwise"}, False, False, NO_BORDERS)


def test_an_unknown_entry_of_a_plan_is_refused() -> None:
    with pytest.raises(MegabatchError, match=r"^the tensor-parallel plan .* has the entry 'packed_colwise', which"):
        style_of("packed_colwise", nn.Linear(2, 2), torch.distributed.tensor.Replicate(), False)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks and keys
    "tp": (2, {"parallel__tp": 2}),
    "fsdp2 x tp": (
        4,
        {
            "parallel__tp": 2,
            "parallel__wrapper": "fsdp2",
            "parallel__sequence_parallel": True,
            "parallel__loss_parallel": True,
            "model__activation_checkpointing": "selective",
        },
    ),
    "hsdp": (4, {"parallel__dp_replicate": 2, "parallel__dp_shard": 2}),
    "cp x tp": (4, {"parallel__cp": 2, "parallel__tp": 2}),
}


@pytest.mark.slow
def test_a_run_prints_the_same_losses_in_every_layout(bench: Bench) -> None:
    reference = losses_of(bench, "plain", 1, {})
    assert len(reference) == 2 * (3 + 3)  # updates, and evaluations at 0, 2 and 3
    assert reference[-2] < reference[0] - 0.5
    for name, (ranks, keys) in LAYOUTS.items():
        assert losses_of(bench, name, ranks, keys) == pytest.approx(reference, rel=1e-10), name


def losses_of(bench: Bench, name: str, ranks: int, keys: dict[str, Any]) -> list[float]:
    folder = bench.path / name
    bench.train(ranks=ranks, run__folder=folder, run__max_steps=3, **NO_DROPOUT, **keys)
    return [row[key] for row in bench.rows(folder) for key in ("loss", "eval_loss", "num_target_tokens") if key in row]


@pytest.mark.slow
def test_a_checkpoint_of_shards_of_cut_matrices_goes_on_on_one_process(bench: Bench) -> None:
    keys = {"optim__decay_steps": 6, "optim__ema_decay": 0.5, **NO_DROPOUT}
    bench.train(run__folder=bench.path / "whole", **keys)
    cut = {"parallel__tp": 2, "parallel__wrapper": "fsdp2", "run__max_steps": 3}
    bench.train(ranks=4, **cut, **keys)
    assert "tensor parallel over 2 ranks" in (bench.folder / "plan.txt").read_text()
    bench.train(run__resume=True, **keys)
    assert bench.losses() == pytest.approx(bench.losses(bench.path / "whole"), rel=1e-10)
