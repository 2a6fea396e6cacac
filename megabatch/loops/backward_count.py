"""A count of the backwards that add to the gradients of a model, in code of the user's."""

from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megabatch.core.wrapper import Wrapper
from megabatch.torch_private.autograd import backward_id, is_in_function_backward


class BackwardCount:
    """Counts backwards by hooks on the parameters, until `close`. Backwards that start inside another do not count.

    Reentrant checkpointing starts such a backward for each layer.
    """

    def __init__(self, wrapper: Wrapper) -> None:
        self.number = 0
        self._wrapper = wrapper
        self._backwards: set[int] = set()
        self._watched: dict[int, nn.Parameter] = {}
        self._hooks: list[RemovableHandle] = []
        # FSDP2 makes the parameters of a module in its first forward.
        self._hooks += [model.register_forward_hook(self.watch) for model in wrapper.models]
        self.watch()

    def watch(self, *_: Any) -> None:
        """Add a hook to each parameter that has none."""
        for parameter in self._wrapper.accumulating:
            if id(parameter) not in self._watched:
                self._watched[id(parameter)] = parameter
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._note))

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, parameter: Tensor) -> None:
        backward = backward_id()
        if backward in self._backwards:
            return
        self._backwards.add(backward)
        self.number += not is_in_function_backward()
