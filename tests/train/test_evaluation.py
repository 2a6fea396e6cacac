"""Evaluation leaves the model as it found it."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megabatch.train.config import ModelConfig, UpdateConfig
from megabatch.train.evaluation import complete, held_out_loss
from megabatch.train.model import Wrapper, build_model, wrap
from megabatch.train.ranks import Ranks

pytestmark = pytest.mark.slow

SAMPLES = [{"input_ids": torch.arange(size), "labels": torch.arange(size)} for size in (5, 9)]
CPU = torch.device("cpu")


@pytest.fixture
def alone() -> Iterator[Ranks]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Ranks(0, 1, CPU)
    dist.destroy_process_group()


def test_a_sharded_model_is_sharded_again_and_in_training_mode(alone: Ranks) -> None:
    """Left unsharded, the weights that the next forward sees would not be those that the optimizer moves."""
    config = ModelConfig(config={"model_type": "gpt2", "vocab_size": 32, "n_embd": 8, "n_layer": 1, "n_head": 2})
    model = wrap(build_model(config, 0), Wrapper("fsdp2", "a test"))
    update = UpdateConfig(global_batch_size=2, micro_batch_size=1)
    for evaluate in (
        lambda: held_out_loss(model, SAMPLES, update, alone),
        lambda: complete(model, SAMPLES[0]["input_ids"], 1, CPU),
    ):
        evaluate()
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert model.training
