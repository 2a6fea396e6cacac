"""TensorBoard: scalars as TensorBoard reads them, written by this thread, a row of them whole or not at all.

A file of events is a sequence of records. torch's SummaryWriter leaves them to a thread that a full disk ends.
"""

import contextlib
import io
import os
import socket
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, cast

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from megabatch.train.runtime.files import RetryingAppender

VERSION = "brain.Event:2"  # of the format, in a file's first record
Event = cast(Any, event_pb2).Event
Summary = cast(Any, summary_pb2).Summary
SessionLog = cast(Any, event_pb2).SessionLog


class Events:
    """A new file of events in the folder.

    Args:
        purge_step: TensorBoard drops what earlier files have of this step and of later ones; None: nothing.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        self._folder = folder
        with contextlib.suppress(OSError):  # `flush` makes it too
            folder.mkdir(parents=True, exist_ok=True)
        self._file = RetryingAppender(new_file(folder))
        self._file.append(record(file_version=VERSION))
        if purge_step is not None:
            self._file.append(record(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Write numbers by their tags, at a step; or let them wait, where there is no room."""
        values = [Summary.Value(tag=tag, simple_value=number) for tag, number in scalars.items()]
        self._file.append(b"".join(record(step=step, summary=Summary(value=[value])) for value in values))

    def flush(self) -> None:
        """Write what waits. Raises `OSError` where that cannot be done."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file.flush()


def new_file(folder: Path) -> Path:
    """A name that no file in the folder has; TensorBoard reads files in the order of their names."""
    begin = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
    paths = (folder / f"{begin}.{number}" for number in count())
    return next(path for path in paths if not path.exists())


def record(**fields: Any) -> bytes:
    """An event as a record."""
    framed = io.BytesIO()
    RecordWriter(framed).write(Event(wall_time=time.time(), **fields).SerializeToString())
    return framed.getvalue()
