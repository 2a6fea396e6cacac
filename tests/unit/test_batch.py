"""Samples: what a batch looks like, how long its samples are, and what a microbatch of them is."""

import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding

from megabatch import PlanError
from megabatch.batching.deferred import Deferred
from megabatch.core.right_padding import Padded, pad_right
from megabatch.core.samples import Batching, sample_length
from megabatch.inspection.tree import clone, to_device
from megabatch.verification.float64_copy import in_float64


def equal(one, other) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one)


PADDED = {  # samples -> microbatch
    "labels are ignored, other keys are 0": (
        [{"input_ids": [1, 2, 3], "labels": [4, 5, 6]}, {"input_ids": [7], "labels": [8]}],
        {"input_ids": [[1, 2, 3], [7, 0, 0]], "labels": [[4, 5, 6], [8, -100, -100]]},
    ),
    "keys of different lengths": (
        [{"question": [1], "answer": [2, 3]}, {"question": [4, 5], "answer": [6, 7]}],
        {"question": [[1, 0], [4, 5]], "answer": [[2, 3], [6, 7]]},
    ),
    "scalars": ([{"score": 0.5}, {"score": 2.0}], {"score": [0.5, 2.0]}),
    "booleans": ([{"mask": [True]}, {"mask": [True, True]}], {"mask": [[True, False], [True, True]]}),
    "audio, one frame after the other": (
        [{"frames": [[1.0, 2.0]]}, {"frames": [[3.0, 4.0], [5.0, 6.0]]}],
        {"frames": [[[1.0, 2.0], [0.0, 0.0]], [[3.0, 4.0], [5.0, 6.0]]]},
    ),
    "nothing in one of them": (
        [{"input_ids": [1]}, {"input_ids": torch.zeros(0, dtype=torch.long)}], {"input_ids": [[1], [0]]},
    ),
}  # fmt: skip

LENGTHS = [
    ({"input_ids": torch.zeros(5), "labels": torch.zeros(9)}, 5),
    ({"image": torch.zeros(3, 8, 8)}, 3),
    ({"score": torch.tensor(1.0)}, 1),
    ({"input_ids": [1, 2, 3]}, 3),
    ({"input_ids": torch.zeros(0)}, 0),
]


@pytest.mark.parametrize("name", PADDED)
def test_padded(name):
    samples, expected = PADDED[name]
    assert equal(pad_right(samples), {key: torch.tensor(value) for key, value in expected.items()})


@pytest.mark.parametrize(("sample", "length"), LENGTHS)
def test_length_of_a_sample(sample, length):
    assert sample_length(sample) == length


def test_lengths_of_a_batch():
    assert Padded().samples([sample for sample, _ in LENGTHS[:-1]]).lengths == [length for _, length in LENGTHS[:-1]]
    assert Padded().samples([]).lengths == []
    assert Padded().samples({"input_ids": torch.zeros(2, 7)}).lengths == [7, 7]
    assert Padded().samples({"score": torch.zeros(3), "input_ids": torch.zeros(3, 7)}).lengths == [1, 1, 1]
    assert Padded().samples({"input_ids": torch.zeros(0, 7)}).lengths == []


def test_a_collate_of_the_user_sees_samples_in_the_order_asked_for():
    seen = []
    Batching(seen.append).samples([{"x": torch.tensor(number)} for number in range(3)]).take([2, 0])
    Batching(seen.append).samples({"x": torch.arange(3)}).take([2, 0])
    assert [[int(sample["x"]) for sample in samples] for samples in seen] == [[2, 0], [2, 0]]


def test_with_collate_and_length_of_the_user_samples_may_be_anything():
    samples = Batching("+".join).samples(["ab", "abcd"], length=len)
    assert samples.lengths == [2, 4]
    assert samples.take([1, 0]) == "abcd+ab"


def test_a_length_of_the_user_sees_the_rows_of_a_mapping():
    rows = {"x": torch.tensor([[0, 1], [2, 3], [4, 5]])}
    assert Padded().samples(rows, length=lambda sample: int(sample["x"].sum())).lengths == [1, 5, 9]


def test_the_last_sample_owns_its_memory():
    batch = {"x": torch.arange(6.0).reshape(3, 2)}
    last = Padded().samples(batch).copy_last()
    assert last.dummy()["x"].tolist() == [[4.0, 5.0]]
    assert last.dummy()["x"].untyped_storage().nbytes() == 2 * 4  # a view would keep the batch


def test_what_a_tokenizer_returns_is_a_batch():
    from transformers import BatchEncoding

    rows = {"input_ids": torch.tensor([[1, 2], [3, 4]])}
    assert equal(Padded().samples(BatchEncoding(rows)).take([1]), {"input_ids": torch.tensor([[3, 4]])})
    samples = [BatchEncoding({"input_ids": [1, 2, 3]}), BatchEncoding({"input_ids": torch.tensor([4])})]
    assert Padded().samples(samples).lengths == [3, 1]
    assert Padded().samples(samples).take([0, 1])["input_ids"].tolist() == [[1, 2, 3], [4, 0, 0]]


def test_told_lengths_of_another_kind_are_taken_as_told():
    images = [{"images": torch.full((3, 4, 4), float(number))} for number in range(3)]
    samples = Padded().samples(Deferred(images.__getitem__, [16, 9, 4], measured=False))
    assert samples.lengths == [16, 9, 4]
    assert equal(samples.take([0, 2]), pad_right([images[0], images[2]]))
    assert equal(samples.dummy(), pad_right([images[2]]))
    with pytest.raises(PlanError, match="a sample is a tuple; expected a mapping of tensors"):
        Padded().samples(Deferred(lambda index: (1, 2), [1], measured=False)).take([0])


def test_nested_tensors_of_a_microbatch_are_moved():
    microbatch = {"x": torch.zeros(2), "pair": (torch.ones(1), "a word"), "number": 3}
    moved = to_device(microbatch, torch.device("meta"))
    assert isinstance(moved["x"], Tensor)
    assert (moved["x"].device.type, moved["pair"][0].device.type) == ("meta", "meta")
    assert (moved["pair"][1], moved["number"]) == ("a word", 3)
    assert to_device(microbatch, torch.device("cpu"))["x"] is microbatch["x"]


class Words(dict):
    """A mapping that pytree takes for a leaf, as it takes those of transformers' tokenizers."""


@pytest.mark.parametrize("kind", [BatchEncoding, Words])
def test_mappings_of_other_kinds_are_moved_cloned_and_cast(kind):
    microbatch = kind({"x": torch.ones(2), "inner": {"y": torch.ones(1)}, "name": "a"})
    moved, cloned = to_device(microbatch, torch.device("meta")), clone(microbatch)
    assert type(moved) is type(cloned) is kind
    assert (moved["x"].device.type, moved["inner"]["y"].device.type, moved["name"]) == ("meta", "meta", "a")
    assert microbatch["x"].device.type == "cpu"
    cloned["x"] += 1
    cloned["inner"]["y"] += 1
    assert microbatch["x"].tolist() == [1, 1]
    assert microbatch["inner"]["y"].tolist() == [1]
    assert in_float64(microbatch, torch.device("cpu"))["x"].dtype == torch.float64


def test_what_can_be_moved_is_moved():
    class Graph:
        def __init__(self, device: str) -> None:
            self.device = device

        def to(self, device: torch.device) -> "Graph":
            return Graph(device.type)

    assert to_device({"graph": Graph("cpu")}, torch.device("meta"))["graph"].device == "meta"
