"""Dealing: what a sample costs, by which an update's samples are dealt over ranks.

Of what was measured one number is kept: the tokens at which attention costs a sample as much as all the rest. As a
power of two it hardly depends on what else the machine did, and sums of prices are exact: ranks of any make deal alike.
"""

import math

from megabatch import CostModel
from megabatch.planning import TunedLimit

# Attention of the longest sample, over its other work. Less changes no balance by a percent; and where a noisy clock
# has said more, dealing by more may cost more than it brings.
LEAST, MOST = 1 / 8, 4


def even_tokens(fit: TunedLimit) -> int | None:
    """Return the tokens of a sample whose attention costs as much as the rest; None if it costs too little."""
    cost = fit.cost
    attention = cost.seconds_per_pair * fit.longest_tokens  # of the longest sample, for each token
    if attention <= 0 or attention < LEAST * cost.seconds_per_token:
        return None
    ratio = min(attention / cost.seconds_per_token, MOST) if cost.seconds_per_token else MOST
    return 2 ** max(0, round(math.log2(fit.longest_tokens / ratio)))


def price_of(tokens: int | None) -> CostModel | None:
    """What samples cost, in units of a token that attends to nothing; None: by length."""
    return None if tokens is None else CostModel(seconds_per_token=1.0, seconds_per_pair=1 / tokens)


def dealt_text(tokens: int) -> str:
    """Return the line about it."""
    return f"samples are dealt over ranks by cost: attention counts as much as the rest at {tokens:,} tokens"
