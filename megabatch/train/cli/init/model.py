"""Model: the answer that names one."""

import json
from dataclasses import dataclass
from pathlib import Path

from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.data.sources import HUB_ID, expanded

SMALL = "small"
CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx")  # as configs call them


@dataclass(frozen=True)
class ModelAnswer:
    """The weights that training begins with; None: fresh ones, of a small Llama on bytes."""

    name: str | None
    context_tokens: int | None = None  # of a sample, at most, as a folder says; None: not known here


def read_model(text: str) -> ModelAnswer:
    """ "small", a name of the hub, or a folder of save_pretrained. Raises `MegabatchError` for any other text."""
    name = text.strip()
    if name == SMALL:
        return ModelAnswer(None)
    folder = expanded(name, "--model")
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise MegabatchError(f"--model is the folder {name!r}, without a config.json; name one of save_pretrained")
        return ModelAnswer(str(folder), context_of(folder))  # a recipe's name is no shell's: it has no ~
    if not HUB_ID.fullmatch(name):
        raise MegabatchError(
            f"--model is {text!r}; write {SMALL}, a name of the hub (Qwen/Qwen3-0.6B), or a folder that "
            "save_pretrained has written"
        )
    return ModelAnswer(name)


def context_of(folder: Path) -> int | None:
    """How many tokens the model in a folder can read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MegabatchError(f"cannot read {folder}/config.json ({in_one_line(error)}); name a whole folder") from None
    found = [config.get(name) for name in CONTEXTS] if isinstance(config, dict) else []
    return next((each for each in found if isinstance(each, int)), None)
