"""A host that is cut off for a minute and comes back: the example of docs/elastic.md on two network namespaces.

Each namespace stands in for a host, with an address and a host name of its own. The Lighthouse runs outside of both.
The link of the second is taken down in the middle of the run, and up again after a minute. The run is right if no
update is lost or has another batch, and if each loss is that of a single replica. Needs root and iproute2, and changes
nothing outside of its namespaces. Writes benchmarks/results/elastic_hosts_*.json.

    pip install torchft==0.2.0
    sudo python -m benchmarks.elastic_hosts
"""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import result
from benchmarks.elastic_torchft import MISSING, answers, free_port, wait_until

CLAIM = "a host that is cut off for a minute and returns changes neither the batch nor the loss of any update"
HOSTS, NETWORK, BRIDGE = ("mbhost1", "mbhost2"), "10.231.7", "mbbridge"
LIGHTHOUSE = f"{NETWORK}.1"
CUT_SECONDS, LIMIT_SECONDS = 60, 300
UPDATE = re.compile(r"^update (\d+)  loss (\S+)  (\d+) samples on (\d+) replicas", re.MULTILINE)
LOSS_TOLERANCE = 0.002  # of losses that are printed with three digits
ENOUGH = 10**6  # updates; the run is ended before


class Row(NamedTuple):
    """An update as the example prints it."""

    number: int
    loss: float
    num_samples: int
    num_replicas: int


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def network() -> Generator[None]:
    """Make a namespace for each host, joined by a bridge."""
    names = [f"{NETWORK}.{number} {host}" for number, host in enumerate(HOSTS, 2)]
    with contextlib.ExitStack() as undo:
        undo.callback(subprocess.run, ["ip", "link", "del", BRIDGE])
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("addr", "add", f"{LIGHTHOUSE}/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for number, host in enumerate(HOSTS, 2):
            undo.callback(subprocess.run, ["ip", "netns", "del", host])
            undo.callback(subprocess.run, ["ip", "link", "del", f"v{host}"])
            undo.callback(shutil.rmtree, f"/etc/netns/{host}", ignore_errors=True)
            ip("netns", "add", host)
            Path(f"/etc/netns/{host}").mkdir(parents=True)
            Path(f"/etc/netns/{host}/hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
            ip("link", "add", f"v{host}", "type", "veth", "peer", "name", "eth0", "netns", host)
            ip("link", "set", f"v{host}", "master", BRIDGE, "up")
            ip("-n", host, "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
            ip("-n", host, "link", "set", "eth0", "up")
            ip("-n", host, "link", "set", "lo", "up")
        yield


def torchrun(host: str) -> list[str]:
    """The command of docs/elastic.md, for one process a host."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--master-addr", host,
        "--master-port", "29601", "--max-restarts", "10", "examples/elastic_torchft.py", str(ENOUGH),
    ]  # fmt: skip


def start(command: list[str], log: Path, port: int | None = None) -> subprocess.Popen[bytes]:
    settings = {} if port is None else {"TORCHFT_LIGHTHOUSE": f"http://{LIGHTHOUSE}:{port}"}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | settings
    with log.open("w") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=file, cwd=result.ROOT, env=environment, start_new_session=True
        )


def rows(log: Path) -> list[Row]:
    found = UPDATE.findall(log.read_text(errors="replace"))
    return [Row(int(number), float(loss), int(samples), int(size)) for number, loss, samples, size in found]


def wait_for(what: str, happened: Any) -> float:
    """Wait until something has happened. Return the time."""
    if not wait_until(happened, time.time() + LIMIT_SECONDS):
        raise SystemExit(f"{what} did not happen within {LIMIT_SECONDS} s")
    return time.time()


def run_hosts(folder: Path) -> tuple[dict[str, float], list[Row], list[Row]]:
    """Run both hosts and cut one off. Return seconds of what happened, and the updates that each host has printed."""
    port, logs = free_port(), [folder / host for host in HOSTS]
    lighthouse = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--bind", f"[::]:{port}"]
    lighthouse += ["--min_replicas", "1", "--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "10000"]
    with network(), contextlib.ExitStack() as undo:

        def begin(command: list[str], log: Path, lighthouse_port: int | None = None) -> None:
            undo.callback(end, start(command, log, lighthouse_port))

        begin(lighthouse, folder / "lighthouse")
        wait_for("the Lighthouse", lambda: answers(port))
        for host, log in zip(HOSTS, logs, strict=True):
            shell = f'hostname {host} && exec "$@"'
            begin(
                ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", shell, "sh", *torchrun(host)], log, port
            )
        first = logs[0]

        def size() -> int:
            return rows(first)[-1].num_replicas

        wait_for("an update of both", lambda: len(rows(first)) > 20 and size() == 2)
        ip("link", "set", f"v{HOSTS[1]}", "down")
        cut = time.time()
        alone = wait_for("an update of the first alone", lambda: size() == 1)
        time.sleep(max(0.0, cut + CUT_SECONDS - time.time()))
        ip("link", "set", f"v{HOSTS[1]}", "up")
        up = time.time()
        back = wait_for("the return of the second", lambda: size() == 2)
        last = rows(first)[-1].number
        wait_for("ten more updates", lambda: rows(first)[-1].number > last + 10)
        seconds = {"cut_to_next_update": alone - cut, "cut_off": up - cut, "up_to_update_of_both": back - up}
        return seconds, rows(first), rows(logs[1])


def run_alone(folder: Path, num_updates: int) -> list[Row]:
    """The same updates on one replica that nothing happens to."""
    port, log = free_port(), folder / "alone"
    lighthouse = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--bind", f"[::]:{port}"]
    address = os.environ | {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}", "OMP_NUM_THREADS": "1"}
    command = [*torchrun("localhost")[:-1], str(num_updates)]
    process = start([*lighthouse, "--min_replicas", "1"], folder / "lighthouse_alone")
    try:
        wait_for("the Lighthouse", lambda: answers(port))
        with log.open("w") as file:
            subprocess.run(command, stdout=file, stderr=file, cwd=result.ROOT, env=address, check=True)
    finally:
        end(process)
    return rows(log)


def end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def compare(first: list[Row], second: list[Row], expected: list[Row]) -> dict[str, Any]:
    """Count updates that are lost, repeated, of another batch or of another loss."""
    alone = {row.number: row for row in expected}
    numbers = {row.number for row in [*first, *second]}
    is_other = [
        row.num_samples != alone[row.number].num_samples or abs(row.loss - alone[row.number].loss) > LOSS_TOLERANCE
        for row in [*first, *second]
    ]
    return {
        "updates": max(numbers),
        "lost_updates": max(numbers) - len(numbers),
        "repeated_updates": len(first) - len({row.number for row in first}),
        "other_loss_or_batch": sum(is_other),
        "updates_on_two": sum(row.num_replicas == 2 for row in first),
        "updates_without_the_second": max(b.number - a.number for a, b in pairwise(second)) - 1,
    }


def main() -> None:
    if importlib.util.find_spec("torchft") is None:
        raise SystemExit(MISSING)
    if os.geteuid() or shutil.which("ip") is None:
        raise SystemExit("this makes network namespaces; run it as root, with iproute2 installed")
    made = result.made_with(["torchft", "transformers"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds, first, second = run_hosts(folder)
        expected = run_alone(folder, max(row.number for row in [*first, *second]))
        found = {"seconds": {key: round(value, 1) for key, value in seconds.items()}} | compare(first, second, expected)
    print(found)
    is_right = not any(found[fault] for fault in ("lost_updates", "repeated_updates", "other_loss_or_batch"))
    result.write(result.dated("elastic_hosts"), {"claim": CLAIM, **made, "is_right": is_right, **found})
    raise SystemExit(0 if is_right else 1)


if __name__ == "__main__":
    main()
