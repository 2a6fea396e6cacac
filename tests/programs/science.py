"""Scientific programs: energies and forces of molecules, a differential equation, an inner step over tasks."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call

import megabatch
from megabatch import GradientAccumulator
from tests.programs.setting import Errors, Setting, gradient_error, inner, weight_error


@dataclass
class Molecule:
    """A graph, as graph libraries keep it."""

    atoms: Tensor  # [n]
    positions: Tensor  # [n, 3]
    energy: Tensor  # []
    forces: Tensor  # [n, 3]


class MoleculeBatch:
    """Molecules side by side, which no pytree sees into."""

    def __init__(self, molecules: list[Molecule]) -> None:
        self.num_graphs = len(molecules)
        self.num_nodes = sum(len(each.atoms) for each in molecules)
        self.atoms = torch.cat([each.atoms for each in molecules])
        self.positions = torch.cat([each.positions for each in molecules])
        self.energies = torch.stack([each.energy for each in molecules])
        self.forces = torch.cat([each.forces for each in molecules])
        self.batch = torch.repeat_interleave(torch.tensor([len(each.atoms) for each in molecules]))


class MessagePassing(nn.Module):
    """Energies of molecules from the distances of their atoms."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, width)
        self.filters = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width))
        self.update = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.head = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, atoms: Tensor, positions: Tensor, batch: Tensor, num_graphs: int) -> Tensor:
        is_pair = (batch[:, None] == batch) & ~torch.eye(len(atoms), dtype=torch.bool)
        source, target = torch.nonzero(is_pair, as_tuple=True)
        distance = (positions[source] - positions[target]).norm(dim=-1)
        basis = torch.exp(-(distance[:, None] - torch.arange(8.0)).square())  # [edges, 8]
        hidden = self.embedding(atoms)
        for _ in range(2):
            messages = hidden[source] * self.filters(basis)
            hidden = hidden + self.update(torch.zeros_like(hidden).index_add(0, target, messages))
        return torch.zeros(num_graphs).index_add(0, batch, self.head(hidden).squeeze(1))


def molecules() -> list[Molecule]:
    return [
        Molecule(torch.randint(1, 9, (size,)), 2 * torch.randn(size, 3), torch.randn(()), torch.randn(size, 3))
        for size in (3, 12, 5, 7, 4, 9, 6)
    ]


def energies_and_forces(model: Any, batch: MoleculeBatch) -> tuple[Tensor, Tensor]:
    positions = batch.positions.clone().requires_grad_()
    energies = model(batch.atoms, positions, batch.batch, batch.num_graphs)
    (slope,) = torch.autograd.grad(energies.sum(), positions, create_graph=True)
    return energies, -slope


@megabatch.loss(weigh=lambda batch: {"energy": batch.num_graphs, "force": batch.num_nodes})
def force_field(model: Any, batch: MoleculeBatch) -> dict[str, tuple[Tensor, int]]:
    energies, forces = energies_and_forces(model, batch)
    return {
        "energy": ((energies - batch.energies).abs().sum(), batch.num_graphs),
        "force": (10 * (forces - batch.forces).norm(dim=1).sum(), batch.num_nodes),
    }


def energy_and_forces(setting: Setting) -> Errors:
    """A mean over structures and a mean over atoms, of batches that fit by atoms."""
    plain, data = MessagePassing(), molecules()
    model = setting.wrap(copy.deepcopy(plain))
    samples = setting.share(data)
    if setting.way.endswith("a rank without molecules"):
        samples = data if setting.rank == 0 else []
    everything = MoleculeBatch(data)
    energies, forces = energies_and_forces(plain, everything)
    energy = (energies - everything.energies).abs().mean()
    (energy + 10 * (forces - everything.forces).norm(dim=1).mean()).backward()
    errors: Errors = {}
    for limit in ({"micro_batch_size": 2}, {"max_microbatch_tokens": 14}):
        gradient = GradientAccumulator(
            model, collate=MoleculeBatch, length=lambda molecule: len(molecule.atoms), **limit
        )  # pyright: ignore[reportArgumentType]
        evaluated = gradient.evaluate(samples, force_field)["energy"]
        gradient.forward_backward(samples, force_field)
        update = gradient.finalize(max_norm=1e9)
        assert update.finite
        errors[f"gradient, {next(iter(limit))}"] = gradient_error(inner(model), plain)
        errors[f"evaluated energy, {next(iter(limit))}"] = abs(float(evaluated - energy.detach()))
    assert not data[0].positions.requires_grad
    return errors


