"""Input mutations of names: tokens, masks and targets under other keys than a model's own, and hooks by any name."""

import copy
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from megabatch import JointLoss, LossContractError, PlanError, loss, losses
from tests.exact.inputs import Sample, User, mean_square, numbers, refused, regressor, right
from tests.exact.inputs_batches import texts
from tests.exact.tiny import tiny
from tests.exact.wrappers import wrap

# Tokens under other names than input_ids, on a model that needs a mask.


def encoder() -> nn.Module:
    return tiny("bert", "", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0)


def renamed(*names: str) -> list[Sample]:
    """Samples whose tokens stand under each of the names, of other lengths under each."""
    return [
        {name: torch.cat([ids, ids[: number * (index + 1) % 3]]) for number, name in enumerate(names)}
        for index, ids in enumerate(sample["input_ids"] for sample in texts())
    ]


def first_hidden(model: nn.Module, ids: Tensor, mask: Tensor | None) -> Tensor:
    return model(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]


def each_alone(reference: nn.Module, samples: list[Sample], names: tuple[str, ...]) -> None:
    """Leaves the gradient of the mean over samples, each without padding."""
    for sample in samples:
        hidden = [first_hidden(reference, sample[name][None], None) for name in names]
        (sum(each.pow(3).sum() for each in hidden) / len(samples)).backward()


