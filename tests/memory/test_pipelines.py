"""A pipeline's plan beside real ranks: what the ledger counts of their tensors, and what they send."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megabatch import losses
from megabatch.pipeline import SCHEDULES, count_held, estimate_bubble
from megabatch.pipeline.order import BACKWARD, FORWARD, Action, finish_seconds, orders_of
from megabatch.simulate import Simulated, device_named, join_ranks, repeat_microbatches
from megabatch.simulate.ledger import Ledger, tagging_shards
from megabatch.simulate.simulated_update import BUBBLE, phase_of
from megabatch.simulate.traffic import Sent
from megabatch.train.config import Config
from megabatch.train.config.parallel_layout import layout_of
from megabatch.train.config.recipe import load_config
from megabatch.train.data.updates import NumUpdates
from megabatch.train.model.build import build
from megabatch.train.model.optimizer import build_learner
from megabatch.train.plan.grid import Choice
from megabatch.train.plan.request import PlanRequest
from megabatch.train.plan.simulation import Simulator, build_simulator
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks
from tests.tiers import full_unless
from tests.train.on_ranks import on_ranks

LENGTH, SAMPLES = 32, 8  # tokens of every sample; samples of an update
RECIPE = f"""
[model.config]
model_type = "llama"
vocab_size = 1024
hidden_size = 64
intermediate_size = 160
num_hidden_layers = 8
num_attention_heads = 4
num_key_value_heads = 4
max_position_embeddings = 64
tie_word_embeddings = false

[data]
path = "nowhere.jsonl"
max_sample_tokens = {LENGTH}

