"""The library's errors, in the words of a recipe."""

from megabatch.train.autotune.build_accumulator import use_recipe_keys


def test_the_librarys_words_are_a_recipes() -> None:
    assert use_recipe_keys("give max_microbatch_tokens= or micro_batch_size=, for shards give sync='last'") == (
        "give update.max_microbatch_tokens= or update.micro_batch_size=, for shards give update.sync='last'"
    )
    assert use_recipe_keys("no_sync, update.sync and synchronize stay; memory_bytes is for") == (
        "no_sync, update.sync and synchronize stay; update.memory is for"
    )
