"""Jobs of the tests of adapters: three updates of a recipe's model, as the trainer lays it out."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from megabatch import GradientAccumulator, losses
from megabatch.train.config import Config, ParallelConfig
from megabatch.train.config.parallel_layout import layout_of
from megabatch.train.model.build import build
from megabatch.train.runtime.ranks import Ranks
from tests.comm.counting import Collectives
from tests.train.contexts import SILENT
from tests.train.model_recipes import FAMILIES, recipe

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
SAMPLES = [torch.arange(length) * 7 % 385 for length in (5, 12, 3, 9, 7, 4)]
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"wrapper": "ddp"},
    "fsdp2": {"wrapper": "fsdp2"},
    "cp": {"wrapper": "replicate", "cp": 2},
}
SGD_LR = 0.5
GPT2 = {**FAMILIES["gpt2"], "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # its norms stay in float64
OF_GPT2 = {**LORA, "target_modules": ["c_attn", "c_proj"]}


def lora_recipe(layout: str | None = None, lora: dict[str, Any] | None = None, **model: Any) -> Config:
    config = recipe({"lora": LORA if lora is None else lora, "dtype": "float64", **model})
    parallel = ParallelConfig() if layout is None else ParallelConfig.model_validate(LAYOUTS[layout])
    return config.model_copy(update={"parallel": parallel})


def saved_base(config: dict[str, Any], folder: Path) -> Path:
    """A folder with weights of a model that reads bytes."""
    torch.manual_seed(0)
    of_bytes = {"vocab_size": 384, "bos_token_id": 0, "eos_token_id": 1}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**config, **of_bytes})).save_pretrained(folder)
    return folder


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(ranks: Ranks, layout: str) -> dict[str, Any]:
    """Adapters after two steps, the gradient of a third update, its collectives, and what was said of the model."""
    config = lora_recipe(layout, OF_GPT2, config=GPT2)
    ranks = replace(ranks, layout=layout_of(config.parallel, ranks.size))
    parallel_model = build(config, ranks, SILENT, None, None)
    parameters = {name: each for name, each in parallel_model.base.named_parameters() if each.requires_grad}
    first = {name: whole(each) for name, each in parameters.items()}
    gradient = GradientAccumulator(parallel_model.model, micro_batch_size=1)
    optimizer = torch.optim.SGD(parameters.values(), lr=SGD_LR)
    own = [{"input_ids": ids, "labels": ids} for ids in SAMPLES[ranks.dp_rank :: ranks.dp_degree]]
    for _ in range(2):
        gradient.forward_backward(own, losses.next_token)
        gradient.finalize()
        optimizer.step()
        optimizer.zero_grad()
    counted = Collectives()  # in which the attention of torch's own CausalBias does not run
    with contextlib.nullcontext() if layout == "cp" else counted:
        gradient.forward_backward(own, losses.next_token)
        gradient.finalize()
    frozen = [each for each in parallel_model.base.parameters() if not each.requires_grad]
    return {
        "first": first,
        "weights": {name: whole(each) for name, each in parameters.items()},
        "gradients": {name: whole(each.grad) for name, each in parameters.items() if each.grad is not None},
        "frozen have a gradient": any(each.grad is not None for each in frozen),
        "collectives": counted.table(),
        "identity": parallel_model.identity,
    }


def all_layouts(ranks: Ranks) -> dict[str, dict[str, Any]]:
    return {layout: trained(ranks, layout) for layout in LAYOUTS}
