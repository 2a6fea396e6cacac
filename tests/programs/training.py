"""Programs around the optimizer: SAM, a GAN, local SGD, sparse embeddings, a teacher, penalties, private gradients."""

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import megabatch
from megabatch import GradientAccumulator, PlanError
from tests.programs.setting import Errors, Setting, gradient_error, inner, refusal, weight_error

Batch = dict[str, Tensor]


def network(*sizes: int, act: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width, following in pairwise(sizes):
        layers += [nn.Linear(width, following), act()]
    return nn.Sequential(*layers[:-1])


@megabatch.loss(weigh=lambda batch: len(batch["x"]))
def classes(model: Any, batch: Batch) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["x"])


def labeled(size: int, width: int = 6, num_classes: int = 3) -> Batch:
    return {"x": torch.randn(size, width), "y": torch.randint(num_classes, (size,))}


def sharpness_aware(setting: Setting) -> Errors:
    """SAM: a second gradient of the same batch at perturbed weights."""
    plain, batch = network(6, 16, 3), labeled(13)
    model = copy.deepcopy(plain)
    gradient = GradientAccumulator(setting.wrap(model), micro_batch_size=4)

    def accumulated() -> None:
        gradient.forward_backward(setting.share(batch), classes)
        gradient.finalize()

    def uncut() -> None:
        plain.zero_grad()
        F.cross_entropy(plain(batch["x"]), batch["y"]).backward()

    def step(trained: nn.Module, optimizer: torch.optim.Optimizer, differentiate: Callable[[], None]) -> None:
        differentiate()
        parameters = list(trained.parameters())
        weights = [each.detach().clone() for each in parameters]
        norm = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
        with torch.no_grad():
            for each in parameters:
                assert each.grad is not None
                each += 0.05 * each.grad / norm
        differentiate()
        with torch.no_grad():
            for each, weight in zip(parameters, weights, strict=True):
                each.copy_(weight)
        optimizer.step()

    for trained, differentiate in ((model, accumulated), (plain, uncut)):
        optimizer = torch.optim.SGD(trained.parameters(), 0.1)
        for _ in range(3):
            step(trained, optimizer, differentiate)
    return {"weights after 3 steps": weight_error(model, plain)}


def adversarial(setting: Setting) -> Errors:
    """A GAN with the R1 penalty: two accumulators, and the discriminator frozen around the generator's call."""
    plain_generator, plain_critic = network(4, 16, 6), network(6, 16, 1, act=nn.Softplus)
    generator, critic = copy.deepcopy(plain_generator), copy.deepcopy(plain_critic)
    data = {"noise": torch.randn(10, 4), "real": torch.randn(10, 6)}

    def real_and_fake(critic: Any, generator: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            fake = generator(batch["noise"])
        real = batch["real"].clone().requires_grad_()
        of_real, of_fake = critic(torch.cat([real, fake])).chunk(2)
        (slope,) = torch.autograd.grad(of_real.sum(), real, create_graph=True)
        return F.softplus(-of_real), F.softplus(of_fake), slope.square().sum(1)

    @megabatch.loss(weigh=lambda batch: {"adversarial": len(batch["real"]), "r1": len(batch["real"])})
    def critic_loss(critic: Any, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        real, fake, slopes = real_and_fake(critic, generator, batch)
        return {"adversarial": (real.sum() + fake.sum(), len(real)), "r1": (5 * slopes.sum(), len(real))}

    @megabatch.loss(weigh=lambda batch: len(batch["noise"]))
    def generator_loss(generator: Any, batch: Batch) -> tuple[Tensor, int]:
        return F.softplus(-critic(generator(batch["noise"]))).sum(), len(batch["noise"])

    def plain_step(losses: Tensor, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        losses.backward()

    def plain_critic_loss() -> Tensor:
        real, fake, slopes = real_and_fake(plain_critic, plain_generator, data)
        return real.mean() + fake.mean() + 5 * slopes.mean()

    of_generator = GradientAccumulator(setting.wrap(generator), micro_batch_size=3)
    of_critic = GradientAccumulator(setting.wrap(critic), micro_batch_size=3)
    models = (generator, critic, plain_generator, plain_critic)
    steps = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    share = setting.share(data)
    errors: Errors = {}
    for number in range(3):
        of_critic.forward_backward(share, critic_loss)
        of_critic.finalize(max_norm=100.0)
        plain_step(plain_critic_loss(), steps[3])
        errors[f"critic, step {number}"] = gradient_error(critic, plain_critic)
        steps[1].step()
        steps[3].step()
        critic.requires_grad_(False)
        of_generator.forward_backward(share, generator_loss)
        of_generator.finalize(max_norm=100.0)
        critic.requires_grad_(True)
        plain_step(F.softplus(-plain_critic(plain_generator(data["noise"]))).mean(), steps[2])
        errors[f"generator, step {number}"] = gradient_error(generator, plain_generator)
        steps[0].step()
        steps[2].step()
    errors["weights of the critic"] = weight_error(critic, plain_critic)
    errors["weights of the generator"] = weight_error(generator, plain_generator)
    halves = [{name: values[part] for name, values in share.items()} for part in (slice(3), slice(3, None))]
    of_critic.open(weights=dict.fromkeys(("adversarial", "r1"), len(share["real"])))
    for half in halves:  # both updates are open
        of_critic.forward_backward(half, critic_loss)
        critic.requires_grad_(False)
        of_generator.forward_backward(half, generator_loss)
        critic.requires_grad_(True)
    of_critic.finalize()
    of_generator.finalize()
    plain_step(plain_critic_loss(), steps[3])
    errors["critic, calls in turn"] = gradient_error(critic, plain_critic)
    return errors


def local_steps(setting: Setting) -> Errors:
    """DiLoCo: inner steps of each rank on its own data, without a reduction."""
    torch.manual_seed(setting.rank)
    plain, batch = network(6, 16, 3), labeled(7 + setting.rank)
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (setting.world, 1), mesh_dim_names=("replica", "dp"))
    gradient = GradientAccumulator(model, micro_batch_size=2, mesh=mesh["dp"])
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, plain)]
    errors: Errors = {}
    for number in range(2):
        gradient.forward_backward(batch, classes)
        gradient.finalize()
        plain.zero_grad()
        F.cross_entropy(plain(batch["x"]), batch["y"]).backward()
        errors[f"gradient, inner step {number}"] = gradient_error(model, plain)
        for optimizer in optimizers:
            optimizer.step()
    assert "replica" in refusal(lambda: GradientAccumulator(model, micro_batch_size=2, mesh=mesh), PlanError)
    return errors


