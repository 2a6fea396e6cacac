"""audit: weights, counts and distances of loops that know nothing of it, against plain torch; and no effect on them."""

import copy
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_  # by value, as scripts import it

import megabatch
from megabatch import Audit, MegabatchError, PlanError
from megabatch.torch_private.autograd import hooks_before_grad
from megabatch.train.runtime.ranks import Ranks
from megabatch.verification.audit_advice import DIFFS, advise
from megabatch.verification.audit_measures import NUM_BINS, NUM_SIGNS, Sketcher, measure_weights
from megabatch.verification.audit_records import LoopRecord, UpdateRecord
from megabatch.verification.audit_report import MEGABATCH
from tests.train.on_ranks import on_ranks

CLASSES, ACCUMULATED = 32, 4
LENGTHS = (5, 20, 3, 30, 9, 14, 25, 4, 7, 11)  # of the samples; the last window has two microbatches of one


class LM(nn.Module):
    """Logits of the next token, from the token alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(CLASSES, 16), nn.Linear(16, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(torch.tanh(self.table(input_ids)))


class Headed(nn.Module):
    """A model that names its head, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = LM()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm.head

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.lm(input_ids)


def samples() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, CLASSES, (length,), generator=generator) for length in LENGTHS]


def loss_of(model: nn.Module, ids: Tensor, **options: Any) -> Tensor:
    logits = model(input_ids=ids[None], attention_mask=torch.ones_like(ids[None]))
    return F.cross_entropy(logits[0, :-1].float(), ids[1:], **options)


def targets_of(window: list[Tensor]) -> int:
    return sum(len(ids) - 1 for ids in window)


def windows(size: int = ACCUMULATED) -> list[list[Tensor]]:
    whole = samples()
    return [whole[start : start + size] for start in range(0, len(whole), size)]


