"""verify on two and three ranks: exact for models as they are wrapped; a wrong loss and a planted fault are seen."""

import pytest

from tests.exact.launch import launch, values
from tests.exact.proofs import FAULTS

WRAPPED = {
    2: ("plain", "ddp", "ddp-static-graph", "fsdp2", "hsdp", "replicate", "several-half"),
    3: ("plain", "ddp", "fsdp2"),
}  # fmt: skip


@pytest.mark.parametrize("world", [2, 3])
def test_on_ranks(world, tmp_path):
    exact = [f"{wrapper}:weighed" for wrapper in WRAPPED[world]] + [f"{each}:late" for each in ("ddp", "fsdp2")]
    exact += ["plain:derivatives", "plain:joint", "ddp:joint", "fsdp2:joint"]
    wrong = [f"{wrapper}:means" for wrapper in ("plain", "ddp", "fsdp2")]
    coupled = ["plain:joint, centred", "fsdp2:joint, centred"]
    planted = [f"{wrapper}:{fault}" for wrapper, faults in FAULTS.items() for fault in faults]
    found = launch(world, "tests.exact.proofs:job", [*exact, *wrong, *coupled, *planted], tmp_path)
    for name, ranks in found.items():
        first, *others = values(ranks)
        assert all(each == first for each in others), name
        assert first["left"], name
        assert first["ok"] == (name in exact), (name, first)
        assert not first["ok"] or first["worst"] < 1e-12, (name, first)
        if name in wrong:
            assert "the total of 'loss' is no sum" in first["causes"][0]
        if name in coupled:
            assert first["causes"][0].startswith("encode gives sample 0 another representation alone")


def test_a_verified_model_trains_as_any_other(tmp_path):
    found = launch(2, "tests.exact.proofs:trains_on", ["ddp:", "fsdp2:", "hsdp:"], tmp_path)
    for name, ranks in found.items():
        for same in values(ranks):
            assert same, name
            assert all(same), name