class Recommender(nn.Module):
    """Clicks from bags of items, with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(50, 8, mode="sum", sparse=True)
        self.head = nn.Linear(8, 1)

    def forward(self, items: Tensor) -> Tensor:
        return self.head(self.items(items)).squeeze(1)


def sparse_embeddings(setting: Setting) -> Errors:
    """The gradient of the embedding stays sparse, also when it is clipped."""
    plain = Recommender()
    model = copy.deepcopy(plain)
    batch = {"items": torch.randint(50, (11, 4)), "clicks": torch.rand(11).round()}

    @megabatch.loss(weigh=lambda batch: len(batch["clicks"]))
    def clicks(model: Any, batch: Batch) -> tuple[Tensor, int]:
        scores = model(batch["items"])
        return F.binary_cross_entropy_with_logits(scores, batch["clicks"], reduction="sum"), len(scores)

    gradient = GradientAccumulator(setting.wrap(model), micro_batch_size=3)
    gradient.forward_backward(setting.share(batch), clicks)
    gradient.finalize(max_norm=0.01)
    F.binary_cross_entropy_with_logits(plain(batch["items"]), batch["clicks"]).backward()
    found = [each.grad for each in plain.parameters() if each.grad is not None]
    norm = torch.stack([each.to_dense().norm() for each in found]).norm()
    for each in found:
        each.mul_(0.01 / norm)
    assert model.items.weight.grad is not None
    assert model.items.weight.grad.is_sparse
    # Torch clips by 0.01 / (norm + 1e-6), and the accumulator too.
    scale = float(norm / (norm + 1e-6))
    for each in found:
        each.mul_(scale)
    errors = {"gradient": gradient_error(model, plain)}
    for trained in (model, plain):
        torch.optim.SparseAdam([trained.items.weight], 0.1).step()
    errors["weights after SparseAdam"] = weight_error(model.items, plain.items)
    return errors


def teacher(setting: Setting) -> Errors:
    """Distillation from an average of the weights that moves after each step; its outputs come from `forward`."""
    plain, data = network(6, 16, 3), {"x": torch.randn(11, 6)}
    model, plain_teacher = copy.deepcopy(plain), copy.deepcopy(plain).requires_grad_(False)
    average = copy.deepcopy(plain_teacher)
    optimizers = [torch.optim.SGD(each.parameters(), 0.5) for each in (model, plain)]
    gradient = GradientAccumulator(setting.wrap(model), micro_batch_size=2)
    samples = [{"x": x} for x in setting.share(data["x"])]

    @megabatch.loss(weigh=lambda batch: len(batch["x"]))
    def distilled(model: Any, batch: Batch) -> tuple[Tensor, int]:
        return (model(batch["x"]) - batch["targets"]).square().sum(), len(batch["x"])

    errors: Errors = {}
    for number in range(2):
        targets = gradient.forward(samples, lambda _, batch: average(batch["x"]).softmax(1), trim=False)
        with_targets = [sample | {"targets": target} for sample, target in zip(samples, targets, strict=True)]
        gradient.forward_backward(with_targets, distilled)
        gradient.finalize()
        plain.zero_grad()
        plain_targets = plain_teacher(data["x"]).softmax(1)
        ((plain(data["x"]) - plain_targets).square().sum() / len(plain_targets)).backward()
        errors[f"gradient, step {number}"] = gradient_error(model, plain)
        for optimizer in optimizers:
            optimizer.step()
        for moved, trained in ((average, model), (plain_teacher, plain)):
            for ours, theirs in zip(moved.parameters(), trained.parameters(), strict=True):
                ours.lerp_(theirs.detach(), 0.1)
    return errors


class Weighted(nn.Module):
    """Two tasks with learned weights (Kendall)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 1)
        self.log_variances = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.body(x).tanh()
        return self.first(hidden), self.second(hidden).squeeze(1), self.log_variances


