"""What FSDP2 holds, by what it is for: gathered parameters, and gradients before they are reduced."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from megabatch.simulate.ledger import Ledger, replaced


@contextlib.contextmanager
def tagging_shards(ledger: Ledger) -> Generator[None]:
    """While it is open, the ledger is told what FSDP2 gathers and what it accumulates, in any model."""

    def gathering(wait: Callable[..., Any]) -> Callable[..., Any]:
        def wait_for_unshard(group: Any) -> Any:
            result = wait(group)
            for parameter in group.fsdp_params:
                ledger.tag(getattr(parameter, "all_gather_outputs", ()), "unsharded parameters")
            return result

        return wait_for_unshard

    def reducing(after: Callable[..., Any]) -> Callable[..., Any]:
        def post_backward(group: Any, *unused: Any) -> Any:
            _tag_gradients(ledger, group)
            result = after(group, *unused)
            _tag_gradients(ledger, group)
            return result

        return post_backward

    with (
        replaced(FSDPParamGroup, "wait_for_unshard", gathering),
        replaced(FSDPParamGroup, "post_backward", reducing),
    ):
        yield


def _tag_gradients(ledger: Ledger, group: Any) -> None:
    for parameter in group.fsdp_params:
        unsharded = getattr(parameter, "_unsharded_param", None)
        ledger.tag((getattr(unsharded, "grad", None), parameter.unsharded_accumulated_grad), "unsharded gradients")
        ledger.tag((parameter.sharded_param.grad, group._partial_reduce_output), "gradients")
