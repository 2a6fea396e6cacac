"""One cell on one rank: the library's update beside the oracle's, update after update."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabatch import GradientAccumulator, MegabatchError, Update, losses
from megabatch import loss as counted_from_data
from tests.exact import cases, functions, models, oracle
from tests.exact.cells import OPENED, Cell
from tests.exact.wrappers import WRAPPERS, Tensors, Wrapped, full, is_part_of_a_sum, mesh_of, parameters_of, whole, wrap

CPU = torch.device("cpu")
GIVEN_DIVISOR = 128.0
MAX_NORM = {"no-clip": None, "loose": 1e9, "tight": 0.05}
Call = list[list[oracle.Sample]]  # samples by rank


@dataclass
class Found:
    """The worst of a cell: of its gradients, and of what it reports."""

    gradient: float = 0.0
    parameter: str = ""
    report: float = 0.0
    report_tolerance: float = 0.0
    wrong: list[str] = field(default_factory=list)  # what must be equal and is not

    @property
    def row(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("gradient", "parameter", "report", "wrong")}

    def see(self, error: float, parameter: str) -> None:
        if error > self.gradient:
            self.gradient, self.parameter = error, parameter

    def expect(self, what: str, found: Any, expected: Any) -> None:
        if found != expected:
            self.wrong.append(f"{what} is {found}, expected {expected}")

    def near(self, what: str, found: Tensor | float, expected: float) -> None:
        error = abs(float(found) - expected) / max(abs(expected), 1e-300)
        self.report = max(self.report, error if error == error else float("inf"))
        if not error <= self.report_tolerance:
            self.wrong.append(f"{what} is {float(found)}, expected {expected}")


class CellRun:
    """A cell's models, losses and data."""

    def __init__(self, cell: Cell, device: torch.device = CPU) -> None:
        self.cell, self.found, self.device = cell, Found(report_tolerance=cell.report_tolerance), device
        self.wrapper = WRAPPERS[cell.wrapper]
        self.mesh = mesh_of(cell.wrapper, cell.world, device.type) if self.wrapper.needs_mesh else None
        self.rank = data_rank(cell.wrapper)
        self.model_kind = "image" if cell.kind.startswith("image") else "tokens"
        if cell.evidence.startswith("float"):
            self.model_kind = "language"
        self._sums, self.weights = functions.of(self.model_kind)
        self.names = functions.NAMES[cell.loss]
        self.reference = self._new_model(torch.float64)
        self.same_dtype = self._new_model(self.dtype) if self.dtype != torch.float64 else None
        self.model = self._wrapped(self._new_model(self.dtype))
        self.parameters = parameters_of(self.model)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.cell.evidence == "float32" else torch.float64

    def _new_model(self, dtype: torch.dtype) -> nn.Module:
        return self._make_model(dtype).to(self.device)

    def _make_model(self, dtype: torch.dtype) -> nn.Module:
        if self.model_kind == "language":
            needs_parts = self.wrapper.several or "tp" in self.wrapper.axes(8)
            return models.small_lm(dtype) if needs_parts else models.gpt2(dtype)
        return models.integer_model("image" if self.model_kind == "image" else self.wrapper.integer)

    def _wrapped(self, model: nn.Module) -> Wrapped:
        return wrap(model, self.cell.wrapper, self.device.type)

    def sums(self, model: Wrapped, batch: oracle.Sample) -> oracle.Sums:
        """The sums of a microbatch, of a model or several."""
        return self._sums(models.called(model), {key: value.to(self.device) for key, value in batch.items()})

    def copy_weights(self) -> None:
        """The oracles start this update from the model's weights: float32 errors are compared at one point."""
        with torch.no_grad():
            for name, value in self._whole({name: each.detach() for name, each in self.parameters.items()}).items():
                for each in (self.reference, self.same_dtype):
                    dict(each.named_parameters())[name].copy_(value)

    def gradients(self) -> dict[str, Tensor | None]:
        """Whole gradients on every rank; one that still is a part of a sum would be summed by whoever reads it."""
        gradients = {name: parameter.grad for name, parameter in self.parameters.items()}
        partial = [name for name, each in gradients.items() if is_part_of_a_sum(each)]
        self.found.expect("gradients that are parts of sums", partial, [])
        return self._whole(gradients)

    def _whole(self, tensors: Tensors) -> Tensors:
        return whole(self.model, tensors, {name: each.shape for name, each in self.reference.named_parameters()})

    def updates(self) -> list[list[Call]]:
        """Samples by update, call and rank."""
        case, power_of_two = self.cell.case, self.cell.evidence == "bits"
        made: list[list[Call]] = []
        for u, update in enumerate(cases.updates(case, self.cell.data_degree, power_of_two)):
            calls = [cases.samples(call, self.model_kind, case, 100 * u + c) for c, call in enumerate(update)]
            if self.model_kind == "language":
                calls = [[[cases.as_language(s) for s in share] for share in call] for call in calls]
            made.append(calls)
        return made

    def bound(self, updates: list[list[Call]]) -> dict[str, int]:
        """The limit of a microbatch in the cell; the cap takes two of the longest samples."""
        counts = {"one-sample": 1, "two-samples": 2, "three-samples": 3, "all-samples": 1000}
        if self.cell.bound in counts:
            return {"micro_batch_size": counts[self.cell.bound]}
        longest = max(length(s) for update in updates for call in update for share in call for s in share)
        return {"max_microbatch_tokens": 2 * longest}

    def loss_fn(self, call: int = 0) -> Callable[..., Any]:
        """The loss in one of the forms that the contract allows; a mixed one says its weight in even calls only."""
        name = self.cell.loss
        if name == "mixed":
            name = "late" if call % 2 else "weigh"
        if name == "library":
            return losses.next_token

        def mapping(model: nn.Module, microbatch: Any) -> Any:
            sums = self.sums(model, microbatch)
            return {each: sums[each] for each in self.names}

        def pair(model: nn.Module, microbatch: Any) -> Any:
            return self.sums(model, microbatch)["loss"]

        if name in ("late", "given"):
            return pair
        if name in ("metric-late", "terms-late"):
            return mapping
        return counted_from_data(weigh=self.weigh())(pair if name == "weigh" else mapping)

    def weigh(self) -> Callable[[Any], Any] | None:
        if self.cell.loss == "terms":
            return self.weights
        if self.cell.loss == "metric":
            return lambda microbatch: {"loss": self.weights(microbatch)["loss"]}
        counted = self.cell.loss in ("weigh", "mixed")
        return (lambda microbatch: self.weights(microbatch)["loss"]) if counted else None

    def batch(self, call: Call) -> Any:
        """This rank's share, as the cell's kind of batch."""
        share = call[self.rank]
        if self.cell.kind in ("list", "images"):
            return share
        if share:
            return oracle.collate(share)
        example = next((sample for other in call for sample in other), None)
        if example is None:
            return []
        return {key: value[None][:0] for key, value in example.items()}

    def oracle_sums(self, model: nn.Module, batch: oracle.Sample) -> oracle.Sums:
        sums = self.sums(model, batch)
        return {name: sums[name] for name in self.names}


