"""Exit: every failure becomes one message from one rank and an exit status, and all ranks end within seconds.

The rank that fails first says why. The others fail the same way, lose their collective, or are ended by a thread that
watches the store; they stay silent. A message names its rank unless every rank fails with it.
"""

import contextlib
import errno
import hashlib
import multiprocessing
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Generator
from types import FrameType
from typing import Any, NoReturn, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from megabatch.errors import MegabatchError
from megabatch.train.runtime.console import CRASHED, FAILED, UNREAD, FailedError, drop_output, failure_text, print_line
from megabatch.train.runtime.files import DISK_FULL
from megabatch.train.runtime.rendezvous import Rendezvous, find_ranks

PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
NO_ACCESS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
# Key of the store: the number of ranks that have seen the run fail.
FAILURE = "failure"
# Seconds in which a rank should see by itself that another has failed.
SECONDS_TO_NOTICE = 3.0
# Seconds in which ranks that fail the same way do so.
SECONDS_TO_AGREE = 0.5
# Seconds between looks at the other ranks, and at torchrun.
SECONDS_BETWEEN_LOOKS = 0.5
# Without torchrun; a new job waits longer for the run's folder.
SECONDS_TO_SAVE = 20.0
# torchrun kills the remaining ranks once the first is gone, so all leave together.
SECONDS_TO_LEAVE = 5.0


class StoppedError(KeyboardInterrupt):
    """A signal that ends the run of a folder at once."""

    def __init__(self, number: int, folder: str) -> None:
        super().__init__(signal.Signals(number).name)
        self.number, self.folder = number, folder


class CrashedError(MegabatchError):
    """A failure that is none of what the user gave: the exit status is 1, and torchrun may start the run again."""


@contextlib.contextmanager
def exit_together() -> Generator[Rendezvous, None, None]:
    """Find the other ranks, run the block, and end together with them. Raises `FailedError` for any failure."""
    rendezvous, ended = Rendezvous(), threading.Event()
    try:
        with _raising_sigterm():
            rendezvous = find_ranks()
        if rendezvous.store is not None:
            threading.Thread(target=_leave_with_others, args=(rendezvous.store, ended), daemon=True).start()
        if rendezvous.job.key:
            threading.Thread(target=_leave_with_launcher, args=(os.getppid(), ended), daemon=True).start()
        yield rendezvous
    except FailedError:
        raise
    except MegabatchError as error:
        fail(rendezvous, failure_text(error), CRASHED if isinstance(error, CrashedError) else FAILED)
    except KeyboardInterrupt as error:
        number, folder = (error.number, error.folder) if isinstance(error, StoppedError) else (signal.SIGINT, "")
        fail(rendezvous, interruption_text(number, folder), 128 + number)
    except BrokenPipeError:
        claim_failure(rendezvous)
        drop_output()
        raise FailedError(UNREAD) from None
    except (Exception, SystemExit) as error:
        # A user's function may raise SystemExit; the other ranks would wait for ever.
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            line = f"the disk is full ({error}); make room and resume with --run.resume=true"
            fail(rendezvous, f"megabatch: {line}", FAILED)
        if isinstance(error, OSError) and error.errno in NO_ACCESS and error.filename is not None:
            line = f"cannot use {str(error.filename)[:200]} ({error.strerror}); allow it, or name another"
            fail(rendezvous, f"megabatch: {line}", FAILED)
        if not claim_failure(rendezvous):
            raise FailedError(FAILED) from None
        if rendezvous.store is None:
            raise
        # Print now: the way out may take long, or be cut short.
        _print_crash(rendezvous, error)
        raise FailedError(CRASHED) from None
    finally:
        ended.set()
        _end_with_others(rendezvous)


