"""Stream: windows, sources by weight, held-out samples, and places from which it goes on."""

import ast
import gzip
import os
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megabatch.errors import MegabatchError
from megabatch.train.data.stdlib import (
    MAX_BYTES,
    MIN_BYTES,
    Function,
    functions_of,
    stdlib_functions,
    stdlib_root,
)
from megabatch.train.data.stream import pack
from tests.train.data_for_tests import ids_of, load, recipe, texts, updates_of, whole_updates, write_texts
from tests.unit.failures.table import line_of


@pytest.fixture
def files(tmp_path):
    """Paths of 30, 12 and 5 texts."""
    return [
        write_texts(tmp_path / f"{name}.jsonl", texts(number, seed))
        for seed, (name, number) in enumerate([("long", 30), ("middle", 12), ("short", 5)])
    ]


def streaming(folder, window=7, num_held_out=0, epochs=1, size=4, tail="step", **data):
    return recipe(
        folder,
        data={"streaming": True, "shuffle_window": window, **data},
        update={"global_batch_size": size, "max_microbatch_tokens": 100, "tail": tail},
        eval={"num_samples": num_held_out},
        run={"folder": "run", "max_epochs": epochs},
    )


def mixture(paths, weights=None):
    weights = weights or [None] * len(paths)
    return {
        "mixture": {f"source{number}": {"path": path, "weight": weight} for number, (path, weight) in
                    enumerate(zip(paths, weights, strict=True))}
    }  # fmt: skip


def order_of(config):
    """Samples as one rank sees them, one after another, by their text's beginning: "seed:index"."""
    return [word(ids) for update in updates_of(config) for ids in ids_of(update)]


def word(ids):
    return bytes(each - 3 for each in ids if each > 2).decode().split()[0]


@pytest.mark.parametrize("row", [{}, {"pack_tokens": 1200}])
def test_a_sample_longer_than_the_models_positions_is_refused(tmp_path, row):
    path = write_texts(tmp_path / "a.jsonl", ["a" * 10] * 9 + ["b" * 1100])
    config = streaming(tmp_path, path=path, **row)
    config = config.model_copy(update={"update": config.update.model_copy(update={"max_microbatch_tokens": 2000})})
    with pytest.raises(
        MegabatchError, match=r"the sample .* has 1\d\d\d tokens and the model 1024 positions; raise the"
    ):
        list(updates_of(config, data=load(config, positions=1024)))


def test_a_window_is_shuffled_and_no_more(files, tmp_path):
    order = order_of(streaming(tmp_path, path=files[0], size=1, epochs=2))
    names = [f"0:{index}" for index in range(30)]
    for epoch in (order[:30], order[30:]):
        for start in range(0, 30, 7):
            assert sorted(epoch[start : start + 7]) == sorted(names[start : start + 7])
        assert epoch != names
    assert order[:30] != order[30:]
    assert order == order_of(streaming(tmp_path, path=files[0], size=1, epochs=2))
    assert order != order_of(
        streaming(tmp_path, path=files[0], size=1, epochs=2).model_copy(
            update={"run": streaming(tmp_path).run.model_copy(update={"seed": 1, "max_epochs": 2})}
        )
    )


def test_ends_of_epochs(files, tmp_path):
    def sizes(tail):
        config = streaming(tmp_path, path=files[1], size=5, window=4, epochs=2, tail=tail)
        return [len(update) for update in updates_of(config)]

    assert sizes("step") == [5, 5, 2, 5, 5, 2]
    assert sizes("drop") == [5, 5, 5, 5]
    assert sizes("carry") == [5, 5, 5, 5]


def test_sources_without_weights_come_one_after_another(files, tmp_path):
    order = order_of(streaming(tmp_path, window=10, **mixture(files)))
    assert Counter(name.partition(":")[0] for name in order) == {"0": 30, "1": 12, "2": 5}
    assert {name[0] for name in order[:30]} == {"0"}
    assert {name[0] for name in order[40:]} == {"1", "2"}  # one window has of both


def test_sources_are_drawn_by_weight_until_one_is_used_up(files, tmp_path):
    """An epoch ends where the source ends that was the first to do so; the others go on in the next."""
    config = streaming(tmp_path, window=3, epochs=9, size=1, **mixture(files, [1.0, 1.0, 1.0]))
    order = order_of(config)
    times = Counter(order)
    assert {times[f"2:{index}"] for index in range(5)} == {9}  # five samples, nine epochs
    for source, size in (("0", 30), ("1", 12)):
        counts = [times[f"{source}:{index}"] for index in range(size)]
        assert max(counts) - min(counts) <= 1
        assert counts == sorted(counts, reverse=True)  # read in their order, again and again
        assert sum(counts) > 20
    assert Counter(name[0] for name in order).keys() == {"0", "1", "2"}


