"""Updates on replicas that are killed, stopped and added, against plain torch: pip install torchft==0.2.0."""

import copy
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks import elastic_torchft, result
from benchmarks.elastic_torchft import Case, Fault
from megabatch import GradientAccumulator, JointLoss, UpdateSampler, loss
from megabatch.errors import MegabatchError, PlanError
from megabatch.integrations.lighthouse import LighthouseError, call_while_it_answers
from megabatch.integrations.torchft import Replicas, digest_weights
from megabatch.planning.balancing import fill
from tests.exact.launch import of_ranks

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated", "ignore:unclosed")  # of torchft
needs_torchft = pytest.mark.skipif(result.version("torchft") is None, reason=elastic_torchft.MISSING)


@pytest.fixture(scope="module")
def exact() -> elastic_torchft.Reference:
    return elastic_torchft.undisturbed()


def run(case: Case, folder: Path, reference: elastic_torchft.Reference) -> dict[str, Any]:
    with elastic_torchft.lighthouse() as address:
        elastic_torchft.run(case, 0, address, folder)
    row = elastic_torchft.judge(folder, case, reference)
    logs = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.log")))
    assert row["right"], f"{row}\n{logs}"
    return row


@pytest.mark.slow
@needs_torchft
def test_a_kill_in_the_reduction_and_a_join_change_no_update(tmp_path, exact):
    """The four microbatches of the lost replica are computed again, and nothing else."""
    row = run(Case("killed, and one joins", (Fault(1, 1, "reduction"),), join_after=1), tmp_path, exact)
    assert row["kills"] == 1
    assert row["computed_again"] == 4


@pytest.mark.full
@needs_torchft
def test_a_stopped_replica_takes_the_weights_of_the_others(tmp_path, exact):
    run(Case("stopped for a while", (Fault(2, 2, "forward", signal=19),)), tmp_path, exact)


@pytest.mark.full
@needs_torchft
def test_a_replica_that_is_back_in_the_same_update_drops_what_others_have_computed_again(tmp_path, exact):
    """They vote against their attempt once it is back, so that all three hold its microbatches or theirs."""
    splits = [Fault(index, 2, "split", attempt=1, seconds=1.0) for index in (0, 1)]
    stop = Fault(2, 2, "reduction", signal=19, seconds=4.0)
    row = run(Case("stopped, and back in the same update", (stop, *splits)), tmp_path, exact)
    assert row["computed_again"] == 4


@pytest.mark.full
@needs_torchft
def test_two_reductions_of_one_step_end_with_the_same_bits(tmp_path, exact):
    faults = (Fault(1, 2, "split"), Fault(2, 2, "split"), Fault(0, 2, "step", signal=19))
    run(Case("one steps and is stopped, the others do not", faults), tmp_path, exact)


@pytest.mark.full
@needs_torchft
def test_replicas_of_two_fsdp2_ranks(tmp_path, exact):
    case = Case("killed, and one joins", (Fault(1, 1, "reduction"),), join_after=1, setting="fsdp2")
    run(case, tmp_path, exact)


@pytest.mark.full
@needs_torchft
def test_the_same_bits_with_and_without_a_loss(tmp_path):
    case = Case("killed, and one joins", (Fault(0, 1, "forward"),), join_after=1, setting="same_bits")
    row = run(case, tmp_path, elastic_torchft.undisturbed_bits())
    assert row["gradient_error"] == row["weights_error"] == 0.0


@pytest.mark.full
@needs_torchft
def test_two_terms_and_two_dtypes_added_in_float64(tmp_path):
    case = Case("killed, and one joins", (Fault(1, 1, "reduction"),), join_after=1, setting="mixed")
    run(case, tmp_path, elastic_torchft.undisturbed("mixed"))


