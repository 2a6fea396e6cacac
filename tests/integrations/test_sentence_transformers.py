"""sentence-transformers' losses under the shipped trainer: the gradient of the loss of all samples of the update."""

import random
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from megabatch import PlanError
from tests.exact import oracle
from tests.integrations.trainers import Recorder

st = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed (extra: dev)")
losses = st.sentence_transformer.losses
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

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


@pytest.fixture(scope="session")
def folder(tmp_path_factory: Any) -> str:
    path = str(tmp_path_factory.mktemp("bert"))
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


@pytest.mark.full
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("tokens", [None, 64])
def test_an_update_has_the_gradient_of_all_its_samples_at_once(name, tokens, folder, tmp_path):
    from megabatch.integrations.sentence_transformers import MegabatchSentenceTransformerTrainer

    loss, data = LOSSES[name]
    number = len(data) if isinstance(data, dict) else 1
    expected = train(st.SentenceTransformerTrainer, folder, tmp_path, loss, data, SIZE, number)
    found = train(
        MegabatchSentenceTransformerTrainer, folder, tmp_path, loss, data, 2, SIZE * number // 2,
        max_microbatch_tokens=tokens,
    )  # fmt: skip
    reached = {name: gradient for name, gradient in expected.items() if gradient is not None}
    assert {name for name, gradient in found.items() if gradient is not None} == reached.keys()
    assert oracle.whole_error({name: found[name] for name in reached}, reached) <= 1e-12


@pytest.mark.full
def test_a_loss_that_is_no_function_of_embeddings_alone_is_refused(folder, tmp_path):
    from megabatch.integrations.sentence_transformers import MegabatchSentenceTransformerTrainer

    def classifier(model: Any) -> nn.Module:
        return losses.SoftmaxLoss(model, 16, num_labels=2)

    def guided(model: Any) -> nn.Module:
        return losses.GISTEmbedLoss(model, guide=model_of(folder))

    labelled = pairs(("premise", "hypothesis"), label=lambda draw: draw.randrange(2))
    for loss, data, cause in ((classifier, labelled, "parameters of its own"), (guided, ANCHORS, "has a guide")):
        with pytest.raises(PlanError, match=cause):
            train(MegabatchSentenceTransformerTrainer, folder, tmp_path, loss, data, 2, 4)
