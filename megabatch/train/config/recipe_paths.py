"""Paths of a recipe: checks that need no torch, so that a wrong path is told at once."""

import difflib
import glob
from pathlib import Path

from megabatch.errors import MegabatchError
from megabatch.train.config import Config

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer_config.json",
)  # fmt: skip
NUM_FILES_NAMED = 8
FUNCTIONS = (
    "model.function", "data.function", "loss.function", "optim.function", "eval.metrics", "eval.function",
    "run.after_update", "run.after_evaluation",
)  # fmt: skip


def check_paths(config: Config) -> None:
    """Raise `MegabatchError` for a model's folder or a Python file that is not there."""
    if config.model.name is not None:
        check_model_folder(config.model.name)
        check_weights(config.model.name)
    tokenizer, key = config.model.tokenizer or config.model.name, "model.tokenizer" if config.model.tokenizer else ""
    if tokenizer is not None and Path(tokenizer).is_dir():
        check_tokenizer_folder(tokenizer, key or "model.name")
    named = {key: getattr(getattr(config, key.partition(".")[0]), key.partition(".")[2]) for key in FUNCTIONS}
    for key, name in [*named.items(), *(("run.callbacks", name) for name in config.run.callbacks)]:
        path = Path((name or "").rpartition(":")[0])
        if path.suffix == ".py" and not path.is_file():
            raise MegabatchError(f"{key} is {name!r}, and there is no file {path}{near(path)}; mend its name")


def near(path: Path) -> str:
    """Return the name that comes nearest to a missing file's, as words."""
    if glob.has_magic(str(path)):
        return ""
    if not path.parent.is_dir():
        return f", and no folder {path.parent}"
    nearest = difflib.get_close_matches(path.name, [sibling.name for sibling in path.parent.iterdir()], n=1)
    return f" ({path.parent / nearest[0]} comes nearest)" if nearest else ""


def check_model_folder(name: str) -> None:
    """Raise where ``model.name`` is a folder that holds no model, or looks like one and is not there."""
    folder = Path(name)
    if not folder.is_dir():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise MegabatchError(
                f"model.name is {name!r} and there is no such folder{near(folder)}; name one that is, or a hub id"
            )
        return
    if (folder / "checkpoints").is_dir():
        raise MegabatchError(
            f"model.name is {name!r}, a run of megabatch's; begin with its weights by "
            f"--run.init_from={name} and its own [model], or write its model into a folder that you can name with "
            f"`megabatch export {name} --to FOLDER`"
        )
    if not (folder / "config.json").exists():
        raise MegabatchError(
            f"model.name is {name!r}, a folder without config.json ({files_text(folder)}); "
            "name a folder that save_pretrained has written"
        )


def check_weights(name: str) -> None:
    """Raise where ``model.name`` is a folder without weights. A plan needs none."""
    folder = Path(name)
    if folder.is_dir() and not any(True for pattern in WEIGHTS for _ in folder.glob(pattern)):
        raise MegabatchError(
            f"model.name is {name!r}, a folder without weights, model.safetensors say ({files_text(folder)}); "
            "name one that has them, or write the keys of its config.json into model.config for fresh weights"
        )


def check_tokenizer_folder(name: str, key: str) -> None:
    if not any((Path(name) / file).exists() for file in TOKENIZER_FILES):
        raise MegabatchError(
            f"{key} is {name!r}, a folder without tokenizer files (tokenizer.json, say); "
            'set model.tokenizer to a folder or hub id that has one, or to "bytes"'
        )


def files_text(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    more = f" and {len(names) - NUM_FILES_NAMED} more" if len(names) > NUM_FILES_NAMED else ""
    return f"it has {', '.join(names[:NUM_FILES_NAMED])}{more}" if names else "it is empty"
