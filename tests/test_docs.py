"""The documentation is true: what is shown runs, what is named is there, and what is counted is so."""

import contextlib
import json
import re
import shlex
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor

from megabatch import Update, losses, verify
from megabatch.train.cli.arguments import COMMANDS, WITH_RECIPE, read_arguments
from megabatch.train.cli.recipe_command import device_path
from megabatch.train.config import Config
from megabatch.train.config.keys import known_keys, sections
from megabatch.train.config.recipe import load_config
from tests.exact.full import RESULT
from tests.exact.sparse import VOCABULARY, SparseLM
from tests.test_errors import patterns
from tests.train.planning import request_of
from tests.train.test_docs import LEAST

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}
READ = PAGES | {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")}
NOT_RUN = {  # page → the mark of its blocks that are not run here, and who runs them
    "docs/parallelism.md": ("ranks", "needs two processes; tests/comm/test_document.py runs it on two"),
    "docs/tutorial.md": ("ranks", "needs two processes; tests/test_tiny.py runs it on two"),
    "docs/checkpoints.md": ("ranks", "needs two processes; tests/comm/test_resumed.py stops and resumes it on two"),
    "docs/elastic.md": ("replicas", "needs torchft; tests/integrations/test_torchft.py runs the example"),
    "docs/integrations.md": ("example", "an excerpt of a file of examples/, which tests/test_examples.py runs"),
}


PEFT_ASKS = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def blocks(page: str, language: str) -> list[tuple[str, str]]:
    """Fenced blocks of a language: what follows it in the fence, and the block."""
    fenced = re.findall(r"^```([^\n ]*)(?: ([^\n]*))?\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return [(words, block) for kind, words, block in fenced if re.fullmatch(language, kind)]


def of_all_pages(language: str) -> dict[str, str]:
    """Blocks of a language, by page and number."""
    found = {name: blocks(page, language) for name, page in READ.items()}
    return {f"{name}:{number}": block for name in found for number, (_, block) in enumerate(found[name])}


# What the pages show


class Routed(SparseLM):
    """As transformers' models answer."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Any:
        logits, routers = super().forward(input_ids)
        return SimpleNamespace(logits=logits, router_logits=routers)


def given() -> dict[str, Any]:
    """The names that pages take for granted: a model, its optimizer, data and loss."""
    torch.manual_seed(0)
    model = Routed()
    texts = [torch.arange(length) % VOCABULARY for length in (3, 5, 8, 13, 4)]
    batch = [{"input_ids": text, "labels": text, "attention_mask": torch.ones_like(text)} for text in texts]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return {"model": model, "optimizer": optimizer, "batch": batch, "loader": [batch], "loss_fn": losses.next_token}


@cache
def ran(name: str) -> dict[str, Any]:
    """The names of a page whose blocks have run, one after the other, in a folder of their own."""
    names = given()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for mark, block in blocks(READ[name], "python"):
            code = compile(block, name, "exec")
            if not mark:
                exec(code, names)
    return names


@pytest.fixture(scope="module")
def group(group_of_one: None) -> Iterator[None]:
    """A process group of one, and what Accelerate keeps for a whole process forgotten at the end."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@PEFT_ASKS
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", [name for name in PAGES if any(not mark for mark, _ in blocks(PAGES[name], "python"))])
def test_the_python_of_a_page_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """README's diff runs in tests/test_tiny.py."""
    assert len(ran(name)) > len(given())


@pytest.mark.usefixtures("group")
def test_the_balance_by_sequence_is_exact() -> None:
    assert verify(Routed(), ran("docs/experts.md")["loss_fn"], given()["batch"]).ok


OTHER_LOSSES = {  # loss → model, samples and options, by their names on the page or as they are made there
    "classes": lambda names: (names["network"](4, 8, 3), names["batch"], {}),
    "critic_loss": lambda names: (names["network"](4, 8, 1), names["batch"] | {"noise": torch.randn(12, 2)}, {}),
    "inside": lambda names: (names["network"](1, 16, 1), names["points"], {}),
    "boundary": lambda names: (names["network"](1, 16, 1), names["edge"], {}),
    "over_tasks": lambda names: (
        names["network"](4, 8, 1), names["tasks"], {"collate": list, "length": lambda task: 1},
    ),
    "force_field": lambda names: (names["network"](3, 8, 1), names["molecules"], names["options"]),
    "detection": lambda names: (
        names["network"](4, 16, 48), names["images"], {"collate": list, "length": lambda image: 1},
    ),
}  # fmt: skip


@PEFT_ASKS
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_other_losses_are_exact(name: str) -> None:
    names = ran("docs/other-losses.md")
    model, samples, options = OTHER_LOSSES[name](names)
    verification = verify(model, names[name], samples, **options)
    assert verification.ok, str(verification)


def test_what_is_not_run_has_a_reason() -> None:
    marks = {(name, mark) for name, page in PAGES.items() for mark, _ in blocks(page, "python") if mark}
    assert marks == {(page, f"notest-{mark}") for page, (mark, _) in NOT_RUN.items()}


TOML = of_all_pages("toml")


@pytest.mark.parametrize("block", TOML)
def test_a_piece_of_a_recipe_is_valid(block: str, tmp_path: Path) -> None:
    missing = [text for name, text in LEAST.items() if name not in tomllib.loads(TOML[block])]
    path = tmp_path / "recipe.toml"
    path.write_text(TOML[block] + "\n" + "\n".join(missing))
    assert isinstance(load_config(path, []), Config)


@pytest.mark.parametrize("name", [name for name in PAGES if "decisions" not in name])
def test_a_key_that_is_named_is_a_key(name: str) -> None:
    of_an_update = {f"update.{field.name}" for field in fields(Update)}
    known = [*known_keys(), *of_an_update]
    named = re.findall(rf"`((?:{'|'.join(sections())})\.[a-z_]+)(?: = [^`]*)?`", PAGES[name])
    assert not [key for key in named if not any(each == key or each.startswith(f"{key}.") for each in known)]


def commands() -> list[list[str]]:
    """Command lines of megabatch in the blocks of all pages, without what starts them."""
    found: list[list[str]] = []
    for block in of_all_pages("(?:console|bash)?").values():
        for line in block.replace("\\\n", " ").splitlines():
            _, started, rest = line.removeprefix("$ ").rpartition("-m megabatch ")
            words = line.removeprefix("$ ").removeprefix("megabatch ")
            if started or words != line.removeprefix("$ "):
                found.append(shlex.split(rest if started else words, comments=True))
    return found


def test_there_are_commands() -> None:
    assert {command[0] for command in commands()} == {*COMMANDS}


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_a_command_is_understood(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    verb, *rest = command
    if verb not in WITH_RECIPE:
        assert read_arguments(COMMANDS[verb], rest)
    elif (path := device_path(verb, rest)) is not None:
        assert path == Path("here.toml")
    elif rest[0].endswith(".toml"):
        overrides = [word for word in rest[1:] if word not in ("--data.path=...", "--device=here.toml")]
        recipe = Path("recipes/stdlib.toml" if rest[0] == "recipe.toml" else rest[0])  # the one that init has written
        load_config(recipe, list(request_of(overrides).overrides) if verb == "plan" else overrides)
    else:
        assert rest == [rest[0]]
        assert rest[0].startswith(("runs/", "RUN"))


# What the pages say


TROUBLES = PAGES["docs/troubleshooting.md"]
SHOWN = [line for _, block in blocks(TROUBLES, "text") for line in block.splitlines()]
SHOWN += re.findall(r"^\| `([^`]+)` \|", TROUBLES.partition("## Other errors")[2], re.MULTILINE)


@pytest.mark.parametrize("text", SHOWN)
def test_an_error_is_shown_as_it_is_written(text: str) -> None:
    assert any(re.fullmatch(pattern, text) for pattern in patterns())


def test_the_cells_are_those_of_the_result() -> None:
    result = json.loads(RESULT.read_text())
    counted = {
        name: part["num_cells"] + part["num_cells_averaged_more_than_once"] for name, part in result["summary"].items()
    }
    rows = dict(re.findall(r"^\| (\w+)(?:: [^|]*)? \| ([\d,]+) \|", PAGES["docs/exactness.md"], re.MULTILINE))
    said = {name: int(number.replace(",", "")) for name, number in rows.items()}
    assert said == counted | {"all": result["num_cells"]}