def length(sample: oracle.Sample) -> int:
    return len(next(iter(sample.values())))


def data_rank(wrapper: str) -> int:
    """The place of this rank among those with different samples."""
    if not dist.is_initialized():
        return 0
    axes = WRAPPERS[wrapper].axes(dist.get_world_size())
    return dist.get_rank() // axes.get("tp", 1)  # the last axis of a mesh runs fastest


def full_gradients(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor | None]:
    """Whole gradients on every rank."""
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    return {name: None if gradient is None else full(gradient) for name, gradient in gradients.items()}


def run_cell(name: str) -> dict[str, Any]:
    """The job: a cell by its name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about gloo and about one rank
        cell = Cell.parse(name)
        if cell.world == 1 and cell.wrapper == "plain":
            dist.destroy_process_group()  # the way most people start
        this = CellRun(cell)
        return run(this) if cell.evidence != "refused" else _refused(this)


def _refused(this: CellRun) -> dict[str, Any]:
    """The error of a cell that cannot be."""
    said = "nothing was refused"
    try:
        GradientAccumulator(this.model, mesh=this.mesh, micro_batch_size=1, sync=this.cell.sync)
    except MegabatchError as error:
        said = str(error)
    this.found.expect("the error", said, this.cell.refusal)
    return this.found.row


def run(this: CellRun) -> dict[str, Any]:
    """Every update of the cell, with an optimizer between; the optimizer moves the oracle by its own gradient."""
    cell = this.cell
    updates = this.updates()
    gradient = GradientAccumulator(this.model, mesh=this.mesh, sync=cell.sync, **this.bound(updates))
    trained = (this.parameters, *(dict(each.named_parameters()) for each in (this.reference, this.same_dtype) if each))
    optimizers = [_optimizer(parameters.values(), cell) for parameters in trained]
    for calls in updates:
        if this.same_dtype is not None:
            this.copy_weights()
        if cell.way in OPENED:
            gradient.open(told(this, calls) if cell.way == "told" else None)
        if cell.way == "open" and any(share for call in calls for share in call):
            _run_loop(this, gradient, calls)
        else:
            for index, call in enumerate(calls):
                _forward_backward(this, gradient, this.loss_fn(index), call)
        divisor = GIVEN_DIVISOR if cell.loss == "given" else None
        update = gradient.finalize(max_norm=MAX_NORM[cell.clip], weight=divisor)
        if judge(this, update, calls, divisor):
            for optimizer in optimizers:
                optimizer.step()
    return this.found.row


def told(this: CellRun, calls: list[Call]) -> Any:
    """The weights of this rank's samples in all calls: by term, or a number of the only one."""
    samples = [sample for call in calls for sample in call[this.rank]]
    weights = {name: int(weight) for name, weight in this.weights(oracle.collate(samples)).items()} if samples else {}
    own = {name: weights.get(name, 0) for name in this.names if name != "above"}
    return own if len(own) > 1 else own["loss"]


