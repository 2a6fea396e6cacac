"""Rows that do not fit, are broken or too long: refused, or counted."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, ByT5Tokenizer

from megabatch import MegabatchError
from megabatch.train.data.encode import Skipped
from tests.train.test_samples import CHAT, learned_text, named, refusal, samples, write


@pytest.mark.parametrize(
    ("row", "values", "learned"),
    [
        ({"messages": [CHAT[1], CHAT[2]], "prompt": "p", "response": "r", "text": "t"}, {}, "yes\n\n<|end|>"),
        ({"prompt": "p", "response": "r", "text": "t"}, {}, "r<|end|>"),
        ({"prompt": "p", "text": "t"}, {}, "t<|end|>"),
        ({"messages": [], "a": "t"}, {"text_field": "a"}, "t<|end|>"),
        ({"a": "p", "response": "r"}, {"prompt_field": "a"}, "r<|end|>"),
        ({"prompt": "p", "b": "r", "text": "t"}, {"response_field": "b"}, "r<|end|>"),
        ({"c": [CHAT[1], CHAT[2]], "text": "t"}, {"messages_field": "c"}, "yes\n\n<|end|>"),
    ],
)
def test_what_a_row_is_follows_from_the_keys_or_else_its_fields(
    tmp_path: Path, chatty: dict[bool, Any], row: dict[str, Any], values: dict[str, str], learned: str
) -> None:
    (sample,) = samples(write(tmp_path / "a.jsonl", [row]), chatty[True], **values)
    assert learned_text(sample, chatty[True]) == learned


@pytest.mark.parametrize("broken_rows", ["stop", "skip"])
def test_a_recipe_that_does_not_fit_the_first_row_is_refused(tmp_path: Path, broken_rows: str) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": "q", "answer": "a"}, {"prompt": "p", "text": "t"}])
    values: dict[str, Any] = {"tokenizer": ByT5Tokenizer(), "broken_rows": broken_rows}
    assert refusal(path, **values) == (
        "1 has the fields 'question', 'answer'; say which to learn: set data.prompt_field and data.response_field, or "
        "data.messages_field, or data.text_field"
    )
    assert refusal(path, **values, prompt_field="question") == (
        "1 has no field 'response', only 'question', 'answer'; set data.response_field to the field to read"
    )
    assert refusal(path, **values, text_field="a", prompt_field="b") == (
        "data.prompt_field and data.text_field are set, and a row is one of text, prompt and response, and "
        "chat; keep one"
    )


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{oops", "2 is not JSON (Expecting property name enclosed in double quotes, at its character 2)"),
        ({"prompt": "p"}, "2 has nothing, only 'prompt', in the field 'response', where text is expected"),
        ({"prompt": "p", "response": 3}, "2 has a value of type int in the field 'response', where text is expected"),
        (
            {"prompt": "p", "response": None},
            "2 has a value of type NoneType in the field 'response', where text is expected",
        ),
        (
            {"prompt": "p", "response": "\ud800"},
            "2 has half of a surrogate pair in the field 'response', which is no text",
        ),
        ({"prompt": "p", "response": ""}, "2 has an empty text in the field 'response', so no token to learn"),
    ],
)
def test_a_broken_row_stops_or_is_counted(tmp_path: Path, row: Any, problem: str) -> None:
    good = {"prompt": "p", "response": "r"}
    path, skipped = write(tmp_path / "a.jsonl", [good, row, good, row]), Skipped()
    hint = '; mend it, or leave such rows out with data.broken_rows = "skip"'
    assert refusal(path, ByT5Tokenizer()) == problem + hint
    found = list(named(path, ByT5Tokenizer(), broken_rows="skip", skipped=skipped))
    assert [name for name, _ in found] == [f"{path}:1", f"{path}:3"]
    assert skipped == Skipped(broken=2, first=f"{path}:{problem}")


def test_text_that_is_empty_or_has_no_target_is_broken(tmp_path: Path, chatty: dict[bool, Any]) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "fine"}, {"text": ""}])
    assert refusal(path, ByT5Tokenizer()).startswith("2 has an empty text in the field 'text'")
    silent = AutoTokenizer.from_pretrained(chatty[True].name_or_path)
    silent.chat_template = "{% for m in messages %}{{ m['content'] }}{% generation %}{% endgeneration %}{% endfor %}"
    path = write(tmp_path / "b.jsonl", [{"messages": CHAT}])
    assert refusal(path, silent).startswith("1 has no token to learn; mend it")
    silent.chat_template = "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    path = write(
        tmp_path / "c.jsonl", [{"messages": [{"role": "assistant", "content": "a"}]}]
    )  # the first is no target
    assert refusal(path, silent).startswith("1 has no token to learn; mend it")


def test_long_samples_are_left_out_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "x" * length} for length in (3, 9, 4, 5)])
    skipped = Skipped()
    assert [len(each["input_ids"]) for each in samples(path, ByT5Tokenizer(), cap=5, skipped=skipped)] == [4, 5]
    assert skipped == Skipped(long=2)


def test_no_more_rows_are_read_than_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "a"}, "{oops", {"text": "b"}, {"text": "c"}])
    values: dict[str, Any] = {"max_samples": 3, "broken_rows": "skip"}
    assert [name for name, _ in named(path, ByT5Tokenizer(), **values)] == [f"{path}:1", f"{path}:3"]


def test_a_source_without_a_good_row_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ["{oops", "{oops"])
    assert refusal(path, ByT5Tokenizer(), broken_rows="skip").startswith(
        "no row of data can be used: 2 rows are broken (first: 1 is not JSON (Expecting property name"
    )
    path = write(tmp_path / "b.jsonl", [{"text": "aaa"}, "{oops"])
    assert refusal(path, ByT5Tokenizer(), broken_rows="skip", cap=1).endswith(
        "), 1 are longer than data.max_sample_tokens; set data.path, its fields, or data.max_sample_tokens"
    )
    assert "names a source without rows" in refusal(write(tmp_path / "c.jsonl", []), ByT5Tokenizer())


def test_the_first_rows_come_before_the_last_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "a"}] * 2000 + ["{oops"])
    found = named(path, ByT5Tokenizer())
    assert [next(found)[0] for _ in range(1000)][-1] == f"{path}:1000"
    with pytest.raises(MegabatchError, match="2001 is not JSON"):
        list(found)