@needs_torchft
@pytest.mark.parametrize("damage", ["none", "gradient", "update", "weights", "bits", "samples", "ended", "not killed"])
def test_a_run_is_judged_by_gradients_weights_and_samples(tmp_path, exact, damage):
    gradients, weights = exact
    for index in (1, 2):
        journal = elastic_torchft.Journal(tmp_path, f"replica{index}")
        for update, gradient in enumerate(gradients):
            written = gradient * (1 + 1e-11 * (damage == "gradient" and update == 3))
            if damage != "update" or update != 3:
                (tmp_path / f"replica{index}.{update}.gradient").write_bytes(written.numpy().tobytes())
            samples = 24 - (damage == "samples" and index == 2 and update == 3)
            journal.write("step", update=update, size=2, samples=samples, weight=400.0, loss=4.0)
        last = weights * (1 + {"weights": 1e-11, "bits": 1e-15}.get(damage, 0.0) * (index == 2))
        if damage != "ended" or index == 1:
            (tmp_path / f"replica{index}.weights").write_bytes(last.numpy().tobytes())
    if damage != "not killed":
        elastic_torchft.Journal(tmp_path, "replica0").write("fault", signal=9, update=3)
    case = Case("killed in forward", (Fault(0, 3, "forward"),))
    assert elastic_torchft.judge(tmp_path, case, exact)["right"] == (damage == "none")


class Rows(nn.Module):
    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), norm or nn.Identity(), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[:, 0]


@loss(weigh=lambda microbatch: len(microbatch["x"]))
def squares(model: Any, microbatch: Any) -> Any:
    return model(microbatch["x"]).square().sum(), len(microbatch["x"])


def without_weigh(model: Any, microbatch: Any) -> Any:
    return squares(model, microbatch)


@loss(weigh=lambda microbatch: 2 * len(microbatch["x"]))
def double_weights(model: Any, microbatch: Any) -> Any:
    return model(microbatch["x"]).square().sum(), 2 * len(microbatch["x"])


class Quorum:
    """A real manager of one replica, with what it needs."""

    def __init__(self, address: str, **settings: Any) -> None:
        from torchft import Manager, ProcessGroupGloo

        settings = {"min_replica_size": 1, **settings}
        self.address, self.name = address, uuid.uuid4().hex
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.group = ProcessGroupGloo(timeout=timedelta(seconds=5))
        self.manager = Manager(
            self.group, None, None, use_async_quorum=False, rank=0, world_size=1, **settings,
            store_addr="localhost", store_port=self.store.port, lighthouse_addr=address,
            timeout=timedelta(seconds=5), hostname="localhost", replica_id=self.name,
        )  # fmt: skip

    def end(self) -> None:
        self.manager.shutdown()
        self.group.abort()
        del self.manager
        gc.collect()  # sockets of torchft are closed here


@pytest.fixture(scope="module")
def lighthouse() -> Any:
    with elastic_torchft.lighthouse() as address:
        yield address


@pytest.fixture
def quorum(lighthouse) -> Any:
    quorum = Quorum(lighthouse)
    yield quorum
    quorum.end()


def new_sampler(**place: Any) -> UpdateSampler:
    return UpdateSampler([1] * 48, global_batch_size=8, **place or {"dp_rank": 0, "dp_degree": 1})


def replicas_of(quorum: Any, model: nn.Module, seed: int = 0, **place: Any) -> Replicas:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Replicas(quorum.manager, quorum.group, new_sampler(**place), optimizer, seed=seed, lighthouse=quorum.address)


def load(ids: list[int]) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.randn(3, generator=torch.Generator().manual_seed(sample))} for sample in ids]


def assert_gradient_of_plain_torch(model: nn.Module, ids: list[int], max_norm: float = torch.inf) -> float:
    """Return the norm before the clip."""
    rows, parameters = torch.stack([sample["x"] for sample in load(ids)]), list(model.parameters())
    plain = torch.autograd.grad(model(rows).square().mean(), parameters)
    norm = float(torch.cat([gradient.flatten() for gradient in plain]).norm())
    for parameter, gradient in zip(parameters, plain, strict=True):
        torch.testing.assert_close(parameter.grad, gradient * min(1.0, max_norm / (norm + 1e-6)))
    return norm


