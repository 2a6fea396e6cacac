"""Samples of rows: what is given and what is learned, by which tokenizer, and rows that are broken or too long."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from megabatch import MegabatchError
from megabatch.train.config import DataConfig, ModelConfig, SourceConfig
from megabatch.train.data.encode import Sample, Skipped, Tokens, samples_of
from megabatch.train.data.stdlib import stdlib_functions, stdlib_root
from megabatch.train.init.data_survey import survey
from megabatch.train.model.architecture import load_tokenizer
from tests.train.tokenizers_for_tests import chat_tokenizer
from tests.unit.failures.table import line_of

CHAT = [
    {"role": "system", "content": "Be terse."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes\n\n"},
    {"role": "user", "content": "and <é>\u2028?"},
    {"role": "assistant", "content": "\n no  \n"},
    {"role": "user", "content": "bye"},
]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def named(
    path: Path,
    tokenizer: Any,
    *,
    broken_rows: Any = "stop",
    cap: int | None = None,
    skipped: Skipped | None = None,
    **values: Any,
) -> Iterator[tuple[str, Sample]]:
    source = SourceConfig(path=str(path), **values)
    data = DataConfig(broken_rows=broken_rows, max_sample_tokens=cap)
    return samples_of(source, "data", data, tokenizer, Skipped() if skipped is None else skipped)


def samples(path: Path, tokenizer: Any, **values: Any) -> list[Sample]:
    return [sample for _, sample in named(path, tokenizer, **values)]


def refusal(path: Path, tokenizer: Any, **values: Any) -> str:
    return line_of(samples, path, tokenizer, **values).replace(f"{path}:", "")


def learned_text(sample: Sample, tokenizer: Any) -> str:
    return tokenizer.decode(sample["labels"][sample["labels"] != -100])


def test_the_prompt_is_given_and_the_response_and_the_end_are_learned(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "dé", "response": "ab"}, {"prompt": "", "response": "c"}])
    first, second = samples(path, ByT5Tokenizer())
    assert first["input_ids"].tolist() == [byte + 3 for byte in "déab".encode()] + [1]
    assert first["labels"].tolist() == [-100] * 3 + first["input_ids"].tolist()[3:]
    assert second["labels"].tolist() == second["input_ids"].tolist() == [ord("c") + 3, 1]
    assert {tensor.dtype for tensor in (*first.values(), *second.values())} == {torch.int64}


def test_the_beginning_that_a_tokenizer_adds_is_given(tmp_path: Path, chatty: dict[bool, Any]) -> None:
    tokenizer = chatty[False]
    ids = {text: tokenizer(text)["input_ids"] for text in ("one", "two")}
    with_start = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()),
        eos_token="<|end|>",
        bos_token="<|start|>",
    )
    with_start.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A <|end|>", special_tokens=[("<|start|>", 2), ("<|end|>", 1)]
    )
    (pair,) = samples(write(tmp_path / "a.jsonl", [{"prompt": "one", "response": "two"}]), with_start)
    (text,) = samples(write(tmp_path / "b.jsonl", [{"text": "one"}]), with_start)
    assert pair["input_ids"].tolist() == [2, *ids["one"], *ids["two"], 1]
    assert pair["labels"].tolist() == [-100] * (1 + len(ids["one"])) + [*ids["two"], 1]
    assert (text["input_ids"].tolist(), text["labels"].tolist()) == ([2, *ids["one"], 1], [-100, *ids["one"], 1])


def test_real_data_has_as_many_targets_as_bytes_after_the_prompt() -> None:
    source = SourceConfig(source="stdlib", max_samples=100)
    found = samples_of(source, "data", DataConfig(), ByT5Tokenizer(), Skipped())
    num_targets = sum(int((sample["labels"][1:] != -100).sum()) for _, sample in found)
    functions = [function for function, _ in zip(stdlib_functions(stdlib_root()), range(100), strict=False)]
    assert num_targets == sum(len(function.response.encode()) + 1 for function in functions)


@pytest.mark.parametrize("text", ["", "aé\0\n", "a</s>b<pad>", "<extra_id_0>", "<", "\u2028\U0001f600", "<unk> and <"])
def test_bytes_are_those_of_the_tokenizer(text: str) -> None:
    (ids,) = Tokens(ByT5Tokenizer()).ids_of([text])
    assert ids.tolist() == ByT5Tokenizer()(text, add_special_tokens=False)["input_ids"]


def test_batches_change_nothing(tmp_path: Path, chatty: dict[bool, Any]) -> None:
    texts = [function.response[:300] for function, _ in zip(stdlib_functions(stdlib_root()), range(600), strict=False)]
    path = write(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    for (name, sample), number, text in zip(named(path, chatty[True]), range(1, 601), texts, strict=True):
        assert name == f"{path}:{number}"
        assert sample["input_ids"].tolist() == [*chatty[True](text)["input_ids"], 1]


@pytest.mark.parametrize("is_trimmed", [False, True])
@pytest.mark.parametrize("marks", [True, False])
def test_of_a_chat_the_assistants_turns_are_learned(
    tmp_path: Path, chatty: dict[bool, Any], marks: bool, is_trimmed: bool
) -> None:
    tokenizer = chatty[marks]
    if is_trimmed:  # Llama 3's: white space has no offsets of its own
        tokenizer = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    (sample,) = samples(write(tmp_path / "a.jsonl", [{"messages": CHAT}]), tokenizer)
    turns = [f"<|start|>{message['role']}\n|{message['content']}<|end|>|\n" for message in CHAT]
    assert tokenizer.decode(sample["input_ids"]) == "".join(turns).replace("|\n", "\n").replace("\n|", "\n")
    expected = "yes\n\n<|end|>\n no  \n<|end|>" if marks else "yes\n\n<|end|>\n\n no  \n<|end|>\n"
    assert learned_text(sample, tokenizer) == expected
    assert sample["input_ids"].tolist() == tokenizer.apply_chat_template(CHAT)["input_ids"]


def test_a_turn_that_begins_with_a_space(tmp_path: Path, chatty: dict[bool, Any]) -> None:
    """The mask of transformers loses it where a tokenizer trims offsets; ours must not."""
    tokenizer = AutoTokenizer.from_pretrained(chatty[True].name_or_path)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    chat = [CHAT[1], {"role": "assistant", "content": " no"}]
    (sample,) = samples(write(tmp_path / "a.jsonl", [{"messages": chat}]), tokenizer)
    theirs = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    assert not any(theirs["assistant_masks"])  # once this fails, use theirs: docs/decisions/0042
    assert learned_text(sample, tokenizer) == " no<|end|>"


@pytest.mark.parametrize("marks", [True, False])
def test_a_chat_is_the_same_on_every_day(tmp_path: Path, chatty: dict[bool, Any], marks: bool) -> None:
    """The template asks for the date."""
    tokenizer = AutoTokenizer.from_pretrained(chatty[marks].name_or_path)
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}\n" + chatty[marks].chat_template
    (sample,) = samples(write(tmp_path / "a.jsonl", [{"messages": CHAT}]), tokenizer)
    assert tokenizer.decode(sample["input_ids"]).startswith("01 Jan 2025\n<|start|>")


def test_a_tokenizer_without_offsets_learns_the_same_turns(tmp_path: Path, chatty: dict[bool, Any]) -> None:
    for marks in (True, False):
        tokenizer = ByT5Tokenizer(chat_template=chatty[marks].chat_template)
        (sample,) = samples(write(tmp_path / "a.jsonl", [{"messages": CHAT}]), tokenizer)
        (fast,) = samples(tmp_path / "a.jsonl", chatty[marks])
        assert learned_text(sample, tokenizer) == learned_text(fast, chatty[marks])
        assert tokenizer.decode(sample["input_ids"]) == chatty[marks].decode(fast["input_ids"])


@pytest.mark.parametrize("marks", [True, False])
def test_empty_fields_of_messages_are_as_if_missing(tmp_path: Path, chatty: dict[bool, Any], marks: bool) -> None:
    """Tables have every field in every row; templates ask whether one is defined."""
    tokenizer = AutoTokenizer.from_pretrained(chatty[marks].name_or_path)
    tokenizer.chat_template += "{% if messages[0].tool_calls is defined %}a tool{% endif %}"
    padded = [message | {"tool_calls": None} for message in CHAT]
    plain, filled = (samples(write(tmp_path / "a.jsonl", [{"messages": chat}]), tokenizer) for chat in (CHAT, padded))
    assert plain[0]["input_ids"].tolist() == filled[0]["input_ids"].tolist()


@pytest.mark.parametrize("marks", [True, False])
def test_messages_of_sharegpt_are_read(tmp_path: Path, chatty: dict[bool, Any], marks: bool) -> None:
    speakers = {"system": "system", "user": "human", "assistant": "gpt"}
    spoken = [{"from": speakers[message["role"]], "value": message["content"]} for message in CHAT]
    tokenizer = chatty[marks]
    plain = samples(write(tmp_path / "a.jsonl", [{"messages": CHAT}]), tokenizer)
    path = write(tmp_path / "b.jsonl", [{"conversations": spoken}])
    shared = samples(path, tokenizer, messages_field="conversations")
    for name in ("input_ids", "labels"):
        assert plain[0][name].tolist() == shared[0][name].tolist()
    found = survey(str(path), None, lambda number: None)
    assert found.keys["messages_field"] == "conversations"
    assert len(found.lengths) == 1


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ("hi", "has no list of messages in the field 'messages'"),
        ([], "has no list of messages in the field 'messages'"),
        (["hi"], "message 1, is str, not an object with the fields role and content"),
        (
            [CHAT[1], {"from": "narrator", "value": "x"}],
            "message 2, is ['from', 'value'], not an object with the fields role",
        ),
        ([CHAT[1]], 'has no message of the role "assistant", so no token to learn'),
        ([{"role": "assistant", "content": None}], "message 1, has neither text in its field content nor tool_calls"),
        (
            [CHAT[1], {"role": "assistant", "content": "\ud800"}],
            "has half of a surrogate pair in its messages, which is no text",
        ),
        ([CHAT[2]], "begins with the assistant, which has nothing to answer"),
        (
            [CHAT[1], {"role": "assistant", "content": ["x"]}],
            "is refused by the chat template (can only concatenate list",
        ),
    ],
    ids=["text", "none", "strings", "sharegpt", "no answer", "no content", "surrogate", "answer first", "parts"],
)
def test_a_bad_chat_is_a_broken_row(tmp_path: Path, chatty: dict[bool, Any], messages: Any, problem: str) -> None:
    path = write(tmp_path / "a.jsonl", [{"messages": CHAT}, {"messages": messages}])
    assert problem in refusal(path, chatty[False])
    skipped = Skipped()
    assert len(samples(path, chatty[False], broken_rows="skip", skipped=skipped)) == 1
    assert (skipped.broken, skipped.long, str(skipped.first).startswith(f"{path}:2")) == (1, 0, True)


def test_a_template_that_rewrites_what_was_said_is_refused(tmp_path: Path, chatty: dict[bool, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chatty[False].name_or_path)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] ~ loop.revindex ~ m['content'] }}{% endfor %}"
    path = write(tmp_path / "a.jsonl", [{"messages": CHAT}])
    for broken_rows in ("stop", "skip"):
        said = refusal(path, tokenizer, broken_rows=broken_rows)
        assert said.startswith(f"the chat template writes {path}:1".replace(f"{path}:", ""))
        assert "put {% generation %} and {% endgeneration %} around it in the template of model.tokenizer" in said


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    assert refusal(write(tmp_path / "a.jsonl", [{"messages": CHAT}]), ByT5Tokenizer()) == (
        "data has chats and the tokenizer has no chat template; set model.tokenizer to one that has, or "
        "data.prompt_field and data.response_field to fields of plain text"
    )


def test_tokenizers_that_cannot_end_a_text_are_refused(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    path = write(tmp_path / "a.jsonl", [{"text": "a"}])
    assert "has no token for the end of a text" in refusal(path, PreTrainedTokenizerFast(tokenizer_object=backend))
    assert "the recipe has no tokenizer; set model.tokenizer" in refusal(path, None)


CONFIG: dict[str, object] = {"model_type": "llama"}


def test_bytes_are_what_a_fresh_model_reads() -> None:
    for config in (ModelConfig(config=CONFIG), ModelConfig(name="unread", tokenizer="bytes")):
        tokenizer = load_tokenizer(config)
        assert isinstance(tokenizer, ByT5Tokenizer)
        assert tokenizer("ab")["input_ids"] == [100, 101, 1]


def test_a_folder_has_its_own(tmp_path: Path) -> None:
    folder = str(chat_tokenizer(tmp_path / "chat", generation_markers=False))
    for config in (ModelConfig(name=folder), ModelConfig(config=CONFIG, tokenizer=folder)):
        tokenizer = load_tokenizer(config)
        assert len(tokenizer) == 512
        assert tokenizer.decode(tokenizer("def f(x): return x")["input_ids"]) == "def f(x): return x"


def refused(config: ModelConfig, capfd: pytest.CaptureFixture[str]) -> str:
    line = line_of(load_tokenizer, config)
    assert capfd.readouterr() == ("", "")
    return line


def test_a_damaged_one_gets_its_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    assert refused(ModelConfig(name=str(tmp_path)), capfd).startswith(
        f"no tokenizer for model.name = {str(tmp_path)!r} ("
    )


def test_the_hub_out_of_reach_gets_its_line(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    line = refused(ModelConfig(config=CONFIG, tokenizer="nobody/nothing"), capfd)
    assert line.startswith("no tokenizer for model.tokenizer = 'nobody/nothing' (OSError: ")
    assert line.endswith('or to "bytes"')


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
