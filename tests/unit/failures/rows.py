"""Samples that cannot lie in one row, and models in which they would see each other."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from megabatch import GradientAccumulator, LossContractError, loss, losses
from megabatch.batching.deferred import Deferred
from megabatch.batching.packed_row import OneRow
from tests.unit.failures.table import Failure, linear

THREE = torch.ones(3, dtype=torch.long)
SAMPLE = {"input_ids": THREE, "labels": THREE}
NO_BEGINNING = "position_ids … with 0"
COUNTS_ROWS = "counts 1 in … and 2 in"
MASKED = "attention_mask … past_key_values … position_ids"
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def model_of(family: str, **sizes: Any) -> Any:
    config = AutoConfig.for_model(family, **{**SIZES, **sizes}, use_cache=False)
    return AutoModelForCausalLM.from_config(config)


def small() -> Any:
    return model_of("gpt_neox", intermediate_size=24)


def accumulator(model: Any) -> GradientAccumulator:
    return GradientAccumulator(model, micro_batch_size=2, batching=OneRow())


def run(*samples: Mapping[str, Any], loss_fn: Any = losses.next_token) -> object:
    return accumulator(small()).forward_backward(list(samples), loss_fn)


def headless() -> None:
    model = small()
    nn.init.zeros_(model.get_output_embeddings().weight)
    accumulator(model)


def by_tokens(model: Any, row: Any) -> Any:
    logits = model(input_ids=row["input_ids"]).logits
    return logits.sum(), losses.count_targets(row)


def with_cache(model: Any, row: Any) -> Any:
    logits = model(input_ids=row["input_ids"], position_ids=row["position_ids"], use_cache=True).logits
    return logits.sum(), losses.count_targets(row)


@loss(weigh=lambda row: len(row["input_ids"]))
def by_rows(model: Any, row: Any) -> Any:
    return model(**row).logits.sum(), len(row["input_ids"])


def with_mask(model: Any, row: Any) -> Any:
    mask = torch.ones_like(row["input_ids"])
    logits = model(row["input_ids"], attention_mask=mask, position_ids=row["position_ids"]).logits
    return logits.sum(), losses.count_targets(row)


def with_mask_by_place(model: Any, row: Any) -> Any:
    mask = torch.ones_like(row["input_ids"])
    return model(row["input_ids"], mask, position_ids=row["position_ids"]).logits.sum(), losses.count_targets(row)


def by_parts(model: Any, row: Any) -> Any:
    states = model.base_model(input_ids=row["input_ids"]).last_hidden_state
    return model.get_output_embeddings()(states).sum(), losses.count_targets(row)


def of_llama4() -> Any:
    sizes = {"intermediate_size": 24, "intermediate_size_mlp": 24, "num_key_value_heads": 2, "num_local_experts": 2}
    return model_of("llama4_text", **sizes, head_dim=8, pad_token_id=None, bos_token_id=None, eos_token_id=None)


class WithoutPositions(nn.Module):
    """Knows its tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.config = AutoConfig.for_model("gpt_neox", **SIZES)
        self.embedding = nn.Embedding(40, 40)

    def forward(self, input_ids: Any) -> Any:
        return self.embedding(input_ids)


FAILURES = {
    "a sample without tokens, in one row": Failure("input_ids … [T]", lambda: run({"x": THREE})),
    "keys that differ, in one row": Failure(
        "['input_ids', 'labels'] … ['input_ids']",
        lambda: run({"input_ids": THREE, "labels": THREE}, {"input_ids": THREE}),
    ),
    "a label of a whole sample, in one row": Failure(
        "'labels' … () … input_ids … (3,)", lambda: run({"input_ids": THREE, "labels": 1})
    ),
    "hidden tokens, in one row": Failure(
        "attention_mask … position_ids",
        lambda: run({"input_ids": THREE, "labels": THREE, "attention_mask": torch.tensor([1, 1, 0])}),
    ),
    "positions that go on, in one row": Failure(
        NO_BEGINNING, lambda: run({"input_ids": THREE, "labels": THREE, "position_ids": torch.tensor([3, 4, 5])})
    ),
    "positions below the first, in one row": Failure(
        NO_BEGINNING, lambda: run({"input_ids": THREE, "labels": THREE, "position_ids": torch.tensor([0, 1, -1])})
    ),
    "several models, in one row": Failure("OneRow", lambda: accumulator([linear(), linear()])),
    "a model of no tokens, in one row": Failure("OneRow", lambda: accumulator(linear())),
    "a model of no positions, in one row": Failure(
        "OneRow … input_ids … position_ids … TypeError … WithoutPositions … forward()",
        lambda: accumulator(WithoutPositions()),
    ),
    "a model whose head is zero": Failure("OneRow", headless),
    "a loss that counts rows": Failure(COUNTS_ROWS, lambda: run(SAMPLE, SAMPLE, loss_fn=by_rows), LossContractError),
    "a loss that counts rows, of samples that are not read": Failure(
        COUNTS_ROWS,
        lambda: accumulator(small()).forward_backward(Deferred([SAMPLE, SAMPLE].__getitem__, (3, 3)), by_rows),
        LossContractError,
    ),
    "a loss that does not weigh, in one row": Failure(
        "weight is counted",
        lambda: run(SAMPLE, loss_fn=lambda model, row: (model(**row).logits.sum(), 1)),
        LossContractError,
    ),
    "a loss that keeps positions to itself": Failure(
        "position_ids", lambda: run(SAMPLE, loss_fn=loss(weigh=losses.count_targets)(by_tokens)), LossContractError
    ),
    "a mask, in one row": Failure(
        MASKED, lambda: run(SAMPLE, loss_fn=loss(weigh=losses.count_targets)(with_mask)), LossContractError
    ),
    "a mask by place, in one row": Failure(
        MASKED, lambda: run(SAMPLE, loss_fn=loss(weigh=losses.count_targets)(with_mask_by_place)), LossContractError
    ),
    "a loss that calls a part of the model, in one row": Failure(
        "part of it", lambda: run(SAMPLE, loss_fn=loss(weigh=losses.count_targets)(by_parts)), LossContractError
    ),
    "a model that goes by places, in one row": Failure(
        "OneRow … attention_chunk_size … position_ids", lambda: accumulator(of_llama4())
    ),
    "rotary positions that go by the longest row": Failure(
        "OneRow … dynamic … max_microbatch_tokens=32",
        lambda: accumulator(model_of("llama", max_position_embeddings=32, rope_parameters=DYNAMIC)),
    ),
    "a cache, in one row": Failure(
        "position_ids", lambda: run(SAMPLE, loss_fn=loss(weigh=losses.count_targets)(with_cache)), LossContractError
    ),
    "types that differ, in one row": Failure(
        "'input_ids' … (3,) … (3,)", lambda: run({"input_ids": THREE}, {"input_ids": THREE.int()})
    ),
    "a model whose samples see each other": Failure(
        "OneRow", lambda: accumulator(model_of("bloom", n_layer=1, n_head=2))
    ),
}
