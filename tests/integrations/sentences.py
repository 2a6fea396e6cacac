"""Losses, data and trainers of sentence-transformers, alone and on several ranks."""

import random
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from tests.exact import oracle
from tests.exact.foreign import as_torchrun
from tests.integrations.trainers import Recorder, without_wrapper

st = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed (extra: dev)")
losses = st.sentence_transformer.losses
datasets = pytest.importorskip("datasets", reason="datasets is not installed (extra: dev)")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed (extra: dev)")

SIZE = 8  # samples of an update of a data set


def text(draw: random.Random) -> str:
    return " ".join(f"w{draw.randrange(40)}" for _ in range(draw.randint(2, 12)))


def pairs(names: tuple[str, ...], **labels: Any) -> Any:
    draw = random.Random(len(names))
    columns = {name: [text(draw) for _ in range(SIZE)] for name in names}
    return datasets.Dataset.from_dict(
        columns | {name: [make(draw) for _ in range(SIZE)] for name, make in labels.items()}
    )


SCORED = pairs(("sentence1", "sentence2"), score=lambda draw: draw.random())
ANCHORS = pairs(("anchor", "positive"))
TRIPLETS = pairs(("anchor", "positive", "negative"))
CLASSES = pairs(("sentence",), label=lambda draw: draw.randrange(2))
LOSSES: dict[str, tuple[Any, Any]] = {
    "CosineSimilarityLoss": (lambda model: losses.CosineSimilarityLoss(model), SCORED),
    "CoSENTLoss": (lambda model: losses.CoSENTLoss(model), SCORED),
    "AnglELoss": (lambda model: losses.AnglELoss(model), SCORED),
    "MultipleNegativesRankingLoss": (lambda model: losses.MultipleNegativesRankingLoss(model), ANCHORS),
    "with negatives": (lambda model: losses.MultipleNegativesRankingLoss(model), TRIPLETS),
    "cached": (lambda model: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2), ANCHORS),
    "symmetric": (
        lambda model: losses.MultipleNegativesRankingLoss(
            model, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"
        ),
        ANCHORS,
    ),
    "TripletLoss": (lambda model: losses.TripletLoss(model), TRIPLETS),
    "BatchAllTripletLoss": (lambda model: losses.BatchAllTripletLoss(model), CLASSES),
    "matryoshka": (
        lambda model: losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), [16, 8]), ANCHORS,
    ),
    "several": (
        lambda model: {"scored": losses.CosineSimilarityLoss(model),
                       "anchors": losses.MultipleNegativesRankingLoss(model)},
        {"scored": SCORED, "anchors": ANCHORS},
    ),
}  # fmt: skip


def save_model(path: str) -> str:
    """Write a small BERT and its tokenizer, and return the folder."""
    words = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(40))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(path)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=42, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertModel(config).save_pretrained(path)
    return path


def model_of(folder: str) -> Any:
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    return st.SentenceTransformer(modules=[Transformer(folder), Pooling(16)], device="cpu").double()


def train(base: Any, folder: str, tmp_path: Any, loss: Any, data: Any, size: int, number: int, **given: Any) -> Any:
    torch.manual_seed(0)
    model, recorder = model_of(folder), Recorder()
    args = st.SentenceTransformerTrainingArguments(
        str(tmp_path), per_device_train_batch_size=size, gradient_accumulation_steps=number, max_steps=1,
        max_grad_norm=0.0, learning_rate=0.0, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no",
        lr_scheduler_type="constant", optim="sgd",
    )  # fmt: skip
    trainer = base(model=model, args=args, train_dataset=data, loss=loss(model), callbacks=[recorder], **given)
    trainer.train()
    return recorder.gradients[0]


def run_job(name: str) -> float | str:
    """The error of an update beside sentence-transformers' own of the same samples on one rank, or what is said.

    The name: a loss, and how many samples a rank loads at once.
    """
    from megabatch import MegabatchError
    from megabatch.integrations.sentence_transformers import MegabatchSentenceTransformerTrainer

    name, size = name.split("/")
    loss, data = LOSSES[name]
    number = len(data) if isinstance(data, dict) else 1
    accumulated = SIZE * number // (int(size) * dist.get_world_size())
    with tempfile.TemporaryDirectory() as own:
        folders = [save_model(own) if dist.get_rank() == 0 else ""]  # transformers writes on rank 0 alone
        dist.broadcast_object_list(folders)
        folder = folders[0]
        with as_torchrun():
            try:
                found = train(MegabatchSentenceTransformerTrainer, folder, folder, loss, data, int(size), accumulated)
            except MegabatchError as error:
                return str(error)
        dist.barrier()
        dist.destroy_process_group()  # so that the trainer of the oracle runs alone
        with as_torchrun():
            expected = train(st.SentenceTransformerTrainer, save_model(own), own, loss, data, SIZE, number)
    reached = {name: gradient for name, gradient in expected.items() if gradient is not None}
    return oracle.whole_error({name: without_wrapper(found)[name] for name in reached}, reached)
