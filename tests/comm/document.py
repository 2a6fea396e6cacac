"""Makes the table of docs/parallelism.md: `python -m tests.comm.document`. A test holds the page to what this makes."""

import re
from pathlib import Path

from tests.comm.planned import AUTO, POLICIES, Policy, Sizes, evaluate, expected

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
BEGIN, END = "<!-- made by python -m tests.comm.document -->\n", "<!-- end of what is made -->\n"
GIGABYTE = 10**9

CALLS = {  # how each wrapper is made
    "plain": "`model`",
    "ddp": "`DistributedDataParallel(model)`",
    "ddp-find-unused": "`DistributedDataParallel(model, find_unused_parameters=True)`",
    "ddp-static-graph": "`DistributedDataParallel(model, static_graph=True)`",
    "ddp-bucket-view": "`DistributedDataParallel(model, gradient_as_bucket_view=True)`",
    "replicate": "`replicate(block, mesh=mesh)` for each block, `replicate(model, mesh=mesh)`",
    "fsdp2": "`fully_shard(block, mesh=mesh)` for each block, `fully_shard(model, mesh=mesh)`",
    "hsdp": "the same over a mesh of (dp_replicate, dp_shard)",
    "fsdp1": "`FullyShardedDataParallel(model, use_orig_params=True)`, FULL_SHARD",
    "fsdp1-grad-op": "SHARD_GRAD_OP",
    "fsdp1-no-shard": "NO_SHARD",
    "fsdp1-hybrid": "HYBRID_SHARD",
    "tp": "`parallelize_module(model, mesh['tp'], plan)`",
    "tp-sp": "and `SequenceParallel()` for the norms",
    "fsdp2-tp": "`parallelize_module`, then `fully_shard` over `mesh['dp']`",
    "fsdp2-tp-sp": "and `SequenceParallel()` for the norms",
    "replicate-tp": "`parallelize_module`, then `replicate` over `mesh['dp']`",
}
# A Llama of 8 billion parameters, its gradient in bfloat16: 32 blocks, 64 norms and one more, buckets of 25 MB.
EXAMPLE = Sizes(C=1, N=8, P=16 * GIGABYTE, R=2 * GIGABYTE, T=291, B=640, F=184, G=33, S=8, K=65, Q=65 * 4096 * 2)
TENSOR_DEGREE = 8
HEAD = "| made by | sync | bytes | gradient held | 8B: bytes | 8B: held | take it for |\n" + 7 * "|---" + "|\n"


def table() -> str:
    """The policies, a line each, but for those that are never cheaper than another."""
    lines = [HEAD]
    shown = [policy for policy in POLICIES if not policy.when.startswith("never cheaper")]
    for number, policy in enumerate(shown):
        again = number > 0 and shown[number - 1].wrapper == policy.wrapper
        lines.append(_line(policy, "" if again else CALLS[policy.wrapper]))
    return "".join(lines)


def _line(policy: Policy, call: str) -> str:
    sync = f"**{policy.sync}**" if AUTO[policy.wrapper] == policy.sync else policy.sync
    sizes = " + ".join(_text(size) for _, size in policy.collectives.values())
    of_example = _example(policy)
    sent = sum(value for name, value in expected(policy, of_example, {}).items() if name.endswith("_bytes"))
    held = evaluate(policy.held, of_example)
    cells = (call, sync, sizes, _text(policy.held), _gigabytes(sent), _gigabytes(held), policy.when)
    return "| " + " | ".join(cells) + " |\n"


def _example(policy: Policy) -> Sizes:
    """The example's sizes; under tensor parallelism a rank has its part of the gradient."""
    degree = TENSOR_DEGREE if "tp" in policy.wrapper else 1
    embedding = EXAMPLE.R // 2 - EXAMPLE.R // 2 // degree if policy.wrapper.endswith("-sp") else 0
    return EXAMPLE._replace(P=EXAMPLE.P // degree, R=EXAMPLE.R // degree, E=embedding)


def _text(formula: str) -> str:
    """A formula as it is read, for one call."""
    formula = formula.removeprefix("C*").replace("//", "/").replace("+", " + ")
    formula = re.sub(r"(?<=\d)\*(?=[A-Z])", "", formula)
    if formula.startswith("(") and formula.endswith(")"):
        formula = formula[1:-1]
    return re.sub(r"(?<=[A-Z0-9)])-(?=[A-Z0-9])", " - ", formula).replace("*", "·")


def _gigabytes(size: int) -> str:
    return f"{size / GIGABYTE:,.0f} GB" if size >= 10 * GIGABYTE else f"{size / GIGABYTE:,.1f} GB"


def snippets(page: str) -> list[str]:
    """The page's pieces of Python."""
    return re.findall(r"^```python[^\n]*\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def written(page: str) -> str:
    """The page with the table as it is made now."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
