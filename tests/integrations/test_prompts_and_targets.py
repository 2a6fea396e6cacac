"""PEFT's virtual tokens under MegabatchTrainer, data without targets, and causes that refusals name."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

from megabatch import LossContractError
from megabatch.integrations.transformers import MegabatchTrainer
from tests.integrations.trainers import Recorder, arguments
from tests.integrations.users import CASES, gpt2, padded_texts, texts, trainer_of

peft = pytest.importorskip("peft", reason="peft is not installed (extra: dev)")
NUM_VIRTUAL = 3
KINDS = {
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=NUM_VIRTUAL),
    "p-tuning": lambda: peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=NUM_VIRTUAL, encoder_hidden_size=8
    ),
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=NUM_VIRTUAL),
}


def prompted(kind: str) -> Any:
    model = gpt2()
    torch.manual_seed(0)
    return peft.get_peft_model(model, KINDS[kind]()).double()


def with_front(samples: list[Any]) -> dict[str, Tensor]:
    padded = padded_texts(samples)
    return padded | {"labels": F.pad(padded["labels"], (NUM_VIRTUAL, 0), value=-100)}


def expected(kind: str) -> tuple[dict[str, Tensor], float]:
    """The loss of PEFT's model in float64, sample by sample."""
    model = prompted(kind).train()
    total, count = 0.0, 0
    for text in texts()[:6]:
        logits = model(input_ids=text["input_ids"][None]).logits[0]
        is_prefix = kind == "prefix"
        labels = text["labels"][1:] if is_prefix else text["labels"]  # a virtual token predicts the first
        predictions = logits[:-1] if is_prefix else logits[NUM_VIRTUAL - 1 : -1]
        total = total + F.cross_entropy(predictions, labels, ignore_index=-100, reduction="sum")
        count += int((labels != -100).sum())
    (total / count).backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
    return gradients, float(total.detach() / count)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT, which asks for a name that transformers will remove
@pytest.mark.parametrize(
    ("kind", "collate"),
    [("prompt", padded_texts), ("prompt", with_front), ("p-tuning", padded_texts), ("prefix", padded_texts)],
)
def test_virtual_tokens_train_and_evaluate_exactly(kind, collate, tmp_path):
    model, recorder = prompted(kind), Recorder()
    args = arguments(str(tmp_path), label_names=["labels"])
    trainer = MegabatchTrainer(
        model, args, collate, texts()[:6], texts()[:2], callbacks=[recorder]
    )  # fmt: skip
    trainer.train()
    gradients, loss = expected(kind)
    for name, gradient in gradients.items():
        assert (recorder.gradients[0][name] - gradient).norm() <= 1e-12, name
    assert abs(recorder.logged[0]["loss"] - loss) <= 1e-5
    assert trainer.evaluate()["eval_loss"] > 0


def test_updates_without_a_target_warn_once_and_are_not_stepped(tmp_path):
    model, recorder = gpt2(), Recorder()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    data = [text | {"labels": torch.full_like(text["labels"], -100)} for text in texts()]
    args = arguments(str(tmp_path), learning_rate=1.0, weight_decay=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        MegabatchTrainer(model, args, padded_texts, data, callbacks=[recorder]).train()
    assert len([each for each in caught if "have no target" in str(each.message)]) == 1
    assert len(recorder.gradients) == 2
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_a_loss_that_couples_samples_is_pointed_to_joint_loss(tmp_path):
    trainer, _ = trainer_of(CASES["pairwise"], str(tmp_path))
    with pytest.raises(LossContractError, match="or a JointLoss where samples are each other's negatives"):
        trainer.train()


def test_padding_in_group_norm_is_named(tmp_path):
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        vocab_size=12, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        conv_dim=[8, 8], conv_stride=[4, 2], conv_kernel=[8, 4], num_feat_extract_layers=2, num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, feat_extract_norm="group", mask_time_prob=0.0, ctc_loss_reduction="mean",
        layerdrop=0.0, pad_token_id=0,
    )  # fmt: skip
    lengths = ((160, 3), (400, 9), (240, 4), (800, 15), (160, 2), (600, 12))
    data = [{"input_values": torch.randn(n), "labels": torch.randint(1, 12, (k,))} for n, k in lengths]

    def collate(samples: list[Any]) -> dict[str, Tensor]:
        values = [sample["input_values"] for sample in samples]
        pad = torch.nn.utils.rnn.pad_sequence
        return {
            "input_values": pad(values, batch_first=True),
            "attention_mask": pad([torch.ones(len(each), dtype=torch.long) for each in values], batch_first=True),
            "labels": pad([sample["labels"] for sample in samples], batch_first=True, padding_value=-100),
        }

    class Rows(MegabatchTrainer):
        def count_targets(self, microbatch: Any) -> int:
            return len(microbatch["labels"])

    with pytest.raises(LossContractError, match=r"normalizes over all frames.*set per_device_train_batch_size=1"):
        Rows(Wav2Vec2ForCTC(config), arguments(str(tmp_path)), collate, data).train()
