"""An update that is not finite: what is left of it is the exact gradient of the other samples, or nothing."""

import pytest
import torch

from megabatch.train.callbacks.nonfinite import at_fault
from tests.elastic.nonfinite_jobs import BAD, BAD_UPDATE, MAX_NORM, NUM_SAMPLES, NUM_UPDATES, Regression, samples
from tests.exact.launch import of_ranks
from tests.tiers import some

ON_ONE = [
    *(f"skip_microbatch:{fault}:{who}:plain:float64:{clip}" for fault in ("nan", "spike")
      for who in BAD for clip in ("clipped", "free")),
    *(f"skip_update:{fault}:one:plain:float64:{clip}" for fault in ("nan", "spike") for clip in ("clipped", "free")),
    "skip_microbatch:nan:three:plain:float32:clipped", "skip_microbatch:sum:three:plain:float64:free",
]  # fmt: skip
ON_TWO = [
    *(f"skip_microbatch:{fault}:{wrapper}:float64:{clip}" for wrapper in ("ddp", "fsdp2") for fault, clip in [
        ("nan:one", "free"), ("nan:all of a rank", "clipped"), ("spike:all of a rank", "free"),
        ("spike:three", "clipped"), ("nan:most", "free"), ("nan:late", "free"),
    ]),
    *(f"skip_update:nan:all of a rank:{wrapper}:float64:free" for wrapper in ("ddp", "fsdp2")),
    "skip_microbatch:nan:three:fsdp2:float32:clipped",
]  # fmt: skip
ON_FOUR = ["skip_microbatch:nan:one:hsdp:float64:clipped", "skip_microbatch:nan:three:hsdp:float64:free"]
ALL = [(world, name) for world, names in ((1, ON_ONE), (2, ON_TWO), (4, ON_FOUR)) for name in names]
TOLERANCE = {"float64": 1e-12, "float32": 2e-6}


found = of_ranks("tests.elastic.nonfinite_jobs:job", {1: ON_ONE, 2: ON_TWO, 4: ON_FOUR})


def is_whole(how: str, fault: str, who: str) -> bool:
    """Whether the update is skipped: asked to be, too much at fault, or no sample by itself."""
    return how == "skip_update" or who == "most" or fault == "sum"


def plain(how: str, fault: str, who: str, dtype: str, *, clipped: bool) -> tuple[Regression, list[float]]:
    """Plain torch on the samples that are not at fault; and the learning rates that each update left."""
    model = Regression(getattr(torch, dtype))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.SGD(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=0.1, momentum=0.9
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - 0.9 * step / 5)
    rates: list[float] = []
    for update in range(NUM_UPDATES):
        bad = BAD[who] if update == BAD_UPDATE else ()
        is_left_out = bool(bad) and is_whole(how, fault, who)
        good = [
            each for index, each in enumerate(samples(update, getattr(torch, dtype), fault, ())) if index not in bad
        ]
        if not is_left_out:
            optimizer.zero_grad()
            x, y = torch.stack([each["x"] for each in good]), torch.stack([each["y"] for each in good])
            (model(x) - y).square().mean().backward()
            if clipped:
                torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return model, rates


@pytest.mark.parametrize(("world", "name"), some(ALL, 3))
def test_weights_are_those_of_plain_torch_on_the_rest(found, world, name):
    how, fault, who, _, dtype, clip = name.split(":")
    model, rates = plain(how, fault, who, dtype, clipped=clip == "clipped")
    whole = is_whole(how, fault, who)
    num_skipped = NUM_SAMPLES if whole else len(BAD[who])
    for told in found(name, world):
        for key, expected in model.named_parameters():
            error = (torch.tensor(told["state"][key], dtype=expected.dtype) - expected.detach().flatten()).abs().max()
            assert error <= TOLERANCE[dtype] * expected.detach().abs().max(), key
        assert [row[3] for row in told["rows"]] == pytest.approx(rates, rel=1e-12)
        assert [row[1] for row in told["rows"]] == [0, num_skipped, 0]
        assert [row[2] for row in told["rows"]] == [False, whole, False]
        assert told["step"] == NUM_UPDATES
    if not whole:
        assert found(name, world)[0]["rows"][BAD_UPDATE][0] == NUM_SAMPLES - len(BAD[who])


@pytest.mark.parametrize(("world", "name"), some(ALL, 3))
def test_what_was_left_out_is_written_down_by_name(found, world, name):
    how, fault, who, _, _, _ = name.split(":")
    main, *others = (told["skipped"] for told in found(name, world))
    assert others == [[]] * (world - 1)
    (row,) = main
    whole = is_whole(how, fault, who)
    left_out = range(NUM_SAMPLES) if whole else BAD[who]
    assert row["samples"] == sorted(f"{BAD_UPDATE}:{index}" for index in left_out)
    assert (row["step"], row["is_whole"]) == (BAD_UPDATE + 1, whole)
    reason = (
        "the loss is finite but the norm of the gradient" if fault == "spike" else "the loss is not finite on data rank"
    )
    assert row["reason"].startswith(reason)


@pytest.mark.parametrize("name", some(ON_ONE, 3))
def test_buffers_have_seen_the_other_samples_only(found, name):
    how, fault, who, _, dtype, clip = name.split(":")
    model, _ = plain(how, fault, who, dtype, clipped=clip == "clipped")
    assert found(name, 1)[0]["state"]["seen"] == pytest.approx([float(model.seen)], rel=1e-5)


@pytest.mark.parametrize("bad", [(0,), (63,), (5, 6), (0, 21, 42, 63), tuple(range(64)), ()])
def test_culprits_are_found_in_few_groups(bad):
    groups: list[int] = []

    def is_bad(items):
        groups.append(len(items))
        return any(index in bad for _, index in items)

    items = [(0, index) for index in range(64)]
    assert [index for _, index in at_fault(items, is_bad)] == list(bad)
    assert len(groups) <= 2 * 6 * max(1, len(bad))
    if len(bad) == 1:
        assert sum(groups) < 2 * 64  # the work of two updates
