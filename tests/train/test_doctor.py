"""`megabatch doctor`: what works is said once, what does not is named, and nothing hangs."""

import contextlib
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megabatch.errors import MegabatchError
from megabatch.train.autotune.device_file import read_device
from megabatch.train.cli.doctor import (
    WRAPPERS,
    Deadline,
    check_device_path,
    device_finding,
    examine,
    proof_finding,
    version_finding,
)
from megabatch.train.runtime.exit import FailedError, exit_together
from megabatch.train.runtime.ranks import Ranks
from megabatch.train.runtime.rendezvous import Rendezvous
from tests.train.on_ranks import on_ranks
from tests.train.processes import CONTEXT, Run, rank_environment
from tests.unit.small import unseen

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FACTS = {"host": "one", "device": "H100", "gpu": "GPU-1", "versions": {"python": "3.11", "torch": "2.13"}}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_what_works_is_said_once_and_the_status_is_0(tmp_path: Path, num_ranks: int) -> None:
    finished = Run(["doctor"], tmp_path / "logs", num_ranks).wait()
    assert [each.status for each in finished] == [0] * num_ranks, finished[0].err
    assert [each.out for each in finished[1:]] == [""] * (num_ranks - 1)
    assert [each.err for each in finished] == [""] * num_ranks
    lines = [re.split(r" +", line, maxsplit=2) for line in finished[0].out.splitlines()]
    proofs = ["plain"] if num_ranks == 1 else ["ddp", "fsdp2"]
    steps = [] if num_ranks == 1 else ["step"]
    assert [subject for _, subject, _ in lines] == ["versions", "devices", *proofs, *steps]
    assert {level for level, _, _ in lines} == {"ok"}
    for _, _, text in lines[2 : 2 + len(proofs)]:
        found = re.fullmatch(
            rf"{2 * num_ranks + 3} uneven samples on {num_ranks} ranks?: gradient (\S+) from plain torch's, in float64",
            text,
        )
        assert found is not None, text
        assert 0 < float(found[1]) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(("options", "expected"), [
    ([], "exact: 3 optimizer steps are bit-equal to one process"),
    (["--optim.options.fused=true"], "NOT exact: "),
    (["--optim.name=Muon"], "exact: 3 optimizer steps are bit-equal to one process"),
])  # fmt: skip
def test_verify_compares_the_steps_of_a_recipe(tmp_path: Path, options: list[str], expected: str) -> None:
    """Rows of 37 leave a rest of vectors of 8, which a fused optimizer rounds in another way."""
    command = [
        "verify",
        "recipes/stdlib.toml",
        "--step",
        "--parallel.wrapper=fsdp2",
        "--model.config.intermediate_size=37",
        *options,
    ]
    finished = Run(command, tmp_path / "logs", 3).wait()
    assert [each.status for each in finished] == [int(expected.startswith("NOT"))] * 3, finished[0].err
    assert [each.out for each in finished[1:]] == ["", ""]
    line = next(line for line in finished[0].out.splitlines() if "optimizer steps" in line)
    assert line.startswith(expected)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_this_machine_is_measured_into_a_file(tmp_path: Path, num_ranks: int) -> None:
    """Ranks on one host measure their link; a single rank has the one of the known device."""
    path = tmp_path / "here.toml"
    finished = Run(["doctor", "--measure", str(path)], tmp_path / "logs", num_ranks).wait()
    assert [each.status for each in finished] == [0] * num_ranks, finished[0].err
    assert [each.out for each in finished[1:]] == [""] * (num_ranks - 1)
    assert finished[0].out.splitlines()[-1] == f"wrote {path}; plan with --device {path}"
    assert ("[all_gather]" in path.read_text()) == (num_ranks > 1)
    assert read_device(path).launch_seconds > 0
    assert [each.name for each in tmp_path.glob("*.toml*")] == ["here.toml"]


