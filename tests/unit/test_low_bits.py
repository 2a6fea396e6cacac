"""bfloat16 parameters with their low bits move as float32 parameters do, bit for bit, and planted bugs are caught."""

import copy
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megabatch.errors import PlanError
from megabatch.optim import LowBits, low_bits
from tests.exact.launch import launch, of_ranks, values
from tests.unit.failures.table import check_error

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any], int]] = {  # with its options and a number of steps
    "AdamW": (optim.AdamW, {"foreach": False}, 200),
    "AdamW foreach": (optim.AdamW, {"foreach": True}, 200),
    "AdamW fused": (optim.AdamW, {"fused": True}, 200),
    "Adam": (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}, 30),
    "SGD": (optim.SGD, {}, 30),
    "SGD momentum": (optim.SGD, {"momentum": 0.9, "nesterov": True}, 30),
    "NAdam": (optim.NAdam, {}, 30),
    "RMSprop": (optim.RMSprop, {"momentum": 0.9}, 30),
    "Adagrad": (optim.Adagrad, {}, 30),
}
TOKENS = torch.arange(44).reshape(4, 11) * 7 % 13  # [B, T]


class Small(nn.Module):
    """Logits of the next of 13 tokens, from matrices of uneven sizes, a convolution and vectors."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.table = nn.Embedding(13, 5)
            self.norm = nn.LayerNorm(5)
            self.mix = nn.Conv2d(5, 5, (1, 3), padding=(0, 2)).to(memory_format=torch.channels_last)
            self.head = nn.Linear(5, 13)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.table(tokens))  # [B, T, 5]
        mixed = self.mix(hidden.transpose(1, 2)[:, :, None])[:, :, 0, : tokens.shape[1]]  # [B, 5, T]
        return self.head(mixed.transpose(1, 2))


def pair(kind: type[Optimizer], options: dict[str, Any], wrap: Callable[..., Any]) -> tuple[Any, Any, Any, Any]:
    """A bfloat16 model with low bits, and a float32 model of the same values, each with its optimizer."""
    narrow = Small().bfloat16()
    wide = copy.deepcopy(narrow).float()
    made, expected = (kind(each.parameters(), lr=1e-5, **options) for each in (narrow, wide))
    return narrow, wrap(made), wide, expected


def give_gradients(narrow: nn.Module, wide: nn.Module) -> None:
    """The gradient of the bfloat16 model, to both."""
    narrow.zero_grad()
    cross_entropy(narrow(TOKENS)[:, :-1].flatten(0, 1).float(), TOKENS[:, 1:].flatten()).backward()
    for one, other in zip(narrow.parameters(), wide.parameters(), strict=True):
        assert one.grad is not None
        other.grad = one.grad.float()


def differing(narrow: nn.Module, optimizer: Any, wide: nn.Module) -> list[str]:
    """Names of the parameters whose joined bits are not those of float32, or that are not the nearest bfloat16."""
    found: list[str] = []
    for (name, one), other in zip(narrow.named_parameters(), wide.parameters(), strict=True):
        nearest = (one.double() - other.double()).abs() <= (other.bfloat16().double() - other.double()).abs()
        if not torch.equal(optimizer.master_weight(one), other) or not bool(nearest.all()):
            found.append(name)
    return found


def check_learning(wrap: Callable[..., Any], name: str = "AdamW foreach", num_steps: int = 40) -> None:
    """The state is saved and loaded into new objects on the way."""
    kind, options, _ = OPTIMIZERS[name]
    narrow, optimizer, wide, expected = pair(kind, options, wrap)
    schedules = [LambdaLR(each, lambda step: 1 / (1 + step / 50)) for each in (optimizer, expected)]
    for step in range(num_steps):
        give_gradients(narrow, wide)
        optimizer.step()
        expected.step()
        for schedule in schedules:
            schedule.step()
        if step == num_steps // 2:
            weights, state = copy.deepcopy(narrow.state_dict()), copy.deepcopy(optimizer.state_dict())
            narrow = Small().bfloat16()
            optimizer = wrap(kind(narrow.parameters(), lr=1e-5, **options))
            again = LambdaLR(optimizer, lambda step: 1 / (1 + step / 50))
            again.load_state_dict(schedules[0].state_dict())
            schedules[0] = again
            optimizer.load_state_dict(state)  # before the model, too
            narrow.load_state_dict(weights)
    assert not differing(narrow, optimizer, wide)
    assert not any(map(torch.equal, wide.parameters(), Small().bfloat16().float().parameters()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_move_as_in_float32_bit_for_bit(name: str) -> None:
    check_learning(LowBits, name, OPTIMIZERS[name][2])


SPECIAL = [0x0, 0x80000000, 0x3F808000, 0xBF808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x7F7FFFFF, 0x7F800000,
           0xFF800000, 0x00000001, 0x80008000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000]  # fmt: skip


def check_bits(module: Any) -> None:
    """Split and join all kinds of floats: ties, zeros, the largest, denormal ones, infinity, what is no number."""
    some = torch.randint(0, 2**32, (300_000,), generator=torch.Generator().manual_seed(0))
    bits = torch.cat([torch.tensor(SPECIAL), some])
    weights = (bits - (bits >= 2**31) * 2**32).to(torch.int32).view(torch.float32)
    high, low = torch.empty(len(bits), dtype=torch.bfloat16), torch.empty(len(bits), dtype=torch.int16)
    module._split(weights.clone(), [high], [low])
    joined = torch.empty_like(weights)
    module._join([high], [low], joined)
    assert torch.equal(joined.nan_to_num(7.0), weights.nan_to_num(7.0))
    assert torch.equal(joined.signbit()[~weights.isnan()], weights.signbit()[~weights.isnan()])
    assert torch.equal(high.isnan(), weights.isnan())
    magnitude = (bits & 0x7FFFFFFF)[~weights.isnan()]  # ties away from zero, in integers
    assert torch.equal(high.view(torch.int16)[~weights.isnan()].long() & 0x7FFF, (magnitude + 0x8000) >> 16)


def test_every_float_is_split_into_the_nearest_bfloat16_and_the_rest() -> None:
    check_bits(low_bits)


MUTATIONS = {
    "the sign of the low bits is lost": ("copy_(bits).bitwise_xor_(-HALF)", "copy_(bits)"),
    "rounded down": ("        bits.add_(HALF)\n", ""),
    "NaN becomes zero": ("view(torch.float32).nan_to_num_", "view(torch.float32).clone().nan_to_num_"),
    "low bits are not kept": ("            self.state[parameter][LOW] = bits\n", ""),
    "the scratch is bfloat16": ("_split(flat, narrow, low)", "_split(flat.bfloat16().float(), narrow, low)"),
    "low bits are dropped after a load": (
        "            return low\n        # The host",
        "            return low if written else low * 0\n        # The host",
    ),
    "saved states are cast": ("            keep_state_dtypes(self)\n", "            pass\n"),
}


def check_both(module: Any) -> None:
    check_bits(module)
    check_learning(module.LowBits)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_caught(name: str) -> None:
    source, (old, new) = inspect.getsource(low_bits), MUTATIONS[name]
    assert source.count(old) == 1
    planted = ModuleType("planted")
    exec(compile(source.replace(old, new), "planted", "exec"), vars(planted))
    with pytest.raises((AssertionError, NotImplementedError)):  # torch has no xor of low bits that were cast
        check_both(planted)


def stepped() -> tuple[Small, LowBits]:
    narrow, optimizer, wide, _ = pair(optim.AdamW, {}, LowBits)
    for _ in range(3):
        give_gradients(narrow, wide)
        optimizer.step()
    assert any(bool((optimizer.master_weight(each) != each).any()) for each in narrow.parameters())
    return narrow, optimizer


def test_low_bits_of_weights_that_others_have_changed_are_dropped() -> None:
    narrow, optimizer = stepped()
    narrow.load_state_dict({name: 2 * value + 1 for name, value in narrow.state_dict().items()})
    assert all(torch.equal(optimizer.master_weight(each), each.float()) for each in narrow.parameters())


def test_weights_that_come_back_keep_their_low_bits() -> None:
    narrow, optimizer = stepped()
    before = [optimizer.master_weight(each) for each in narrow.parameters()]
    kept = copy.deepcopy(narrow.state_dict())
    narrow.load_state_dict({name: 2 * value + 1 for name, value in kept.items()})
    narrow.load_state_dict(kept)
    assert all(map(torch.equal, map(optimizer.master_weight, narrow.parameters()), before))


def test_a_checksum_sees_order_and_the_last_weights() -> None:
    values = torch.arange(1.0, 8.0).bfloat16()
    sums = [low_bits._checksum(each) for each in (values, values.flip(0), values[:6], values[1:], values + 1)]
    assert len({int(each) for each in sums}) == len(sums)


def test_states_may_be_bfloat16_for_4_bytes_a_weight_less() -> None:
    narrow, optimizer, wide, expected = pair(optim.AdamW, {}, lambda inner: LowBits(inner, state_dtype=torch.bfloat16))
    for _ in range(50):
        give_gradients(narrow, wide)
        optimizer.step()
        expected.step()
    for one, other, start in zip(narrow.parameters(), wide.parameters(), Small().parameters(), strict=True):
        state = optimizer.state[one]
        assert [state[key].dtype for key in ("exp_avg", "exp_avg_sq", "step")] == [torch.bfloat16] * 2 + [torch.float32]
        error = (optimizer.master_weight(one) - other).norm() / (other - start.bfloat16().float()).norm()
        assert 0 < error < 0.02


def test_it_is_an_optimizer() -> None:
    """Hooks, closures, further groups, copies; parameters of other dtypes are stepped as they are."""
    narrow, plain = nn.Parameter(torch.ones(9).bfloat16()), nn.Parameter(torch.ones(2))
    later = nn.Parameter(torch.ones(3).bfloat16())
    optimizer = LowBits(optim.SGD([{"params": [narrow, plain], "lr": 2.0**-12}]))
    optimizer.add_param_group({"params": [later], "lr": 2.0**-3})
    seen: list[object] = []
    handle = register_optimizer_step_pre_hook(lambda hooked, *_: seen.append(hooked))
    optimizer.register_step_post_hook(lambda hooked, *_: seen.append(hooked))

    def closure() -> float:
        loss = narrow.float().sum() + plain.sum() + later.float().sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 14
    handle.remove()
    assert seen == [optimizer] * 2
    assert optimizer.master_weight(narrow).tolist() == [1 - 2**-12] * 9
    assert narrow.tolist() == [1.0] * 9
    assert plain.tolist() == [1 - 2**-12] * 2
    assert later.tolist() == [0.875] * 3
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        (parameter, _), _ = (group["params"] for group in copied.param_groups)
        assert copied.master_weight(parameter).tolist() == [1 - 2**-12] * 9


class Counting(optim.SGD):
    """Counts its steps in a group."""

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["count"] = object()


class Rows(optim.SGD):
    """Keeps a number a row."""

    def step(self, closure: Any = None) -> None:
        for each in self.param_groups[0]["params"]:
            self.state[each]["rows"] = each.grad.sum(-1)


class AdamW8bit(optim.SGD):
    """Named as torchao's."""