def learned_weights(setting: Setting) -> Errors:
    """Penalties on parameters alone: in the total, times the number of samples, or as a term of weight 1 per update."""
    plain = Weighted()
    data = labeled(9) | {"z": torch.randn(9)}

    def parts(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        scores, numbers, log_variances = model(batch["x"])
        cross_entropies = F.cross_entropy(scores, batch["y"], reduction="none")
        squares = (numbers - batch["z"]).square()
        weighted = cross_entropies * (-log_variances[0]).exp() + squares * (-log_variances[1]).exp()
        return weighted, log_variances.sum() + 0.01 * inner(model).body.weight.square().sum()

    @megabatch.loss(weigh=lambda batch: len(batch["x"]))
    def in_the_total(model: Any, batch: Batch) -> tuple[Tensor, int]:
        weighted, penalty = parts(model, batch)
        return weighted.sum() + len(weighted) * penalty, len(weighted)

    @megabatch.loss(weigh=lambda batch: {"tasks": len(batch["x"]), "penalty": 1})
    def as_a_term(model: Any, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        weighted, penalty = parts(model, batch)
        return {"tasks": (weighted.sum(), len(weighted)), "penalty": (penalty, 1)}

    weighted, penalty = parts(plain, data)
    (weighted.mean() + penalty).backward()
    share = setting.share(data)
    if setting.way.endswith("a rank without samples"):
        share = data if setting.rank == 0 else []
    errors: Errors = {}
    for loss in (in_the_total, as_a_term):
        model = copy.deepcopy(plain)
        gradient = GradientAccumulator(setting.wrap(model), micro_batch_size=2)
        gradient.forward_backward(share, loss)
        gradient.finalize()
        errors[f"gradient, {loss.__name__}"] = gradient_error(model, plain)
    return errors


def per_sample_gradients(setting: Setting) -> Errors:
    """Per-sample gradients that module hooks leave in ``p.grad_sample`` are the true ones, if the loss has no weigh."""
    model, batch = network(6, 8, 3), labeled(7)
    layer = model[-1]

    def keep_inputs(module: nn.Module, inputs: Any, _output: Any) -> None:
        module.inputs = inputs[0].detach()  # pyright: ignore[reportAttributeAccessIssue]

    def keep_samples(module: Any, _inputs: Any, outputs: Any) -> None:
        rows = torch.einsum("bo,bi->boi", outputs[0], module.inputs)
        module.weight.grad_sample = [*getattr(module.weight, "grad_sample", []), rows]

    def sums(model: Any, batch: Batch) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["x"])

    expected = [
        torch.autograd.grad(F.cross_entropy(model(x[None]), y[None]), layer.weight)[0]
        for x, y in zip(batch["x"], batch["y"], strict=True)
    ]
    layer.register_forward_hook(keep_inputs)
    layer.register_full_backward_hook(keep_samples)
    gradient = GradientAccumulator(model, micro_batch_size=3)
    gradient.forward_backward(batch, sums)
    gradient.finalize()
    order = [row for rows in (gradient.last_plan.microbatches if gradient.last_plan else ()) for row in rows]
    found = torch.cat(layer.weight.grad_sample)  # pyright: ignore[reportAttributeAccessIssue]
    truth = torch.stack(expected)[order]
    return {"per-sample gradients": float((found - truth).norm() / truth.norm())}
