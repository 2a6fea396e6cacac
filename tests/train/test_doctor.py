"""`megabatch doctor`: what works is said once, what does not is named, and nothing hangs."""

import contextlib
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import megabatch.train.runtime.exit as exit_module
from megabatch.errors import MegabatchError
from megabatch.train.cli.doctor import proof
from megabatch.train.cli.doctor.command import examine, read_folder
from megabatch.train.cli.doctor.deadline import Deadline
from megabatch.train.cli.doctor.facts import Facts, device_finding, memory_finding, version_finding
from megabatch.train.cli.doctor.places import folder_finding, hub_finding, unreachable
from megabatch.train.cli.init.hardware import seen_gpus
from megabatch.train.runtime.ranks import Ranks
from megabatch.train.runtime.rendezvous import Rendezvous
from tests.train.on_ranks import on_ranks
from tests.train.processes import CONTEXT, Run, rank_environment
from tests.unit.small import unseen

CPU = torch.device("cpu")
FACTS = Facts("one", "H100", "GPU-1", 2.0**36, {"python": "3.11", "torch": "2.13", "NCCL": None})


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_what_works_is_said_once_and_the_status_is_0(tmp_path: Path, num_ranks: int) -> None:
    finished = Run(["doctor", "--folder", str(tmp_path / "runs")], tmp_path / "logs", num_ranks).wait()
    assert [each.status for each in finished] == [0] * num_ranks, finished[0].err
    assert [each.out for each in finished[1:]] == [""] * (num_ranks - 1)
    assert [each.err for each in finished] == [""] * num_ranks
    lines = [re.split(r" +", line, maxsplit=2) for line in finished[0].out.splitlines()]
    proofs = ["plain"] if num_ranks == 1 else ["ddp", "fsdp2"]
    assert [subject for _, subject, _ in lines] == ["versions", "devices", "memory", "ranks", "folder", "hub", *proofs]
    assert {level for level, _, _ in lines} <= {"ok", "warn"}
    for _, _, text in lines[6:]:
        cut, error = re.fullmatch(
            rf"{2 * num_ranks + 3} uneven samples in (\d+) microbatches on (?:each of )?{num_ranks} ranks?: gradient "
            r"(\S+) from plain torch's, in float64",
            text,
        ).groups()
        assert int(cut) >= 2
        assert 0 < float(error) <= 1e-12
    assert not (tmp_path / "runs").exists()


def wrong_on_one(model: nn.Module) -> nn.Module:
    """DDP, and a rank whose gradient a bug has changed a little; the loss is what it was."""
    wrapped = nn.parallel.DistributedDataParallel(model)
    if dist.get_rank() == 1:
        wrapped.module.head.bias.register_hook(unseen(lambda gradient: gradient * (1 + 1e-9)))
    return wrapped


def proved(ranks: Ranks) -> list[str]:
    """What is said where all is right, where a rank sends what is wrong, where one keeps it, and of a wrong device."""
    right, plain, whole = proof.wrappers(ranks)["ddp"], proof.plain_gradient, proof.whole
    told = [str(proof.proof_of("ddp", wrap, ranks)) for wrap in (right, wrong_on_one)]
    if ranks.rank == 1:
        proof.whole = lambda gradient: whole(gradient) + 1e-9
    told.append(str(proof.proof_of("ddp", right, ranks)))
    if ranks.rank == 1:
        proof.plain_gradient = lambda *words: [1.000000001 * each for each in plain(*words)]
    return [*told, str(proof.proof_of("ddp", right, ranks))]


@pytest.mark.slow
def test_a_gradient_that_is_wrong_on_one_rank_names_it(tmp_path: Path) -> None:
    told = on_ranks(2, tmp_path, proved)
    assert told[0] == told[1]
    right, sent, kept, device = told[0]
    assert right.startswith("ok ")
    assert sent.startswith("fail  ddp")
    assert " from plain torch's on every rank, and it may be 1e-12; do not train here" in sent
    assert " from plain torch's on rank 1, and it may be 1e-12; do not train here" in kept
    assert " not known: plain torch on rank 1 computes another gradient than on rank 0; look at the devices" in device


