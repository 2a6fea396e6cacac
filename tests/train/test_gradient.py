"""The library's errors, in the words of a recipe."""

import pytest

from megabatch.errors import PlanError
from megabatch.train.model.build_accumulator import use_recipe_keys


@pytest.mark.parametrize(("words", "of_recipe"), [
    ("give max_microbatch_tokens= or micro_batch_size=, for shards give sync='last'",
     "give update.max_microbatch_tokens= or update.micro_batch_size=, for shards give update.sync='last'"),
    ("no_sync, update.sync and synchronize stay; memory_bytes is for",
     "no_sync, update.sync and synchronize stay; update.memory is for"),
])  # fmt: skip
def test_the_librarys_words_are_a_recipes(words: str, of_recipe: str) -> None:
    with pytest.raises(PlanError) as caught, use_recipe_keys():
        raise PlanError(words)
    assert str(caught.value) == of_recipe
