"""The user's machine is safe from a run's folder, a checkpoint, a model and a name that come from somebody else."""

import grp
import json
import os
import pwd
import socket
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from megabatch import MegabatchError
from megabatch.train.checkpoints.export import writing
from megabatch.train.checkpoints.metadata import DamagedError, FileDigest, find_changed_file, read_digests
from megabatch.train.checkpoints.paths import checkpoints_of, named_by, recipe_of, steps_of
from megabatch.train.checkpoints.retention import Checkpoints, find_damage
from megabatch.train.checkpoints.run_folder import check_own_paths, lock_run
from megabatch.train.cli import front
from megabatch.train.config import ModelConfig
from megabatch.train.config.secrets import check_unmasked, mask, mask_command
from megabatch.train.model.architecture import architecture_of, construct, new_architecture
from megabatch.train.report.data import end_of_log, ended_of, is_running, plan_of, read_run
from megabatch.train.report.runs import find_runs, runs_text, summarize
from megabatch.train.runtime.console import printable
from megabatch.train.runtime.files import (
    JsonlFile,
    NotAFileError,
    RetryingAppender,
    open_file,
    read_starts,
    remove_unfinished,
    sealed_text,
)
from megabatch.train.trust import open_to_others
from tests.train.conftest import Bench
from tests.train.contexts import ALONE

CONTROL = "\x1b]0;PWNED\x07\x1b[31m"


def tree(folder: Path) -> dict[str, str]:
    """The files below a folder, and what is in them."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def place_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's path is short
        bound.bind(path.name)
        os.chdir(here)


ODD: dict[str, Callable[[Path], object]] = {
    "a link to another file or folder": lambda path: path.symlink_to(path.parents[-2] / "nowhere"),
    "a pipe": os.mkfifo,
    "a socket": place_socket,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with two damaged checkpoints, as it may come from anywhere."""
    folder = tmp_path / "run"
    for step in (1, 20):
        (folder / "checkpoints" / f"step-{step}").mkdir(parents=True)
        (folder / "checkpoints" / f"step-{step}" / "data").write_text("x")
    (folder / "checkpoints" / "latest").write_text("step-20")
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (folder / "config.toml").write_text('[run]\nfolder = "run"\n')
    return folder


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of the user's with names that a run would delete."""
    folder = tmp_path / "victim"
    (folder / "step-1").mkdir(parents=True)
    (folder / "step-1" / "data").write_text("mine")
    for name in (".note.tmp", "latest", f".latest.{'0' * 32}.tmp", "step-1.tmp", "events.1"):
        (folder / name).write_text("mine")
    return folder


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize(
    "name",
    [
        ".lock", "log.txt", "metrics.jsonl", "config.toml", "environment.json", "microbatch.json", "checkpoints",
        "checkpoints/latest", "checkpoints/step-7", "checkpoints/step-1/meta.json", "checkpoints/step-1/a/b",
        "tensorboard", "tensorboard/events", "stuck/rank-0.txt", "profile", "wandb",
    ],
)  # fmt: skip
def test_nothing_of_a_run_may_be_a_link_or_a_pipe(tmp_path: Path, kind: str, name: str) -> None:
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    ODD[kind](path)
    with pytest.raises(MegabatchError, match=f"{name} is {kind}; put a file or folder there, or choose another"):
        check_own_paths(tmp_path / "run")


def test_what_a_run_does_not_touch_may_be_a_link(run: Path, victim: Path) -> None:
    (run / "my-data").symlink_to(victim)
    (run / "wandb").mkdir()
    (run / "wandb" / "latest-run").symlink_to(victim)
    check_own_paths(run)
    linked = run.with_name("linked")
    linked.symlink_to(run)
    check_own_paths(linked)
    assert steps_of(linked) == [1, 20]


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard"])
def test_a_run_neither_deletes_nor_writes_through_a_link(
    bench: Bench, refuse: Callable[..., str], victim: Path, name: str
) -> None:
    before = tree(victim)
    bench.folder.mkdir()
    (bench.folder / name).symlink_to(victim)
    assert refuse(run__resume=True).startswith(f"{bench.folder / name} is a link to another file or folder")
    assert tree(victim) == before


