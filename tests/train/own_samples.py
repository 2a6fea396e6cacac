"""A file of a user's own functions, as data.function names them."""

import pytest

OWN = """
import torch

class Counted(list):
    pass

def samples(number=20, first=0, **others):
    return [{"x": torch.full((index % 5 + 1,), float(first + index)), "y": index} for index in range(number)]

def sets():
    return {"train": samples(), "other": samples(6, 100)}

def measured():
    found = Counted(samples(4))
    found.lengths = [7, 8, 9, 7]
    return found

def badly_measured():
    found = Counted(samples(4))
    found.lengths = [7, 8]
    return found

def held_out():
    return {"train": samples(), "held-out": samples()}

def own():
    return {"train": samples(), "own": samples()}

def no_train():
    return {"training": samples()}

def generator():
    return (sample for sample in samples())

def nothing():
    return []

def pairs():
    return [(1, 2)]

def words():
    return [{"x": "word"}]

def fails():
    raise ZeroDivisionError("no luck")
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return lambda name: f"{tmp_path / 'own.py'}:{name}"
