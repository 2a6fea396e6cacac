"""Parts of a recipe put together in real runs: one's own functions, evaluation and what is kept, verify and export."""

import json
from pathlib import Path

import pytest

from tests.train.conftest import Bench
from tests.train.processes import Run

pytestmark = pytest.mark.slow

OWN = """
import json
import torch
import megabatch
from torch import nn

def model(width):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1)).double()

def data(num_samples):
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_samples, 4, generator=draw, dtype=torch.float64)
    samples = [{"inputs": row, "labels": row.sum(0, keepdim=True).tanh()} for row in inputs]
    return {"train": samples[10:], "near": samples[:10]}

@megabatch.loss(weigh=lambda microbatch: len(microbatch["labels"]))
def loss(model, microbatch):
    error = (model(microbatch["inputs"]) - microbatch["labels"]).square().sum()
    return {"loss": (error, len(microbatch["labels"])), "largest": (error.detach() * 2, len(microbatch["labels"]))}

@megabatch.loss(weigh=lambda microbatch: len(microbatch["labels"]))
def mean_loss(model, microbatch):
    return (model(microbatch["inputs"]) - microbatch["labels"]).square().mean(), len(microbatch["labels"])

def optimizer(groups, lr, momentum):
    return torch.optim.SGD(groups, lr=lr, momentum=momentum)

def metrics(model, microbatch):
    return {"sign": ((model(microbatch["inputs"]) > 0).eq(microbatch["labels"] > 0).sum(), len(microbatch["labels"]))}

def evaluate(event):
    return {"first_weight": event.model[0].weight[0, 0].item(), "num_near": len(event.sets["near"])}

def listen(event):
    if event.is_main:
        with (event.folder / "told.jsonl").open("a") as file:
            file.write(json.dumps([event.step, event.row.get("set"), sorted(event.row)]) + "\\n")
"""
RECIPE = """
[model]
function = "{own}:model"
dtype = "float64"
options = {{ width = 8 }}
[data]
function = "{own}:data"
options = {{ num_samples = 50 }}
[loss]
function = "{own}:loss"
[update]
global_batch_size = 8
micro_batch_size = 3
tail = "step"
[optim]
function = "{own}:optimizer"
options = {{ momentum = 0.5 }}
lr = 0.05
[eval]
every = 3
num_samples = 4
metrics = "{own}:metrics"
function = "{own}:evaluate"
[run]
folder = "{folder}"
after_update = "{own}:listen"
after_evaluation = "{own}:listen"
max_epochs = 3
profile_steps = [2]
"""


@pytest.fixture
def own(bench: Bench) -> Bench:
    (bench.path / "own.py").write_text(OWN)
    bench.recipe.write_text(RECIPE.format(own=bench.path / "own.py", folder=bench.folder))
    return bench


def test_every_part_can_be_ones_own(own: Bench, tmp_path: Path) -> None:
    own.train()
    rows = own.rows()
    updates, near = [row for row in rows if "set" not in row], [row for row in rows if row.get("set") == "near"]
    assert len(updates) == 15  # 36 samples to train on, in updates of 8: five an epoch
    assert all(row["loss_largest"] == pytest.approx(2 * row["loss"]) for row in updates)
    assert "num_tokens" not in updates[0]
    assert [row["step"] for row in near] == [0, 3, 6, 9, 12, 15]
    assert near[-1]["eval_loss"] < near[0]["eval_loss"] * 0.7
    assert 0 <= near[-1]["eval_sign"] <= 1
    of_own = [row for row in rows if row.get("set") == "own"]
    assert [row["eval_num_near"] for row in of_own] == [10] * 6
    assert of_own[-1]["eval_first_weight"] != of_own[0]["eval_first_weight"]
    told = [json.loads(line) for line in (own.folder / "told.jsonl").read_text().splitlines()]
    assert [step for step, name, _ in told if name is None] == list(range(1, 16))
    assert [step for step, name, _ in told if name == "near"] == [0, 3, 6, 9, 12, 15]
    assert {path.name for path in (own.folder / "profile").iterdir()} == {"update-2.json.gz", "update-2.txt"}
    assert next((own.folder / "tensorboard").iterdir()).stat().st_size > 0
    own.train(ranks=2, run__folder=tmp_path / "two")
    assert own.losses(tmp_path / "two") == pytest.approx(own.losses(), rel=1e-10)
    split = [row for row in own.rows(tmp_path / "two") if row.get("set") == "near"]
    assert [row["eval_sign"] for row in split] == [row["eval_sign"] for row in near]


