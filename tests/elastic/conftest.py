"""The trainer's tiny recipe, and functions of a user's that disturb a run at a place of their own choice."""

from pathlib import Path

import pytest

from tests.train.conftest import Bench, bench, chatty, refuse

__all__ = ["bench", "chatty", "refuse"]

OWN = '''
"""What is to happen is in files beside this one: disturb.json says at which update, on which ranks, what."""

import json
import os
import signal
import time
from pathlib import Path

from megabatch import loss, losses

HERE, RANK = Path(__file__).parent, int(os.environ.get("RANK", "0"))
SEEN = []


def disturb(place, step):
    file = HERE / "disturb.json"
    asked = json.loads(file.read_text()) if file.exists() else {}
    if asked.get("place") != place or asked["step"] != step or RANK not in asked["ranks"] or SEEN:
        return
    SEEN.append(step)
    (HERE / f"disturbed-{RANK}").touch()
    for number in asked["signals"]:
        os.kill(os.getpid(), number)
        time.sleep(asked.get("seconds", 0))


def after_update(event):
    (HERE / f"made-{RANK}").write_text(str(event.step))
    disturb("after", event.step)


def model(**options):
    from transformers import GPT2Config, GPT2LMHeadModel

    disturb("build", 0)
    return GPT2LMHeadModel(GPT2Config(**options))


@loss(weigh=losses.next_token.weigh)
def within(model, microbatch):
    made = HERE / f"made-{RANK}"
    disturb("within", int(made.read_text() or 0) + 1 if made.exists() else 1)
    return losses.next_token(model, microbatch)
'''


@pytest.fixture
def own(bench: Bench) -> Path:
    """The file of those functions."""
    path = bench.path / "own.py"
    path.write_text(OWN)
    return path
