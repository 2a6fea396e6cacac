"""The completion of a prompt: the right prompt, any tokenizer, the same text every time, and no trace."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer

from megabatch.train.callbacks.messages import complete, num_new_tokens, prompt_of, sample_completion
from tests.train.jobs import CPU, Tiny, lay
from tests.train.tokenizers_for_tests import VOCAB_SIZE, chat_tokenizer

FIVE = torch.arange(5, dtype=torch.int64)


def sample(tokens: int, num_given: int, **others: Any) -> dict[str, Tensor]:
    labels = torch.arange(tokens)
    labels[:num_given] = -100
    return {"input_ids": torch.arange(tokens), "labels": labels, **others}


@pytest.fixture(scope="module")
def gpt2() -> nn.Module:
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 1}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model("gpt2", vocab_size=VOCAB_SIZE + 8, use_cache=False, **sizes)
        return cast(nn.Module, AutoModelForCausalLM.from_config(config)).train()


@pytest.mark.parametrize(("given", "expected"), [
    (sample(9, 4), 4),  # a prompt and a response
    (sample(9, 0), 3),  # a text: a third of it
    (sample(10, 1), 4),  # a text of which nothing predicts the first token
    (sample(1, 0), 1),
    (sample(6, 6), 6),  # nothing to learn: all of it is given
    (sample(2000, 0), 240),
    (sample(9, 0, position_ids=torch.tensor([0, 1, 2, 3, 4, 5, 0, 1, 2])), 2),  # of packed documents the first
    ({"image": torch.zeros(3), "labels": torch.tensor(1)}, 0),
    (torch.zeros(3), 0),
])  # fmt: skip
def test_a_prompt_is_what_is_not_learned_or_a_third(given: Any, expected: int) -> None:
    assert len(prompt_of(given)) == expected


def test_any_tokenizer_makes_text_of_it_and_the_same_twice(gpt2: nn.Module, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_tokenizer(tmp_path, generation_markers=False))
    ids = tokenizer("def wrap(text): return the lines of it", return_tensors="pt")["input_ids"][0]
    samples = [{"input_ids": ids, "labels": ids}]
    before = torch.get_rng_state()
    prompt, completion = sample_completion(gpt2, samples, tokenizer, CPU)
    assert prompt == tokenizer.decode(ids[: -(-len(ids) // 3)])
    assert completion
    assert sample_completion(gpt2, samples, tokenizer, CPU) == (prompt, completion)
    assert torch.equal(torch.get_rng_state(), before)
    assert gpt2.training


def test_only_tokens_that_the_tokenizer_has_are_drawn() -> None:
    assert complete(Counting(), FIVE, None, 8, CPU).tolist()[:2] == [5, 6]
    assert max(complete(Counting(), FIVE, None, 8, CPU).tolist()) == 7


def test_there_is_nothing_to_say_without_a_tokenizer_or_tokens(gpt2: nn.Module) -> None:
    assert sample_completion(gpt2, [sample(9, 4)], None, CPU) == ("", "")
    assert sample_completion(gpt2, [{"labels": torch.tensor(1)}], ByT5Tokenizer(), CPU) == ("", "")


def test_no_token_comes_without_a_position(gpt2: nn.Module) -> None:
    assert len(complete(gpt2, torch.zeros(60, dtype=torch.int64), None, 300, CPU)) == 4
    assert len(complete(gpt2, torch.zeros(64, dtype=torch.int64), None, 300, CPU)) == 0
    assert num_new_tokens(Tiny(), 500, CPU) == 200
    assert num_new_tokens(gpt2, 60, CPU, wanted=9) == 4


def test_as_many_tokens_come_as_are_wanted(gpt2: nn.Module) -> None:
    assert len(complete(gpt2, FIVE, None, 300, CPU, wanted=7)) == 7
    assert sample_completion(gpt2, [sample(9, 4)], ByT5Tokenizer(), CPU, wanted=0) == ("", "")


class Counting(nn.Module):
    """Always writes the token after the last one; counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1e6))
        self.num_forwards = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.num_forwards += 1
        return nn.functional.one_hot((tokens + 1) % 300, 300) * self.scale  # [B, T, V]


def test_it_is_cut_at_the_end_and_takes_as_many_forwards_all_the_same() -> None:
    model = Counting()
    assert complete(model, FIVE, 9, 300, CPU).tolist() == [5, 6, 7, 8]
    assert model.num_forwards == 200
    assert len(complete(model, FIVE, None, 300, CPU)) == 200


def test_a_model_that_has_lost_its_way_still_says_something() -> None:
    model = Counting()
    with torch.no_grad():
        model.scale.fill_(torch.inf)
    assert len(complete(model, FIVE, None, 300, CPU)) == 200


@pytest.mark.usefixtures("group_of_one")
def test_shards_write_little_and_are_shards_again() -> None:
    model = lay(Tiny(), "fsdp2")
    assert len(complete(model, FIVE, None, 300, CPU)) == 32
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert model.training
