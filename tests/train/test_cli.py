"""The command line as a user meets it: exit statuses, one line on stderr, nothing half-written."""

import io
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megabatch.__main__ import main
from megabatch.errors import install_command
from megabatch.train.cli import front
from megabatch.train.cli.help import print_help
from megabatch.train.config.keys import known_keys
from megabatch.train.runtime import signals
from megabatch.train.runtime.signals import StopSignal
from tests.train.conftest import Bench
from tests.train.processes import Run

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[2])}


def python(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_mistake_in_a_recipe_is_told_before_torch_is_imported(bench: Bench) -> None:
    script = (
        "import sys\nfrom megabatch.train.cli import front\n"
        "print([front.run(['train', *words.split()]) for words in sys.argv[1:]], 'torch' in sys.modules)"
    )
    wrong = ("--update.globl=3", "--optim.lr=fast", "--data.path=none.csv", "--data.text_field=a --data.label=b", "--x")
    done = python("-c", script, *(f"{bench.recipe} {each}" for each in wrong), str(bench.recipe), folder=bench.path)
    assert done.stdout == "[2, 2, 2, 2, 2, None] False\n", done.stderr
    assert done.stderr.count("\n") == len(wrong)


@pytest.mark.full
def test_a_sweep_makes_a_run_for_each_value_and_a_table(bench: Bench) -> None:
    sweep = ("--sweep", "optim.name=Nope,AdamW", "--sweep", "optim.lr=1e-3", f"--data.cache={bench.path}/cache")
    command = ("-m", "megabatch", "train", str(bench.recipe), "--run.max_steps=2", *sweep)
    done = python(*command, folder=bench.path)
    folder = bench.path / "run-sweep"
    assert done.returncode == 2
    assert "sweep: optim.name=Nope optim.lr=1e-3 ended with status 2\n" in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["name=AdamW,lr=1e-3"]
    table = done.stdout[done.stdout.rindex("held-out") :]
    assert "name=AdamW,lr=1e-3" in table
    assert "sweep: failed with status 2: optim.name=Nope optim.lr=1e-3\n" in table
    again = python(*command, folder=bench.path)
    assert again.stderr.endswith(
        "name=AdamW,lr=1e-3 already holds a run; resume it with --run.resume=true, or choose another run.folder\n"
    )
    assert "sweep: run" not in again.stdout


@pytest.mark.slow
def test_under_torchrun_every_rank_ends_with_status_2_and_one_line_is_said(bench: Bench) -> None:
    recipe = bench.path / "none.toml"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = python(*torchrun, "-m", "megabatch", "train", str(recipe), folder=bench.path)
    ours = [line for line in done.stderr.splitlines() if line.startswith("megabatch: ")]
    nearest = f"{bench.path / 'recipe.toml'} comes nearest"
    assert ours == [f"megabatch: no recipe {recipe} ({nearest}); give the path of a TOML file, or of a run's folder"]
    assert "exitcode  : 2" in done.stderr
    assert "megabatch/train" not in done.stderr  # no traceback of ours


@pytest.mark.slow
def test_no_command_at_all_prints_the_usage_and_is_an_error(tmp_path: Path) -> None:
    nothing, asked = (Run(arguments, tmp_path / f"{len(arguments)}", 1).wait()[0] for arguments in ([], ["--help"]))
    assert (nothing.status, nothing.out, asked.status, asked.err) == (2, "", 0, "")
    assert nothing.err == f"megabatch: no command; {asked.out}"


@pytest.mark.slow
@pytest.mark.parametrize("asks_for_help", [True, False])
def test_a_reader_that_goes_away_ends_it_without_a_traceback(bench: Bench, asks_for_help: bool) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "megabatch", "train", "--help" if asks_for_help else str(bench.recipe)]
    with os.fdopen(writing, "wb") as unread:
        done = subprocess.run(
            command, cwd=bench.path, env=ENVIRONMENT, stdout=unread, stderr=subprocess.PIPE, timeout=120, check=False
        )
    assert done.stderr == b""
    assert done.returncode == 141


@pytest.mark.slow
def test_help_names_every_key_with_its_meaning(tmp_path: Path) -> None:
    (done,) = Run(["train", "--help"], tmp_path, ranks=1).wait()
    assert done.status == 0
    for text in ("--update.global_batch_size", "Samples of an update, over all ranks", "--parallel.wrapper {None,ddp,"):
        assert text in done.out
    assert {key for key in known_keys() if f"--{key} " not in done.out} == set()
    assert done.err == ""


def test_help_takes_the_folder_of_a_run(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    folder = bench.path / "some-run"
    folder.mkdir()
    (folder / "config.toml").write_bytes(bench.recipe.read_bytes())
    print_help("train", [str(folder), "--help"])
    assert "--update.global_batch_size" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pydantic", "rich"])
def test_without_the_extra_one_line_says_what_to_install(bench: Bench, name: str) -> None:
    script = f"import sys; sys.modules[{name!r}] = None; import megabatch.__main__ as m; m.main()"
    done = python("-c", script, "train", str(bench.recipe), folder=bench.path)
    assert done.returncode == 2
    assert done.stderr == f"megabatch: {name} is not installed; {install_command('train')}\n"


def test_an_interrupt_while_torch_is_imported_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(front, "run", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "\n")


def test_a_second_signal_is_heard_where_nobody_reads_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(signals, "leave_now", left.append)
    monkeypatch.setattr(signals, "SECONDS_OF_ONE", -1.0)
    stop = StopSignal(speaks=True)
    stop.has_begun = True
    closed = io.StringIO()
    closed.close()
    with monkeypatch.context() as context, stop.handling():
        context.setattr(sys, "stderr", closed)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
        deadline = time.monotonic() + 10
        while not left and time.monotonic() < deadline:
            time.sleep(0.01)
    assert left == [128 + signal.SIGTERM]


def test_the_end_of_a_run_does_not_wait_for_processes_that_it_forked() -> None:
    """They have the pipe of signals too, so that closing it here ends nothing."""
    ours, theirs = multiprocessing.Pipe()
    with StopSignal(speaks=False).handling():
        child = os.fork()
        if not child:
            theirs.poll(30)
            os._exit(0)
    try:
        assert os.waitpid(child, os.WNOHANG) == (0, 0)  # it is still there
    finally:
        ours.send("end")
        os.waitpid(child, 0)


ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "datasets", "matplotlib", "numpy")
SCRIPT = f"""
import sys
from megabatch.__main__ import main
try:
    main()
finally:
    print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""
LIGHT = ["--help", "train --help", "plan --help", "train {recipe} --help", "export --help",
         "init new.toml --model small --data stdlib --hardware cpu"]  # fmt: skip


def ran(words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "RANK"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, *words.format(recipe=ROOT / "recipes/stdlib.toml").split()]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("words", LIGHT)
def test_it_is_answered_without_torch(tmp_path: Path, words: str) -> None:
    done = ran(words, tmp_path)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert done.stdout


def test_a_name_that_can_be_none_is_one_line_and_status_2(tmp_path: Path) -> None:
    done = ran(f"init {'n' * 300} --model small --data stdlib --hardware cpu", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    line, heavy = done.stderr.splitlines()
    assert line.startswith("megabatch: ")
    assert "File name too long" in line
    assert heavy == "[]"
    assert not list(tmp_path.iterdir())


def test_importing_the_package_imports_nothing_else() -> None:
    script = "import sys, megabatch; print('torch' in sys.modules); megabatch.Plan; print('torch' in sys.modules); "
    script += "megabatch.GradientAccumulator; print('torch' in sys.modules)"
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False", "True"]
