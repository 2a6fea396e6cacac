"""The plan of experts on ranks of their own beside real ranks: tensors, as the ledger counts them, and traffic."""

from pathlib import Path

import pytest

from megabatch import MegabatchError
from megabatch.simulate import Simulated, device_named
from megabatch.train.config.recipe import load_config
from megabatch.train.plan.estimate import ExpertSizes
from megabatch.train.plan.grid import Choice
from megabatch.train.plan.layouts import layout_text, propose_layouts
from megabatch.train.plan.request import PlanRequest
from megabatch.train.plan.simulation import Simulator, build_simulator
from tests.memory.test_pipelines import LENGTH, MESSAGES, SAMPLES, SILENT, counted, key_of
from tests.tiers import full_unless
from tests.train.on_ranks import on_ranks
from tests.train.planning import plan

EXPERTS, LAYERS = 4, 2
RECIPE = f"""
[model]
dtype = "bfloat16"

[model.config]
model_type = "mixtral"
vocab_size = 1024
hidden_size = 64
intermediate_size = 160
num_hidden_layers = {LAYERS}
num_attention_heads = 4
num_key_value_heads = 4
max_position_embeddings = 64
tie_word_embeddings = false
num_local_experts = {EXPERTS}
num_experts_per_tok = {EXPERTS}

[data]
path = "nowhere.jsonl"
max_sample_tokens = {LENGTH}

[update]
global_batch_size = {SAMPLES}
micro_batch_size = 1

[run]
folder = "nowhere"
"""


ROOT = Path(__file__).parents[2]
DEEPSEEK = {  # the config of deepseek-ai/DeepSeek-V3, as far as sizes follow from it
    "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "max_position_embeddings": 4096,
}  # fmt: skip


def recipe_of(folder: Path) -> Path:
    path = folder / "recipe.toml"
    path.write_text(RECIPE)
    return path


def large_recipe(folder: Path, model: str) -> Path:
    """The recipe of Qwen3-30B-A3B, or one of DeepSeek-V3 with another model in it."""
    own = ROOT / "recipes" / "qwen3-30b-a3b.toml"
    if model == "qwen3_moe":
        return own
    head, _, rest = own.read_text().partition("[model.config]")
    _, _, rest = rest.partition("[data]")
    lines = "\n".join(f"{key} = {value}" for key, value in DEEPSEEK.items())
    path = folder / "recipe.toml"
    path.write_text(f'{head}[model.config]\nmodel_type = "{model}"\n{lines}\n\n[data]{rest}')
    return path


def simulator_of(recipe: Path, world: int, *keys: str, device: str = "cpu") -> Simulator:
    config = load_config(recipe, [f"--{key}" for key in keys])
    return build_simulator(config, PlanRequest(world, device_named(device), 2**40), SILENT)


