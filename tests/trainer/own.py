"""A user's parts that note what the trainer does with them: run as a file of the run's folder, beside which it writes.

The clock stands still but for forwards: one second for one that trains, a hundred for any other.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

HERE, RANK = Path(__file__).parent, os.environ.get("RANK", "0")
NUM_SAMPLES, VOCABULARY, BAD = 21, 32, 5  # the sample whose logits are not finite, where one is
CLOCK = [0.0]
time.perf_counter = lambda: CLOCK[0]


def note(**what: Any) -> None:
    with (HERE / f"seen{RANK}.jsonl").open("a") as file:
        file.write(json.dumps(what) + "\n")


def samples() -> list[dict[str, torch.Tensor]]:
    """Sample k begins with the token k, and its first two labels are a prompt's."""
    draw, found = torch.Generator().manual_seed(3), []
    for number in range(NUM_SAMPLES):
        length = 4 + number * 5 % 9
        ids = torch.randint(NUM_SAMPLES, VOCABULARY, (length,), generator=draw)
        ids[0] = number
        labels = ids.clone()
        labels[:2] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


class Noting(GPT2LMHeadModel):
    """A model that notes which samples go through it, and how."""

    has_bad_sample = False

    def forward(self, input_ids: Any = None, **given: Any) -> Any:
        numbers, grad = input_ids[:, 0].tolist(), torch.is_grad_enabled()
        note(kind="forward", numbers=numbers, training=self.training, grad=grad)
        CLOCK[0] += 1.0 if self.training and grad else 100.0
        output = super().forward(input_ids=input_ids, **given)
        if self.has_bad_sample and BAD in numbers:
            output.logits = output.logits * float("nan")
        return output


def model(dropout: float = 0.0, has_bad_sample: bool = False) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    made = Noting(GPT2Config(**sizes, resid_pdrop=dropout, embd_pdrop=0.0, attn_pdrop=0.0)).double()
    made.has_bad_sample = has_bad_sample
    return made


def after_update(event: Any) -> None:
    note(kind="update", step=event.step, training=event.model.training)
    weights = {name: parameter.detach().clone() for name, parameter in event.model.named_parameters()}
    torch.save(weights, HERE / f"weights{event.step}-{RANK}.pt")
    if (HERE / f"die{event.step}").exists():
        (HERE / f"die{event.step}").unlink()
        os._exit(9)
