"""A small tokenizer with a chat template, trained here on the docstrings of the standard library."""

import inspect
import textwrap
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 512
SPECIAL = ["<|pad|>", "<|end|>", "<|start|>"]

# Each turn: <|start|>role\ncontent<|end|>\n; an assistant's content and end are what it generates.
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "BEGIN{{ message['content'] + '<|end|>' }}FINISH"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def chat_template(*, generation_markers: bool) -> str:
    """The template, with or without {% generation %} around what the assistant says."""
    begin, finish = ("{% generation %}", "{% endgeneration %}") if generation_markers else ("", "")
    return TEMPLATE.replace("BEGIN", begin).replace("FINISH", finish)


def chat_tokenizer(folder: Path, *, generation_markers: bool, chat: bool = True) -> Path:
    """Writes a byte-level BPE tokenizer of 512 tokens, with the chat template unless ``chat`` is off; its folder."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(map(inspect.getsource, (inspect, textwrap)), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|end|>")
    if chat:
        tokenizer.chat_template = chat_template(generation_markers=generation_markers)
    tokenizer.save_pretrained(folder)
    return folder