def train(model: nn.Module, kind: str = "means", optimizer: Any = None) -> nn.Module:
    """A loop of microbatches of one sample: a mean of their means, or what ``kind`` says."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for window in windows():
        for number, ids in enumerate(window):
            if kind == "zero":
                optimizer.zero_grad()
            if kind == "exact":
                loss = loss_of(model, ids, reduction="sum") / targets_of(window)
            elif kind == "bf16":
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_of(model, ids, reduction="sum") / targets_of(window)
            elif kind == "smooth":
                loss = loss_of(model, ids, reduction="sum", label_smoothing=0.1) / targets_of(window)
            else:
                loss = loss_of(model, ids) / ACCUMULATED
            loss.backward()
            if kind == "twice" and number == 0:
                for each in model.parameters():
                    assert each.grad is not None
                    each.grad *= 2
            if kind == "each":
                scheduler.step()
        if kind == "tail" and len(window) < ACCUMULATED:
            break
        if kind == "clip":
            clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        if kind != "each":
            scheduler.step()
        if kind != "leak":
            optimizer.zero_grad()
    return model


def audited(kind: str, **options: Any) -> Audit:
    model = LM()
    with megabatch.audit(model, **options) as found:
        train(model, kind)
    return found


# What is measured


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)]
)
def test_weights_are_read_from_the_gradient_of_logits(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 100, generator=generator, dtype=torch.float64) * 3
    targets, weights = logits.argmax(-1), torch.rand(40, generator=generator, dtype=torch.float64) + 0.1
    targets[:20] = torch.randint(0, 100, (20,), generator=generator)
    weights[3], weights[5] = 0.0, -0.7  # no target; a negative advantage
    logits[7, targets[7]] += 15  # as sure as a trained model
    logits = logits.to(dtype).requires_grad_()
    (F.cross_entropy(logits.double(), targets, reduction="none") * weights).sum().backward()
    assert logits.grad is not None
    found = measure_weights(logits.grad, logits)
    assert found.positions.tolist() == [row for row in range(40) if row != 3]
    assert torch.allclose(found.weights, weights[found.positions], rtol=tolerance)
    assert found.residual < tolerance
    assert found.smoothing == 0


def test_label_smoothing_is_told_from_the_weight() -> None:
    logits = torch.randn(30, 50, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (3 * F.cross_entropy(logits, torch.arange(30), label_smoothing=0.1)).backward()
    assert logits.grad is not None
    found = measure_weights(logits.grad, logits)
    assert found.smoothing == pytest.approx(0.1, rel=1e-3)
    assert torch.allclose(found.weights, torch.full((30,), 0.1, dtype=torch.float64), rtol=1e-3)


def test_the_gradient_of_another_loss_has_a_residual() -> None:
    logits = torch.randn(30, 50, generator=torch.Generator().manual_seed(0)).requires_grad_()
    logits.square().mean().backward()
    assert logits.grad is not None
    assert measure_weights(logits.grad, logits).residual > 0.3


def test_a_sketch_is_linear_and_keeps_lengths_and_angles() -> None:
    parameter, sketcher = torch.zeros(NUM_SIGNS + 3 * NUM_BINS + 5), Sketcher()
    sketcher.add_parameter(parameter)
    a = torch.randn(parameter.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    b = a + torch.randn(parameter.numel(), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    of_a, of_b = (sketcher.add_sketch(None, parameter, each) for each in (a, b))
    both = sketcher.add_sketch(None, parameter, 2 * a - b)
    assert torch.allclose(both, 2 * of_a - of_b)
    assert float(of_a.norm() / a.norm()) == pytest.approx(1, abs=0.04)
    assert float(of_a @ of_b / of_a.norm() / of_b.norm()) == pytest.approx(float(a @ b / a.norm() / b.norm()), abs=0.04)


def test_rows_that_resemble_each_other_keep_their_length() -> None:
    """A matrix of rank 1 has the same numbers in each bin, which signs of whole rows would add up."""
    parameter, sketcher = torch.zeros(256, NUM_BINS // 8), Sketcher()
    sketcher.add_parameter(parameter)
    lengths: list[float] = []
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        gradient = torch.randn(256, 1, generator=generator) @ torch.randn(1, NUM_BINS // 8, generator=generator)
        lengths.append(float(sketcher.add_sketch(None, parameter, gradient).norm() / gradient.norm()))
    assert lengths == pytest.approx([1] * 5, abs=0.06)


# Loops


def test_the_token_mean_is_exact() -> None:
    found = audited("exact")
    assert found.ok
    assert found.error() == pytest.approx(0, abs=1e-6)
    assert [each.kind for each in found.updates] == ["token mean"] * 3
    assert str(found).splitlines()[0].startswith("megabatch audit: exact: the token mean")
    assert len(str(found).splitlines()) == 10


class Chunked(LM):
    """Logits in chunks of the sequence, as torchtune's models return them."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return list(super().forward(input_ids).chunk(3, dim=1))


