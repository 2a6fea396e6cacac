"""Data: prompts are masked, bodies are learned, nothing held out is trained on."""

import ast
import json
import sysconfig
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import ByT5Tokenizer

from megabatch import MegabatchError
from megabatch.train.config import Config
from megabatch.train.data import (
    MAX_BYTES,
    MIN_BYTES,
    Pair,
    functions_of,
    jsonl_pairs,
    load_data,
    sample_of,
    stdlib_pairs,
)
from megabatch.train.recipe import load_config

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


@pytest.fixture(scope="module")
def tokenizer() -> ByT5Tokenizer:
    return ByT5Tokenizer()


def config(*overrides: str) -> Config:
    recipe = Path(__file__).parents[2] / "recipes" / "gpt2-float64.toml"
    return load_config(
        recipe,
        ["--data.max_samples=100", "--data.max_sample_tokens=None", "--update.max_microbatch_tokens=16384", *overrides],
    )


def test_signature_and_docstring_are_the_prompt_and_the_body_is_the_response() -> None:
    undocumented, method = functions_of(MODULE, "module.py")
    assert undocumented == Pair("module.py:4", "def undocumented(x):\n", "    return x\n")
    assert method.prompt == 'async def method(\n    self,\n):\n    """Says é.\n\n    Twice."""\n'
    assert method.response == "    def inner():\n        return 1\n    return inner()\n"


def test_only_newlines_end_a_line_as_they_do_for_ast() -> None:
    source = "\f\ntext = 'a\u2028b\x0bc'\ndef f():\n    '''One\x0c.'''\n    return '\x85'"
    assert list(functions_of(source, "m.py")) == [Pair("m.py:3", "def f():\n    '''One\x0c.'''\n", "    return '\x85'")]


def test_a_json_string_may_hold_other_line_separators(tmp_path: Path) -> None:
    path, response = tmp_path / "pairs.jsonl", "a\u2028b\x85c\u2029"
    line = json.dumps({"prompt": "p", "response": response}, ensure_ascii=False)
    path.write_bytes(f"{line}\r\n\n{line}".encode())
    assert list(jsonl_pairs(path, "prompt", "response")) == [Pair(f"{path}:{n}", "p", response) for n in (1, 3)]


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (
            r'"\ud800"',
            "has half of a surrogate pair in the field 'response', which is no text; mend or leave out that line",
        ),
        ("[" * 100_000, "has a number of thousands of digits, or is nested too deeply; write the text in plain fields"),
        ("9" * 5000, "has a number of thousands of digits, or is nested too deeply; write the text in plain fields"),
    ],
    ids=["surrogate", "nested", "digits"],
)
def test_a_line_beyond_python_gets_its_line(tmp_path: Path, value: str, line: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "p", "response": "r"}\n{"prompt": "p", "response": ' + value + "}")
    with pytest.raises(MegabatchError) as caught:
        list(jsonl_pairs(path, "prompt", "response"))
    assert str(caught.value) == f"{path}:2 {line}"


def test_an_empty_sample_is_refused_by_its_name(tokenizer: ByT5Tokenizer) -> None:
    with pytest.raises(MegabatchError, match=r"the sample a.jsonl:3 is empty, prompt and response; give it text or "):
        sample_of(Pair("a.jsonl:3", "", ""), tokenizer)


def test_what_is_not_python_has_no_functions() -> None:
    assert list(functions_of("print 'python 2'", "old.py")) == []
    assert list(functions_of("a\0b", "binary.py")) == []


def test_the_prompt_is_masked_and_the_end_is_learned(tokenizer: ByT5Tokenizer) -> None:
    sample = sample_of(Pair("x", "dé", "ab"), tokenizer)
    text = "déab".encode()
    assert sample["input_ids"].tolist() == [byte + 3 for byte in text] + [tokenizer.eos_token_id]
    assert sample["labels"].tolist() == [-100] * 3 + sample["input_ids"].tolist()[3:]
    assert sample_of(Pair("x", "a", ""), tokenizer)["labels"].tolist() == [-100]


def test_the_standard_library_gives_functions_of_the_size_that_is_asked_for() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    pairs = list(islice(stdlib_pairs(root), 500))
    assert pairs == list(islice(stdlib_pairs(root), 500))
    texts = [pair.prompt + pair.response for pair in pairs]
    assert len(set(texts)) == 500
    assert all(MIN_BYTES <= len(text.encode()) <= MAX_BYTES for text in texts)
    assert all(pair.response.strip() for pair in pairs)
    assert not any("/test/" in pair.name or "/tests/" in pair.name for pair in pairs)
    assert sum(isinstance(ast.parse(text).body[0], ast.FunctionDef | ast.AsyncFunctionDef) for text in texts) > 490


def test_held_out_samples_are_chosen_by_the_seed_and_never_trained_on(tokenizer: ByT5Tokenizer) -> None:
    data, again, other = (load_data(config(f"--run.seed={seed}"), tokenizer) for seed in (1, 1, 2))
    assert len(data.held_out) == 8
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(data.held_out, again.held_out, strict=True))
    ids = {tuple(sample["input_ids"].tolist()) for sample in data.held_out}
    assert ids.isdisjoint(tuple(sample["input_ids"].tolist()) for sample in data.train)
    assert ids != {tuple(sample["input_ids"].tolist()) for sample in other.held_out}


def test_at_most_a_tenth_is_held_out(tokenizer: ByT5Tokenizer) -> None:
    data = load_data(config("--eval.num_samples=1000"), tokenizer)
    assert len(data.held_out) == (len(data.held_out) + len(data.train)) // 10