def test_a_link_that_is_put_later_is_not_followed(run: Path, victim: Path) -> None:
    before, shelf = tree(victim), Checkpoints(run)
    checkpoints_of(run).rename(run / "aside")
    (run / "checkpoints").symlink_to(victim)
    for use in (lambda: shelf.prune(1, ALONE), lambda: shelf.make_room(ALONE), lambda: shelf.latest_valid(ALONE)):
        with pytest.raises(MegabatchError, match="checkpoints is a link to another file or folder"):
            use()
    assert tree(victim) == before


def test_a_checkpoint_that_is_a_link_is_none_and_is_deleted_alone(run: Path, victim: Path) -> None:
    (run / "checkpoints" / "step-3").symlink_to(victim)
    (run / "checkpoints" / "step-4.tmp").symlink_to(victim)
    before = tree(victim)
    assert steps_of(run) == [1, 20]
    Checkpoints(run).prune(None, ALONE)
    assert tree(victim) == before
    assert not (run / "checkpoints" / "step-4.tmp").is_symlink()


def test_only_files_that_a_run_has_left_unfinished_are_deleted(run: Path) -> None:
    names = (".note.tmp", "step-mine.tmp", ".latest.abc.tmp")
    for folder in (run, checkpoints_of(run)):
        for name in (*names, f".latest.{'a' * 32}.tmp"):
            (folder / name).write_text("x")
        remove_unfinished(folder)
        assert {path.name for path in folder.glob("*.tmp")} | {path.name for path in folder.glob(".*.tmp")} == {*names}
    Checkpoints(run).prune(None, ALONE)
    assert (checkpoints_of(run) / "step-mine.tmp").exists()


def test_a_second_name_of_a_log_keeps_its_content(tmp_path: Path) -> None:
    """A hard link may be a file of the user's elsewhere, or the run that this one was copied from."""
    (tmp_path / "mine").write_text("mine\n")
    (tmp_path / "log.txt").hardlink_to(tmp_path / "mine")
    log = RetryingAppender(tmp_path / "log.txt")
    log.pending.append("a run's\n")
    log.flush()
    assert (tmp_path / "mine").read_text() == "mine\n"
    assert (tmp_path / "log.txt").read_text() == "mine\na run's\n"


@pytest.mark.parametrize("kind", ODD)
def test_a_log_is_opened_as_a_file_only(tmp_path: Path, kind: str) -> None:
    ODD[kind](tmp_path / "log.txt")
    log = RetryingAppender(tmp_path / "log.txt")
    log.pending.append("x")
    with pytest.raises(NotAFileError):
        log.flush()
    with pytest.raises(NotAFileError):
        open_file(tmp_path / "log.txt")


def seal(run: Path, files: Any) -> Path:
    checkpoint = run / "checkpoints" / "step-20"
    (checkpoint / "meta.json").write_text(sealed_text({"step": 20, "files": files}))
    return checkpoint


@pytest.mark.parametrize(
    "name",
    [
        "../../../../../../dev/zero", "/dev/zero", "..", ".", "", "a/b", "../latest", "a\0b", "\ud800", "a\nb",
        "\x1b[31m",
    ],
)  # fmt: skip
def test_metadata_names_files_of_its_checkpoint_alone(run: Path, name: str) -> None:
    checkpoint = seal(run, {name: {"num_bytes": 0, "sha256": "0" * 64}})
    with pytest.raises(DamagedError, match="which is no file of a checkpoint"):
        read_digests(checkpoint)
    with pytest.raises(MegabatchError, match="has no whole checkpoint to resume from"):
        Checkpoints(run).latest_valid(ALONE)


