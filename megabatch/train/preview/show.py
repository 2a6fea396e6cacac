"""`megabatch show`: the first samples of a recipe as text, with the learned tokens marked, and what was left out.

No model is built and nothing is cached: rows are tokenized as in training.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, cast

from torch import Tensor

from megabatch.batching import IGNORED_LABEL
from megabatch.train.config import Config, LossConfig
from megabatch.train.data.custom_dataset import TRAIN, own_samples
from megabatch.train.data.encode import Skipped, samples_of
from megabatch.train.data.sources import named_sources
from megabatch.train.model.architecture import load_tokenizer
from megabatch.train.runtime.console import Console, count, print_line, printable
from megabatch.train.runtime.ranks import ONE_RANK

# Samples of each source.
NUM_SHOWN = 3
# Samples of each source among which the left out ones are counted.
NUM_READ = 1000
# Tokens of a sample that are printed.
MOST_TOKENS = 600
MARKS = ("\N{LEFT-POINTING DOUBLE ANGLE QUOTATION MARK}", "\N{RIGHT-POINTING DOUBLE ANGLE QUOTATION MARK}")
# Colors on a terminal.
COLORS = ("\x1b[32m", "\x1b[0m")
IDS = "input_ids"


def show_recipe(config: Config) -> None:
    """Print samples of each source of a recipe. Raises `MegabatchError` for what a run would refuse of them."""
    marks = COLORS if sys.stdout.isatty() else MARKS
    tokenizer = load_tokenizer(config.model)
    legend = f"learned tokens are {'green' if marks is COLORS else 'between ' + ' and '.join(marks)}"
    if config.data.function is not None:
        console = Console(enabled=False, loss_digits=4)
        samples = own_samples(config, ONE_RANK, console, None)[TRAIN]
        if len(samples) and has_token_labels(samples.at(0), tokenizer):
            print_line(legend)
        print_line(f"\n{config.data.function}: {count(len(samples), 'sample')}")
        for index in range(min(NUM_SHOWN, len(samples))):
            show_own_sample(f"sample {index}", samples.at(index), tokenizer, marks, config.data.options.get("labels"))
    else:
        print_line(legend)
    # The first token is no target of next_token.
    is_shifted = config.loss.function == LossConfig().function
    for key, source in named_sources(config).items():
        skipped = Skipped()
        named = samples_of(source, key, config.data, tokenizer, skipped)
        lengths = list[int]()
        for name, sample in islice(named, NUM_READ):
            if len(lengths) < NUM_SHOWN:
                show_sample(name, sample, tokenizer, marks, is_shifted=is_shifted)
            lengths.append(len(sample[IDS]))
        for line in cut_lines(key, lengths, skipped, config):
            print_line(line)


def show_sample(
    name: str, sample: Mapping[str, Tensor], tokenizer: Any, marks: Sequence[str], *, is_shifted: bool
) -> None:
    """Print the text of one sample, with marks around what is learned of it."""
    ids, is_learned = sample[IDS], sample["labels"] != IGNORED_LABEL  # [T], [T]
    if is_shifted:
        is_learned = is_learned.clone()
        is_learned[:1] = False
    print_line(f"\n{name}: {count(len(ids), 'token')}, {int(is_learned.sum()):,} of them learned")
    text = "".join(marked_pieces(ids[:MOST_TOKENS], is_learned[:MOST_TOKENS], tokenizer, marks))
    print(text, flush=True)
    if len(ids) > MOST_TOKENS:
        num_learned = int(is_learned[MOST_TOKENS:].sum())
        print_line(f"... and {len(ids) - MOST_TOKENS:,} more tokens, {num_learned:,} of them learned")


def marked_pieces(ids: Tensor, is_learned: Tensor, tokenizer: Any, marks: Sequence[str]) -> Iterator[str]:
    """Yield the text of each stretch of tokens that are learned, or not; together they are the whole text."""
    changes = (is_learned[1:] != is_learned[:-1]).nonzero().flatten() + 1
    ends = [*changes.tolist(), len(ids)]
    start, before = 0, ""
    for end in ends:
        text = cast(str, tokenizer.decode(ids[:end]))
        piece = printable(text[len(before) :])
        yield f"{marks[0]}{piece}{marks[1]}" if bool(is_learned[start]) else piece
        start, before = end, text


def show_own_sample(name: str, sample: Any, tokenizer: Any, marks: Sequence[str], classes: Any = None) -> None:
    """Print a sample of data.function: token ids as text where there is a tokenizer, of all else the shape.

    ``classes`` are the names of a classifier's labels.
    """
    if not isinstance(sample, Mapping):
        print_line(f"\n{name}: {shape_text(sample)}")
        return
    fields: dict[str, Any] = dict(cast(Mapping[str, Any], sample))
    if has_token_labels(fields, tokenizer):
        show_sample(name, fields, tokenizer, marks, is_shifted=False)
        fields = {key: value for key, value in fields.items() if key not in (IDS, "labels")}
    else:
        print_line(f"\n{name}:")
    for key, value in fields.items():
        if tokenizer is not None and key.endswith(IDS) and is_tokens(value):
            print_line(f"  {key}: {tokenizer.decode(value[:MOST_TOKENS])!r}")
        elif key == "labels" and is_class(value, classes):
            print_line(f"  {key}: {int(value)} ({classes[int(value)]})")
        else:
            print_line(f"  {key}: {shape_text(value)}")


def has_token_labels(sample: Any, tokenizer: Any) -> bool:
    if tokenizer is None or not isinstance(sample, Mapping):
        return False
    fields = cast(Mapping[str, Any], sample)
    ids: Any = fields.get(IDS)
    labels: Any = fields.get("labels")
    return is_tokens(ids) and is_tokens(labels) and labels.shape == ids.shape


def is_class(value: Any, classes: Any) -> bool:
    """Return True for a label that has a name; -100, which the loss ignores, has none."""
    is_label = isinstance(value, Tensor) and value.ndim == 0
    return is_label and isinstance(classes, list) and 0 <= int(value) < len(cast(list[Any], classes))


def is_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 1 and not value.is_floating_point()


def shape_text(value: Any) -> str:
    """Return the number of a scalar, the shape of a tensor, the type of all else."""
    if isinstance(value, Tensor):
        shape = f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        return str(value.item()) if value.ndim == 0 else shape
    return repr(value)[:80] if isinstance(value, str | int | float) else type(value).__name__


def cut_lines(key: str, lengths: Sequence[int], skipped: Skipped, config: Config) -> list[str]:
    """Return what a run leaves out or cuts of the samples that were read, in a line each."""
    read = f"{key}: {count(len(lengths), 'sample')} of {sum(lengths):,} tokens read"
    lines = [f"{read}{', and no further' if len(lengths) == NUM_READ else ''}; the longest has {max(lengths):,}"]
    lines += skipped.words(key)
    row_tokens, limit = config.data.pack_tokens, config.update.max_microbatch_tokens
    longer = [length for length in lengths if row_tokens is not None and length > row_tokens]
    if longer:
        number = count(len(longer), "sample")
        lines.append(f"{key}: {number} longer than data.pack_tokens = {row_tokens:,}, which are cut into rows")
    elif row_tokens is None and isinstance(limit, int) and max(lengths) > limit:
        number = count(sum(length > limit for length in lengths), "sample")
        then = "run in chunks" if config.update.long_samples is not None else "a run refuses"
        lines.append(f"{key}: {number} longer than update.max_microbatch_tokens = {limit:,}, which {then}")
    return ["", *lines]
