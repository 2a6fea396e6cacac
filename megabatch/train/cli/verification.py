"""`megabatch verify`: the cut gradient of a recipe against the uncut one; under torchrun on its wrapper."""

import platform
from collections.abc import Mapping, Sequence

import torch

from megabatch import Verification, verify
from megabatch.errors import MegabatchError
from megabatch.train.checkpoints.metadata import installed_version
from megabatch.train.config import Config, ParallelConfig
from megabatch.train.data.load import load_data
from megabatch.train.data.updates import Updates
from megabatch.train.model.adapters import stir
from megabatch.train.model.architecture import load_tokenizer, positions_for_stream
from megabatch.train.model.build import build
from megabatch.train.model.expert_balance import train_with_router
from megabatch.train.model.frozen import dequantize
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.plugins import load_function
from megabatch.train.runtime.ranks import Ranks

# Samples over all ranks. Each rank runs all of them in float64.
MAX_SAMPLES = 8
# Parameters in the table, the worst first.
NUM_SHOWN = 12


def verify_recipe(config: Config, ranks: Ranks) -> Verification:
    """Verify the gradient of a recipe (see `plain_config`) on samples of its first update, and print the result."""
    versions = {name: installed_version(name) for name in ("torch", "transformers", "megabatch")}
    check_versions(ranks.gather({"python": platform.python_version(), **versions}))
    console = Console(enabled=ranks.rank == 0, loss_digits=4)
    tokenizer = load_tokenizer(config.model)
    data = load_data(config, tokenizer, ranks, console, positions_for_stream(config))
    updates = Updates(data, config, ranks)
    batch = updates.peek()[: max(2, MAX_SAMPLES // ranks.size)]
    num_samples = int(ranks.sum([len(batch)])[0])
    if num_samples < 2:
        raise MegabatchError(
            f"the first update has {num_samples} sample; cutting needs at least 2: set update.global_batch_size"
        )
    parallel_model = build(config, ranks, console, None, tokenizer)
    if config.model.lora is not None:
        stir(parallel_model.base, config.run.seed)
        console.say("adapters begin with zeros, where half of their gradient is zero: they are given small numbers")
    if config.model.quantize is not None:
        dequantize(parallel_model.base, torch.float32)
        console.say("four bits are compared as the numbers that they stand for")
    num_parameters = sum(parameter.numel() for parameter in parallel_model.base.parameters() if parameter.requires_grad)
    words_of_ranks = f" on {ranks.size} ranks ({parallel_model.wrapper.name})" if ranks.size > 1 else ""
    console.say(
        f"comparing the gradient of {num_samples} samples whole with that of the same samples cut in several ways"
        f"{words_of_ranks}, over {num_parameters:,} parameters in float64, dropout off"
    )
    torch.manual_seed(config.run.seed)
    loss_fn = train_with_router(load_function(config.loss.function, "loss.function"), config, parallel_model, updates)
    verification = verify(parallel_model.model, loss_fn, batch)
    errors = sorted(verification.errors.items(), key=lambda item: -item[1])
    if errors:
        console.say("relative error of each parameter's gradient:")
    for name, error in errors[:NUM_SHOWN]:
        console.say(f"  {error:.1e}  {name}")
    if len(errors) > NUM_SHOWN:
        console.say(f"  ... and {len(errors) - NUM_SHOWN} parameters with less")
    console.say(str(verification))
    return verification


def plain_config(config: Config, num_ranks: int) -> Config:
    """Return the recipe without keys of speed and precision, since `verify` computes in float64.

    One process has no wrapper, and several have the recipe's. Raises `MegabatchError` where ranks share samples.
    """
    model = config.model.model_copy(
        update={"dtype": "float32", "compute_dtype": None, "compile": False, "activation_checkpointing": False}
    )
    parallel = ParallelConfig()
    if num_ranks > 1:
        stated = config.parallel
        for axis in ("cp", "tp", "pp"):
            if getattr(stated, axis) > 1:
                raise MegabatchError(
                    f"verify compares ranks with samples of their own, and parallel.{axis} is {getattr(stated, axis)}; "
                    f"add --parallel.{axis}=1, or start verify without torchrun"
                )
        parallel = ParallelConfig(
            wrapper=stated.wrapper, dp_replicate=stated.dp_replicate, dp_shard=stated.dp_shard, ep=stated.ep
        )
    return config.model_copy(update={"model": model, "parallel": parallel})


def check_versions(versions: Sequence[Mapping[str, str | None]]) -> None:
    for rank, rank_versions in enumerate(versions):
        for name, version in rank_versions.items():
            if version != versions[0][name]:
                raise MegabatchError(
                    f"rank {rank} has {name} {version}, and rank 0 has {versions[0][name]}; install the same on all"
                )