def test_weights_are_shares(tmp_path):
    paths = [write_texts(tmp_path / f"{seed}.jsonl", texts(400, seed, longest=2)) for seed in range(2)]
    order = order_of(streaming(tmp_path, window=50, size=50, **mixture(paths, [3.0, 1.0])))
    drawn = Counter(name[0] for name in order)
    assert drawn["0"] == 400
    assert 90 < drawn["1"] < 180


def test_the_first_samples_are_held_out_of_every_pass(files, tmp_path):
    config = streaming(tmp_path, path=files[0], num_held_out=3, epochs=2)
    data = load(config)
    assert [word(ids) for ids in ids_of(data.sets["held-out"])] == ["0:0", "0:1", "0:2"]
    assert Counter(order_of(config)) == {f"0:{index}": 2 for index in range(3, 30)}
    mixed = streaming(tmp_path, num_held_out=4, epochs=3, **mixture(files[:2], [3.0, 1.0]))
    held_out = {word(ids) for ids in ids_of(load(mixed).sets["held-out"])}
    assert held_out == {"0:0", "0:1", "0:2", "1:0"}
    assert held_out.isdisjoint(order_of(mixed))


def test_a_stream_of_nothing_but_held_out_samples(files, tmp_path):
    with pytest.raises(MegabatchError, match="the stream ends after 5 samples, of which the first 5 are"):
        load(streaming(tmp_path, path=files[2], num_held_out=5))