def test_logits_in_chunks_are_weighed_together() -> None:
    model = Chunked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with megabatch.audit(model, updates=2) as audit:
        for window in windows():
            for ids in window:
                chunks, targets = model(ids[None]), ids[1:]
                sizes = [chunk.shape[1] for chunk in chunks[:-1]]
                total = sum(
                    F.cross_entropy(chunk[0][: len(part)], part, reduction="sum")
                    for chunk, part in zip(chunks, targets.split([*sizes, len(targets) - sum(sizes)]), strict=True)
                )
                (total / targets_of(window)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert audit.ok
    counted = [sum(part.numel() for part in update.weights or ()) for update in audit.updates]
    assert counted == [targets_of(window) for window in windows()[:2]]


def true_errors() -> list[float]:
    """The error of a mean of means against the token mean: each window's gradient in float64, at the loop's weights."""
    model, errors = LM().double(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in windows():
        tokens = sum((loss_of(model, ids, reduction="sum") for ids in window), torch.zeros(())) / targets_of(window)
        wanted = torch.cat([each.flatten() for each in torch.autograd.grad(tokens, list(model.parameters()))])
        (sum((loss_of(model, ids) for ids in window), torch.zeros(())) / ACCUMULATED).backward()
        got = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        errors.append(float((got - wanted).norm() / wanted.norm()))
        optimizer.step()
        optimizer.zero_grad()
    return errors


def test_a_mean_of_means_is_as_far_off_as_plain_torch_says() -> None:
    found = audited("means")
    assert not found.ok
    assert [each.error() for each in found.updates] == pytest.approx(true_errors(), rel=0.04)
    assert [each.factor for each in found.updates] == pytest.approx([1, 1, 0.5], rel=1e-4)
    # A microbatch of one sample: a mean of microbatches is one of samples too.
    assert [each.kind for each in found.updates] == ["sample mean"] * 3
    assert found.error("sample") == pytest.approx(0.5, abs=1e-4)  # the short last window
    for each, window in zip(found.updates, windows(), strict=True):
        assert each.weights is not None
        expected = [targets_of(window) / ACCUMULATED / (len(ids) - 1) for ids in window]
        assert [float(part.mean()) for part in each.weights] == pytest.approx(expected, rel=1e-4)


def test_a_tail_that_is_dropped_is_left_over() -> None:
    found = audited("tail")
    assert found.left_over == [len(ids) - 1 for ids in windows()[-1]]
    assert "at the end 2 microbatches of 16 targets never stepped" in found.problems


def test_zero_grad_in_the_loop_drops_all_but_the_last() -> None:
    assert [each.dropped for each in audited("zero").updates] == [[0, 1, 2], [0, 1, 2], [0]]


def test_without_zero_grad_an_update_leaks_into_the_next() -> None:
    assert [each.leaks for each in audited("leak").updates] == pytest.approx([0, 1, 1], abs=1e-4)


def test_a_microbatch_that_is_counted_twice_is_named() -> None:
    found = audited("twice")
    assert found.updates[0].counts == pytest.approx([2, 1, 1, 1], abs=1e-4)
    assert found.problems[0] == "update 1: microbatch 1 of 4 counted 2 times"


@pytest.mark.filterwarnings("ignore:Detected call")  # torch's own, of the same bug
def test_a_scheduler_that_steps_with_each_microbatch_is_seen() -> None:
    assert [each.scheduler_steps for each in audited("each").updates] == [[4], [4], [2]]
    assert [each.scheduler_steps for each in audited("exact").updates] == [[1]] * 3


@pytest.mark.parametrize("kind", ["exact", "bf16", "smooth"])
def test_precision_and_smoothing_do_not_hide_what_is_exact(kind: str) -> None:
    found = audited(kind)
    assert found.ok, str(found)


def test_a_gradient_is_taken_before_it_is_clipped() -> None:
    plain, clipped = audited("means"), audited("clip")
    assert clipped.updates[0].num_clips == 1
    assert clipped.updates[0].error() == pytest.approx(plain.updates[0].error(), rel=1e-5)
    assert clipped.updates[0].counts == pytest.approx([1] * 4, abs=1e-4)


def test_log_probabilities_without_logits_have_weights() -> None:
    """As TRL's trainers get them: those of positions without a target are constants."""

    class Fused(LM):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
            logits = super().forward(input_ids)[:, :-1].log_softmax(-1)
            found, mask = logits.gather(-1, input_ids[:, 1:, None])[..., 0], input_ids[:, 1:] % 3 > 0
            return SimpleNamespace(logits=None, log_probs=torch.where(mask, found, 0.0), label_mask=mask)

    model = Fused()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with megabatch.audit(model) as found:
        total = sum(int((ids[1:] % 3 > 0).sum()) for ids in windows()[0])
        for ids in windows()[0]:
            (-model(input_ids=ids[None]).log_probs.sum() / total).backward()
        optimizer.step()
    assert found.updates[0].num_targets == total
    assert found.ok, str(found)


def test_a_scaler_is_no_error() -> None:
    model = LM()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with megabatch.audit(model) as found:
        for window in windows():
            for ids in window:
                scaler.scale(loss_of(model, ids, reduction="sum") / targets_of(window)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert found.ok, str(found)


# No effect


def states(kind: str, watch: Callable[[nn.Module], Any] | None) -> list[Tensor]:
    model = LM()
    if watch is None:
        return list(train(model, kind, torch.optim.AdamW(model.parameters())).parameters())
    with watch(model):
        return list(train(model, kind, torch.optim.AdamW(model.parameters())).parameters())


@pytest.mark.parametrize("kind", ["means", "bf16", "clip"])
@pytest.mark.parametrize("updates", [1, 5])
def test_weights_are_bit_equal_with_and_without(kind: str, updates: int) -> None:
    without = states(kind, None)
    assert all(map(torch.equal, without, states(kind, lambda model: megabatch.audit(model, updates=updates))))
    assert all(map(torch.equal, without, states(kind, lambda _: megabatch.audit(updates=updates))))


def test_nothing_is_left_after_the_last_update() -> None:
    before = (nn.Module.__call__, F.cross_entropy, torch.optim.lr_scheduler.LRScheduler.step)
    model = LM()
    with megabatch.audit(model, updates=1) as found:
        train(model)
        assert len(found.updates) == 1
        assert (nn.Module.__call__, F.cross_entropy, torch.optim.lr_scheduler.LRScheduler.step) == before
        assert not any(hooks_before_grad(each) for each in model.parameters())
    assert found.left_over is None
    assert "the end of the run was not watched" in str(found)


# What cannot be told


def test_a_loss_without_logits_is_counted_but_not_weighed() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with megabatch.audit(model) as found:
        for _ in range(2):
            for _ in range(2):
                model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert found.updates[0].counts == pytest.approx([1, 1], abs=1e-5)
    assert found.error() is None
    assert not found.ok
    assert "cannot tell what a token weighs" in str(found)
    assert "no sample twice in an update" in str(found)


def step_one(optimizer: torch.optim.Optimizer, _: Tensor) -> None:
    optimizer.step()


def test_an_optimizer_in_the_backward_cannot_be_told() -> None:
    model = LM()
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(partial(step_one, torch.optim.SGD([each], lr=0.1)))
    with megabatch.audit(model) as found:
        loss_of(model, samples()[0]).backward()
    assert not found.ok
    assert "the optimizer steps inside of the backward" in str(found)


def test_a_gradient_from_elsewhere_makes_counts_unknown() -> None:
    model = LM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with megabatch.audit(model) as found:
        loss_of(model, samples()[0]).backward()
        for each in model.parameters():
            assert each.grad is not None
            each.grad += each.detach()  # weight decay by hand
        optimizer.step()
    assert found.updates[0].counts is None
    assert "of the gradient comes from elsewhere" in str(found)


def test_a_clip_of_ones_own_leaves_the_direction() -> None:
    model = LM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with megabatch.audit(model) as found:
        for ids in windows()[0]:
            (loss_of(model, ids, reduction="sum") / targets_of(windows()[0])).backward()
        for each in model.parameters():
            assert each.grad is not None
            each.grad *= 0.3
        optimizer.step()
    assert str(found).startswith("megabatch audit: exact in direction: the token mean")
    assert "the gradient's length: something scales it between the last backward and the step" in str(found)


def test_records_of_some_ranks_are_no_verdict() -> None:
    records = [replace(each, world=2) if isinstance(each, UpdateRecord) else each for each in audited("exact").records]
    found = Audit.from_records(records)
    assert not found.ok
    assert "cannot tell how often microbatches are counted" in str(found)
    assert "records of 1 of 2 ranks are here" in str(found)


def test_no_update_says_so() -> None:
    with megabatch.audit() as found:
        pass
    assert str(found).startswith("megabatch audit: cannot tell, no update was seen")


def test_a_microbatch_without_targets_is_no_alarm() -> None:
    """As a rank runs it that has fewer microbatches than the others: megabatch's dummy, or labels of -100."""
    model = LM()
    gradient = megabatch.GradientAccumulator(model, max_microbatch_tokens=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with megabatch.audit(model) as found:
        for window in windows()[:2]:
            for number, ids in enumerate([*window, window[0]]):
                with gradient.microbatch(
                    number, of=len(window) + 1, sum_over=(number < len(window)) * len(ids[1:])
                ) as part:
                    part.scale(loss_of(model, ids, reduction="sum")).backward()
            gradient.finalize(max_norm=0.1)
            optimizer.step()
    assert found.ok, str(found)
    assert "weighs 1.00 of its share" in str(found)  # before the clip
    assert "2 microbatches had no target" in str(found)


def test_a_sample_mean_that_is_a_mean_of_means_is_not_called_right() -> None:
    model = LM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with megabatch.audit(model) as found:
        for ids in samples()[:4]:
            (loss_of(model, ids) / 4).backward()
        optimizer.step()
    assert found.may_be_mean_of_means
    assert not found.ok
    (verdict,) = [line for line in str(found).splitlines() if "also the mean of microbatch means" in line]
    assert verdict.startswith("megabatch audit: depends: the sample mean")
    assert verdict.endswith("% off the token mean")


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_a_change_after_the_clip_is_seen(factor: float) -> None:
    model = LM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with megabatch.audit(model) as found:
        loss_of(model, samples()[1]).backward()
        clip_grad_norm_(model.parameters(), 10.0)
        if not factor:
            optimizer.zero_grad()
        optimizer.step()
    assert found.ok == bool(factor), str(found)


def test_a_gradient_that_is_not_finite_is_not_counted() -> None:
    model = LM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with megabatch.audit(model) as found:
        (loss_of(model, samples()[1]) * math.inf).backward()
        optimizer.step()
    assert not found.ok
    assert "is not finite" in str(found)


def test_a_model_is_saved_and_copied_without_the_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "megabatch.gradient_accumulator")  # beside it the head gets no hook
    model = Headed()
    with megabatch.audit(model):
        model(samples()[0][None])
        torch.save(model, tmp_path / "model.pt")
        copied = copy.deepcopy(model)
    kept = [
        list(vars(each.lm.head)["_forward_hooks"].values())
        for each in (copied, torch.load(tmp_path / "model.pt", weights_only=False))
    ]
    assert [[hook(1, 2, 3) for hook in hooks] for hooks in kept] == [[None], [None]]
    assert not vars(model.lm.head)["_forward_hooks"]


def test_a_second_optimizer_is_named() -> None:
    model = LM()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.table, model.head)]
    with megabatch.audit(model) as found:
        loss_of(model, samples()[1]).backward()
        for each in optimizers:
            each.step()
    assert "what a second optimizer steps" in str(found)


def test_optimizers_that_step_in_turns_cannot_be_told() -> None:
    model = LM()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.table, model.head)]
    with megabatch.audit(model, updates=2) as found:
        for each in optimizers:
            loss_of(model, samples()[1]).backward()
            each.step()
    assert str(found).startswith("megabatch audit: cannot tell how often microbatches are counted")
    assert "several optimizers step in turns" in str(found)
    assert "no parameter has a gradient" not in str(found)
    assert not found.ok