[update]
global_batch_size = {SAMPLES}
micro_batch_size = 1
"""
SILENT = Console(enabled=False, loss_digits=4)
TIED = "model.config.tie_word_embeddings=true"
RUNS: dict[str, tuple[int, list[str]]] = {  # ranks, keys
    "1F1B": (2, ["parallel.pp=2"]),
    "GPipe": (2, ["parallel.pp=2", "parallel.schedule=GPipe"]),
    "tied, three": (3, ["parallel.pp=3", TIED]),
    "four": (4, ["parallel.pp=4"]),
    "fsdp2": (4, ["parallel.pp=2", "parallel.wrapper=fsdp2"]),
    "ddp": (4, ["parallel.pp=2", "parallel.wrapper=ddp"]),
    "tp": (4, ["parallel.pp=2", "parallel.tp=2"]),
    "recompute": (2, ["parallel.pp=2", "model.activation_checkpointing=true"]),
    "Interleaved1F1B, fsdp2": (4, ["parallel.pp=2", "parallel.schedule=Interleaved1F1B", "parallel.wrapper=fsdp2"]),
    "LoopedBFS": (2, ["parallel.pp=2", "parallel.schedule=LoopedBFS"]),
    "InterleavedZeroBubble": (2, ["parallel.pp=2", "parallel.schedule=InterleavedZeroBubble"]),
    "ZBVZeroBubble": (2, ["parallel.pp=2", "parallel.schedule=ZBVZeroBubble"]),
    "DualPipeV": (2, ["parallel.pp=2", "parallel.schedule=DualPipeV"]),
}
# What ranks tell each other before and after a call is not simulated: calls and bytes, at most.
MESSAGES = {"all_gather": (10, 11_200), "broadcast": (1, 100)}
QUICK = ("1F1B", "tied, three", "fsdp2", "Interleaved1F1B, fsdp2", "InterleavedZeroBubble")  # one of a kind
ONE_STAGE = ("1F1B", "GPipe", "tied, three", "four", "fsdp2", "ddp", "tp", "recompute")


def simulator_of(name: str, folder: Path, *keys: str) -> Simulator:
    world, own = RUNS[name]
    path = folder / "recipe.toml"
    path.write_text(RECIPE)
    config = load_config(path, [f"--{key}" for key in (*own, *keys)])
    return build_simulator(config, PlanRequest(world, device_named("cpu"), 2**40), SILENT)


def choice_of(simulator: Simulator, num_samples: int) -> Choice:
    recompute = simulator.config.model.activation_checkpointing
    return Choice(1, simulator.grid.filled(num_samples), "last", True, recompute, False)


def key_of(sent: Sent) -> str:
    return f"{sent.collective}:{sent.axis}:{sent.num_ranks}"


def counted(ranks: Ranks, config: Config, axes: dict[str, int]) -> dict[str, Any]:
    """What the ledger counts of updates of the trainer's own stages."""
    ranks = replace(ranks, layout=layout_of(config.parallel, ranks.size))
    ids = torch.zeros(LENGTH, dtype=torch.long)
    samples = [{"input_ids": ids, "labels": ids} for _ in range(SAMPLES // ranks.dp_degree)]
    with Ledger(axes=axes) as ledger, tagging_shards(ledger):
        parallel_model = build(config, ranks, SILENT, None, None)
        learner = build_learner(parallel_model, config, NumUpdates(20, 20), None)

        def update() -> None:
            learner.forward_backward(samples, losses.next_token)
            assert learner.optim_step().finite

        for _ in range(2):  # the first makes the optimizer's states; in the second DDP makes its buckets anew
            update()
        seen = []
        for _ in range(3):  # a thread of gloo may hold what it has sent a moment longer: the least is what is needed
            learner.optimizer.zero_grad()  # as an update begins
            ledger.begin()
            ledger.enter_phase("update", "activations")
            update()
            ledger.enter_phase("after", "activations")
            seen.append((ledger.log.steady_bytes, ledger.log.phases["update"]))
    assert learner.gradient.last_plan is not None
    return {
        "steady_bytes": min(steady for steady, _ in seen),
        "peak_bytes": min(phase.peak_bytes for _, phase in seen),
        "sent": {key_of(each): [each.calls, each.sent_bytes] for each in seen[0][1].sent.values()},
        "microbatches": learner.gradient.last_plan.num_microbatches,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", full_unless(RUNS, lambda _, name: name in QUICK))
def test_the_first_and_the_last_rank_need_and_send_what_real_ones_do(name: str, tmp_path: Path) -> None:
    world, _ = RUNS[name]
    simulator = simulator_of(name, tmp_path)
    degree = simulator.config.parallel.pp
    choice = choice_of(simulator, SAMPLES // layout_of(simulator.config.parallel, world).dp_degree(world))
    found = on_ranks(world, tmp_path, counted, simulator.config, simulator.axes)
    for end, real in zip(simulator.ends, (found[0], found[world // degree * (degree - 1)]), strict=True):
        simulated = simulator._simulate(choice, end.repeats, end)
        assert 0.995 < simulated.peak_bytes / real["peak_bytes"] < 1.03, (simulated.peak_bytes, real["peak_bytes"])
        assert simulated.steady_bytes == pytest.approx(real["steady_bytes"], rel=0.005)
        assert choice.num_microbatches == real["microbatches"]
        sent = {key_of(each): [each.calls, each.sent_bytes] for each in simulated.sent}
        for key, (calls, num_bytes) in real["sent"].items():
            expected_calls, expected_bytes = sent.pop(key, [0, 0])
            most_calls, most_bytes = MESSAGES.get(key.partition(":")[0], (0, 0))
            assert 0 <= calls - expected_calls <= most_calls, key
            assert 0 <= num_bytes - expected_bytes <= most_bytes, key
        assert not sent


@pytest.mark.slow
@pytest.mark.parametrize("name", full_unless(ONE_STAGE, lambda _, name: name in ("1F1B", "GPipe", "ddp")))
def test_a_few_microbatches_and_layers_tell_of_all(name: str, tmp_path: Path) -> None:
    layers = ["model.config.num_hidden_layers=24"] if name in ("1F1B", "fsdp2") else []
    simulator = simulator_of(name, tmp_path, *layers)
    choice = choice_of(simulator, 13)
    for end in simulator.ends:
        assert (end.repeats is not None) == bool(layers)
        few = simulator._simulate(replace(choice, num_microbatches=end.share.num_telling), end.repeats, end)
        found, whole = repeat_microbatches(few, 13), simulator._simulate_layers(choice, end)
        assert found is not None
        for key in ("peak_bytes", "steady_bytes", "sent_bytes", "flops"):
            assert getattr(found, key) == getattr(whole, key), key
        assert found.reserved() == whole.reserved()
        assert found.seconds == pytest.approx(whole.seconds)


def test_memory_that_is_left_over_is_noticed(tmp_path: Path) -> None:
    simulator = simulator_of("1F1B", tmp_path)
    choice, end = choice_of(simulator, 5), simulator.ends[0]
    few = simulator._simulate(choice, None, end)
    names = {step.category: index for index, step in enumerate(few.steps) if step.kind == "phase"}
    start = names[phase_of(Action(BACKWARD, 0, 1))]
    freed = next(index for index, step in enumerate(few.steps) if index > start and step.kind == "free")
    broken = replace(few, steps=(*few.steps[:freed], *few.steps[freed + 1 :]))
    assert repeat_microbatches(few, 9) is not None
    assert repeat_microbatches(broken, 9) is None


def order_seconds(schedule: str, num_ranks: int, per_rank: int, num: int, message: float = 0.0) -> float:
    """The time of a schedule whose forwards take 1, and their backwards 2, for all stages of a rank."""
    seconds = {FORWARD: 1.0, BACKWARD: 2.0}
    orders = orders_of(schedule, num_ranks, per_rank, num)
    return max(finish_seconds(orders, lambda _, action: seconds.get(action.kind, 1.0) / per_rank, lambda *_: message))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_schedule_takes_its_microbatches_and_its_bubble(num_ranks: int) -> None:
    num, more = 8, num_ranks - 1
    for schedule in ("GPipe", "1F1B"):
        assert order_seconds(schedule, num_ranks, 1, num) == 3 * (num + more)
    for schedule in ("Interleaved1F1B", "LoopedBFS"):
        assert order_seconds(schedule, num_ranks, 2, num) == pytest.approx(3 * (num + more / 2))
    for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble"):
        assert order_seconds(schedule, num_ranks, 2, num) < 3 * (num + more / 2)
    assert order_seconds("GPipe", num_ranks, 1, num, 0.5) == 3 * (num + more) + more  # to the last rank and back
    assert order_seconds("1F1B", num_ranks, 1, num, 0.5) > 3 * (num + more) + more  # and where ranks take turns


def test_a_bubble_and_what_is_held_are_those_of_the_schedule() -> None:
    assert estimate_bubble("1F1B", 4, 1, 8) == pytest.approx(3 / 8)
    assert estimate_bubble("1F1B", 4, 1, 8, recomputes=True) == pytest.approx(3 / 8)
    assert estimate_bubble("Interleaved1F1B", 4, 2, 8) == pytest.approx(3 / 16)
    assert [count_held("1F1B", 4, 1, rank, 8) for rank in range(4)] == [4, 3, 2, 1]
    assert [count_held("GPipe", 4, 1, rank, 8) for rank in range(4)] == [8, 8, 8, 8]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_runs_every_microbatch_once(schedule: str) -> None:
    per_rank = SCHEDULES[schedule].per_rank or 2
    orders = orders_of(schedule, 4, per_rank, 8)
    for rank, order in enumerate(orders):
        assert {action.stage for action in order} == set(SCHEDULES[schedule].indices(rank, 4, per_rank))
        assert len(set(order)) == len(order)
        assert sum(action.kind == FORWARD for action in order) == 8 * per_rank


def test_the_slowest_stage_sets_the_pace(tmp_path: Path) -> None:
    """An update takes as long as its slowest rank, from its first microbatch to its step."""
    simulator = simulator_of("1F1B", tmp_path)
    choice = choice_of(simulator, 8)
    first, last = (simulator._simulate(choice, None, end) for end in simulator.ends)

    def slowed(found: Simulated, seconds: float) -> Simulated:
        """Every action takes this long, and the rest no time."""
        times = {name: seconds * (" of stage " in name and "reduction" not in name) for name in found.phases}
        phases = {name: replace(found.phases[name], compute_seconds=0.0, host_seconds=times[name]) for name in times}
        return replace(found, phases=phases)

    joined = join_ranks(slowed(first, 1), slowed(last, 3), "1F1B", 2)
    inputs = 8 * 3  # of the last rank
    assert joined.seconds == pytest.approx(1 + 8 * (3 + 3) + inputs, rel=0.01)
    assert joined.phases[BUBBLE].idle_seconds == pytest.approx(joined.seconds - 8 * 3, rel=0.01)
    assert joined.peak_bytes == max(first.peak_bytes, last.peak_bytes)
    assert joined.bound == "bubble"