@given(
    window=st.integers(1, 60),
    size=st.integers(1, 20),
    tail=st.sampled_from(["step", "drop", "carry"]),
    weights=st.sampled_from([None, [1.0, 2.0, 0.5], [1.0, 1.0, 10.0]]),
    num_held_out=st.integers(0, 4),
    stop=st.integers(0, 30),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_it_goes_on_on_other_ranks_from_any_place(window, size, tail, weights, num_held_out, stop, files, tmp_path):
    config = streaming(
        tmp_path, window, num_held_out, epochs=3, size=size, tail=tail, **mixture(files, weights)
    )  # fmt: skip
    data = load(config)
    stream = whole_updates(config, 1, data)
    running = updates_of(config, data=data)
    for _, _ in zip(range(stop), running, strict=False):
        pass
    done = running.state_dict()["updates"]
    ranks = [updates_of(config, rank, 2, data) for rank in range(2)]
    for each in ranks:
        each.load_state_dict(running.state_dict())
    resumed = [sorted(ids for share in shares for ids in ids_of(share)) for shares in zip(*ranks, strict=True)]
    assert resumed == stream[done:]


def test_rows_are_packed_within_a_window(files, tmp_path):
    config = streaming(tmp_path, path=files[0], window=10, pack_tokens=60, size=3, num_held_out=2)
    data = load(config)
    rows = [sample for update in updates_of(config, data=data) for sample in update]
    assert all(len(row["input_ids"]) <= 60 and "position_ids" in row for row in rows)
    assert len(rows) < 28
    tokens = Counter(token for row in rows for token in row["input_ids"].tolist())
    plain = streaming(tmp_path, path=files[0], window=10, size=3, num_held_out=2)
    assert tokens == Counter(token for update in updates_of(plain) for ids in ids_of(update) for token in ids)
    assert "position_ids" in data.sets["held-out"][0]


def test_a_sample_that_fits_into_no_microbatch_is_named(tmp_path):
    path = write_texts(tmp_path / "data.jsonl", ["a", "b" * 120])
    assert line_of(lambda: list(updates_of(streaming(tmp_path, path=path)))) == (
        f"the sample {path}:2 has 121 tokens, more than update.max_microbatch_tokens=100; "
        "raise it to 121 or leave such samples out with data.max_sample_tokens"
    )


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_is_left_out_is_counted_as_it_comes(num_workers, tmp_path):
    path = tmp_path / "data.jsonl"
    lines = [f'{{"text": "{text}"}}' for text in texts(20)]
    lines[5:5] = ["{", '{"text": "' + "y" * 50 + '"}']
    path.write_text("\n".join(lines))
    config = streaming(
        tmp_path, path=str(path), broken_rows="skip", max_sample_tokens=48, window=4, epochs=2, num_workers=num_workers
    )
    updates, counts = updates_of(config), []
    for _ in updates:
        counts.append((updates.skipped.broken, updates.skipped.long))
    assert counts[-1] == (1, 1)
    assert str(updates.skipped.first).startswith(f"{path}:6 is not JSON")


def test_compressed_files_are_read_too(tmp_path):
    with gzip.open(tmp_path / "data.jsonl.gz", "wt") as file:
        file.writelines(f'{{"text": "{text}"}}\n' for text in texts(9))
    assert len(order_of(streaming(tmp_path, path=str(tmp_path / "data.jsonl.gz")))) == 9


def test_words_of_a_stream(files, tmp_path):
    config = streaming(tmp_path, window=1000, num_workers=3, **mixture(files))
    assert load(config).words == [
        "data is read while training, 1,000 samples shuffled at a time; how many updates it makes is not known "
        "beforehand",
        "the sources of the stream are read one after another; give them weights to mix them",
        "a stream is read by one process, and data.num_workers is 3",
    ]


@pytest.mark.parametrize("pattern", ["long.jsonl", "l*.jsonl"])
def test_a_stream_over_changed_files_is_another(pattern, tmp_path, files):
    config = recipe(tmp_path, data={"path": str(tmp_path / pattern), "streaming": True})
    before = load(config).identity
    os.utime(files[0], (1, 1))
    assert load(config).identity == before
    with Path(files[0]).open("a") as file:
        file.write('{"text": "one more"}\n')
    assert load(config).identity != before


def test_a_stream_of_a_saved_data_set_over_changed_rows_is_another(tmp_path):
    def identity(rows):
        Dataset.from_dict({"text": rows}).save_to_disk(tmp_path / "saved")
        return load(recipe(tmp_path, data={"path": str(tmp_path / "saved"), "streaming": True})).identity

    before = identity(["one", "two"])
    (tmp_path / "saved" / "cache-1234.arrow").write_text("what datasets has computed")
    assert identity(["one", "two"]) == before != identity(["one", "two and a half" * 9])


def test_every_packed_row_has_a_name_of_its_own():
    """By which it is left out, or put into a half of its update."""
    named = [(f"sample {number}", dict.fromkeys(("input_ids", "labels"), torch.arange(9))) for number in range(8)]
    names = [name for name, _ in pack(named, 20)]
    assert len(names) > 2
    assert len(set(names)) == len(names)
    assert names[1] == "row 2 of the documents from sample 0 on"


MODULE = '''
import os

def undocumented(x):
    return x

class Thing:
    @property
    async def method(
        self,
    ):
        """Says é.

        Twice."""
        def inner():
            return 1
        return inner()

def only_documented():
    """Nothing else."""

def on_one_line(): return 1
'''


def test_signature_and_docstring_are_the_prompt_and_the_body_is_the_response() -> None:
    undocumented, method = functions_of(MODULE, "module.py")
    assert undocumented == Function("module.py:4", "def undocumented(x):\n", "    return x\n")
    assert method.prompt == 'async def method(\n    self,\n):\n    """Says é.\n\n    Twice."""\n'
    assert method.response == "    def inner():\n        return 1\n    return inner()\n"


def test_only_newlines_end_a_line_as_they_do_for_ast() -> None:
    source = "\f\ntext = 'a\u2028b\x0bc'\ndef f():\n    '''One\x0c.'''\n    return '\x85'"
    assert list(functions_of(source, "m.py")) == [
        Function("m.py:3", "def f():\n    '''One\x0c.'''\n", "    return '\x85'")
    ]


def test_what_is_not_python_has_no_functions() -> None:
    assert list(functions_of("print 'python 2'", "old.py")) == []
    assert list(functions_of("a\0b", "binary.py")) == []


def test_the_standard_library_gives_functions_of_the_size_that_is_asked_for() -> None:
    functions = list(islice(stdlib_functions(stdlib_root()), 500))
    assert functions == list(islice(stdlib_functions(stdlib_root()), 500))
    texts = [function.prompt + function.response for function in functions]
    assert len(set(texts)) == 500
    assert all(MIN_BYTES <= len(text.encode()) <= MAX_BYTES for text in texts)
    assert all(function.response.strip() for function in functions)
    assert not any("/test/" in function.name or "/tests/" in function.name for function in functions)
    assert sum(map(is_function, texts)) > 490


def is_function(text: str) -> bool:
    """Return False for a method with a string at column 0 too, which does not dedent."""
    try:
        return isinstance(ast.parse(text).body[0], ast.FunctionDef | ast.AsyncFunctionDef)
    except IndentationError:
        return False