def test_a_forward_without_a_backward_is_named() -> None:
    model = LM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for is_left_out in (False, True):
        with megabatch.audit(model, updates=1) as found:
            for number in (0, 1):
                loss = loss_of(model, samples()[number])
                if not (is_left_out and number):
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert ("a forward whose logits got no gradient" in str(found)) == is_left_out


def scripted_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_a_loss_can_be_compiled_by_torchscript() -> None:
    model, ids = LM(), samples()[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with megabatch.audit(model) as found:
        loss = torch.jit.script(scripted_loss)
        loss(model(input_ids=ids[None])[0, :-1], ids[1:]).backward()
        optimizer.step()
    assert found.error() == pytest.approx(0.0, abs=1e-6)


def test_bad_arguments() -> None:
    with pytest.raises(PlanError, match="updates is 0"), megabatch.audit(updates=0):
        pass
    with pytest.raises(MegabatchError, match="the mean 'all' is not known"):
        Audit().error("all")
    with pytest.raises(MegabatchError, match="line 1 is not of an audit"):
        Audit.from_lines(["{}", "{}"])


# Records


def test_findings_go_through_lines_and_a_page() -> None:
    found = audited("twice")
    again = Audit.from_lines([Audit.to_line(each) for each in found.records])
    assert str(again) == str(found)
    page = found.page()
    assert "counted 2 times" in page
    assert "http://" not in page  # it loads nothing
    assert "https://" not in page


@pytest.mark.parametrize(
    ("kind", "mark", "change"),
    [("exact", "✓", "Nothing; the gradient is exact"), ("twice", "✗", "Every microbatch would count once with")],
)
def test_the_page_has_a_verdict_and_a_change(kind: str, mark: str, change: str) -> None:
    page = audited(kind).page()
    assert f'aria-hidden="true">{mark}</div>' in page
    assert change in page
    assert ("+    with gradient.microbatch(index, of=4" in page) == (kind == "twice")
    assert page.count('class="bar ') == len(LENGTHS)


def test_a_loop_is_shown_its_line() -> None:
    found = audited("means")
    assert (found.loop.library, found.loop.file) == ("", "test_audit.py")
    assert found.loop.code == "optimizer.step()"
    assert advise(found).diff.startswith(f"--- test_audit.py, line {found.loop.line}\n")


@pytest.mark.parametrize("library", [*DIFFS, "torchtune", MEGABATCH])
def test_each_library_has_a_change(library: str) -> None:
    records = audited("means").records
    loop = LoopRecord(library, "OwnTrainer", "train.py", 7, "trainer.train()")
    found = Audit.from_records(replace(each, loop=loop) if isinstance(each, UpdateRecord) else each for each in records)
    advice = advise(found)
    assert "\n" not in advice.text
    assert ("OwnTrainer" in advice.text) == (library in ("TRL", "Trainer", "Lightning", "sentence-transformers"))
    assert bool(advice.diff) == (library in DIFFS)


@pytest.mark.parametrize(("tokens", "limit"), [(300, 300), (0, 8192)])
def test_the_change_keeps_the_size_of_the_microbatches(tokens: int, limit: int) -> None:
    """So that the padding that is promised is the one that comes; 0 is unknown."""
    found = Audit.from_records(
        replace(each, loop=LoopRecord("TRL", "SFTTrainer", "train.py", 7, "trainer.train()"))
        for each in audited("means").records
        if isinstance(each, UpdateRecord)
    )
    for update in found.updates:
        for _, record in update.microbatches:
            record.num_positions = 0
    found.updates[-1].microbatches[-1][1].num_positions = tokens
    assert advise(found).diff.endswith(f"+trainer = Exact(..., max_microbatch_tokens={limit})")


# Losses of preferences and policies


def audited_policy(size: int) -> Audit:
    """Updates of log-probabilities times advantages of both signs, ``size`` samples to a microbatch."""
    model, advantages = LM(), (1.0, -0.5, 0.25, -1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with megabatch.audit(model) as found:
        for window in windows()[:2]:
            weighed = list(zip(window, advantages, strict=True))
            for start in range(0, len(window), size):
                losses = [
                    advantage * loss_of(model, ids, reduction="sum") for ids, advantage in weighed[start : start + size]
                ]
                (torch.stack(losses).sum() / targets_of(window)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_weights_of_both_signs_are_no_verdict(size: int) -> None:
    found = audited_policy(size)
    assert str(found).startswith("megabatch audit: cannot tell: a preference or policy loss")
    assert found.error("any") is None
    assert not found.ok
    assert "the same for all tokens of a sample in 4 of 4 samples" in str(found)
    assert "megabatch.verify compares" in advise(found).text
    assert 'class="bar negative"' in found.page() or size == 4


def test_a_fault_of_a_policy_loss_is_named() -> None:
    found = audited_policy(1)
    for update in found.updates:
        assert update.counts is not None
        update.counts[0] = 0.0
    assert "and other things are WRONG" in str(found).splitlines()[0]


def test_a_sample_mean_is_claimed_only_where_it_is_near() -> None:
    """Microbatches of two samples of unequal length: a mean of means is neither mean."""
    model = LM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with megabatch.audit(model) as found:
        for start in (0, 2):
            pair = samples()[start : start + 2]
            losses = [loss_of(model, ids, reduction="sum") for ids in pair]
            (torch.stack(losses).sum() / targets_of(pair) / 2).backward()
        optimizer.step()
    assert not found.may_be_mean_of_means
    assert str(found).startswith("megabatch audit: NOT exact: mean of microbatch means\n")
    assert "every token would weigh 1.00 with: gradient.microbatch" in str(found)


@pytest.mark.slow
def test_a_compiled_loss_names_the_variable() -> None:
    class Compiled(LM):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return F.cross_entropy(super().forward(input_ids)[0, :-1], input_ids[0, 1:])

    model: Any = torch.compile(Compiled(), backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with megabatch.audit() as found:
        model(samples()[1][None]).backward()
        optimizer.step()
    found.command = "python train.py"
    assert str(found).startswith("megabatch audit of python train.py: cannot tell what a token weighs")
    assert "TORCH_COMPILE_DISABLE=1 megabatch audit -- python train.py" in str(found)


# Two ranks


def on_rank(ranks: Ranks, kind: str) -> tuple[str, dict[str, Any]]:
    """A loop in a wrapper, of every other sample; what all ranks' records say."""
    model = LM()
    if kind.startswith("fsdp"):
        wrapped: Any = fully_shard(model)
    else:
        wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = samples()
    with megabatch.audit(wrapped) as found:
        for start in range(0, 8, 4):
            mine = whole[start + ranks.rank : start + 4 : 2]
            for number, ids in enumerate(mine):
                called = model if kind == "module" else wrapped
                if kind == "fsdp":
                    wrapped.set_requires_gradient_sync(number == len(mine) - 1)
                if kind == "zero":
                    optimizer.zero_grad()
                if kind == "means":
                    loss = loss_of(called, ids) / 2
                else:
                    loss = 2 * loss_of(called, ids, reduction="sum") / targets_of(whole[start : start + 4])
                loss.backward()
            optimizer.step()
            if kind != "leak":
                optimizer.zero_grad()
    found.gather()
    first, last = found.updates[0], found.updates[-1]
    return str(found), {
        "ok": found.ok, "error": found.error(), "counts": first.counts, "leaks": last.leaks,
        "differ": first.rank_difference, "collectives": first.collectives,
    }  # fmt: skip


KINDS = ["exact", "means", "module", "zero", "leak", "fsdp", "fsdp-each"]


def all_on_rank(ranks: Ranks) -> dict[str, tuple[str, dict[str, Any]]]:
    return {kind: on_rank(ranks, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, dict[str, Any]]]:
    """The findings of the first of two ranks, by kind of loop."""
    found = on_ranks(2, tmp_path_factory.mktemp("audit"), all_on_rank)
    for first, second in pairwise(found):
        assert {kind: text for kind, (text, _) in first.items()} == {kind: text for kind, (text, _) in second.items()}
    return found[0]


@pytest.mark.parametrize("kind", ["exact", "fsdp", "fsdp-each"])
def test_two_ranks_are_exact(two_ranks: dict[str, Any], kind: str) -> None:
    text, said = two_ranks[kind]
    assert said["ok"], text
    assert said["counts"] == pytest.approx([0.5] * 4, abs=1e-5)
    assert said["collectives"], text


def test_planted_bugs_of_two_ranks_are_named(two_ranks: dict[str, Any]) -> None:
    said = {kind: each for kind, (_, each) in two_ranks.items()}
    assert said["means"]["error"] > 0.1
    assert said["means"]["counts"] == pytest.approx([0.5] * 4, abs=1e-5)
    assert said["module"]["counts"] == pytest.approx([1, 1, 0, 0], abs=1e-5)
    assert said["module"]["differ"] > 0.1
    assert said["module"]["collectives"] == {}
    assert said["zero"]["counts"] == pytest.approx([0, 0.5, 0, 0.5], abs=1e-5)
    assert said["leak"]["leaks"] == pytest.approx(1, abs=1e-4)
    assert [two_ranks["exact"][1]["collectives"]["all-reduce"][0]] == [2]  # DDP reduces with each microbatch
