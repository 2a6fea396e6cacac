"""Sequences cut over ranks: the gradient of every parameter against the uncut model, by plain torch on one process.

A job is "way:model:case:dtype:cp". Ways: "alone" sums the gradients of all stretches by hand, and so does one of `BUGS`
with that bug planted; the others run the library's accumulator over a model wrapped so, on a mesh of data ranks x cp.
"""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator, MegabatchError, loss, losses
from megabatch.batching import context_parallel
from megabatch.planning import stretches
from megabatch.train.parallel.wrap import attend_over
from tests.comm.counting import Collectives
from tests.exact import models, oracle

Sample = dict[str, Tensor]
Way = Callable[[nn.Module, DeviceMesh, list[Sample]], None]
Wrap = Callable[[nn.Module, DeviceMesh], nn.Module]
SIZES = {
    "vocab_size": models.VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 96, "use_cache": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
CONFIGS = {
    "gpt_neox": ("GPTNeoXConfig", {}),
    "llama": ("LlamaConfig", GROUPED),
    "mistral": ("MistralConfig", GROUPED | {"sliding_window": None, "head_dim": 4}),
    "olmo2": ("Olmo2Config", GROUPED),
    "qwen2": ("Qwen2Config", GROUPED),
    "qwen3": ("Qwen3Config", GROUPED | {"head_dim": 4}),
    "smollm3": ("SmolLM3Config", GROUPED),
}


def language_model(family: str, dtype: torch.dtype) -> nn.Module:
    """A small model of a family, the same weights at every call, whose norms keep the dtype."""
    if family == "gpt2":
        return models.gpt2(dtype)
    name, options = CONFIGS[family]
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**SIZES, **options))
    for module in list(model.modules()):
        for child_name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):  # transformers' drop to float32
                setattr(module, child_name, nn.RMSNorm(child.weight.shape, child.variance_epsilon))
    return model.double().to(dtype)


def tokens(length: int, seed: int) -> Sample:
    """A sample some of whose labels are no targets."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, models.VOCABULARY, (length,), generator=generator)
    return {"input_ids": ids, "labels": ids.masked_fill(torch.rand(length, generator=generator) < 0.3, -100)}


def packed(lengths: list[int], seed: int) -> Sample:
    """Documents in a row, whose positions begin anew."""
    pieces = [tokens(length, seed + index) for index, length in enumerate(lengths)]
    for piece in pieces:
        piece["labels"][0] = -100
    row = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    return row | {"position_ids": torch.cat([torch.arange(length) for length in lengths])}


def masked(length: int, seed: int) -> Sample:
    return tokens(length, seed) | {"attention_mask": torch.ones(length, dtype=torch.long)}


def padded_left(length: int, longest: int, seed: int) -> Sample:
    """As a tokenizer pads for generation; even the first token is a target."""
    missing = longest - length
    sample = {"input_ids": tokens(length, seed)["input_ids"]}
    sample |= {"labels": sample["input_ids"], "attention_mask": torch.ones(length, dtype=torch.long)}
    fills = {"labels": -100}
    return {name: nn.functional.pad(value, (missing, 0), value=fills.get(name, 0)) for name, value in sample.items()}


CASES: dict[str, list[Sample]] = {
    "uneven": [tokens(length, seed) for seed, length in enumerate((13, 5, 8, 1, 17))],
    "one": [tokens(9, 3)],
    "short": [tokens(length, seed) for seed, length in enumerate((3, 1, 2, 2))],
    "masked": [masked(length, seed) for seed, length in enumerate((9, 12, 4, 7))],
    "left": [padded_left(length, 11, seed) for seed, length in enumerate((11, 6, 3, 10))],
    "packed": [packed(lengths, 10 * seed) for seed, lengths in enumerate(([5, 1, 6], [13], [2, 9, 3, 4], [7, 7]))],
    "weightless": [
        tokens(6, 1) | {"labels": torch.full((6,), -100)},
        *(tokens(length, length) for length in (9, 4, 7)),
    ],
}
LARGEST_MICROBATCH = 2


BUGS = {  # a text of the library's files and what is planted for it
    "shift within the stretch": (
        "return Stretch(part, ",
        'part["shift_labels"][:, -1] = IGNORED_LABEL\n    return Stretch(part, ',
    ),
    "positions of the stretch in the mask": (
        "positions <= positions[start:, None]",
        "positions <= positions[: end - start, None]",
    ),
    "positions of the stretch in the order": (
        "causal_lower_right(end - start, end)",
        "causal_upper_left(end - start, end)",
    ),
    "documents see each other": ("(earlier & same)", "(earlier & (same | True))"),
    "pieces in the order of ranks": ("*seconds.flip(0)", "*seconds"),
    "gradients of other ranks' queries lost": ("received.sum(0)", "received[ctx.group.rank()]"),
    "positions from the stretch": (
        "return Stretch(part, ",
        'part["position_ids"] = part["position_ids"] - part["position_ids"][:, :1]\n    return Stretch(part, ',
    ),
}


def with_bug(name: str) -> ModuleType:
    """The library's file with one text replaced, beside the attention of the library."""
    text, planted = BUGS[name]
    source = Path((stretches if "Stretch(" in text else context_parallel).__file__).read_text()
    source = source.replace("import causal_lower_right", "import causal_lower_right, causal_upper_left")
    assert source.count(text) == 1, f"{text!r} occurs {source.count(text)} times"
    module = ModuleType("planted")
    module.__dict__["GatheredAttention"] = context_parallel.GatheredAttention
    exec(source.replace(text, planted), module.__dict__)
    return module


