"""Load: keys and functions that do not go together, each refused in one line."""

import pytest

from megabatch.errors import MegabatchError
from tests.train.data_for_tests import load, recipe
from tests.train.own_samples import own as own
from tests.unit.failures.table import names

SOURCE = {"path": "x.jsonl"}
REFUSED = {  # [data], [eval] -> what the error names
    "function and path": ({"function": "FILE:samples", "path": "x"}, {}, "data.function and data.path … remove one"),
    "function and streaming": ({"function": "FILE:samples", "streaming": True}, {}, "data.function and data.streaming"),
    "function and packing": ({"function": "FILE:samples", "pack_tokens": 8}, {}, "data.function and data.pack_tokens"),
    "options of nothing": ({"options": {"a": 1}}, {}, "data.options is set and data.function is not"),
    "mixture and path": ({"mixture": {"a": SOURCE}, "path": "x"}, {}, "data.mixture and data.path … set path in"),
    "some weights": (
        {"mixture": {"a": {**SOURCE, "weight": 1.0}, "b": SOURCE}}, {}, "data.mixture.a … data.mixture.b",
    ),
    "a weight of one source": ({**SOURCE, "weight": 1.0}, {}, "data.weight … [data.mixture.NAME]"),
    "a weight of a set": (SOURCE, {"sets": {"a": {**SOURCE, "weight": 1.0}}}, "eval.sets.a.weight … remove it"),
    "rows of one token": ({**SOURCE, "pack_tokens": 1}, {}, "data.pack_tokens is 1 … at least 2"),
    "a name that is taken": (
        SOURCE, {"sets": {"held-out": SOURCE}, "num_samples": 3}, 'eval.sets … "held-out" … rename it',
    ),
    "no sequence": ({"function": "FILE:generator"}, {}, '"train" … FILE:generator is a generator; return'),
    "nothing": ({"function": "FILE:nothing"}, {}, '"train" of data.function FILE:nothing is empty; return'),
    "no mappings": ({"function": "FILE:pairs"}, {}, "FILE:pairs is a tuple; expected a mapping of tensors"),
    "no training set": ({"function": "FILE:no_train"}, {}, "FILE:no_train … ['training'] … \"train\""),
    "a held-out set of one's own": (
        {"function": "FILE:held_out"}, {"num_samples": 2}, 'FILE:held_out … "held-out" … eval.num_samples to 0',
    ),
    "a set named own": ({"function": "FILE:own"}, {"function": "FILE:fails"}, 'FILE:own … "own" … rename it'),
    "lengths of other samples": ({"function": "FILE:badly_measured"}, {}, "FILE:badly_measured is no list of 4"),
    "a function that fails": (
        {"function": "FILE:fails"}, {}, "FILE:fails failed (ZeroDivisionError: no luck, at FILE:45)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tmp_path, own):
    data, evaluation, seen = REFUSED[name]
    file = own("").removesuffix(":")
    data = {key: value.replace("FILE", file) if key == "function" else value for key, value in data.items()}
    with pytest.raises(MegabatchError) as raised:
        load(recipe(tmp_path, data=data, eval={"num_samples": 0} | evaluation))
    assert names(str(raised.value), seen.replace("FILE", file)), str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()
