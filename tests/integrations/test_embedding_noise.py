"""The noise of neftune_noise_alpha has a scale by the sample's own length, whatever the microbatch is padded to."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening, GPT2Config, GPT2LMHeadModel, TrainerCallback

from megabatch import JointLoss, PlanError
from megabatch.integrations.embedding_noise import LENGTHS, with_lengths
from megabatch.integrations.transformers import MegabatchTrainer
from tests.integrations.trainers import arguments
from tests.integrations.users import PAD, bart, padded_texts
from tests.tiers import full_unless

ALPHA, WIDTH = 5.0, 64
LENGTHS_OF_SAMPLES = [4, 30, 5, 25, 6, 20]


def texts() -> list[dict[str, Tensor]]:
    """Samples of one token each, by which their rows are recognized."""
    rows = [torch.full((length,), 4 + index) for index, length in enumerate(LENGTHS_OF_SAMPLES)]
    return [{"input_ids": row, "labels": row} for row in rows]


def without_mask(samples: list[Any]) -> dict[str, Tensor]:
    padded = padded_texts(samples)
    del padded["attention_mask"]
    return padded


def flat(samples: list[Any]) -> dict[str, Tensor]:
    listed = [{name: value.tolist() for name, value in sample.items()} for sample in samples]
    return DataCollatorWithFlattening(return_tensors="pt")(listed)


class Listed(MegabatchTrainer):
    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_dataset, self.args.per_device_train_batch_size, collate_fn=self.data_collator)


def measure_noise(folder: Any, collate: Any, size: int, base: Any = MegabatchTrainer, **given: Any) -> dict[int, float]:
    """Return the largest noise of each sample, by its length."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=WIDTH, n_head=1, n_layer=1, n_positions=128))
    embeddings = model.get_input_embeddings()
    largest: dict[int, float] = {}

    def look(_: Any, inputs: Any, output: Tensor) -> None:
        noise = (output.detach() - embeddings.weight[inputs[0]].detach()).abs().amax(-1)
        for index, length in enumerate(LENGTHS_OF_SAMPLES):
            if len(found := noise[inputs[0] == 4 + index]) and model.training:
                largest[length] = float(found.max())

    class Look(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 1:
                embeddings.register_forward_hook(look)  # behind the hook that adds the noise

    settings = {
        "per_device_train_batch_size": size, "gradient_accumulation_steps": 6 // size, "num_train_epochs": 2,
        "neftune_noise_alpha": ALPHA,
    }  # fmt: skip
    trainer = base(
        model, arguments(str(folder), **settings), train_dataset=texts(), data_collator=collate, callbacks=[Look()],
        **given,
    )  # fmt: skip
    trainer.train()
    assert not hasattr(embeddings, "neftune_noise_alpha")
    assert len(embeddings._forward_hooks) == 1
    return largest


@pytest.mark.parametrize("size", full_unless([1, 2, 6], lambda _, size: size == 6))
@pytest.mark.parametrize("collate", full_unless([padded_texts, without_mask, flat], lambda number, _: number != 1))
def test_the_scale_is_that_of_the_samples_own_length(collate, size, tmp_path):
    largest = measure_noise(tmp_path, collate, size)
    for length in LENGTHS_OF_SAMPLES:
        bound = ALPHA / (length * WIDTH) ** 0.5
        assert 0.95 * bound < largest[length] <= bound * (1 + 1e-6)


@pytest.mark.full
def test_the_scale_does_not_depend_on_a_limit_in_tokens_or_on_a_loader_that_pads(tmp_path):
    for given in ({"max_microbatch_tokens": 64}, {"base": Listed}):
        largest = measure_noise(tmp_path, padded_texts, 2, **given)
        assert largest[4] > 0.95 * ALPHA / (4 * WIDTH) ** 0.5


@pytest.mark.parametrize("kind", ["joint", "encoder-decoder"])
def test_unknown_lengths_are_refused(kind, tmp_path):
    model = bart() if kind == "encoder-decoder" else GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=1, n_layer=1))
    given = {"loss_fn": JointLoss(lambda *_: None, lambda *_: None)} if kind == "joint" else {}
    args = arguments(str(tmp_path), neftune_noise_alpha=ALPHA)
    with pytest.raises(PlanError, match=r"cannot keep neftune_noise_alpha with an? "):
        MegabatchTrainer(model, args, padded_texts, texts(), **given).train()


def test_lengths_are_counted_by_mask_positions_or_samples():
    ids = torch.tensor([[5, 6, 7, PAD], [5, PAD, PAD, PAD]])
    samples = [{"input_ids": [5, 6, 7]}, {"input_ids": [5]}]
    mask = (ids != PAD).long()
    assert with_lengths({"input_ids": ids, "attention_mask": mask}, samples)[LENGTHS].tolist() == [[3], [1]]
    assert with_lengths({"input_ids": ids}, samples)[LENGTHS].tolist() == [[3], [1]]
    assert with_lengths({"input_ids": ids})[LENGTHS].tolist() == [[4], [4]]
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    packed = {"input_ids": torch.zeros(1, 5, dtype=torch.long), "position_ids": positions}
    assert with_lengths(packed, samples, is_packed=True)[LENGTHS].tolist() == [[3, 3, 3, 2, 2]]
    del packed["position_ids"]
    for microbatch, is_packed in ((packed, True), ({"input_ids": ids}, False), ({"x": ids}, False)):
        with pytest.raises(PlanError, match="leave neftune_noise_alpha out"):
            with_lengths(microbatch, samples[:1], is_packed=is_packed)
