"""`megabatch audit`: run a command whose Python processes are watched, merge what they noted, and say it.

A folder on PYTHONPATH holds a ``sitecustomize`` module, which every Python process imports when it starts. It waits
until torch is imported, and begins the audit then: before a script can import names of torch. So torchrun and
accelerate launch need nothing else.
"""

import atexit
import os
import socket
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.cli.arguments import Audit as Arguments
from megabatch.train.cli.sweep import run_process
from megabatch.train.runtime.console import CRASHED, print_line

# Environment variables of the audited processes.
FOLDER, UPDATES = "MEGABATCH_AUDIT_FOLDER", "MEGABATCH_AUDIT_UPDATES"
PAGE = "audit.html"
# Folder from which megabatch is imported.
ROOT = Path(__file__).parents[3]

SITECUSTOMIZE = f"""
import importlib.util
import os
import sys

here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [each for each in sys.path if os.path.abspath(each) != here]
own = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize  # the machine's own
except ImportError:
    sys.modules["sitecustomize"] = own


class AfterTorch:
    is_looking = False

    def find_spec(self, name, path=None, target=None):
        if name != "torch" or self.is_looking:
            return None
        self.is_looking = True
        spec = importlib.util.find_spec(name)  # a library may only ask whether torch is there, and import it later
        self.is_looking = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                sys.meta_path.remove(self)
                spec.loader.exec_module = run
                run(module)
                begin()

            spec.loader.exec_module = exec_module
        return spec


def begin():
    is_missing = importlib.util.find_spec("megabatch") is None  # in the environment of the script
    try:
        if is_missing:
            sys.path.append({str(ROOT)!r})
        from megabatch.train.cli.audited_command import begin_audit

        begin_audit()
    except Exception as error:
        print(f"megabatch audit: this process is not watched: {{type(error).__name__}}: {{error}}", file=sys.stderr)
    finally:
        if is_missing:  # so that the script imports nothing else from there
            sys.path.remove({str(ROOT)!r})


if os.environ.get({FOLDER!r}):
    sys.meta_path.insert(0, AfterTorch())
"""


# In an audited process


def begin_audit() -> None:
    """Begin the audit of this process, whose records go into a file of its own."""
    from megabatch import Audit, audit

    folder, launcher = Path(os.environ[FOLDER]), os.getppid()
    # torch's profiler writes to stderr when it starts.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")

    def write(record: Any) -> None:
        with (folder / f"{socket.gethostname()}-{launcher}-{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(Audit.to_line(record) + "\n")

    stack = ExitStack()
    stack.enter_context(audit(updates=int(os.environ[UPDATES]), write=write))
    atexit.register(stack.close)


# In the process of the command


def run_audited(arguments: Arguments) -> int:
    """Run the command, print the findings, write the page; return the exit status.

    It is the command's own if that failed, and else 1 where ``fail_over`` is known to be exceeded.

    Raises:
        MegabatchError: The command cannot be started, or the folder holds something else.
    """
    if arguments.updates < 1:
        raise MegabatchError(f"--updates is {arguments.updates}; watch at least one")
    if arguments.fail_over is not None and not arguments.fail_over >= 0:
        raise MegabatchError(f"--fail-over is {arguments.fail_over}; give a relative error of at least 0")
    if not arguments.command:
        if arguments.to is None or not arguments.to.is_dir():
            raise MegabatchError("no command; write it after --: megabatch audit -- python train.py")
        if not any(arguments.to.glob("*.jsonl")):
            raise MegabatchError(f"{arguments.to} has no records of an audit; give the folder of an earlier one")
        return report(arguments, arguments.to, 0)
    folder = make_folder(arguments.to)
    status = run_watched(arguments.command, folder, arguments.updates)
    return report(arguments, folder, status)


def make_folder(to: Path | None) -> Path:
    if to is None:
        names = (f"megabatch-audit{f'-{number}' if number > 1 else ''}" for number in range(1, sys.maxsize))
        to = next(path for path in map(Path, names) if not path.exists())
    elif os.path.exists(to) and (not to.is_dir() or any(to.iterdir())):
        raise MegabatchError(f"{to} exists; --to names a new folder")
    try:
        to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MegabatchError(f"--to is {to}, which cannot be made: {in_one_line(error)}; name a new folder") from None
    return to.resolve()


def run_watched(command: tuple[str, ...], folder: Path, updates: int) -> int:
    """Run a command whose Python processes are watched; return its status, as a shell says it."""
    with TemporaryDirectory(prefix="megabatch-audit-") as hooks:
        (Path(hooks) / "sitecustomize.py").write_text(SITECUSTOMIZE, encoding="utf-8")
        paths = [hooks, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {FOLDER: str(folder), UPDATES: str(updates), "PYTHONPATH": os.pathsep.join(paths)}
        try:
            # The command decides what a signal does.
            status, _ = run_process(command, os.environ | environment)
        except OSError as error:
            folder.rmdir()
            raise MegabatchError(f"{command[0]} cannot be started: {in_one_line(error)}; see that it runs") from None
    return status


def report(arguments: Arguments, folder: Path, status: int) -> int:
    """Print the findings in a folder and write its page; return the exit status."""
    program, *words = arguments.command or ("",)
    audit, num_others = read_findings(folder, " ".join([Path(program).name, *words]))
    sys.stdout.flush()
    print_line(str(audit))
    if num_others:
        print_line(f"{num_others} more runs trained apart from this one; their records are in {folder}")
    page = folder / PAGE
    page.write_text(audit.page(), encoding="utf-8")
    print_line(f"a page to look at: {page}")
    if arguments.fail_over is None:
        return status
    verdict, has_failed = check(audit, arguments.mean, arguments.fail_over)
    print_line(f"--fail-over {arguments.fail_over:g}: {verdict}")
    return status or (CRASHED if has_failed else 0)


def check(audit: Any, mean: str, limit: float) -> tuple[str, bool]:
    """Return the words of ``--fail-over``, and True if something is known to be wrong."""
    error = audit.error(mean)
    faults = f"; {'; '.join(audit.problems)}" if audit.problems else ""
    if error is None:
        measured = "cannot tell"
    else:
        measured = f"{error:.2g} from the {mean} mean{'' if audit.is_length_known else ' in direction'}"
    if audit.problems or (error is not None and error > limit):
        return f"FAILED, {measured}{faults}", True
    if error is None or not audit.is_length_known:
        return f"cannot tell, so it does not fail{'' if error is None else f' ({measured})'}", False
    return f"passed, {measured}", False


def read_findings(folder: Path, command: str) -> tuple[Any, int]:
    """Return the findings of the processes that trained together, and how many other runs there are."""
    from megabatch import Audit

    by_launcher: dict[str, list[Any]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise MegabatchError(f"records in {folder} cannot be read: {in_one_line(error)}") from None
        by_launcher.setdefault(file.stem.rpartition("-")[0], []).append(Audit.from_lines(lines, command))

    def merge(files: Iterable[Any]) -> Any:
        return Audit.from_records((record for part in files for record in part.records), command)

    runs, parts = list[Any](), list[Any]()
    for files in by_launcher.values():
        together = [part for part in files if part.updates and part.updates[0].world > 1]
        ranks = {record.rank for part in together for record in part.records}
        if together and len(ranks) == together[0].updates[0].world:
            runs.append(merge(together))
        else:
            parts += together
    runs += [merge(parts)] if parts else []
    every = [part for files in by_launcher.values() for part in files]
    runs = runs or [part for part in every if part.updates] or [merge(every)]
    return max(runs, key=lambda run: len(run.updates)), len(runs) - 1