def test_a_file_of_somebody_else_is_not_overwritten(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[update]")
    with pytest.raises(MegabatchError, match="which is there and no device file; name another"):
        check_device_path(recipe)
    with pytest.raises(MegabatchError, match=r"name a \.toml file in a folder that is there"):
        check_device_path(tmp_path / "none" / "here.toml")
    check_device_path(tmp_path / "here.toml")


def wrong_on_one(model: nn.Module) -> nn.Module:
    """DDP, and a rank whose gradient a bug has changed a little; the loss is what it was."""
    if dist.get_rank() == 1:
        model.head.bias.register_hook(unseen(lambda gradient: gradient * (1 + 1e-7)))
    return nn.parallel.DistributedDataParallel(model)


def proved(ranks: Ranks) -> list[str]:
    """The lines if all is right, and if a rank computes something wrong."""
    return [str(proof_finding("ddp", wrap, ranks)) for wrap in (WRAPPERS["ddp"], wrong_on_one)]


@pytest.mark.slow
def test_a_gradient_that_is_wrong_fails_on_all_ranks(tmp_path: Path) -> None:
    told = on_ranks(2, tmp_path, proved)
    assert told[0] == told[1]
    right, wrong = told[0]
    assert right.startswith("ok ")
    assert wrong.startswith("fail  ddp")
    assert " from plain torch's; do not train here: " in wrong


def late(rank: int, port: int, log: str, waits: bool) -> None:
    """Rank 1 never comes to the stage, or comes and waits for what is never sent."""
    import os

    os.environ |= rank_environment(rank, 2, port)
    with open(log, "w") as told, contextlib.redirect_stderr(told), exit_together() as met:
        deadline = Deadline(met, 1.5)
        if rank == 1 and not waits:
            time.sleep(60)
        with deadline.of("telling each other what is here"):
            time.sleep(60)


@pytest.mark.slow
@pytest.mark.parametrize("waits", [False, True])
def test_a_rank_that_does_not_come_is_named_within_the_deadline(tmp_path: Path, waits: bool) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    logs = [tmp_path / f"{rank}.err" for rank in range(2)]
    processes = [CONTEXT.Process(target=late, args=(rank, store.port, str(logs[rank]), waits)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        assert not process.is_alive()
    said = [line for log in logs for line in log.read_text().splitlines()]
    why = (
        "every rank has come to it, so what they send does not arrive: let hosts reach each other on every port, or "
        "name their common network in NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
        if waits
        else "of 2 ranks these have not come to it: 1; look at their hosts"
    )
    assert said == [f"megabatch: doctor: telling each other what is here has not ended within 1.5 s; {why}"]
    assert {process.exitcode for process in processes} <= {1, 2}


def test_what_a_rank_cannot_do_is_one_line_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors ...")

    monkeypatch.setattr("megabatch.train.cli.doctor.init_ranks", broken)
    with pytest.raises(FailedError) as raised:
        examine(Rendezvous())
    assert raised.value.status == 1
    assert capsys.readouterr().err == (
        "megabatch: doctor: taking a device and joining the others: RuntimeError: CUDA error: out of memory CUDA "
        "kernel errors ...; look at that rank's device and network, or try another version of torch\n"
    )


def test_versions_are_the_same_everywhere() -> None:
    other = FACTS | {"host": "two", "versions": {"python": "3.11", "torch": "2.12"}}
    assert str(version_finding([FACTS, FACTS])) == "ok    versions  python 3.11, torch 2.13"
    assert str(version_finding([FACTS, other])) == (
        "fail  versions  rank 1 on two has torch 2.12, and rank 0 on one has 2.13; install the same on all"
    )


def test_a_gpu_is_one_ranks() -> None:
    other = FACTS | {"gpu": "GPU-2"}
    assert str(device_finding([FACTS, other], GPU)) == "ok    devices   2 x H100 on 1 host"
    assert str(device_finding([FACTS, other, FACTS], GPU)) == (
        "fail  devices   ranks 0 and 2 share one GPU of one; start fewer"
    )
    assert device_finding([FACTS, FACTS | {"host": "two"}], GPU).text == "2 x H100 on 2 hosts"


def test_a_driver_that_torch_does_not_see_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)

    def hint() -> bool:
        return "install torch for CUDA" in device_finding([FACTS | {"gpu": None}], CPU).text

    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert not hint()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hint()