@pytest.mark.parametrize("entry", [{"num_bytes": "0", "sha256": "0"}, {"num_bytes": 0, "sha256": None}, 5, {"a": 1}])
def test_metadata_of_odd_types_is_damage(run: Path, entry: Any) -> None:
    assert (find_damage(seal(run, {"data": entry}), ALONE) or "").startswith("meta.json: ")


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", ["data", ".metadata", "meta.json"])
def test_a_file_of_a_checkpoint_that_is_none_is_damage(run: Path, kind: str, name: str) -> None:
    checkpoint = seal(run, {"data": {"num_bytes": 0, "sha256": "0"}, ".metadata": {"num_bytes": 0, "sha256": "0"}})
    (checkpoint / ".metadata").write_text("")
    (checkpoint / name).unlink()
    ODD[kind](checkpoint / name)
    assert "not a file" in (find_damage(checkpoint, ALONE) or "")


def test_a_zero_of_a_device_is_never_read(run: Path) -> None:
    checkpoint = seal(run, {})
    (checkpoint / "zero").symlink_to("/dev/zero")
    problem = find_changed_file(checkpoint, {"zero": FileDigest(0, "0" * 64)}, ALONE)
    assert problem == "zero is a link, not a file"


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", ["metrics.jsonl", "log.txt", "config.toml", "environment.json", "plan.txt", ".lock"])
def test_one_bad_folder_does_not_keep_the_others_from_being_shown(
    run: Path, tmp_path: Path, kind: str, name: str
) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    for each in ("metrics.jsonl", "config.toml"):
        (bad / each).write_bytes((run / each).read_bytes())
    (bad / name).unlink(missing_ok=True)
    ODD[kind](bad / name)
    folders = find_runs(tmp_path)
    summaries = [summarize(folder, folder.name) for folder in folders]
    assert [each.name for each in summaries] == ["bad", "run"]
    assert summaries[1].state == "stopped at update 1"
    if name in ("metrics.jsonl", "config.toml"):
        assert summaries[0].state == "damaged"
        assert "not a file" in summaries[0].problem
    with pytest.raises(MegabatchError) if name == "metrics.jsonl" else nullcontext():
        read_run(bad)
    assert len(read_starts(bad)) == (name == "environment.json")
    assert (plan_of(bad), ended_of(end_of_log(bad)), is_running(bad)) == ([], "", False)
    if name == "config.toml":
        with pytest.raises(MegabatchError, match=r"without config\.toml"):
            recipe_of(bad)


def test_a_pointer_that_is_a_pipe_names_nothing(run: Path) -> None:
    (run / "checkpoints" / "latest").unlink()
    os.mkfifo(run / "checkpoints" / "latest")
    assert named_by(run / "checkpoints" / "latest") == ""


