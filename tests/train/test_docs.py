"""The guide: its recipes have known keys and its list of own parts is whole."""

import re
import tomllib
from pathlib import Path

import pytest

from megabatch.train.config import Config
from megabatch.train.config.keys import known_keys
from megabatch.train.config.recipe import load_config
from megabatch.train.config.sections import FUNCTION

GUIDE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
BLOCKS = re.findall(r"^```toml\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
LEAST = {
    "model": "[model.config]\nmodel_type = 'llama'",
    "update": "[update]\nglobal_batch_size = 8\nmicro_batch_size = 2",
}


def test_there_are_recipes_in_the_guide() -> None:
    assert len(BLOCKS) >= 5


@pytest.mark.parametrize("block", BLOCKS)
def test_a_recipe_of_the_guide_is_valid(block: str, tmp_path: Path) -> None:
    given = tomllib.loads(block)
    missing = [text for name, text in LEAST.items() if name not in given]
    path = tmp_path / "recipe.toml"
    path.write_text(block + "\n" + "\n".join(missing))
    assert isinstance(load_config(path, []), Config)


def test_the_table_of_own_parts_names_every_key_that_takes_a_function() -> None:
    keys = {key for key, kind in known_keys().items() if FUNCTION in str(kind)}
    named = set(re.findall(r"`(\w+\.\w+)`", GUIDE.partition("## Your own parts")[2].partition("Each is")[0]))
    assert keys <= named
    assert len(keys) >= 8
