"""What is trained on."""

from typing import Literal

from megabatch.train.config.section import Count, Function, Options, Positive, Section, Step


class SourceConfig(Section):
    """Rows of text: a file, files, a folder or a data set of the hub."""

    path: str | list[str] | None = None
    """A file, a glob ("data/*.jsonl"), a list of them, a folder that datasets' save_to_disk wrote, or a hub id."""
    source: Literal["stdlib", "jsonl", "csv", "parquet", "text", "documents", "saved", "hub"] | None = None
    """What path is; None: seen by its ending. text (.txt): a line a document; documents (.md, .rst, .py): a file a
    document; stdlib: the functions of Python's own standard library, without path."""
    subset: str | None = None
    """Configuration of a hub data set."""
    split: str = "train"
    """Split of a saved or hub data set."""
    text_field: str | None = None
    """Field of plain text, all of it learned."""
    prompt_field: str | None = None
    """Field of a prompt, which is not learned; with response_field."""
    response_field: str | None = None
    """Field of the response to it, which is learned."""
    messages_field: str | None = None
    """Field of a chat, [{role, content}, ...], of which the assistant's turns are learned. None of the four: the field
    messages, prompt and response, or text, whichever the first row has."""
    max_samples: Count | None = None
    """Read no more samples than this; None: all."""
    weight: Positive | None = None
    """In a mixture: its share of an epoch's samples, by weight over the sum of weights."""


class DataConfig(SourceConfig):
    """What is trained on: one source, or a mixture of them, or a function's samples."""

    mixture: dict[str, SourceConfig] = {}
    """Named sources, in place of path: [data.mixture.code] path = ... weight = 2. Without weights every sample is seen
    once an epoch; with them (all or none) an epoch ends when a source is used up, and the others go on in the next."""
    function: Function | None = None
    """"module:function" that returns samples, or {"train": samples, "a name": samples}; called with data.options."""
    options: Options = {}
    """Keyword arguments of data.function."""
    max_sample_tokens: Count | None = None
    """Leave out longer samples; None: a sample that does not fit into a microbatch is an error."""
    pack_tokens: Count | None = None
    """Pack samples into rows of so many tokens; longer ones are cut. None: a document a sample."""
    broken_rows: Literal["stop", "skip"] = "stop"
    """A row that cannot be read, or has no text in its fields: stop and name it, or skip and count it."""
    streaming: bool = False
    """Read while training, never whole: no cache, no number of updates known beforehand."""
    shuffle_window: Count = 10_000
    """Samples of a stream that are shuffled at a time."""
    num_workers: Step = 0
    """Processes that load samples while the model trains."""
    look_ahead: Step | None = None
    """Load an update's samples when their microbatch comes, so many microbatches ahead, for images and long text; they
    are read twice then, to be counted and to be run. None: an update is in memory whole before it runs."""
    cache: str | None = None
    """Folder of tokenised data; None: megabatch's in the user's cache folder."""
