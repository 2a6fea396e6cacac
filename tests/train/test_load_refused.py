"""Load: keys and functions that do not go together, each refused in one line."""

import pytest

from megabatch.errors import MegabatchError
from tests.train.data_for_tests import load, recipe
from tests.train.own_samples import own as own

SOURCE = {"path": "x.jsonl"}
REFUSED = {  # [data], [eval] -> what is said
    "function and path": (
        {"function": "FILE:samples", "path": "x"}, {},
        "data.function and data.path are both set; what the function returns is taken as it is: remove one",
    ),
    "function and streaming": (
        {"function": "FILE:samples", "streaming": True}, {},
        "data.function and data.streaming are both set; what the function returns is taken as it is: remove one",
    ),
    "function and packing": (
        {"function": "FILE:samples", "pack_tokens": 8}, {},
        "data.function and data.pack_tokens are both set; what the function returns is taken as it is: remove one",
    ),
    "options of nothing": (
        {"options": {"a": 1}}, {},
        "data.options is set and data.function is not; name the function that takes them, or remove them",
    ),
    "mixture and path": (
        {"mixture": {"a": SOURCE}, "path": "x"}, {},
        "data.mixture and data.path are both set; set path in each [data.mixture.NAME] instead",
    ),
    "some weights": (
        {"mixture": {"a": {**SOURCE, "weight": 1.0}, "b": SOURCE}}, {},
        "data.mixture.a has a weight and data.mixture.b has none; give weights to all sources or to none",
    ),
    "a weight of one source": (
        {**SOURCE, "weight": 1.0}, {},
        "data.weight is set, and a weight is for a source of a mixture; set it in [data.mixture.NAME]",
    ),
    "a weight of a set": (
        SOURCE, {"sets": {"a": {**SOURCE, "weight": 1.0}}},
        "eval.sets.a.weight is set, and a set is evaluated whole; remove it",
    ),
    "rows of one token": (
        {**SOURCE, "pack_tokens": 1}, {},
        "data.pack_tokens is 1, and in a row of one token there is nothing to predict; set at least 2",
    ),
    "a name that is taken": (
        SOURCE, {"sets": {"held-out": SOURCE}, "num_samples": 3},
        'eval.sets has a set named "held-out", which is the name of what eval.num_samples=3 takes off the training '
        "data; rename it, or set eval.num_samples to 0",
    ),
    "no sequence": (
        {"function": "FILE:generator"}, {},
        '"train" of data.function FILE:generator is a generator; return samples with len() and [number], such as a '
        "list",
    ),
    "nothing": (
        {"function": "FILE:nothing"}, {},
        '"train" of data.function FILE:nothing is empty; return at least one sample',
    ),
    "no mappings": (
        {"function": "FILE:pairs"}, {},
        'sample 0 of "train" of data.function FILE:pairs is a tuple; expected a mapping of tensors, such as '
        '{"inputs": ...}',
    ),
    "no training set": (
        {"function": "FILE:no_train"}, {},
        "data.function FILE:no_train returned a mapping of ['training']; name what is trained on \"train\"",
    ),
    "a held-out set of one's own": (
        {"function": "FILE:held_out"}, {"num_samples": 2},
        'data.function FILE:held_out returns a set named "held-out", and there is another of that name (held out of '
        "the training data); set eval.num_samples to 0",
    ),
    "a set named own": (
        {"function": "FILE:own"}, {"function": "FILE:fails"},
        'data.function FILE:own returns a set named "own", which is the name of what eval.function finds; rename it',
    ),
    "lengths of other samples": (
        {"function": "FILE:badly_measured"}, {},
        'the attribute lengths of "train" of data.function FILE:badly_measured is no list of 4 whole numbers; give one '
        "for each sample",
    ),
    "a function that fails": (
        {"function": "FILE:fails"}, {},
        "data.function 'FILE:fails' raised ZeroDivisionError: no luck (FILE, line 45); mend it, or data.options",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tmp_path, own):
    data, evaluation, expected = REFUSED[name]
    file = own("").removesuffix(":")
    data = {key: value.replace("FILE", file) if key == "function" else value for key, value in data.items()}
    with pytest.raises(MegabatchError) as raised:
        load(recipe(tmp_path, data=data, eval={"num_samples": 0} | evaluation))
    assert str(raised.value) == expected.replace("FILE", file)
    assert not (tmp_path / "run").exists()