@needs_torchft
def test_one_replica_has_the_update_of_plain_torch(quorum):
    model = Rows()
    replicas = replicas_of(quorum, model)
    gradient = GradientAccumulator(model, micro_batch_size=2, extensions=[replicas])
    updates = replicas.updates(gradient, load, squares, num_updates=3, max_norm=0.1)
    num_updates = 0
    for update, ids in zip(updates, new_sampler(), strict=False):
        num_updates += 1
        norm = assert_gradient_of_plain_torch(model, ids, max_norm=0.1)
        assert float(update.grad_norm) == pytest.approx(norm, rel=1e-5)
        assert (update.num_samples, update.num_tokens, update.num_microbatches, float(update.weight)) == (8, 8, 4, 8.0)
    assert num_updates == 3


@needs_torchft
def test_an_update_of_replicas_has_less_padding_than_the_fewest_microbatches(quorum):
    model = Rows()
    replicas = replicas_of(quorum, model)
    GradientAccumulator(model, micro_batch_size=8, extensions=[replicas])
    lengths = [20 + 7 * (37 * sample % 64) for sample in range(64)]  # 20 to 461 tokens, each once
    cut = replicas.plan(lengths)
    assert sorted(sample for rows in cut.microbatches for sample in rows) == list(range(64))
    assert max(map(len, cut.microbatches)) <= 8
    filled = fill(lengths, max_rows=8, max_tokens=None)  # by length too, as few microbatches as there can be
    assert cut.padding < 0.8 * (
        1 - sum(lengths) / sum(len(rows) * max(lengths[row] for row in rows) for rows in filled)
    )


class Program:
    """The five objects of a checkpoint."""

    def __init__(self, quorum: Quorum) -> None:
        self.model, self.sampler = Rows(), new_sampler()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.replicas = Replicas(
            quorum.manager, quorum.group, self.sampler, self.optimizer, scheduler=self.scheduler,
            lighthouse=quorum.address,
        )  # fmt: skip
        self.gradient = GradientAccumulator(self.model, micro_batch_size=2, extensions=[self.replicas])

    def stateful(self) -> list[Any]:
        return [self.model, self.optimizer, self.scheduler, self.sampler, self.gradient]

    def states(self) -> list[Any]:
        return [copy.deepcopy(part.state_dict()) for part in self.stateful()]

    def load(self, states: list[Any]) -> None:
        for part, state in zip(self.stateful(), copy.deepcopy(states), strict=True):
            part.load_state_dict(state)

    def updates(self, loss_fn: Any = squares, num_updates: int = 5) -> Any:
        """Step, and yield the gradients."""
        for _ in self.replicas.updates(self.gradient, load, loss_fn, num_updates=num_updates):
            yield [parameter.grad.clone() for parameter in self.model.parameters()]
            self.step()

    def step(self) -> None:
        self.optimizer.step()
        self.scheduler.step()


@needs_torchft
def test_a_checkpoint_resumes_to_the_bit(quorum):
    program = Program(quorum)
    assert len(list(program.updates(num_updates=2))) == 2
    states = program.states()
    assert states[-1] == {"torchft": {"step": 2, "batches_committed": 2}}
    gradients = list(program.updates())
    program.load(states)
    resumed = list(program.updates())
    assert len(gradients) == len(resumed) == 3
    for gradient, other in zip(gradients, resumed, strict=True):
        assert all(map(torch.equal, gradient, other))


def train_on(address: str, num_updates: int, states: list[Any] | None = None, killed: Any = None) -> list[Any]:
    """Return the gradients of the next updates, and then the states. The Lighthouse may be killed after them."""
    torch.manual_seed(0)
    program = Program(quorum := Quorum(address, quorum_timeout=timedelta(seconds=4)))
    if states is not None:
        program.load(states)
    updates = program.updates()
    results: list[Any] = [next(updates) for _ in range(num_updates)]
    if killed is not None:
        killed.kill()
        killed.wait()
        began = time.monotonic()
        with pytest.raises(LighthouseError, match=rf"the Lighthouse at {address} does not answer \(ConnectionRefused"):
            next(updates)
        assert time.monotonic() - began < 3
    results.append(program.states())
    del program, updates
    quorum.end()
    return results


