"""Ray Train: WORKERS=16 python launch/ray_train.py recipe.toml --run.save_every=50 [--section.key=value ...]

Where a worker is lost Ray starts all of them again, up to three times, and the run goes on from its last checkpoint.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def work(given: dict[str, Any]) -> None:
    """A rank of `megabatch train`, in a process whose main thread hears signals; it ends with this worker of Ray's."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = [str(free.getsockname()[1])]
    dist.broadcast_object_list(port)  # of rank 0's host, where Ray's own group has MASTER_PORT
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "megabatch", "train", *given["arguments"]]
    subprocess.run(command, cwd=given["folder"], env={**os.environ, "MASTER_PORT": port[0]}, check=True)


if __name__ == "__main__":
    if len(sys.argv) < 2 or not os.environ.get("WORKERS", "").isdecimal():
        print("usage: WORKERS=N python launch/ray_train.py RECIPE [--section.key=value ...]", file=sys.stderr)
        sys.exit(2)
    recipe, *overrides = sys.argv[1:]
    run = os.environ.get("RUN", f"runs/{Path(recipe).stem}")  # on a disk that all workers see
    run = recipe if os.path.isdir(recipe) else run  # a run to go on with
    arguments = [recipe, f"--run.folder={run}", "--run.resume=true", *overrides]
    ray.init()
    TorchTrainer(
        work,
        train_loop_config={"folder": os.getcwd(), "arguments": arguments},
        torch_config=TorchConfig(backend="gloo"),  # for the port; megabatch makes its own group
        scaling_config=ScalingConfig(num_workers=int(os.environ["WORKERS"]), use_gpu="GPU" in ray.cluster_resources()),
        run_config=RunConfig(storage_path=os.path.abspath("runs/ray"), failure_config=FailureConfig(max_failures=3)),
    ).fit()
