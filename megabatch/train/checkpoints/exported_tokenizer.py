"""The tokenizer in an exported folder: AutoTokenizer reads the ids that were trained on, for every model type."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from megabatch.errors import in_one_line
from megabatch.train.model.architecture import BYTES_MARK

# Encoded after the tokenizer was written, and compared.
SENTENCE = "user: Grüße, 3 x 4 = 12.\n"


def save_tokenizer(tokenizer: Any, folder: Path) -> str:
    """Write a tokenizer beside its model and read it back.

    Args:
        tokenizer: The tokenizer of the run.
        folder: It holds the model's files already.

    Returns:
        A warning if AutoTokenizer reads other ids from the folder, or "".
    """
    written = byte_level(tokenizer) if isinstance(tokenizer, ByT5Tokenizer) else tokenizer
    written.save_pretrained(folder)
    expected = tokenizer(SENTENCE)["input_ids"]
    try:
        ids = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)(SENTENCE)["input_ids"]
    except Exception as error:
        return f"AutoTokenizer does not load the exported tokenizer ({in_one_line(error)}); load it by its own class"
    if ids == expected:
        return ""
    return f"AutoTokenizer reads other ids from the exported tokenizer; load it as {type(written).__name__}"


def byte_level(tokenizer: ByT5Tokenizer) -> PreTrainedTokenizerFast:
    """Return ByT5's tokenizer with a tokenizer.json, which AutoTokenizer loads for every model type.

    AutoTokenizer takes the class from the type of the model for many types, and ByT5's has no file for it.
    """
    special = [token for token, _ in sorted(tokenizer.get_added_vocab().items(), key=lambda pair: pair[1])]
    vocabulary = {token: tokenizer.get_added_vocab()[token] for token in special}
    vocabulary |= {character: byte + tokenizer.offset for byte, character in bytes_to_unicode().items()}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    end = str(tokenizer.eos_token)
    backend.post_processor = TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, vocabulary[end])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=tokenizer.pad_token,
        eos_token=tokenizer.eos_token,
        unk_token=tokenizer.unk_token,
        chat_template=tokenizer.chat_template,
        **{BYTES_MARK: True},
    )
