"""Compiled layers in a simulation: they keep what torch.compile keeps of real tensors, as docs/planning.md has it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from megabatch import PlanError, losses
from megabatch.simulate import Replica, Simulated, compile_layers, simulate
from megabatch.simulate.compiled_layers import find_kernels
from megabatch.simulate.fake_cluster import FakeMode
from tests.memory.runs import Run, batch_of, llama, optimizer_of, wrapped

EIGHTH_OF_13B = {"hidden_size": 640, "intermediate_size": 1728, "num_attention_heads": 5, "num_key_value_heads": 5}


def kept_numbers(layer: Callable[..., Any], hidden: Tensor, embeddings: tuple[Tensor, ...], weights: set[int]) -> float:
    """Return the bfloat16 numbers that the layer keeps for its backward, for each number of its input [B, T, E]."""
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(hidden, position_embeddings=embeddings)
    num_bytes = sum(each.untyped_storage().nbytes() for address, each in kept.items() if address not in weights)
    return num_bytes / hidden.nbytes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler, about torch's own code
def test_a_compiled_layer_keeps_less() -> None:
    """The partitioner is that of torch.compile on a GPU; the kernels are not, and decide nothing here."""
    torch.manual_seed(0)
    config = LlamaConfig(**EIGHTH_OF_13B, num_hidden_layers=1, attn_implementation="sdpa")
    layer = LlamaDecoderLayer(config, 0).bfloat16()
    hidden = torch.randn(2, 512, 640, dtype=torch.bfloat16, requires_grad=True)
    embeddings = LlamaRotaryEmbedding(config)(hidden, torch.arange(512)[None])
    weights = {each.untyped_storage()._cdata for each in (*layer.parameters(), *embeddings)}
    torch._dynamo.reset()  # else this may be the ninth layer of the process, which torch does not compile
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, backend="aot_eager_decomp_partition")
    compiled(hidden, position_embeddings=embeddings)  # compiles, without the hooks
    state = torch._dynamo.eval_frame._stance, torch._dynamo.config.disable
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, f"not compiled: {state}"
    eager, partitioned = (kept_numbers(each, hidden, embeddings, weights) for each in (layer, compiled))
    assert eager == pytest.approx(22.8, abs=0.1)
    assert partitioned == pytest.approx(16.1, abs=0.1)
    expected = layer(hidden, position_embeddings=embeddings)
    layer._compiled_call_impl = None
    compile_layers([layer])
    found = layer(hidden, position_embeddings=embeddings)
    assert torch.allclose(found, expected, rtol=0.1, atol=0.1), "the graphs are those of the layer"
    assert kept_numbers(layer, hidden, embeddings, weights) == partitioned
    with torch.device("meta"):
        bare = LlamaDecoderLayer(config, 0).bfloat16()
    with FakeMode():
        fake = [torch.empty_like(each) for each in (hidden, *embeddings)]
        compile_layers([bare.to_empty(device="cpu")])
        own = {each.untyped_storage()._cdata for each in (*bare.parameters(), *fake[1:])}
        assert kept_numbers(bare, fake[0].requires_grad_(), tuple(fake[1:]), own) == partitioned


def test_operations_between_matrix_products_are_one_kernel() -> None:
    def compute(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        scaled = (x * 2).relu()
        product = scaled @ weight
        return (product + 1).sum(), (x + product).exp()

    x, weight = torch.zeros(8, 16), torch.zeros(16, 16)
    found = find_kernels(make_fx(compute)(x, weight).graph)
    assert found.num == 3, "one before the product, and two after it"
    assert found.num_bytes == 2 * x.nbytes + 4 + 3 * x.nbytes, "the product is read once by both"
    assert sorted(found.written.values()) == [False, False, False, True, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["plain", "fsdp2"])
def test_an_update_of_compiled_layers_keeps_and_launches_less(wrapper: str) -> None:
    """By the numbers that four layers keep less. Recomputed layers keep their inputs alone, compiled or not."""
    run = Run("25m", wrapper, 16, precision="mixed" if wrapper == "fsdp2" else "bfloat16")
    less = 4 * (22.8 - 16.1) * 2 * 16 * 128 * 512
    (eager, compiled), (recomputed, both) = (
        [of_layers(replace(run, recompute=recompute), is_compiled) for is_compiled in (False, True)]
        for recompute in ("no", "yes")
    )
    kept = [each.phases["backward 1"].at_peak["activations"] for each in (eager, compiled)]
    assert kept[0] - kept[1] == pytest.approx(less, rel=0.05)
    assert compiled.flops == eager.flops
    assert compiled.compute_seconds < 0.9 * eager.compute_seconds
    launches = [each.phases["backward 1"].host_seconds for each in (eager, compiled)]
    assert launches[1] < 0.6 * launches[0]
    assert both.phases["forward 1"].at_peak["activations"] == recomputed.phases["forward 1"].at_peak["activations"]
    assert both.flops == recomputed.flops


def of_layers(run: Run, is_compiled: bool) -> Simulated:
    def make_model(mesh: DeviceMesh | None) -> nn.Module:
        with torch.device("meta"):
            model = llama(run)
        if is_compiled:
            compile_layers(list(model.model.layers))
        return wrapped(model, run, mesh, Replica)

    return simulate(
        make_model, lambda model: optimizer_of(model, run), lambda: batch_of(run, 1), losses.next_token,
        axes=run.axes, device="h100",
    )  # fmt: skip


def test_a_layer_that_is_not_one_graph_is_refused() -> None:
    class Printing(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            assert not isinstance(input, FunctionalTensor), "no tracer here"
            return super().forward(input)

    def make_model(mesh: DeviceMesh | None) -> nn.Module:
        model = Printing(3, 3, device="meta")
        compile_layers([model])
        return model

    with pytest.raises(PlanError, match=r"a Printing cannot be traced as one graph .* leave compile out"):
        simulate(
            make_model, lambda model: torch.optim.SGD(model.parameters()), lambda: torch.zeros(2, 3),
            lambda model, batch: (model(batch).sum(), 1.0),
        )  # fmt: skip
