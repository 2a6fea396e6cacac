"""`megabatch plan --measure FILE`: measure this machine and write a device file."""

from pathlib import Path

import torch

from megabatch.errors import MegabatchError
from megabatch.simulate import DEVICES
from megabatch.train.cli.help import EXAMPLE
from megabatch.train.config import ParallelConfig
from megabatch.train.init.hardware import kind_of
from megabatch.train.plan.device_file import device_toml, measure_device, read_device
from megabatch.train.runtime.console import print_line
from megabatch.train.runtime.files import replace_text
from megabatch.train.runtime.ranks import init_ranks
from megabatch.train.runtime.rendezvous import Rendezvous


def measure(rendezvous: Rendezvous, path: Path) -> None:
    """Measure this machine, under torchrun with an all-gather over all ranks, and write a device file.

    Rank 0 prints the figures. Raises `MegabatchError` where the file cannot be written.
    """
    check_device_path(path)
    ranks = init_ranks(rendezvous, EXAMPLE.model_copy(update={"parallel": ParallelConfig(wrapper="ddp")}))
    is_cuda = ranks.device.type == "cuda"
    name = kind_of(f"GPU 0: {torch.cuda.get_device_name(ranks.device)}") if is_cuda else "cpu"
    like = next((device for device in DEVICES if device.startswith(name)), "a100-80g")
    figures = measure_device(ranks.device, like, print_line if ranks.rank == 0 else None)
    ranks.on_main(lambda: replace_text(path, device_toml(figures)), str(path))
    if ranks.rank == 0:
        print_line(f"wrote {path}; plan with --device {path}")


def check_device_path(path: Path) -> None:
    """Raise before minutes are spent where the file cannot be written, or is somebody else's."""
    if not path.parent.is_dir() or path.suffix != ".toml":
        raise MegabatchError(f"--measure is {str(path)!r}; name a .toml file in a folder that is there")
    if path.exists():
        try:
            read_device(path)
        except MegabatchError:
            raise MegabatchError(
                f"--measure is {str(path)!r}, which is there and no device file; name another"
            ) from None