def sent_of(simulated: Simulated) -> dict[str, list[int]]:
    return {key_of(each): [each.calls, each.sent_bytes] for each in simulated.sent}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "ep", "sync", "recompute"),
    full_unless(
        [(4, 2, "every", True), (2, 2, "every", False), (4, 2, "last", False), (4, 2, "gather_once", False)],
        lambda number, _: number == 0,
    ),
)
def test_a_rank_needs_and_sends_what_a_real_one_does(
    tmp_path: Path, world: int, ep: int, sync: str, recompute: bool
) -> None:
    """Every token goes to every expert, so that the real load is even too."""
    keys = (f"parallel.ep={ep}", f"update.sync={sync}", f"model.activation_checkpointing={str(recompute).lower()}")
    simulator = simulator_of(recipe_of(tmp_path), world, *keys)
    simulated = simulator.simulate(Choice(1, SAMPLES // world, sync, True, recompute, False))
    found = on_ranks(world, tmp_path, counted, simulator.config, simulator.axes)
    for real in found:
        assert 0.99 < simulated.peak_bytes / real["peak_bytes"] < 1.03, (simulated.peak_bytes, real["peak_bytes"])
        assert simulated.steady_bytes == pytest.approx(real["steady_bytes"], rel=0.005)
        sent = sent_of(simulated)
        for key, (calls, num_bytes) in real["sent"].items():
            expected_calls, expected_bytes = sent.pop(key, [0, 0])
            most_calls, most_bytes = MESSAGES.get(key.partition(":")[0], (0, 0))
            assert 0 <= calls - expected_calls <= most_calls, key
            assert 0 <= num_bytes - expected_bytes <= most_bytes, key
        assert sent == {}


@pytest.mark.parametrize(("ep", "sync", "recompute"), [(2, "last", True), (4, "every", False)])
def test_an_estimate_sends_what_the_simulation_does(tmp_path: Path, ep: int, sync: str, recompute: bool) -> None:
    simulator = simulator_of(recipe_of(tmp_path), 4, f"parallel.ep={ep}", "model.config.num_experts_per_tok=2")
    choice = Choice(1, 2, sync, True, recompute, False)
    estimate, simulated = simulator.estimate(choice), simulator.simulate(choice)
    own = sum(each.sent_bytes for each in simulated.sent if each.collective != "all_reduce")  # of the norm
    assert estimate.sent_bytes == pytest.approx(own, rel=0.005)
    assert 0.7 < estimate.peak_bytes / simulated.peak_bytes < 1.1
    rows = LENGTH * 2  # of tokens, for two experts each
    exchanges = (4 + 2 * recompute) * LAYERS * choice.num_microbatches
    (exchanged,) = (each for each in simulated.sent if each.collective == "all_to_all")
    counts = (1 + recompute) * LAYERS * choice.num_microbatches  # messages that say how many rows come
    assert exchanged.calls == exchanges + counts
    assert exchanged.sent_bytes == (ep - 1) * (exchanges * rows * 64 * 2 + counts * EXPERTS * 8) // ep


def test_experts_are_priced(tmp_path: Path) -> None:
    """Computing follows the experts that a token goes to, and nothing is computed beside the exchange."""
    two, four = (
        simulator_of(
            recipe_of(tmp_path), 4, "parallel.ep=2", f"model.config.num_experts_per_tok={num}", device="h100-80g"
        )
        for num in (2, 4)
    )
    choice = Choice(1, 2, "every", True, False, False)
    num_parameters = LAYERS * EXPERTS * 3 * 64 * 160
    assert two.sizes.experts == ExpertSizes(num_parameters, num_parameters // LAYERS, LAYERS, True, 2, EXPERTS, 2)
    assert two.sizes.experts.num_idle == num_parameters // 2
    idle = 6 * (num_parameters // 2) * LENGTH * choice.num_microbatches  # operations of forward and backward
    assert four.simulate(choice).flops - two.simulate(choice).flops == pytest.approx(idle, rel=0.02)
    simulated, estimate = two.simulate(choice), two.estimate(choice)
    (exchanged,) = (each for each in simulated.sent if each.collective == "all_to_all")
    assert simulated.seconds > exchanged.seconds > 0
    awaited = sum(
        simulated.times[name] * phase.awaited_seconds for name, phase in simulated.phases.items() if name != "step"
    )
    assert awaited == pytest.approx(exchanged.seconds)
    assert estimate.awaited_seconds == pytest.approx(exchanged.seconds, rel=0.05)


def test_layouts_deal_experts_out(tmp_path: Path) -> None:
    asked = PlanRequest(8, device_named("h100-80g"), 2**40)
    parallel = load_config(recipe_of(tmp_path), []).parallel
    texts = [layout_text(each) for each in propose_layouts(parallel, asked, LENGTH, num_experts=EXPERTS)]
    assert [text for text in texts if "ep" in text.split(", ")[-1].split()] == ["fsdp2 8, ep 2", "fsdp2 8, ep 4"]
    degrees = {layout.ep for layout in propose_layouts(parallel, asked, LENGTH)}
    assert degrees == {1}


def test_the_command_plans_them(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    rows = plan(recipe, ["--world", "4", "--parallel.ep=2", "--device", "h100-80g"])
    assert rows
    assert all(row.parallel.ep == 2 for row in rows)
    with pytest.raises(MegabatchError, match=r"parallel\.ep is 8 and 4 ranks have the shards of the model"):
        plan(recipe, ["--world", "4", "--parallel.ep=8"])
    with pytest.raises(MegabatchError, match=r"parallel\.ep is 4, which does not divide"):
        plan(recipe, ["--world", "4", "--parallel.ep=4", "--model.config.num_local_experts=6"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "world", "ep", "parameters", "active"),
    [("qwen3_moe", 8, 8, 30.53e9, 3.35e9), ("deepseek_v3", 256, 64, 671.03e9, 37.55e9)],
)
def test_large_models_are_planned(
    tmp_path: Path, model: str, world: int, ep: int, parameters: float, active: float
) -> None:
    """With the numbers of parameters that their makers state, and weights that are not gathered but exchanged for."""
    recipe, key = large_recipe(tmp_path, model), "update.global_batch_size=512"
    whole, dealt = (simulator_of(recipe, world, f"parallel.ep={degree}", key, device="h100-80g") for degree in (1, ep))
    experts = dealt.sizes.experts
    assert experts is not None
    assert dealt.sizes.num_parameters == pytest.approx(parameters, rel=1e-3)
    assert dealt.sizes.num_parameters - experts.num_idle == pytest.approx(active, rel=1e-3)
    choice = Choice(1, 2, "every", True, True, True)
    assert dealt.estimate(choice).sent_bytes < whole.estimate(choice).sent_bytes / 3
    assert dealt.estimate(choice).seconds < whole.estimate(choice).seconds
    if model == "qwen3_moe":  # the other takes minutes
        simulated = dealt.simulate(choice)
        assert dealt.estimate(choice).sent_bytes == pytest.approx(simulated.sent_bytes, rel=0.01)
        assert 0.9 < dealt.estimate(choice).peak_bytes / simulated.peak_bytes < 1
