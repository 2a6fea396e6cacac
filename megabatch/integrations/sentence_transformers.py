"""sentence-transformers' trainer with exact gradients: `MegabatchSentenceTransformerTrainer`.

A loss of sentence-transformers is a function of the embeddings of a batch. It runs as a `JointLoss` over all samples
that an update has of a data set, so that in-batch negatives are those of the update and not of a microbatch.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Sampler

from megabatch.errors import LossContractError, MegabatchError, PlanError, in_one_line
from megabatch.integrations.transformers import MegabatchTrainer
from megabatch.losses.coupled_loss import JointLoss

try:
    from sentence_transformers import SentenceTransformerTrainer
except ModuleNotFoundError as error:
    raise MegabatchError(
        f"megabatch.integrations.sentence_transformers needs {error.name}, which is not installed: pip install "
        '"sentence-transformers[train]"'
    ) from None

EMBEDDING, LABELS = "sentence_embedding", "labels"


class MegabatchSentenceTransformerTrainer(MegabatchTrainer, SentenceTransformerTrainer):
    """A SentenceTransformerTrainer whose every update has the exact gradient of its samples.

    The loss of an update is the loss of all its samples at once, in the memory of a microbatch. Samples of several data
    sets are not coupled: the losses of the data sets count by their samples. Each text is embedded twice.

    Args:
        arguments: All arguments of SentenceTransformerTrainer, and those of `MegabatchTrainer` but ``loss_fn``.

    Raises:
        PlanError: A loss reads more than embeddings, gathers them over ranks or has parameters of its own; or the data
            set has no length.
    """

    def __init__(self, *positional: Any, **arguments: Any) -> None:
        super().__init__(*positional, **arguments)
        losses = self.loss if isinstance(self.loss, dict) else {"": self.loss}
        for loss in losses.values():
            _check_loss(loss)
        self._joint_losses = {name: _join_samples(loss) for name, loss in losses.items()}
        self._given_loss = next(iter(self._joint_losses.values()))

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of uncollated samples in the order of sentence-transformers' batch samplers."""
        if isinstance(self.train_dataset, IterableDataset):
            raise PlanError("MegabatchSentenceTransformerTrainer needs a data set with a length; give a Dataset")
        args = self.args
        size = args.per_device_train_batch_size * args.world_size
        loader = self._build_dataloader(cast(Any, self.train_dataset), size, dataset_kind="train")
        sampler = _RankBatches(cast(Any, loader.batch_sampler), args.process_index, args.world_size)
        self._gives_samples = True
        return DataLoader(_Numbered(loader.dataset), batch_sampler=sampler, collate_fn=list)

    @property
    def _collate(self) -> Any:
        return self.data_collator

    def _calls(self) -> list[Any]:
        """Return the samples of the update by data set: each is a call of its own."""
        calls: dict[int, list[Any]] = {}
        for batch in self._batches:
            for number, sample in batch:
                calls.setdefault(number, []).append(sample)
        return list(calls.values())

    def _loss_of(self, batch: list[Any]) -> JointLoss:
        name = batch[0].get("dataset_name", "") if batch else ""
        return self._joint_losses.get(name, next(iter(self._joint_losses.values())))

    def floating_point_ops(self, inputs: Any) -> int:
        """Estimate the operations of a batch."""
        return super().floating_point_ops([sample for _, sample in inputs])

    def _length(self, sample: Any) -> int:
        if self._given_length is not None or self._max_microbatch_tokens is None:
            return super()._length(sample) if self._given_length is not None else 1
        columns = cast(Any, self.data_collator)([sample])
        return max(value.numel() for name, value in columns.items() if name.endswith("input_ids"))


class _StandIn(nn.Module):
    """Takes the place of the model in a loss, whose features are embeddings already."""

    def __init__(self, size: int | None) -> None:
        super().__init__()
        self._size = size

    def forward(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {EMBEDDING: features[EMBEDDING]}

    def get_embedding_dimension(self) -> int | None:
        return self._size


class _Numbered(Dataset[Any]):
    """The samples of a data set, each with the number of the data set that it is of."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        sizes = self._dataset.cumulative_sizes if isinstance(self._dataset, ConcatDataset) else ()
        return sum(index >= size for size in sizes), self._dataset[index]


class _RankBatches(Sampler[list[int]]):
    """This rank's samples of each batch of another sampler."""

    def __init__(self, batches: Any, rank: int, world: int) -> None:
        self._batches, self._rank, self._world = batches, rank, world

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._batches, "set_epoch"):
            self._batches.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        return (batch[self._rank :: self._world] for batch in self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def _check_loss(loss: nn.Module) -> None:
    """Raise `PlanError` for a loss that is no function of the embeddings alone."""
    name = type(loss).__name__
    of_model = {id(parameter) for module in loss.modules() if _is_model(module) for parameter in module.parameters()}
    if any(parameter.requires_grad and id(parameter) not in of_model for parameter in loss.parameters()):
        raise PlanError(f"{name} has parameters of its own, which no update would train; put them into the model")
    if any(hasattr(module, "guide") for module in loss.modules()):
        raise PlanError(f"{name} has a guide, which reads texts beside embeddings; choose another loss")
    if any(getattr(module, "gather_across_devices", False) for module in loss.modules()):
        raise PlanError(f"{name} gathers across devices, and is given the samples of all; leave it out")


def _is_model(module: nn.Module) -> bool:
    return hasattr(module, "get_embedding_dimension") and hasattr(module, "preprocess")


def _join_samples(loss: nn.Module) -> JointLoss:
    """Return a loss of sentence-transformers as a loss over all samples of a call."""

    def encode(model: Any, microbatch: Any) -> dict[str, Tensor]:
        features, labels = cast(Any, SentenceTransformerTrainer).collect_features(None, microbatch)
        embeddings = {str(index): model(column)[EMBEDDING] for index, column in enumerate(features)}
        return embeddings if labels is None else {**embeddings, LABELS: labels}

    def compute(representations: dict[str, Tensor]) -> tuple[Tensor, int]:
        labels = representations.get(LABELS)
        embeddings = [value for name, value in representations.items() if name != LABELS]
        mean = _run_on_embeddings(loss, embeddings, None if labels is None else labels.detach())
        return mean * len(embeddings[0]), len(embeddings[0])

    return JointLoss(encode, compute)


def _run_on_embeddings(loss: Any, embeddings: list[Tensor], labels: Tensor | None) -> Tensor:
    """Return the loss of embeddings [N, D] of each column, with another module in the place of its model."""
    stand_in = _StandIn(embeddings[0].shape[-1])  # one for all: a loss may decorate the model of the loss in it
    models: list[tuple[nn.Module, str, nn.Module]] = []
    for module in loss.modules():
        models += [(module, name, child) for name, child in module.named_children() if _is_model(child)]
    try:
        for module, name, _ in models:
            setattr(module, name, stand_in)
        features = [{EMBEDDING: embedding} for embedding in embeddings]
        cached = getattr(loss, "calculate_loss", None)  # of losses that cache gradients, as a JointLoss does
        loss_terms: Any = (
            loss(features, labels) if cached is None else cached([[embedding] for embedding in embeddings], labels)
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise LossContractError(
            f"{type(loss).__name__} reads more than sentence embeddings ({in_one_line(error)}), which an update cannot "
            "keep; train with SentenceTransformerTrainer, or choose another loss"
        ) from error
    finally:
        for module, name, model in models:
            setattr(module, name, model)
    return torch.stack([*loss_terms.values()]).sum() if isinstance(loss_terms, dict) else loss_terms
