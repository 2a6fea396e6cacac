"""MegabatchTrainer on data without a length: a resumed training sees what it would have seen, in every pass."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel

from megabatch import PlanError
from megabatch.integrations.transformers import MegabatchTrainer, _StreamLoader
from tests.integrations.trainers import Recorder, arguments


class Numbers(IterableDataset):
    """Samples by number, in another order for each pass or for each state of Python's generator."""

    def __init__(self, count: int, order: str = "same") -> None:
        self.count, self.order, self.epoch = count, order, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        numbers = list(range(self.count))
        if self.order == "by pass":
            random.Random(self.epoch).shuffle(numbers)
        if self.order == "drawn":
            random.shuffle(numbers)
        return iter([{"input_ids": [3 + number] * 4, "labels": [3 + number] * 4} for number in numbers])


class Listed(MegabatchTrainer):
    """A user's loader, which skips within its first pass only."""

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_dataset, self.args.per_device_train_batch_size, collate_fn=list)


def train(
    folder: Path, data: IterableDataset, *, checkpoint: int | None = None, base: Any = MegabatchTrainer, **changed: Any
) -> tuple[list[list[int]], dict[str, Tensor]]:  # fmt: skip
    """Return the samples of each update and the weights."""
    torch.manual_seed(0)
    random.seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=48, n_embd=8, n_head=1, n_layer=1, n_positions=8))
    seen: list[int] = []
    updates: list[list[int]] = []

    class Note(Recorder):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            updates.append(sorted({*seen}))
            seen.clear()

    def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        seen.extend(sample["input_ids"][0] - 3 for sample in samples)
        return {name: torch.tensor([sample[name] for sample in samples]) for name in samples[0]}

    settings = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 9, "learning_rate": 1e-2,
        "save_strategy": "steps", "save_steps": 1, "save_only_model": False, "seed": 3,
    }  # fmt: skip
    trainer = base(
        model, arguments(str(folder), **settings | changed), train_dataset=data, data_collator=collate,
        callbacks=[Note()], check_loss=False,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=checkpoint and str(folder / f"checkpoint-{checkpoint}"))
    assert trainer.args.ignore_data_skip == changed.get("ignore_data_skip", False)
    return updates, {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.full
@pytest.mark.parametrize("count", [13, 12, 4])
@pytest.mark.parametrize("order", ["same", "by pass"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_training_resumed_in_any_pass_sees_the_same_samples(count, order, workers, tmp_path):
    settings = {"dataloader_num_workers": workers}
    updates, weights = train(tmp_path, Numbers(count, order), **settings)
    assert len(updates) == 9
    for step in (2, 3, 5, 6, 8) if not workers else (5,):
        resumed, found = train(tmp_path, Numbers(count, order), checkpoint=step, **settings)
        assert resumed == updates[step:]
        assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.full
def test_an_order_that_is_drawn_in_the_first_pass_is_drawn_again(tmp_path):
    updates, _ = train(tmp_path, Numbers(40, "drawn"))
    assert train(tmp_path, Numbers(40, "drawn"), checkpoint=4)[0] == updates[4:]


@pytest.mark.full
def test_data_is_not_skipped_where_the_user_says_so(tmp_path):
    updates, _ = train(tmp_path, Numbers(13))
    assert train(tmp_path, Numbers(13), checkpoint=4, ignore_data_skip=True)[0] == updates[:5]


@pytest.mark.full
def test_a_loader_of_the_users_that_ends_before_is_refused(tmp_path):
    updates, _ = train(tmp_path, Numbers(13), base=Listed)
    assert train(tmp_path, Numbers(13), checkpoint=2, base=Listed)[0] == updates[2:]
    with pytest.raises(PlanError, match=r"resumes at step 5, and the loader of get_train_dataloader\(\) ends before"):
        train(tmp_path, Numbers(13), checkpoint=5, base=Listed)


def rest(count: int, skipped: int) -> list[list[int]]:
    loader = _StreamLoader(Numbers(count), 2, collate_fn=lambda samples: [each["input_ids"][0] - 3 for each in samples])
    loader.skip_updates(lambda: skipped, 2, torch.device("cpu"))
    remaining = list(loader)
    assert next(iter(loader)) == [0, 1]
    return remaining


@pytest.mark.parametrize(("skipped", "first"), [(0, 0), (2, 8), (5, 8), (7, 4)])
def test_whole_updates_of_whole_passes_are_skipped(skipped, first):
    assert rest(13, skipped)[0] == [first, first + 1]


def test_a_pass_that_ends_with_an_update_is_followed_by_the_next():
    assert rest(12, 3)[0] == [0, 1]
    assert rest(13, 3) == [[12]]  # the tail fills no update, in any training


def test_data_without_one_update_is_refused():
    with pytest.raises(PlanError, match="a pass over the data has not one"):
        rest(2, 1)