def uncut(family: str, case: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The gradient of all samples, each alone, on this process."""
    model = language_model(family, dtype)
    weight = sum(int((sample["labels"][1:] != -100).sum()) for sample in CASES[case])
    for sample in CASES[case]:
        row = {name: value[None] for name, value in sample.items()}
        labels = row.pop("labels")
        logits = model(**row).logits[:, :-1]
        total = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )
        (total / weight).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def alone(model: nn.Module, mesh: DeviceMesh, samples: list[Sample], library: ModuleType = context_parallel) -> None:
    """Every stretch by hand, and one sum over all ranks."""
    group = mesh.get_group("cp")
    data_rank, data_degree = mesh.get_local_rank("dp"), mesh.size(0)
    weight = sum(int((sample["labels"][1:] != -100).sum()) for sample in samples)
    mine = samples[data_rank::data_degree]
    for start in range(0, len(mine), LARGEST_MICROBATCH):
        microbatch = oracle.collate(mine[start : start + LARGEST_MICROBATCH])
        total, _ = losses.next_token(model, library.stretch(microbatch, group.rank(), group.size()))
        (total / weight).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def plain(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return model


def ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model)  # over all ranks: data and context


def fsdp2(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return hsdp(model, mesh._flatten("dp_cp"))


def hsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Sharded over cp, and replicated over dp where the mesh has both."""
    for block in model.transformer.h if hasattr(model, "transformer") else model.model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def accumulated(wrap: Wrap, num_calls: int) -> Way:
    """By the library; a data rank's samples are dealt over the calls."""

    def way(model: nn.Module, mesh: DeviceMesh, samples: list[Sample]) -> None:
        gradient = GradientAccumulator(wrap(model, mesh), mesh=mesh, micro_batch_size=LARGEST_MICROBATCH)
        mine = samples[mesh.get_local_rank("dp") :: mesh.size(0)]
        for call in range(num_calls):
            gradient.forward_backward(mine[call::num_calls], losses.next_token)
        update = gradient.finalize()
        assert int(update.weight) == sum(int((sample["labels"][1:] != -100).sum()) for sample in samples)
        assert (update.num_samples, update.num_tokens) == (len(samples), sum(len(each["labels"]) for each in samples))

    return way


def checkpointed(model: nn.Module, mesh: DeviceMesh, samples: list[Sample]) -> None:
    """As alone, with activations that are computed again in backward, and keys gathered again."""
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    alone(model, mesh, samples)


WAYS: dict[str, Way] = {
    "alone": alone,
    "checkpointed": checkpointed,
    "plain": accumulated(plain, 1),
    "plain-calls": accumulated(plain, 2),
    "ddp": accumulated(ddp, 1),
    "fsdp2": accumulated(fsdp2, 1),
    "fsdp2-calls": accumulated(fsdp2, 2),
    "hsdp": accumulated(hsdp, 1),
}


def names() -> list[list[str]]:
    return [sorted(["gpt2", *CONFIGS]), sorted(CASES), sorted(BUGS)]


def two_ranks() -> tuple[nn.Module, GradientAccumulator]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = language_model("gpt2", torch.float64)
    attend_over(model, context_parallel.GatheredAttention(mesh.get_group("cp")))
    return model, GradientAccumulator(model, mesh=mesh, micro_batch_size=LARGEST_MICROBATCH)


def traffic() -> dict[str, int]:
    """The collectives of two layers and one microbatch."""
    model, _ = two_ranks()
    microbatch = oracle.collate(CASES["packed"][:2])
    part = context_parallel.stretch(microbatch, dist.get_rank(), 2)
    with Collectives() as collectives:
        losses.next_token(model, part).total.backward()
    return {name: count for name, count in collectives.table().items() if not name.endswith("_bytes")}


def labels_are_read() -> str:
    """A loss that is not made for stretches."""
    _, gradient = two_ranks()

    @loss(weigh=losses.count_targets)
    def of_labels(model: nn.Module, microbatch: Any) -> Any:
        return model(microbatch["labels"]).sum(), 1

    try:
        gradient.forward_backward(CASES["one"], of_labels)
    except MegabatchError as error:
        return str(error)
    return "nothing"


QUESTIONS = {"names": names, "traffic": traffic, "labels-are-read": labels_are_read}


def run_job(name: str) -> Any:
    """The largest relative error of a parameter's gradient, and which; in bfloat16 also that of the uncut run."""
    if name in QUESTIONS:
        return QUESTIONS[name]()
    way, family, case, dtype, cp = name.split(":")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // int(cp), int(cp)), mesh_dim_names=("dp", "cp"))
    model = language_model(family, getattr(torch, dtype))
    library = with_bug(way) if way in BUGS else context_parallel
    attend_over(model, library.GatheredAttention(mesh.get_group("cp")))
    if way in BUGS:
        alone(model, mesh, CASES[case], library)
    else:
        WAYS[way](model, mesh, CASES[case])
    found = {name.removeprefix("module."): whole(parameter.grad) for name, parameter in model.named_parameters()}
    expected = uncut(family, case, torch.float64)
    error, parameter = oracle.worst_error(found, expected)
    of_uncut = oracle.worst_error(uncut(family, case, torch.bfloat16), expected)[0] if dtype == "bfloat16" else None
    return {"error": error, "parameter": parameter, "uncut": of_uncut}


def whole(gradient: Tensor | None) -> Tensor | None:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
