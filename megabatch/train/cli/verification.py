"""`megabatch verify`: the cut gradient against the uncut one, and an optimizer's step against that of one process."""

import torch

from megabatch import Verification, verify
from megabatch.errors import MegabatchError
from megabatch.optim import StepVerification, verify_step
from megabatch.train.config import Config, ParallelConfig
from megabatch.train.data.load import load_data
from megabatch.train.data.updates import Updates
from megabatch.train.model.adapters import stir
from megabatch.train.model.architecture import load_tokenizer, positions_for_stream
from megabatch.train.model.build import build
from megabatch.train.model.expert_balance import train_with_router
from megabatch.train.model.frozen import dequantize
from megabatch.train.model.optimizer import build_optimizer
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.plugins import load_function
from megabatch.train.runtime.ranks import Ranks

MAX_SAMPLES = 8  # run whole, in float64
NUM_SHOWN = 12  # parameters, the worst first


def verify_recipe(config: Config, ranks: Ranks) -> Verification:
    """Verify the gradient of a recipe (see `plain_config`) on samples of its first update, and print the result."""
    console = Console(enabled=True, loss_digits=4)
    tokenizer = load_tokenizer(config.model)
    data = load_data(config, tokenizer, ranks, console, positions_for_stream(config))
    updates = Updates(data, config, ranks)
    batch = updates.peek()[:MAX_SAMPLES]
    if len(batch) < 2:
        raise MegabatchError(
            f"the first update has {len(batch)} sample; cutting needs at least 2: set update.global_batch_size"
        )
    parallel_model = build(config, ranks, console, None, tokenizer)
    if config.model.lora is not None:
        stir(parallel_model.base, config.run.seed)
        console.say("adapters begin with zeros, where half of their gradient is zero: they are given small numbers")
    if config.model.quantize is not None:
        dequantize(parallel_model.base, torch.float32)
        console.say("four bits are compared as the numbers that they stand for")
    num_parameters = sum(parameter.numel() for parameter in parallel_model.base.parameters() if parameter.requires_grad)
    console.say(
        f"comparing the gradient of {len(batch)} samples whole with that of the same samples cut in several ways, "
        f"over {num_parameters:,} parameters in float64, dropout off"
    )
    torch.manual_seed(config.run.seed)
    loss_fn = train_with_router(load_function(config.loss.function, "loss.function"), config, parallel_model, updates)
    verification = verify(parallel_model.base, loss_fn, updates.peek()[:MAX_SAMPLES])
    console.say(words_of_verification(verification))
    return verification


def verify_recipe_step(config: Config, ranks: Ranks) -> StepVerification:
    """Compare steps of a recipe's optimizer on its wrapper with those of one process, and print the result. Collective.

    The gradients are random numbers, the same for both.
    """
    console = Console(enabled=ranks.rank == 0, loss_digits=4)
    parallel_model = build(config, ranks, console, None, load_tokenizer(config.model))
    optimizer = build_optimizer(parallel_model.base, config.optim)
    found = verify_step(parallel_model.base, optimizer)
    size, kind = ranks.size, config.optim.function or config.optim.name
    console.say(f"{kind} on {size} rank{'' if size == 1 else 's'}: {parallel_model.wrapper.name}")
    if size == 1:
        console.say("one process has no shards; start it as torchrun --nproc-per-node 3 -m megabatch verify ... --step")
    console.say(str(found))
    return found


def plain_config(config: Config) -> Config:
    """Return the recipe for one process, without keys of speed and precision: `verify` computes in float64."""
    model = config.model.model_copy(
        update={"dtype": "float32", "compute_dtype": None, "compile": False, "activation_checkpointing": False}
    )
    return config.model_copy(update={"model": model, "parallel": ParallelConfig()})


def words_of_verification(verification: Verification) -> str:
    """Return the errors, the largest first, then verdict and causes."""
    errors = sorted(verification.errors.items(), key=lambda item: -item[1])
    lines = [f"  {error:.1e}  {name}" for name, error in errors[:NUM_SHOWN]]
    if len(errors) > NUM_SHOWN:
        lines.append(f"  ... and {len(errors) - NUM_SHOWN} parameters with less")
    return "\n".join(
        ["relative error of each parameter's gradient:", *lines, str(verification)] if lines else [str(verification)]
    )