def _optimizer(parameters: Iterable[nn.Parameter], cell: Cell) -> torch.optim.Optimizer:
    if cell.evidence.startswith("float"):
        return torch.optim.AdamW(parameters, lr=1e-3)
    return models.SignSGD(parameters)


def _forward_backward(this: CellRun, gradient: GradientAccumulator, loss_fn: Callable[..., Any], call: Call) -> None:
    """One call, which returns this rank's sums."""
    returned = gradient.forward_backward(this.batch(call), loss_fn)
    share = call[this.rank]
    this.found.expect("names of the sums", sorted(returned), sorted(this.names) if any(call) else [])
    with torch.no_grad():
        sums = this.oracle_sums(this.reference, oracle.collate(share)) if share else {}
    for name, term in returned.items():
        total, weight = sums.get(name, (0.0, 0.0))
        this.found.expect(f"the sum of {name!r} carries a gradient", term.total.requires_grad, False)
        this.found.near(f"this rank's weight of {name!r}", term.weight, float(weight))
        this.found.near(f"this rank's total of {name!r}", term.total, float(total))


def _run_loop(this: CellRun, gradient: GradientAccumulator, calls: list[Call]) -> None:
    """An update in a loop of `microbatch`, cut as calls are; a rank that has fewer repeats one with the weight 0."""
    shares = [[sample for call in calls for sample in call[rank]] for rank in range(len(calls[0]))]
    plans = [gradient.plan(share).microbatches for share in shares]
    cuts = [[[share[row] for row in rows] for rows in plan] for share, plan in zip(shares, plans, strict=True)]
    own, spare = cuts[this.rank], next(cut for cut in cuts if cut)[-1]
    weights = [int(this.weights(oracle.collate(samples))["loss"]) for samples in own]
    announced = {} if this.weigh() is None else {"update_weight": sum(weights)}
    num_microbatches = max(map(len, cuts))
    for index in range(num_microbatches):
        is_dummy = index >= len(own)
        microbatch = oracle.collate(spare if is_dummy else own[index])
        with gradient.microbatch(
            index, of=num_microbatches, sum_over=0 if is_dummy else weights[index], **announced
        ) as part:
            part.scale(this.sums(this.model, microbatch)["loss"][0]).backward()


def judge(this: CellRun, update: Update, calls: list[Call], divisor: float | None) -> bool:
    """Compare one update; whether it can be stepped."""
    samples = [sample for call in calls for share in call for sample in share]
    divide_last = this.cell.evidence == "odd"
    expected = oracle.answer(this.reference, this.oracle_sums, samples, divisor, divide_last)
    found, gradients = this.found, this.gradients()
    clipped = MAX_NORM[this.cell.clip]
    _judge_report(this, update, expected, samples)
    if expected.weights["loss"] == 0:
        found.expect("gradients", [name for name, each in gradients.items() if each is not None], [])
        found.expect("finite", bool(update.finite), False)
        return False
    found.expect("finite", bool(update.finite), True)
    if clipped is not None:
        norm = torch.nn.utils.clip_grad_norm_(this.reference.parameters(), clipped)
        assert update.grad_norm is not None
        found.near("the norm", update.grad_norm, float(norm))
    reference = full_gradients(dict(this.reference.named_parameters()))
    if this.same_dtype is None:
        found.see(*oracle.worst_error(gradients, reference))
        return True
    oracle.answer(this.same_dtype, this.oracle_sums, samples, divisor)
    if clipped is not None:
        torch.nn.utils.clip_grad_norm_(this.same_dtype.parameters(), clipped)
    own = oracle.whole_error(full_gradients(dict(this.same_dtype.named_parameters())), reference)
    found.see(oracle.whole_error(gradients, reference) / own, "all")
    return True


def _judge_report(this: CellRun, update: Update, expected: oracle.Answer, samples: list[oracle.Sample]) -> None:
    found, total = this.found, expected.weights["loss"]
    found.near("the weight", update.weight, GIVEN_DIVISOR if this.cell.loss == "given" else total)
    is_loop = this.cell.way == "open"  # which knows microbatches, and no samples
    found.expect("num_samples", int(update.num_samples), 0 if is_loop else len(samples))
    if this.cell.kind in ("list", "images") and not is_loop:
        found.expect("num_tokens", int(update.num_tokens), sum(map(length, samples)))
    if total:
        found.near("the loss", update.loss, expected.loss)
        for name, quotient in expected.terms.items():
            found.near(f"the term {name!r}", update.terms[name], quotient)