def test_a_folder_in_the_place_of_a_file_is_kept_aside_or_named(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    (warning,) = JsonlFile(run / "metrics.jsonl", enabled=True).cut(0)
    assert "is damaged (it is a folder, not a file); it is kept as metrics.jsonl.damaged-1" in warning
    (run / ".lock").mkdir()
    with pytest.raises(MegabatchError, match=r"\.lock cannot be used: it is a folder, not a file; move it away"):
        ALONE.on_main(lambda: lock_run(run, None), str(run))
    (run / "environment.json").mkdir()
    assert read_starts(run) == [{}]


SECRETS: dict[str, Any] = {
    "password": 73510042, "api_keys": ["SECRET", 7], "apiKeys": "SECRET", "hf_tokens": ["SECRET"], "HFToken": "SECRET",
    "APIKey": 735.5, "bearer": "SECRET", "cookie": "SECRET", "cookies": {"a": 7}, "dsn": "SECRET", "secret": 7.5,
    "token": True, "passwords": [735100], "authtoken": "SECRET", "auth": {"user": {"id": 735}}, "jwt": "SECRET",
    "secret_value": 735, "api_tokens": [735, 736], "PASSWORD": 1, "pin_token": 4711, "db_passwd": 7, "keys": ["SECRET"],
    "headers": ["Authorization: Bearer SECRETSECRET"], "connection": "Server=a;Password=SECRET;x=1",
    "note": "hf_SECRETSECRETSECRETSECRET", "passphrase": "SECRET", "url": "https://me:a@SECRET@host/x",
    "clone": "https://ghp_SECRETSECRETSECRET@github.com/x", "options": {"of": [{"password": "SECRET"}]},
    "signed": "https://host/x?a=1&X-Amz-Signature=SECRET&b=2", "credentials": {"user": "a", "value": ["SECRET"]},
}  # fmt: skip


def inline_of(value: Any) -> str:
    """A value of TOML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {inline_of(part)}" for key, part in value.items()) + "}"
    return f"[{', '.join(map(inline_of, value))}]" if isinstance(value, list) else json.dumps(value)


@pytest.mark.parametrize(("key", "value"), SECRETS.items())
def test_a_secret_of_any_type_is_masked(key: str, value: Any) -> None:
    typed = value if isinstance(value, str) else inline_of(value)
    for table in ({key: value}, {"outer": {"inner": [{key: value}]}}):
        shown = json.dumps([mask(table), mask_command([f"--data.options.{key}={typed}"])])
        assert not any(part in shown for part in ("SECRET", "735", "736", "4711", "true", ": 7", ": 1", "7.5")), shown
        with pytest.raises(MegabatchError, match="is a secret that"):
            check_unmasked(mask(table), "config.toml")


@pytest.mark.parametrize(
    "table",
    [
        {"max_microbatch_tokens": 8192}, {"max_microbatch_tokens": "auto"}, {"pack_tokens": 2048}, {"max_token": 5},
        {"pad_token": 0}, {"eos_token": "</s>"}, {"suppress_tokens": [1, 2]}, {"num_keys": 4}, {"use_auth": True},
        {"add_bos_token": True}, {"monkey": "x"}, {"tokenizer": "bytes"}, {"num_key_value_heads": 2}, {"token": None},
        {"path": "s3://bucket/x?page=2"}, {"turkeys": ["a"]}, {"path": "ssh://git@host/x"}, {"path": "a:b@c"},
    ],
)  # fmt: skip
def test_what_is_no_secret_stays(table: dict[str, Any]) -> None:
    assert mask(table) == table


def test_no_column_of_runs_shows_a_secret_that_an_earlier_version_wrote(run: Path, tmp_path: Path) -> None:
    for name, number in (("a", 73510042), ("b", 73510043)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(f"[data.options]\npassword = {number}\nsize = {number % 9}\n")
    text = runs_text([summarize(tmp_path / name, name) for name in "ab"])
    assert "data.options.size" in text
    assert "7351004" not in text


def test_an_export_leaves_a_folder_beside_alone(tmp_path: Path) -> None:
    (tmp_path / "model.tmp").mkdir()
    (tmp_path / "model.tmp" / "thesis.txt").write_text("mine")
    with writing(tmp_path / "model") as beside:
        (beside / "x").write_text("x")
    with pytest.raises(MegabatchError, match="cannot write"), writing(tmp_path / "other"):
        raise OSError("no room")
    assert tree(tmp_path) == {"model.tmp/thesis.txt": "mine", "model/x": "x"}
    assert len([*tmp_path.iterdir()]) == 2


def group_of_others() -> int:
    """A group that is not the user's own."""
    return next(group.gr_gid for group in grp.getgrall() if group.gr_gid not in (os.getgid(), *os.getgroups()))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a file to any group")
def test_what_a_group_may_write_is_not_trusted(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("")
    assert open_to_others(file) == ""
    for path, mode in ((file, 0o664), (tmp_path, 0o2775)):
        os.chown(path, -1, group_of_others())
        before = path.stat().st_mode & 0o7777
        path.chmod(mode)
        assert f"may write to {path}" in open_to_others(file)
        path.chmod(before)
        assert open_to_others(file) == ""
    file.chmod(0o1666)
    assert open_to_others(file) == f"everybody may write to {file}"
    own = pwd.getpwuid(os.geteuid())
    shared = {user.pw_name for user in pwd.getpwall() if user.pw_gid == own.pw_gid} | {*grp.getgrgid(own.pw_gid).gr_mem}
    os.chown(file, -1, own.pw_gid)
    file.chmod(0o664)
    assert bool(open_to_others(file)) == (shared != {own.pw_name})


LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    "extra",
    [
        {"attn_implementation": "evil/kernel"}, {"_attn_implementation": "evil/kernel"},
        {"attn_implementation": "kernels-community/flash-attn:x"}, {"attn_implementation": "paged|evil/kernel"},
        {"experts_implementation": "evil/kernel"}, {"attn_implementation": "flash_attention_3"},
    ],
)  # fmt: skip
def test_a_model_brings_no_code_of_the_hub(tmp_path: Path, extra: dict[str, str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **extra, "architectures": ["LlamaForCausalLM"]}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(MegabatchError, match="asks for the implementation"):
        architecture_of(ModelConfig(name=str(tmp_path)))


def test_a_recipe_brings_no_code_of_the_hub() -> None:
    for config in (
        ModelConfig(config={**LLAMA, "_attn_implementation": "evil/kernel"}),
        ModelConfig(config=LLAMA, attention="evil/kernel"),
    ):
        for use in (lambda given: construct(given, new_architecture(given)), architecture_of):
            with pytest.raises(MegabatchError, match="asks for the implementation 'evil/kernel'"):
                use(config)


def test_names_and_values_do_not_steer_a_terminal(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    # `report --to CONTROL` writes a file of that name into the working directory.
    monkeypatch.chdir(tmp_path)
    twin = tmp_path / f"twin{CONTROL}\nrun  ended \x9b2J"
    twin.mkdir()
    (twin / "config.toml").write_text('[optim]\nname = "Ada\\u001b]0;PWNED\\u0007W"\n"lr\\u001b" = 1\n')
    (run / "config.toml").write_text('[optim]\nname = "AdamW"\n')
    (twin / "metrics.jsonl").write_text("{\n\n")
    (run / "checkpoints" / "best").write_text(f"step-9{CONTROL}")
    commands = [["runs", str(tmp_path)], ["runs", f"{tmp_path}/no{CONTROL}"], ["report", str(twin)]]
    commands += [["train", str(twin)], [f"tra{CONTROL}in"], ["report", "--to", CONTROL, str(run)], ["runs", "a\0b"]]
    commands += [["train", "a\0b.toml"], ["runs", "\udc80\ud800"], ["train", "x.toml", f"--run.{CONTROL}=1\0"]]
    for command in commands:
        status = front.run(command)
        said = capsys.readouterr()
        assert status is not None or command[0].startswith("tra\x1b"), command
        text = said.out + said.err
        assert not [character for character in text if not (character.isprintable() or character == "\n")], command
    assert (
        printable(f"a{CONTROL}\t\n")
        == "a\N{REPLACEMENT CHARACTER}]0;PWNED" + "\N{REPLACEMENT CHARACTER}" * 2 + "[31m\t\n"
    )


def test_runs_of_a_table_stay_in_their_rows(run: Path, tmp_path: Path) -> None:
    twin = tmp_path / "b\nrun  ended"
    twin.mkdir()
    (twin / "config.toml").write_text('[optim]\nname = "x"\n')
    summaries = [summarize(folder, folder.name) for folder in find_runs(tmp_path)]
    assert len(runs_text(summaries).splitlines()) == 3