def late(rank: int, port: int, log: str, waits: bool) -> None:
    """Rank 1 never comes to the stage, or comes and waits for what is never sent."""
    import os

    os.environ |= rank_environment(rank, 2, port)
    with open(log, "w") as told, contextlib.redirect_stderr(told), exit_module.exit_together() as met:
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
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("CUDA error: invalid device ordinal\nCUDA kernel errors ...")

    monkeypatch.setattr("megabatch.train.cli.doctor.command.join", broken)
    with pytest.raises(exit_module.FailedError) as raised:
        examine(["--folder", str(tmp_path)], Rendezvous())
    assert raised.value.status == 1
    assert capsys.readouterr().err == (
        "megabatch: doctor: taking a device and joining the others: RuntimeError: CUDA error: invalid device ordinal "
        "CUDA kernel errors ...; start no more processes on a host than it has GPUs\n"
    )


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ([FACTS, FACTS], "ok    versions  python 3.11, torch 2.13"),
        (
            [FACTS, replace(FACTS, host="two", versions=FACTS.versions | {"torch": "2.12"})],
            "fail  versions  rank 1 on two has torch 2.12, and rank 0 on one has 2.13; install the same on all",
        ),
    ],
)
def test_versions_are_the_same_everywhere(facts: list[Facts], text: str) -> None:
    assert str(version_finding(facts)) == text


def test_a_gpu_is_one_ranks_and_memory_is_the_least() -> None:
    other = replace(FACTS, device_id="GPU-2", free_bytes=2.0**29)
    gpu = torch.device("cuda", 0)
    assert str(device_finding([FACTS, other], gpu)) == "ok    devices   2 x H100"
    assert str(device_finding([FACTS, other, FACTS], gpu)) == (
        "fail  devices   ranks 0 and 2 share one GPU of one; start fewer"
    )
    assert device_finding([FACTS, replace(FACTS, host="two")], gpu).level == "ok"
    assert str(memory_finding([FACTS, FACTS])) == "ok    memory    64.0 GiB free, the least, for rank 0 on one"
    assert str(memory_finding([FACTS, other])) == (
        "warn  memory    0.5 GiB free for rank 1 on one; end what else runs there"
    )


def test_a_driver_that_torch_does_not_see_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert seen_gpus() == []
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA T4 (UUID: GPU-1)'\n")
    program.chmod(0o755)
    assert len(seen_gpus()) == 1
    found = device_finding([replace(FACTS, device="cpu: x", device_id="")], CPU)
    assert (found.level, found.text.endswith("sees none: install torch for CUDA")) == ("warn", True)


def test_the_folder_of_runs_can_be_written_to_or_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folder_finding(tmp_path / "runs/mine").text.endswith(f" free for {tmp_path}/runs/mine")
    (tmp_path / "file").write_text("")
    assert str(folder_finding(tmp_path / "file")) == (
        f"fail  folder    {tmp_path}/file is no folder to write to; allow it, or choose another run.folder"
    )
    monkeypatch.setattr("megabatch.train.cli.doctor.places.SCARCE_BYTES", 2**70)
    assert folder_finding(tmp_path).level == "warn"


def test_the_hub_is_offline_there_or_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub_finding().text.startswith("offline, by HF_HUB_OFFLINE; what is in ")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    found = hub_finding()
    assert (found.level, found.text.endswith(": set HF_HUB_OFFLINE=1")) == ("warn", True)
    assert unreachable("http://127.0.0.1:9") is not None


@pytest.mark.parametrize("words", [["--folder"], ["--folder="], ["here"], ["--folder", "a", "b"], ["--fodler=a"]])
def test_bad_arguments_are_one_line(words: list[str]) -> None:
    with pytest.raises(
        MegabatchError, match=r"^cannot read the arguments '.*'; write: megabatch doctor \[--folder runs\]$"
    ):
        read_folder(words)


@pytest.mark.parametrize("words", [["--folder", "runs/lr=1e-3"], ["--folder=runs/lr=1e-3"]])
def test_a_folder_may_have_any_name(words: list[str]) -> None:
    assert read_folder(words) == Path("runs/lr=1e-3")
