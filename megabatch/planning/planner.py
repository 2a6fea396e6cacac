"""A rule of your own by which samples are split into microbatches."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class Planner(ABC):
    """Splits a rank's samples into microbatches by a rule of your own.

    Give an object of a subclass as ``planner=``, in place of a limit. The gradient does not depend on the rule. A
    microbatch that does not fit in memory still runs in parts, and later ones are then no larger. A rank with fewer
    microbatches than another runs dummy ones. `verify` takes no rule of yours, since it makes cuts of its own.
    """

    @abstractmethod
    def cut(self, lengths: Sequence[int], samples: Sequence[Any]) -> Sequence[Sequence[int]]:
        """Return the samples of each microbatch, as indices, each sample once.

        Microbatches may have unequal numbers of samples. A rank without samples returns none.

        Args:
            lengths: Tokens of each of this rank's samples.
            samples: The samples themselves, as the batch has them. A deferred one is loaded when you read it.
        """