@needs_torchft
def test_updates_end_with_the_lighthouse_and_go_on_to_the_bit_with_another(lighthouse):
    *undisturbed, _ = train_on(lighthouse, 5)
    with elastic_torchft.lighthouse_process() as (address, process):
        *gradients, states = train_on(address, 2, killed=process)
    *resumed, _ = train_on(lighthouse, 3, states)
    for gradient, other in zip(undisturbed, gradients + resumed, strict=True):
        assert all(map(torch.equal, gradient, other))


@needs_torchft
def test_a_lighthouse_that_hangs_or_dies_ends_a_call_that_waits_for_it(monkeypatch):
    """Even if another one starts at once at the same address: torchft sends its request once."""
    monkeypatch.setattr("megabatch.integrations.lighthouse.SECONDS_TO_ANSWER", 1.0)
    has_ended = threading.Event()
    with elastic_torchft.lighthouse_process() as (address, process):
        for end, reason in ((signal.SIGSTOP, "TimeoutError"), (signal.SIGKILL, "RemoteDisconnected|ConnectionReset")):

            def wait(end: int = end) -> None:
                process.send_signal(end)
                has_ended.wait(20)

            with pytest.raises(LighthouseError, match=rf"the Lighthouse at {address} does not answer \(({reason})"):
                call_while_it_answers(address, wait)
            process.send_signal(signal.SIGCONT)
    has_ended.set()


@needs_torchft
def test_a_checkpoint_without_replicas_is_refused(quorum):
    with pytest.raises(PlanError, match="the state has no torchft; give one that was saved with Replicas") as refused:
        Program(quorum).gradient.load_state_dict({})
    assert "\n" not in str(refused.value)


