"""Muon has the bits of torch's Muon and AdamW in one process, on any shards, and planted bugs are caught."""

import copy
import inspect
import itertools
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2LMHeadModel, LlamaConfig

from megabatch import GradientAccumulator
from megabatch.errors import PlanError
from megabatch.optim import LowBits, Muon, muon, split_parameters
from tests.exact.launch import of_ranks
from tests.unit.failures.table import check_error

NUM_STEPS = 10
WIDTHS = (11, 7, 16, 5, 9, 11)  # of layers; no number of ranks divides all
TOKENS = torch.arange(44).reshape(4, 11) * 7 % 13  # [B, T]
OPTIONS: dict[str, dict[str, Any]] = {
    "nesterov": {},
    "original": {"adjust_lr_fn": "original", "nesterov": False, "momentum": 0.8, "weight_decay": 0.3},
}


class Deep(nn.Module):
    """Logits of the next of 13 tokens, through five uneven matrices."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.table, self.norm = nn.Embedding(13, WIDTHS[0]), nn.LayerNorm(WIDTHS[0])
            self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(WIDTHS))
            self.head = nn.Linear(WIDTHS[-1], 13)

    def forward(self, tokens: Tensor) -> Tensor:  # [B, T] -> [B, T, 13]
        hidden = self.norm(self.table(tokens))
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden)


def backward(model: nn.Module) -> None:
    model.zero_grad()
    cross_entropy(model(TOKENS)[:, :-1].flatten(0, 1).float(), TOKENS[:, 1:].flatten()).backward()


def divided(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The layers' matrices, and the rest, by name."""
    named = dict(model.named_parameters())
    matrices = [each for name, each in named.items() if name.startswith("layers") and name.endswith("weight")]
    return matrices, [each for name, each in named.items() if not (name.startswith("layers") and "weight" in name)]


def torchs(model: nn.Module, options: dict[str, Any]) -> list[optim.Optimizer]:
    """The oracle: torch's optimizers on whole parameters."""
    matrices, others = divided(model)
    kinds: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw"} | options
    return [optim.Muon(matrices, lr=0.02, **kinds), optim.AdamW(others, lr=3e-3, foreach=False)]


def ours(model: nn.Module, options: dict[str, Any], kind: Any = Muon) -> Any:
    matrices, others = divided(model)
    return kind(matrices, optim.AdamW(others, lr=3e-3, foreach=False), lr=0.02, **options)


def differing(found: nn.Module, expected: nn.Module) -> list[str]:
    pairs = zip(found.named_parameters(), expected.parameters(), strict=True)
    return [name for (name, one), other in pairs if not torch.equal(whole(one), other)]


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trained(
    model: nn.Module, optimizer: Any, options: dict[str, Any], num_steps: int = NUM_STEPS, start: int = 0
) -> tuple[nn.Module, list[str]]:
    """Step both from the gradients of the oracle's model, with falling rates; that model, and what differs."""
    expected = Deep()
    oracles = torchs(expected, options)
    for step in range(num_steps):
        backward(expected)
        for one, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert other.grad is not None
            one.grad = laid_as(other.grad, one)
        for each in (*oracles, *([optimizer] if step >= start else ())):
            for group in each.param_groups:
                group["lr"] = (0.02 if "momentum" in group else 3e-3) / (1 + step)
            each.step()
    return expected, differing(model, expected)


def laid_as(gradient: Tensor, like: Any) -> Tensor:
    if hasattr(like, "device_mesh"):
        return distribute_tensor(gradient.clone(), like.device_mesh, like.placements, src_data_rank=None)
    return gradient.to(like.dtype, copy=True)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_plain_model_has_the_bits_of_torch(name: str) -> None:
    model = Deep()
    assert not trained(model, ours(model, OPTIONS[name]), OPTIONS[name])[1]
    assert len(differing(model, Deep())) == len(list(model.parameters()))


def test_it_is_an_optimizer() -> None:
    """Hooks, closures, copies and saved states; a schedule scales the rates of both kinds of groups."""
    model = Deep()
    optimizer: Muon = ours(model, {})
    seen: list[object] = []
    optimizer.register_step_post_hook(lambda hooked, *_: seen.append(hooked))
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    trained(model, optimizer, {}, 3)
    assert seen == [optimizer] * 3
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 1.5e-3]

    def closure() -> float:
        backward(model)
        return 2.5

    copied = pickle.loads(pickle.dumps(optimizer))
    loaded = ours(Deep(), {})
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    backward(model)
    for other in (copied, loaded):
        pairs = zip(parameters_of(optimizer), parameters_of(other), strict=True)
        for one, each in pairs:
            each.data.copy_(one)
            each.grad = one.grad
        other.step()
    assert optimizer.step(closure) == 2.5
    for other in (copied, loaded):
        assert all(map(torch.equal, parameters_of(optimizer), parameters_of(other)))