def hooked() -> Optimizer:
    optimizer = optim.SGD(half(), 0.1)
    optimizer.register_step_pre_hook(print)
    return optimizer


def half(*shape: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape or (4, 3), dtype=torch.bfloat16))]


REFUSED: dict[str, tuple[Callable[[], Optimizer], str]] = {
    "Adafactor": (lambda: optim.Adafactor(half()), "Adafactor … rows and columns"),
    "LBFGS": (lambda: optim.LBFGS(half()), "LBFGS … many times"),
    "SparseAdam": (lambda: optim.SparseAdam(half()), "SparseAdam … sparse"),
    "in blocks": (lambda: AdamW8bit(half()), "AdamW8bit … by block"),
    "twice": (lambda: LowBits(optim.SGD(half())), "LowBits … already"),
    "float32": (lambda: optim.SGD([nn.Parameter(torch.ones(2))]), "SGD has no bfloat16 parameter"),
    "hooks": (hooked, "SGD … hook 'print' … LowBits"),
    "groups": (lambda: Counting(half()), "Counting writes to its parameter groups"),
    "rows": (lambda: Rows(half()), "Rows … 'rows' of shape (4,) … (4, 3)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_elementwise_is_refused_before_a_weight_moves(name: str) -> None:
    make, seen = REFUSED[name]
    inner = make()
    (parameter,) = inner.param_groups[0]["params"]
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(PlanError) as caught:
        LowBits(inner).step()
    check_error(str(caught.value), seen)
    assert parameter.float().eq(1).all()


def test_states_of_another_dtype_are_refused() -> None:
    with pytest.raises(PlanError) as caught:
        LowBits(optim.SGD(half()), state_dtype=torch.float16)
    check_error(str(caught.value), "state_dtype is torch.float16")


def shard_job(name: str) -> list[str]:
    """``"AdamW 2"``: shards on all ranks against a float32 model in one process, from the same gradients."""
    kind, options, _ = OPTIMIZERS[name]
    narrow, _, wide, expected = pair(kind, options, LowBits)
    narrow.to(memory_format=torch.contiguous_format)  # FSDP2 takes no other
    source = copy.deepcopy(narrow)
    fully_shard(narrow.head)
    fully_shard(narrow)
    optimizer = LowBits(kind(narrow.parameters(), lr=1e-5, **options))
    for _ in range(20):
        give_gradients(source, wide)
        for one, other in zip(narrow.parameters(), source.parameters(), strict=True):
            assert isinstance(one, DTensor)
            one.grad = _sharded(other.grad, one)
        optimizer.step()
        expected.step()
        with torch.no_grad():
            for one, other in zip(narrow.parameters(), source.parameters(), strict=True):
                other.copy_(one.full_tensor())
    whole = {each: optimizer.master_weight(each).full_tensor() for each in narrow.parameters()}
    is_laid = all(isinstance(optimizer.state[each]["low_bits"], DTensor) for each in whole)
    found = [str(index) for index, (each, other) in enumerate(zip(whole.values(), wide.parameters(), strict=True))
             if not torch.equal(each, other)]  # fmt: skip
    return found if is_laid else ["low bits are not sharded"]


def _sharded(gradient: Any, like: DTensor) -> DTensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(gradient, like.device_mesh, like.placements)


SHARDED = ["AdamW", "AdamW foreach", "SGD momentum"]
shards = of_ranks(f"{__name__}:shard_job", {2: SHARDED, 3: SHARDED})


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", SHARDED)
def test_shards_have_the_bits_of_one_process(shards: Any, name: str, world: int) -> None:
    assert shards(name, world) == [[]] * world


def resized_job(name: str) -> list[str]:
    """``"save FOLDER"``: twenty steps on shards; ``"load FOLDER"``: the next twenty on other ones, and what differs."""
    phase, folder = name.split()
    kind, options, _ = OPTIMIZERS["AdamW foreach"]
    source, of_source, wide, expected = pair(kind, options, LowBits)  # in one process, for the gradients
    model = copy.deepcopy(source).to(memory_format=torch.contiguous_format)
    fully_shard(model.head)
    fully_shard(model)
    optimizer = LowBits(kind(model.parameters(), lr=1e-5, **options))
    for step in range(40):
        if step == 20:
            weights, states = get_state_dict(model, optimizer)
            state = {"weights": weights, "states": states}
            if phase == "save":
                dcp.save(state, checkpoint_id=folder)
                return []
            dcp.load(state, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state["states"])
        give_gradients(source, wide)
        if (step < 20) == (phase == "save"):
            for one, other in zip(model.parameters(), source.parameters(), strict=True):
                assert isinstance(one, DTensor)
                one.grad = _sharded(other.grad, one)
            optimizer.step()
        of_source.step()
        expected.step()
    pairs = zip(model.named_parameters(), wide.parameters(), strict=True)
    return [name for (name, one), other in pairs if not torch.equal(optimizer.master_weight(one).full_tensor(), other)]


@pytest.mark.full
def test_a_run_goes_on_bit_for_bit_on_another_number_of_ranks(tmp_path: Path) -> None:
    for world, phase in ((2, "save"), (3, "load")):
        name = f"{phase} {tmp_path / 'checkpoint'}"
        found = launch(world, f"{__name__}:resized_job", [name], tmp_path / phase)
        assert list(values(found[name])) == [[]] * world
