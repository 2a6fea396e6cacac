"""One folder reads torch's private names, and slow modules are imported only for models that need them."""

import ast
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial

from megabatch import MegabatchError
from megabatch.pipeline import Pipeline
from megabatch.simulate import simulate
from megabatch.torch_private import versions
from megabatch.torch_private.classes import is_partial
from megabatch.wrappers.fsdp2 import FSDP2Wrapper
from tests.test_imports import LIBRARY, TREES, file_of

SLOW = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch._dynamo", "sympy")
OWN = (  # chapters that are not imported for a plain model either
    "megabatch.pipeline", "megabatch.autotune", "megabatch.wrappers.fsdp1", "megabatch.wrappers.fsdp2",
    "megabatch.wrappers.ddp", "megabatch.core.messages", "megabatch.wrappers.rank_sums",
    "megabatch.core.agreement", "megabatch.guards.error_broadcast", "megabatch.guards.oom_retry",
    "megabatch.planners.beyond_limits", "megabatch.verification", "megabatch.simulate",
)  # fmt: skip
MOST = 67  # modules beyond those of torch
IMPORTED = f"""
import sys
import torch
before = set(sys.modules)
from megabatch import GradientAccumulator
made = GradientAccumulator(torch.nn.Linear(2, 2), micro_batch_size=1)
new = set(sys.modules) - before
print(len(new), *(name for name in new if name.startswith({(*SLOW, *OWN)!r})))
"""
EXCEPTIONS = {  # names of torch's that a file uses itself, and why
    "autotune.few_shapes": ("_attn_implementation",),  # of transformers
    "batching.packed_row": ("_attn_implementation",),  # of transformers
    "batching.shared_prefix": ("_attn_implementation",),  # of transformers
    "losses.dropped_terms": ("_loss_function",),  # of transformers
    "integrations.rollouts": (  # of TRL's GRPOTrainer and RLOOTrainer
        "_buffered_inputs", "_entropy_bonus_enabled", "_metrics", "_prepare_inputs", "_step",
    ),
    "integrations.update_metrics": ("_metrics", "_total_train_tokens"),  # of TRL's trainers
    "simulate.devices": (  # keys of tables: operations of ATen, whose names begin so
        "_reshape_alias", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward", "_unsafe_view",
    ),
    "verification.float64_copy": ("_is_expert_parallel",),  # of transformers
    "wrappers.expert_parallel": ("_tp_size",),  # of transformers
}  # fmt: skip

NOTHING: Any = None
USES = {  # of a feature, which says what torch lacks before it looks at its arguments
    "FSDP2": lambda: FSDP2Wrapper(nn.Linear(1, 1), [], NOTHING),
    "pipelines": lambda: Pipeline([], NOTHING, boundary=NOTHING, output=NOTHING),
    "plan": lambda: simulate(NOTHING, NOTHING, NOTHING, NOTHING, device="h100-80g"),
}


def test_what_is_slow_is_not_imported_for_a_plain_model() -> None:
    told = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    number, *slow = told.stdout.split()
    assert slow == []
    assert int(number) <= MOST


def private_names(module: str) -> set[str]:
    """Names with one underscore in front that a file reads and does not make."""
    tree = TREES[file_of(module)]
    own, read = {"_fields", "_replace"}, set[str]()  # of a named tuple
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            own.add(node.attr)
        elif isinstance(node, ast.Attribute):
            read.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch":
            read |= {part for alias in node.names for part in f"{node.module}.{alias.name}".split(".")}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            read |= {each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return {name for name in read - own if re.fullmatch(r"_[^_]\w*", name)}


@pytest.mark.parametrize("module", [name for name in LIBRARY if not name.startswith("torch_private")])
def test_private_names_of_torch_are_read_in_one_folder(module: str) -> None:
    assert private_names(module) == set(EXCEPTIONS.get(module, ()))


def test_what_a_version_of_torch_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "NEEDED", ((torch.Tensor, "_there_is_none", "writes"),))
    with pytest.raises(ImportError) as raised:
        versions.check_torch()
    assert str(raised.value) == (
        f"torch {torch.__version__} has no _there_is_none, by which megabatch reads writes; install torch 2.11 to 2.15"
    )


@pytest.mark.parametrize("feature", versions.NEEDED_BY)
def test_what_a_feature_reads_is_there(feature: str) -> None:
    versions.check_feature(feature)


@pytest.mark.parametrize("feature", versions.NEEDED_BY)
def test_what_a_feature_lacks_is_said_where_it_is_used(monkeypatch: pytest.MonkeyPatch, feature: str) -> None:
    place = next(iter(versions.NEEDED_BY[feature]))
    monkeypatch.setitem(versions.NEEDED_BY, feature, {place: "_there_is_none|_there_is_no_other"})
    versions.check_feature.cache_clear()
    with pytest.raises(MegabatchError, match=rf"^{feature} does not work under torch .*_there_is_none"):
        USES[feature]()
    versions.check_feature.cache_clear()


def test_a_class_that_nobody_has_imported_has_no_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_partial(Partial())
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor")
    assert not is_partial(Partial())