def parameters_of(optimizer: optim.Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def test_the_momentum_of_bfloat16_matrices_is_not_divided() -> None:
    """torch's iteration divides its argument in place; without nesterov and in bfloat16 that is the momentum."""
    matrix = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = Muon([matrix], nesterov=False, momentum=0.5)
    matrix.grad = torch.full_like(matrix, 2.0)
    optimizer.step()
    assert optimizer.state[matrix]["momentum_buffer"].eq(1.0).all()


@pytest.mark.usefixtures("group_of_one")
def test_what_it_cannot_step_is_refused() -> None:
    matrix = nn.Parameter(torch.ones(4, 4))
    hooked = optim.SGD([nn.Parameter(torch.ones(2))])
    hooked.register_step_pre_hook(print)
    mesh = init_device_mesh("cpu", (1, 1))
    both = distribute_tensor(matrix.detach(), mesh, [Shard(0), Shard(1)])
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: Muon([matrix], optim.SGD([matrix])), "a matrix is also a parameter of SGD"),
        (lambda: Muon([matrix], hooked), "SGD has the step hook 'print' … Muon"),
        (lambda: Muon([nn.Parameter(both)]), "shape (4, 4) … Shard(dim=0), Shard(dim=1) … tensor parallelism"),
    ]
    for make, seen in cases:
        with pytest.raises(PlanError) as caught:
            make()
        check_error(str(caught.value), seen)
    one_axis = distribute_tensor(matrix.detach(), mesh, [Replicate(), Shard(0)])
    assert Muon([nn.Parameter(one_axis)])


@pytest.mark.usefixtures("group_of_one")
def test_the_same_bits_on_any_number_of_ranks_go_with_it() -> None:
    model = Deep()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))
    gradient = GradientAccumulator(model, micro_batch_size=1, same_bits=True)
    gradient.reserve_for(ours(model, {}))
    gradient.reserve_for(Muon(divided(model)[0]))
    for refused in (optim.Muon(divided(model)[0]), Muon(divided(model)[0], optim.Adafactor(divided(model)[1]))):
        with pytest.raises(PlanError, match=r"^same_bits=True and \w+ steps a shard to other bits"):
            gradient.reserve_for(refused)


def test_rounds_have_matrices_of_like_cost() -> None:
    assert muon.newton_schulz_cost(4, 9) == muon.newton_schulz_cost(9, 4) == 4 * 4 * (2 * 9 + 4)
    matrices, _ = divided(Deep())
    for each in matrices[1:]:
        each.grad = torch.zeros_like(each)
    ((group),) = Muon(matrices).param_groups
    costs = [muon.newton_schulz_cost(*each.shape) for (each,) in Muon.rounds(group)]
    assert costs == sorted(costs, reverse=True)
    assert len(costs) == len(matrices) - 1  # without a gradient there is no step


def names_of(model: nn.Module) -> list[str]:
    """Names of the matrices for Muon; the others are the rest."""
    matrices, others = split_parameters(model)
    names = {id(each): name for name, each in model.named_parameters()}
    trained = [id(each) for each in model.parameters() if each.requires_grad]
    assert sorted(map(id, [*matrices, *others])) == sorted(trained)
    return [names[id(each)] for each in matrices]


def test_hidden_matrices_are_found() -> None:
    assert names_of(Deep()) == [f"layers.{index}.weight" for index in range(5)]
    sizes: dict[str, Any] = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 13, "n_positions": 8}
    gpt2 = GPT2LMHeadModel(GPT2Config(**sizes))
    inner = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    assert names_of(gpt2) == [f"transformer.h.0.{each}.weight" for each in inner]
    assert names_of(gpt2.transformer) == [f"h.0.{each}.weight" for each in inner]
    config = LlamaConfig(hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, vocab_size=13)
    classifier = AutoModelForSequenceClassification.from_config(config)
    classifier.model.layers[0].mlp.requires_grad_(False)
    assert names_of(classifier) == [f"model.layers.0.self_attn.{each}_proj.weight" for each in "qkvo"]