def of_masks(names: tuple[str, ...]) -> Any:
    """A loss that hands each key's own mask on."""

    @loss(weigh=lambda batch: len(batch[names[0]]))
    def towers(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
        masks = [name.removesuffix("input_ids") + "attention_mask" for name in names]
        hidden = [first_hidden(model, batch[name], batch[mask]) for name, mask in zip(names, masks, strict=True)]
        return sum(each.pow(3).sum() for each in hidden), len(hidden[0])

    return towers


NAMES = {
    "two_towers": ("anchor_input_ids", "query_input_ids"),
    "chosen": ("chosen_input_ids",),
    "labels": ("labels_input_ids", "input_ids"),
}


@right(1, 2, 3, **NAMES)
def masks_of_tokens_by_other_names(user: User, variant: tuple[str, ...]) -> None:
    model, samples = encoder(), renamed(*variant)
    reference = copy.deepcopy(model)
    user.update(model, user.part(samples), of_masks(variant))
    each_alone(reference, samples, variant)
    user.expect(model, reference)


@refused(LossContractError, "attention_mask", 1, 2, **NAMES, ids=("ids",), tokens=("tokens", "input_ids"))
def tokens_by_other_names_without_their_mask(user: User, variant: tuple[str, ...]) -> None:
    @loss(weigh=lambda batch: len(batch[variant[0]]))
    def unmasked(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
        hidden = first_hidden(model, batch[variant[0]], None)
        return hidden.pow(3).sum(), len(hidden)

    user.update(encoder(), user.part(renamed(*variant)), unmasked)


@refused(LossContractError, "attention_mask", 1, 2, rows=0, columns=1)
def tokens_beside_each_other_without_a_mask(user: User, variant: int) -> None:
    """Two texts of a sample in one forward, below or beside each other."""
    names = ("anchor_input_ids", "positive_input_ids")

    @loss(weigh=lambda batch: len(batch[names[0]]))
    def together(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
        ids = [batch[name] for name in names]
        longest = max(each.shape[1] for each in ids)
        ids = ids if variant else [F.pad(each, (0, longest - each.shape[1])) for each in ids]
        hidden = first_hidden(model, torch.cat(ids, dim=variant), None)
        return hidden.pow(3).sum(), len(batch[names[0]])

    user.update(encoder(), user.part(renamed(*names)), together)


@refused(LossContractError, "attention_mask", 1, 2)
def joint_loss_of_tokens_by_another_name(user: User) -> None:
    def encode(model: nn.Module, batch: Sample) -> Tensor:
        return first_hidden(model, batch["query_input_ids"], None)

    joint = JointLoss(encode, lambda hidden: (hidden.pow(3).sum(), len(hidden)))
    user.update(encoder(), user.part(renamed("query_input_ids")), joint)


class Tower(nn.Module):
    """A model of transformers inside of a module of the user's."""

    def __init__(self, hands_on: bool) -> None:
        super().__init__()
        self.encoder, self.hands_on = encoder(), hands_on

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return first_hidden(self.encoder, input_ids, attention_mask if self.hands_on else None)


@loss(weigh=lambda batch: len(batch["input_ids"]))
def of_tower(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
    hidden = model(batch["input_ids"], batch["attention_mask"])
    return hidden.pow(3).sum(), len(hidden)


@right(1, 2, 3)
def mask_of_a_model_inside_of_a_module(user: User) -> None:
    model, samples = Tower(hands_on=True), renamed("input_ids")
    reference = copy.deepcopy(model)
    user.update(model, user.part(samples), of_tower)
    each_alone(reference.encoder, samples, ("input_ids",))
    user.expect(model, reference)


@refused(LossContractError, "attention_mask", 1, 2)
def model_inside_of_a_module_without_its_mask(user: User) -> None:
    user.update(Tower(hands_on=False), user.part(renamed("input_ids")), of_tower)


@right(1, 2)
def tokens_of_one_length_without_a_mask(user: User) -> None:
    """No false refusal: another key is padded, and goes with its mask."""
    samples = [each | {"input_ids": each["query_input_ids"][:2]} for each in renamed("query_input_ids")]
    model = encoder()
    reference = copy.deepcopy(model)

    @loss(weigh=lambda batch: len(batch["input_ids"]))
    def towers(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
        whole = first_hidden(model, batch["input_ids"], None)
        query = first_hidden(model, batch["query_input_ids"], batch["query_attention_mask"])
        return whole.pow(3).sum() + query.pow(3).sum(), len(whole)

    user.update(model, user.part(samples), towers)
    each_alone(reference, samples, ("input_ids", "query_input_ids"))
    user.expect(model, reference)


@refused(PlanError, "'anchor' of a sample is a dict", 1, 2)
def tokens_in_a_mapping_of_a_sample(user: User) -> None:
    samples = [{"anchor": each} for each in renamed("input_ids")]
    user.update(encoder(), user.part(samples), of_masks(("input_ids",)))


# Hooks on parameters, whatever their code is called.


class Halves:
    """A user's object with a hook."""

    def halve(self, gradient: Tensor) -> Tensor:
        return gradient / 2

    def __call__(self, parameter: Tensor) -> None:
        parameter.grad /= 2


HOOKS = {
    "function_of_torch": lambda weight: weight.register_hook(F.relu),
    "function_in_c": lambda weight: weight.register_hook(torch.sign),
    "module_of_torch": lambda weight: weight.register_hook(nn.Hardtanh()),
    "partial": lambda weight: weight.register_hook(functools.partial(torch.mul, other=0.5)),
    "method": lambda weight: weight.register_hook(Halves().halve),
    "after_accumulation": lambda weight: weight.register_post_accumulate_grad_hook(
        functools.partial(nn.utils.clip_grad_value_, clip_value=0.01)
    ),
    "object": lambda weight: weight.register_post_accumulate_grad_hook(Halves()),
    "without_gradients": lambda weight: weight.register_hook(torch.no_grad()(lambda gradient: gradient / 2)),
    "of_several": lambda weight: torch.autograd.graph.register_multi_grad_hook([weight], lambda gradients: None),
}


@refused(PlanError, "hook", 1, 2, 3, **HOOKS)
def hook_on_a_parameter(user: User, variant: Any) -> None:
    model = regressor()
    variant(model[0].weight)
    user.update(model, user.rows(numbers()), losses.mse)


@refused(PlanError, "hook", 1, 2)
def hook_that_the_loss_registers(user: User) -> None:
    @loss(weigh=lambda batch: len(batch["x"]))
    def hooked(model: nn.Module, batch: Sample) -> Any:
        model[0].weight.register_hook(F.relu)
        return losses.mse(model, batch)

    user.update(regressor(), user.rows(numbers()), hooked)


@right(2, 3, ddp="ddp", ddp_static="ddp-static-graph", fsdp1="fsdp1", fsdp2="fsdp2")
def hooks_of_torchs_own_wrappers(user: User, variant: str) -> None:
    model, batch = regressor(), numbers()
    reference = copy.deepcopy(model)
    model = fully_shard(model) if variant == "fsdp2" else wrap(model, variant)
    user.update(model, user.rows(batch), losses.mse)
    user.update(model, user.rows(batch), losses.mse)
    mean_square(reference, batch)
    user.expect(model, reference)