@needs_torchft
@pytest.mark.parametrize("mended_by", ["discard", "load"])
def test_an_update_after_a_caught_error_has_all_its_microbatches(quorum, mended_by):
    program, num_calls = Program(quorum), 0

    @loss(weigh=lambda microbatch: len(microbatch["x"]))
    def failing(model: Any, microbatch: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise ValueError("planned")
        return squares(model, microbatch)

    states = program.states()
    with pytest.raises(ValueError, match="planned"):
        next(program.updates(failing))
    program.load(states) if mended_by == "load" else program.gradient.discard()
    next(program.updates(failing))
    assert_gradient_of_plain_torch(program.model, next(iter(new_sampler())))


@needs_torchft
def test_a_digest_has_every_bit_of_the_weights_whatever_the_number_of_threads():
    torch.manual_seed(0)
    model, digests, num_threads = nn.Linear(1000, 1000), [], torch.get_num_threads()
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        digests.append(digest_weights(model))
    torch.set_num_threads(num_threads)
    model.weight.data.view(torch.int32)[7, 7] ^= 1
    assert len(set(digests)) == 1
    assert digest_weights(model) != digests[0]


class Factors(nn.Module):
    """Multiplies by random numbers that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factors", torch.rand(4) + 0.5, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factors


class PartlySaved(Rows):
    """Has a parameter that no checkpoint has."""

    def state_dict(self, *args: Any, **settings: Any) -> Any:
        state = super().state_dict(*args, **settings)
        return {name: value for name, value in state.items() if name != "layers.2.bias"}

    def load_state_dict(self, state: Any, **settings: Any) -> Any:
        return super().load_state_dict(state, strict=False)


@dataclass
class Peer:
    """The program of one of two replicas."""

    new_model: Callable[[], nn.Module] = lambda: Rows(Factors())
    micro_batch_size: int = 2
    max_norm: float = 0.1
    seed: int = 0
    freezes: bool = False
    trains: bool = True
    decays: bool = False  # with a scheduler that Replicas do not have
    drifts: bool = False  # writes to a weight after the fourth update
    loss_fn: Any = squares
    sizes: list[int] = field(default_factory=list)  # of the quorum of each update
    error: str = ""

    def run(self, quorum: Quorum, after_first: Callable[[], None] = lambda: None) -> None:
        """Compare each gradient with plain torch, and step."""
        model = self.new_model().train(self.trains)
        if self.freezes:
            next(model.parameters()).requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step * self.decays))
        replicas = Replicas(
            quorum.manager, quorum.group, new_sampler(), optimizer, seed=self.seed, lighthouse=quorum.address
        )
        gradient = GradientAccumulator(model, micro_batch_size=self.micro_batch_size, extensions=[replicas])
        ids = list(new_sampler())
        try:
            for _ in replicas.updates(gradient, load, self.loss_fn, num_updates=6, max_norm=self.max_norm):
                number = quorum.manager.current_step() - 1
                assert_gradient_of_plain_torch(model, ids[number], max_norm=0.1)
                self.sizes.append(replicas.num_replicas)
                optimizer.step()
                scheduler.step()
                if number == 3 and self.drifts:
                    model.layers[0].weight.data[0, 0] += 1e-6
                if number == 0:
                    after_first()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"


def run_both(quorum: Quorum, first: Peer, second: Peer) -> None:
    """Run two replicas as threads. The second joins after the first update."""
    threads: list[threading.Thread] = []

    def take_part() -> None:
        other = Quorum(quorum.address)
        second.run(other)
        other.end()

    def join() -> None:
        threads.append(threading.Thread(target=take_part))
        threads[0].start()
        # A member of the last quorum waits for those that have asked, and for nobody else.
        asked = b"[1/1 participants healthy]"
        assert elastic_torchft.wait_until(lambda: asked in urlopen(f"{quorum.address}/status").read(), time.time() + 20)

    first.run(quorum, after_first=join)
    threads[0].join(20)
    assert not threads[0].is_alive()


@needs_torchft
def test_a_replica_joins(quorum):
    first, second = Peer(), Peer()
    run_both(quorum, first, second)
    assert (first.sizes, first.error) == ([1, 2, 2, 2, 2, 2], "")
    assert (second.sizes, second.error) == ([2, 2, 2, 2, 2], "")


DIFFERENCES: dict[str, dict[str, Any]] = {
    "limit": {"micro_batch_size": 4},
    "clip": {"max_norm": 0.2},
    "seed": {"seed": 1},
    "trained parameters": {"freezes": True},
    "modules in training": {"trains": False},
    "weights of samples": {"loss_fn": double_weights},
}


@needs_torchft
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_joining_replica_that_differs_ends_and_the_other_goes_on(quorum, difference):
    first, second = Peer(), Peer(**DIFFERENCES[difference])
    run_both(quorum, first, second)
    assert (first.sizes, first.error) == ([1] * 6, "")
    assert second.sizes == []
    assert second.error.startswith(
        "PlanError: update 1 has other samples, limits, clip, seed, modules in training, trained para"
    )


@needs_torchft
@pytest.mark.parametrize(
    ("settings", "other", "first_update"),
    [({}, {"decays": True}, 2), ({"new_model": PartlySaved}, {"new_model": PartlySaved}, 1)],
    ids=["scheduler", "partly saved model"],
)
def test_a_joining_replica_with_other_weights_or_rates_ends(quorum, settings, other, first_update):
    first, second = Peer(**settings), Peer(**other)
    run_both(quorum, first, second)
    assert (first.sizes, first.error) == ([1, *[2] * (first_update - 1), *[1] * (6 - first_update)], "")
    assert second.error.startswith(
        f"PlanError: update {first_update} has other weights or learning rates on replicas that made"
    )


@needs_torchft
def test_replicas_that_diverge_end(quorum):
    """Nobody knows which of them is right."""
    first, second = Peer(), Peer(drifts=True)
    run_both(quorum, first, second)
    assert first.sizes == [1, 2, 2, 2]
    assert first.error == second.error
    assert first.error.startswith("PlanError: update 4 has other weights or learning rates on replicas")


class Replacing(nn.Module):
    """Counts its calls in a buffer that it replaces. Python gives the tensors of every second call the same id."""

    def __init__(self, *, is_saved: bool = True) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=is_saved)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return x


class Renormed(nn.Module):
    """Writes to the rows of a trained table that a microbatch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 4, max_norm=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table((x[:, 0] > 0).long())


class Averaging(nn.Module):
    """Keeps an average in a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.average.lerp_(x.mean(0), 0.1)
        return x


@needs_torchft
@pytest.mark.filterwarnings("ignore:.* learn")
@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(4),
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        Replacing(),
        Replacing(is_saved=False),
        Renormed(),
        Averaging(),
    ],
)
def test_a_module_that_learns_in_its_forward_is_refused(quorum, norm):
    model = Rows(norm)
    gradient = GradientAccumulator(model, micro_batch_size=2, extensions=[replicas := replicas_of(quorum, model)])
    with pytest.raises(MegabatchError, match=r"the forward writes to 'layers\.1\."):
        next(replicas.updates(gradient, load, squares, num_updates=1))


@needs_torchft
def test_a_manager_with_spares_is_refused(lighthouse):
    from torchft.manager import WorldSizeMode

    quorum, model = Quorum(lighthouse, world_size_mode=WorldSizeMode.FIXED_WITH_SPARES, min_replica_size=0), Rows()
    gradient = GradientAccumulator(model, micro_batch_size=2, extensions=[replicas := replicas_of(quorum, model)])
    with pytest.raises(PlanError, match="Replicas and a manager with spares or a quorum in a thread; give"):
        next(replicas.updates(gradient, load, squares, num_updates=1))
    quorum.end()


@needs_torchft
def test_calls_outside_of_updates_are_refused(quorum):
    model = Rows()
    gradient = GradientAccumulator(model, micro_batch_size=2, extensions=[replicas_of(quorum, model)])
    with pytest.raises(PlanError, match=r"forward_backward\(\) with Replicas would use the samples of one replica"):
        gradient.forward_backward(load([0, 1]), squares)
    with gradient.microbatch(0, of=1, sum_over=2) as part:
        part.scale(model(torch.ones(2, 3)).sum()).backward()
    with pytest.raises(PlanError, match=r"finalize\(\) with Replicas would use the samples of one replica"):
        gradient.finalize()


@needs_torchft
def test_an_update_that_was_opened_elsewhere_is_refused(quorum):
    """Its calls would be divided by other weights."""
    model = Rows()
    gradient = GradientAccumulator(model, micro_batch_size=2, extensions=[replicas := replicas_of(quorum, model)])
    gradient.open(weights=1.0)
    with pytest.raises(PlanError, match=r"updates\(\) was called in an open update; discard\(\) it before"):
        next(replicas.updates(gradient, load, squares, num_updates=1))
    gradient.discard()
    next(replicas.updates(gradient, load, squares, num_updates=1))
    assert_gradient_of_plain_torch(model, next(iter(new_sampler())))


@needs_torchft
def test_losses_samplers_and_accumulators_that_do_not_go_with_replicas_are_refused(quorum):
    model = Rows()
    replicas = replicas_of(quorum, model, dp_rank=1, dp_degree=2)
    gradient = GradientAccumulator(model, micro_batch_size=2, extensions=[replicas])
    joint = JointLoss(lambda model, microbatch: model(microbatch["x"])[:, None], lambda found: (found.sum(), 1))
    other = GradientAccumulator(model, micro_batch_size=2)
    expected = {
        "updates() was given an accumulator without these Replicas": (other, squares),
        "Replicas and a JointLoss, which couples": (gradient, joint),
        "Replicas and a loss without weigh": (gradient, without_weigh),
        "the sampler yields a share of the update; give UpdateSampler dp_rank=0 and dp_degree=1": (gradient, squares),
    }
    for text, (accumulator, loss_fn) in expected.items():
        with pytest.raises(PlanError) as refused:
            next(replicas.updates(accumulator, load, loss_fn, num_updates=1))
        assert str(refused.value).startswith(text)
        assert "\n" not in str(refused.value)


@needs_torchft
def test_sparse_gradients_are_refused(quorum):
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 2, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table((x > 0).long()).sum((1, 2))

    model = Sparse()
    gradient = GradientAccumulator(model, micro_batch_size=2, extensions=[replicas := replicas_of(quorum, model)])
    with pytest.raises(PlanError, match="Replicas and a sparse gradient; make the embedding with sparse=False"):
        next(replicas.updates(gradient, load, squares, num_updates=1))


@needs_torchft
@pytest.mark.parametrize(
    ("models", "settings", "text"),
    [
        (lambda: [Rows(), Rows()], {"micro_batch_size": 2}, "the accumulator has several models; give it one"),
        (Rows, {}, "no limit that all replicas know; give micro_batch_size= or max_microbatch_tokens=, a number"),
    ],
)
def test_models_and_limits_that_do_not_go_with_replicas_are_refused(quorum, models, settings, text):
    with pytest.raises(PlanError, match=f"Replicas and {text}"):
        GradientAccumulator(models(), extensions=[replicas_of(quorum, Rows())], **settings)


REFUSED = {
    "plain": "Replicas and a replica has several ranks",
    "ddp": "Replicas and the model is a DistributedDataParallel, which sums over ranks by itself",
    "hsdp": "Replicas and the model is sharded over several axes",
    "last": "Replicas and sync is 'last', which keeps gradients unreduced",
}


def run_job(name: str) -> str:
    """The error of a job "kind:world:"."""
    kind, model, sync = name.split(":")[0], Rows(), "auto"
    if kind == "ddp":
        model = DistributedDataParallel(model)
    if kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "dp_shard")))
    if kind == "last":
        sync = str(fully_shard(model) and "last")
    with elastic_torchft.lighthouse() as address:
        quorum = Quorum(address)
        try:
            GradientAccumulator(model, micro_batch_size=2, sync=sync, extensions=[replicas_of(quorum, model)])
        except PlanError as error:
            return str(error)
        finally:
            quorum.end()
    return ""


refused = of_ranks(f"{__name__}:run_job", [f"{kind}:2:" for kind in REFUSED])


@pytest.mark.full
@needs_torchft
@pytest.mark.parametrize("kind", REFUSED)
def test_wrappers_that_do_not_go_with_replicas_are_refused_on_all_ranks(refused, kind):
    for message in refused(f"{kind}:2:"):
        assert message.partition(";")[0] == REFUSED[kind]


@pytest.mark.full
@needs_torchft
def test_the_example_runs_as_its_docstring_says_and_a_killed_replica_comes_back(tmp_path):
    """Two replicas, each under a torchrun of its own; the worker of one is killed, and torchrun starts it again."""
    ports, updates = [elastic_torchft.free_port() for _ in range(2)], 60
    with elastic_torchft.lighthouse() as address:
        environ = os.environ | {"TORCHFT_LIGHTHOUSE": address, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        runs = []
        for index, port in enumerate(ports):
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "2"]
            command += ["--master-port", str(port), str(ROOT / "examples/elastic_torchft.py"), str(updates)]
            with (tmp_path / f"{index}.log").open("w") as log:
                runs.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))
        printed = [tmp_path / "0.log", tmp_path / "1.log"]
        assert elastic_torchft.wait_until(lambda: "update 8 " in printed[0].read_text(), time.time() + 200)
        children = Path(f"/proc/{runs[1].pid}/task/{runs[1].pid}/children").read_text().split()
        os.kill(int(children[0]), 9)
        assert [each.wait(200) for each in runs] == [0, 0]
    first, second = (path.read_text() for path in printed)
    assert f"update {updates} " in second
    numbers = [int(line.split()[1]) for line in first.splitlines() if line.startswith("update ")]
    # The second may have made some updates before the first has started.
    assert numbers == list(range(numbers[0], updates + 1))