@contextlib.contextmanager
def _raising_sigterm() -> Generator[None, None, None]:
    """Let SIGTERM raise while the block runs, as SIGINT does, so that the process says why it ends."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise StoppedError(number, "")

    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_DFL or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def fail(rendezvous: Rendezvous, line: str, status: int) -> NoReturn:
    """Print why the run fails, unless another rank has, and raise `FailedError`."""
    store = rendezvous.store
    with contextlib.suppress(RuntimeError):
        if store is not None:
            store.add(_failure_key(line), 1)
    if claim_failure(rendezvous):
        name = f"rank {rendezvous.rank} of {rendezvous.size}"
        if not line.startswith(f"megabatch: {name} ") and not _is_said_by_all(rendezvous, line):
            line = line.replace("megabatch: ", f"megabatch: {name}: ", 1)
        print_line(line, sys.stderr)
    raise FailedError(status) from None


def claim_failure(rendezvous: Rendezvous) -> bool:
    """Record that this rank has failed. Return True if it is the first, which then says why."""
    if rendezvous.store is None:
        return True
    try:
        return rendezvous.store.add(FAILURE, 1) == 1
    except RuntimeError:
        return False


def _is_said_by_all(rendezvous: Rendezvous, line: str) -> bool:
    """Return True if every rank fails with this line within a moment.

    Before there is a process group, ranks only read the same recipe, each at its own time.
    """
    if rendezvous.store is None or not dist.is_initialized():
        return True
    deadline = time.monotonic() + SECONDS_TO_AGREE
    with contextlib.suppress(RuntimeError):
        while (num_same := rendezvous.store.add(_failure_key(line), 0)) < rendezvous.size:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return num_same == rendezvous.size
    return False


def _failure_key(line: str) -> str:
    return f"failure {hashlib.sha256(line.encode()).hexdigest()}"


def _print_crash(rendezvous: Rendezvous, error: Exception | SystemExit) -> None:
    """Print an unforeseen error below the name of its rank, or that another rank was lost."""
    name = f"megabatch: rank {rendezvous.rank} of {rendezvous.size}"
    if rendezvous.size > 1 and isinstance(error, RuntimeError) and any(sign in str(error) for sign in PEER_GONE):
        reason = " ".join(str(error).split())[:200]
        print_line(f"{name} lost another rank, which was killed or ran out of memory ({reason})", sys.stderr)
        return
    if rendezvous.size > 1:
        print(f"{name} failed:", file=sys.stderr)
    traceback.print_exception(error)


def _leave_with_others(store: Store, ended: threading.Event) -> None:
    """End this process if another has failed and this one does not notice.

    It may wait in a rendezvous, or in a collective of NCCL, which a lost peer does not break.
    """
    with contextlib.suppress(RuntimeError):
        # A connection serves one call at a time, and the main thread's may take long.
        connection = cast(Any, store).clone()
        while not ended.wait(SECONDS_BETWEEN_LOOKS):
            if connection.add(FAILURE, 0) and not ended.wait(SECONDS_TO_NOTICE):
                leave_now(FAILED)


def _leave_with_launcher(launcher: int, ended: threading.Event) -> None:
    """Stop as after SIGTERM once torchrun is gone, which restarts and ends nobody any more.

    A signal from the kernel (PR_SET_PDEATHSIG) would come when the thread that started this process ends.
    """
    while not ended.wait(SECONDS_BETWEEN_LOOKS):
        if os.getppid() != launcher:
            print_line("megabatch: torchrun is gone; this process saves the run and ends", sys.stderr)
            os.kill(os.getpid(), signal.SIGTERM)
            if not ended.wait(SECONDS_TO_SAVE):
                leave_now(CRASHED)


def _end_with_others(rendezvous: Rendezvous) -> None:
    """Destroy the process group, which frees ranks that wait in a collective, and wait until all ranks are here."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if rendezvous.store is None:
        return
    deadline = time.monotonic() + SECONDS_TO_LEAVE
    with contextlib.suppress(RuntimeError):
        num_ended = rendezvous.store.add("ended", 1)
        while num_ended < rendezvous.size and time.monotonic() < deadline:
            time.sleep(0.02)
            num_ended = rendezvous.store.add("ended", 0)


def interruption_text(number: int, folder: str) -> str:
    """Return the message for a command that a signal ends. ``folder`` is that of a run, which may not be there yet."""
    line = f"megabatch: ended by {signal.Signals(number).name}"
    if not os.path.isfile(os.path.join(folder, "config.toml")):
        return line
    return f"{line}; `megabatch train {shlex.quote(folder)}` resumes from the last checkpoint, or begins again"


def leave_now(status: int) -> NoReturn:
    """End this process from any thread."""
    kill_workers()
    os._exit(status)


def kill_workers() -> None:
    """Kill the processes that load samples; one that is stuck in a user's function would stay for ever."""
    for child in multiprocessing.active_children():
        child.kill()


def end_with_parent() -> None:
    """End this process, which loads samples, on SIGTERM from its parent, which waits for it when it ends itself.

    A signal to all processes of a run comes from another process, and changes nothing.
    """
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_await_signal_of, args=(os.getppid(),), daemon=True).start()


def _await_signal_of(process: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != process:
        pass
    os._exit(0)


def ignore_signals_in_worker() -> None:
    """Let a process that loads samples ignore signals: its parent gets them too and may still need samples."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