def sharded(kind: str) -> nn.Module:
    model, world = Deep(), dist.get_world_size()
    if kind == "columns":
        mesh = init_device_mesh("cpu", (world,))
        for module in model.modules():
            for name, each in list(module.named_parameters(recurse=False)):
                laid = distribute_tensor(each.detach(), mesh, [Shard(1 if each.ndim == 2 else 0)])
                setattr(module, name, nn.Parameter(laid))
        return model
    axes = ("dp_replicate", "dp_shard")
    mesh = init_device_mesh(
        "cpu", (2, world // 2) if kind == "hsdp" else (world,), mesh_dim_names=axes[kind != "hsdp" :]
    )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def shard_job(name: str) -> Any:
    """``"fsdp2 nesterov"``: what differs from the oracle after ten steps; ``"planted ..."``: the same with a bug."""
    kind, _, rest = name.partition(" ")
    if kind == "planted":
        model = sharded("fsdp2")
        return trained(model, ours(model, OPTIONS["nesterov"], planted(rest).Muon), OPTIONS["nesterov"])[1]
    model = sharded(kind)
    optimizer = ours(model, OPTIONS[rest])
    _, found = trained(model, optimizer, OPTIONS[rest])
    with CommDebugMode() as counted:
        optimizer.step()
    buffers = [each["momentum_buffer"] for each in optimizer.state.values() if "momentum_buffer" in each]
    is_laid = all(hasattr(each, "device_mesh") for each in buffers) and len(buffers) == len(WIDTHS) - 1
    comms = {str(key).rpartition(".")[2]: count for key, count in counted.get_comm_counts().items()}
    return [found, comms, is_laid]


def resize_job(name: str) -> list[str]:
    """Five updates on shards, the state through torch's functions to a whole model, and five more."""
    source, options = sharded("fsdp2"), OPTIONS["nesterov"]
    optimizer = ours(source, options)
    trained(source, optimizer, options, 5)
    full = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(source, optimizer, options=full)
    weights = {key: whole(value) for key, value in source.state_dict().items()}
    model = sharded("fsdp2") if name == "to shards" else Deep()
    target = ours(model, options)
    values = {key: laid_as(value, dict(model.named_parameters())[key]) for key, value in weights.items()}
    model.load_state_dict(values)
    set_optimizer_state_dict(model, target, copy.deepcopy(state) if dist.get_rank() == 0 else state, options=full)
    return trained(model, target, options, NUM_STEPS, start=5)[1]


def low_bits_job(name: str) -> list[str]:
    """bfloat16 weights with low bits against float32 ones, on shards."""
    model, wide = Deep().bfloat16(), Deep().bfloat16().float()
    oracles = torchs(wide, {})
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = LowBits(ours(model, {}))
    source = Deep().bfloat16()
    for _ in range(NUM_STEPS):
        with torch.no_grad():
            for one, other in zip(model.parameters(), source.parameters(), strict=True):
                other.copy_(whole(one))
        backward(source)
        for one, other, given in zip(model.parameters(), wide.parameters(), source.parameters(), strict=True):
            assert given.grad is not None
            one.grad, other.grad = laid_as(given.grad, one), given.grad.float()
        for each in (*oracles, optimizer):
            each.step()
    pairs = zip(model.named_parameters(), wide.parameters(), strict=True)
    return [key for (key, one), other in pairs if not torch.equal(whole(optimizer.master_weight(one)), other)]


MUTATIONS = {
    "each shard by itself": (
        "updates = sharding.orthogonalize([each.shape for each in matrices], updates, orthogonalize)",
        "updates = list(map(orthogonalize, updates))",
    ),
    "the rate of a shard": ('group["adjust_lr_fn"], matrix.shape)', 'group["adjust_lr_fn"], _local(matrix).shape)'),
    "shards come back from another matrix": (
        "pieces = sent.split(shard_sizes)[: len(updates)]",
        "pieces = sent.flip(0).split(shard_sizes)[: len(updates)]",
    ),
}


def planted(name: str) -> Any:
    source, (old, new) = inspect.getsource(muon), MUTATIONS[name]
    assert source.count(old) == 1
    module = ModuleType("planted")
    exec(compile(source.replace(old, new), "planted", "exec"), vars(module))
    return module


CELLS = {
    1: ["fsdp2 nesterov"],
    2: [
        "fsdp2 nesterov",
        "fsdp2 original",
        "columns nesterov",
        "hsdp nesterov",
        *(f"planted {each}" for each in MUTATIONS),
    ],
    3: ["fsdp2 nesterov", "fsdp2 original", "columns nesterov"],
    4: ["hsdp nesterov"],
}
shards = of_ranks(f"{__name__}:shard_job", CELLS)
resized = of_ranks(f"{__name__}:resize_job", {2: ["to shards", "whole"], 3: ["whole"]})
narrow = of_ranks(f"{__name__}:low_bits_job", {2: ["low bits"], 3: ["low bits"]})


WHOLE = [(world, name) for world, names in CELLS.items() for name in names if "planted" not in name]


@pytest.mark.full
@pytest.mark.parametrize(("world", "name"), WHOLE)
def test_shards_have_the_bits_of_one_process(shards: Any, world: int, name: str) -> None:
    width = 2 if (world, name) == (4, "hsdp nesterov") else 1 if name.startswith("hsdp") else world
    rounds = -(-(len(WIDTHS) - 1) // width)
    for found, comms, is_laid in shards(name, world):
        assert not found
        assert comms == {"all_to_all_single": 2 * rounds} or comms == {"alltoall_base_": 2 * rounds}
        assert is_laid


@pytest.mark.full
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_of_shards_is_caught(shards: Any, name: str) -> None:
    assert all(shards(f"planted {name}", 2))


@pytest.mark.full
@pytest.mark.parametrize(("world", "name"), [(2, "to shards"), (2, "whole"), (3, "whole")])
def test_the_state_goes_to_other_shards(resized: Any, world: int, name: str) -> None:
    assert resized(name, world) == [[]] * world


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3])
def test_bfloat16_weights_with_low_bits_move_as_in_float32(narrow: Any, world: int) -> None:
    assert narrow("low bits", world) == [[]] * world