def sharded_evaluation(setting: Setting) -> Errors:
    """FSDP2, and forces that only the first rank asks for: ranks gather parameters in one order all the same."""
    plain, data = MessagePassing(), molecules()
    model = fully_shard(copy.deepcopy(plain))

    def energy(model: Any, batch: MoleculeBatch) -> tuple[Tensor, int]:
        if setting.rank == 0:
            return energies_and_forces(model, batch)[0].sum(), batch.num_graphs
        return model(batch.atoms, batch.positions, batch.batch, batch.num_graphs).sum(), batch.num_graphs

    gradient = GradientAccumulator(model, collate=MoleculeBatch, length=lambda _: 1, micro_batch_size=2)
    evaluated = gradient.evaluate(setting.share(data), energy)["loss"]
    everything = MoleculeBatch(data)
    expected = energies_and_forces(plain, everything)[0].mean().detach()
    assert all(parameter.grad is None for parameter in model.parameters())
    return {"energy": abs(float(evaluated - expected))}


def residuals(model: Any, points: Tensor) -> Tensor:
    """Squared residuals of u_xx + u_yy = 1, [points]."""
    points = points.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
    second = [torch.autograd.grad(slope[:, axis].sum(), points, create_graph=True)[0][:, axis] for axis in (0, 1)]
    return (second[0] + second[1] - 1).square()


@megabatch.loss(weigh=lambda batch: {"inside": len(batch["x"])})
def inside(model: Any, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    return {"inside": (residuals(model, batch["x"]).sum(), len(batch["x"]))}


@megabatch.loss(weigh=lambda batch: {"boundary": len(batch["x"])})
def boundary(model: Any, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    return {"boundary": (model(batch["x"]).square().sum(), len(batch["x"]))}


def differential_equation(setting: Setting) -> Errors:
    """A PINN with more points inside than on the boundary, trained by LBFGS with a line search."""
    plain = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    points, edge = torch.rand(17, 2), torch.rand(5, 2)
    model = copy.deepcopy(plain)
    gradient = GradientAccumulator(model, micro_batch_size=4)
    own_points, own_edge = setting.share(points), setting.share(edge)

    def closure() -> Tensor:
        gradient.open(weights={"inside": len(own_points), "boundary": len(own_edge)})
        gradient.forward_backward({"x": own_points}, inside)
        gradient.forward_backward({"x": own_edge}, boundary)
        return gradient.finalize().loss

    def plain_closure() -> Tensor:
        plain.zero_grad()
        loss = residuals(plain, points).mean() + plain(edge).square().mean()
        loss.backward()
        return loss

    loss, expected = closure(), plain_closure()
    errors = {"gradient": gradient_error(model, plain), "loss": abs(float(loss - expected.detach()))}
    for trained, step in ((model, closure), (plain, plain_closure)):
        torch.optim.LBFGS(trained.parameters(), max_iter=10, line_search_fn="strong_wolfe").step(step)
    errors["weights after LBFGS"] = weight_error(model, plain)
    return errors


def task_loss(model: Any, task: dict[str, Tensor]) -> Tensor:
    """The loss of the queries after two inner steps on the supports."""
    parameters = dict(model.named_parameters())
    for _ in range(2):
        loss = F.mse_loss(functional_call(model, parameters, (task["supports"],)), task["support_labels"])
        slopes = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        parameters = {name: each - 0.1 * slope for (name, each), slope in zip(parameters.items(), slopes, strict=True)}
    return F.mse_loss(functional_call(model, parameters, (task["queries"],)), task["query_labels"])


@megabatch.loss(weigh=len)
def over_tasks(model: Any, tasks: list[dict[str, Tensor]]) -> tuple[Tensor, int]:
    return torch.stack([task_loss(model, task) for task in tasks]).sum(), len(tasks)


def inner_steps(setting: Setting) -> Errors:
    """MAML: a sample is a task, and the gradient goes through its inner steps."""
    plain = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    shapes = {"supports": 5, "support_labels": 5, "queries": 6, "query_labels": 6}
    tasks = [{name: torch.randn(size, 1) for name, size in shapes.items()} for _ in range(7)]
    (sum((task_loss(plain, task) for task in tasks), torch.zeros(())) / len(tasks)).backward()
    model = copy.deepcopy(plain)
    gradient = GradientAccumulator(setting.wrap(model), micro_batch_size=2, collate=list)
    model.zero_grad()
    gradient.forward_backward(setting.share(tasks), over_tasks)
    gradient.finalize()
    return {"gradient": gradient_error(model, plain)}