def test_verify_proves_a_recipe_or_names_the_cause(own: Bench) -> None:
    done = [
        Run(["verify", str(own.recipe), *more], own.path / f"logs-{number}", 1).wait()[0]
        for number, more in enumerate(([], [f"--loss.function={own.path}/own.py:mean_loss"]))
    ]
    assert [each.status for each in done] == [0, 1]
    assert "exact: worst relative error of a gradient" in done[0].out
    assert "0.weight" in done[0].out
    assert "NOT exact" in done[1].out
    assert "the total of 'loss' is no sum" in done[1].out
    assert [each.err for each in done] == ["", ""]
    assert not own.folder.exists()


def test_a_run_stops_early_and_keeps_its_best_and_its_last(own: Bench) -> None:
    """With a rate that is far too high the loss rises, and the evaluation before the first update stays the best."""
    said = own.train(eval__patience=2, eval__watch="near", optim__lr=0.05, run__save_every=2, run__keep_last=1)
    best = (own.folder / "checkpoints" / "best").read_text()
    losses = {row["step"]: row["eval_loss"] for row in own.rows() if row.get("set") == "near"}
    assert best == f"step-{min(losses, key=lambda step: losses[step])}"
    kept = {path.name for path in (own.folder / "checkpoints").iterdir()} - {"best", "latest"}
    assert kept == {best, (own.folder / "checkpoints" / "latest").read_text()}
    worse = own.path / "worse"
    said = own.train(eval__patience=2, eval__watch="near", optim__lr=5.0, run__folder=worse, update__max_norm="None")
    steps = [row["step"] for row in own.rows(worse) if row.get("set") == "near"]
    assert steps[-1] < 15
    stopped = f"stopped after update {steps[-1]}: the watched loss has not fallen for 2 evaluations"
    assert stopped in said
    assert stopped in own.train(
        eval__patience=2, eval__watch="near", optim__lr=5.0, run__folder=worse, update__max_norm="None",
        run__resume=True,
    )  # fmt: skip


def test_a_model_of_ones_own_may_leave_parameters_out_of_a_microbatch(own: Bench) -> None:
    """On two ranks as on one; and what a listener raises is one line that names it."""
    with (own.path / "own.py").open("a") as file:
        file.write(
            "class Two(nn.Module):\n"
            "    def __init__(self, width):\n"
            "        super().__init__()\n"
            "        torch.manual_seed(0)\n"
            "        self.one, self.other = nn.Linear(4, 1), nn.Linear(4, 1)\n"
            "    def forward(self, inputs):\n"
            "        return (self.one if float(inputs.flatten()[0]) > 0 else self.other)(inputs)\n"
            "def fail(event):\n"
            "    raise ValueError('of mine')\n"
        )
    values = {"model__function": f"{own.path}/own.py:Two", "update__micro_batch_size": 1, "eval__metrics": "None"}
    values |= {"eval__function": "None", "run__max_steps": 5}
    own.train(**values)
    own.train(ranks=2, run__folder=own.path / "two", **values)
    assert own.losses(own.path / "two") == pytest.approx(own.losses(), rel=1e-10)
    done = own.finish(run__folder=own.path / "failed", run__after_update=f"{own.path}/own.py:fail")
    assert done[0].status == 2
    assert done[0].err.startswith(f"megabatch: run.after_update '{own.path}/own.py:fail' raised ValueError: of mine (")
    assert len(done[0].err.splitlines()) == 1
