"""Initial weights: a new run begins with the weights of another run's checkpoint (``run.init_from``)."""

from collections.abc import Collection
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state

from megabatch.errors import MegabatchError
from megabatch.train.checkpoints.export import AVERAGE, MODEL, find_checkpoint
from megabatch.train.checkpoints.metadata import DamagedError
from megabatch.train.checkpoints.tensor_files import SafePlanner, SafeReader, reason_of, without_group_warning
from megabatch.train.runtime.ranks import Ranks


def load_initial_weights(run: Path, model: nn.Module, left_out: Collection[str], ranks: Ranks) -> str:
    """Read the weights of a run's best checkpoint, else of its latest, into a model; of `optim.ema_decay` the average.

    The optimizer, the schedule and the position in the data stay new. Collective.

    Args:
        run: Folder of the run.
        model: The model without its DDP wrapper, in whatever layout.
        left_out: Names of the parameters that checkpoints do not have: the base of adapters.
        ranks: Of which the main one chooses the checkpoint.

    Returns:
        What was read, in words.

    Raises:
        MegabatchError: The run has no whole checkpoint, or its model has other parameters.
    """
    checkpoint = Path(ranks.on_main(lambda: str(find_checkpoint(run, None).path), str(run), verb="read"))
    described = SafeReader(checkpoint).read_metadata().state_dict_metadata
    state = get_model_state_dict(model)
    wanted: dict[str, Tensor] = {}
    first_names: dict[int, str] = {}  # of each parameter: an average has a tied one once
    tied = {
        name: first_names.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    for name, tensor in state.items():
        if name in left_out or not isinstance(tensor, Tensor):
            continue
        average = f"{AVERAGE}{tied.get(name, name)}"
        key = average if average in described else f"{MODEL}{name}"
        saved = described.get(key)
        if not isinstance(saved, TensorStorageMetadata) or saved.size != tensor.shape:
            there = list(saved.size) if isinstance(saved, TensorStorageMetadata) else "missing"
            raise MegabatchError(
                f"run.init_from is {run}, and its model is another: {name} is {there} there and {list(tensor.shape)} "
                f"here; take the section [model] of {run}/config.toml, or leave run.init_from out"
            )
        wanted[key] = tensor
    try:
        with without_group_warning():
            load_state(
                wanted, storage_reader=SafeReader(checkpoint), planner=SafePlanner(), no_dist=not dist.is_initialized()
            )
    except CheckpointException as error:
        raise DamagedError(checkpoint, reason_of(error)) from None
    set_model_state_dict(model, state)
    which = "the average of the weights" if any(key.startswith(AVERAGE) for key in wanted) else "the weights"
    return f"begins with {which} of {checkpoint}"
