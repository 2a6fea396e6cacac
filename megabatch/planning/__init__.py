"""Lengths in, plans out: samples balanced over ranks and split into microbatches; no torch but for the sampler."""

from typing import TYPE_CHECKING

from megabatch.lazy import export_lazily

if TYPE_CHECKING:
    from megabatch.planning.balancing import balance as balance
    from megabatch.planning.balancing import deal_microbatches as deal_microbatches
    from megabatch.planning.balancing import fill as fill
    from megabatch.planning.dealing import deal as deal
    from megabatch.planning.limits import MeasuredMicrobatch as MeasuredMicrobatch
    from megabatch.planning.limits import TunedLimit as TunedLimit
    from megabatch.planning.packing import best_fit as best_fit
    from megabatch.planning.sampler import Consumed as Consumed
else:
    _HOME = {  # public name → its module
        "Consumed": "sampler",
        "MeasuredMicrobatch": "limits",
        "TunedLimit": "limits",
        "balance": "balancing",
        "best_fit": "packing",
        "deal": "dealing",
        "deal_microbatches": "balancing",
        "fill": "balancing",
    }
    __all__ = list(_HOME)
    __getattr__, __dir__ = export_lazily(__name__, _HOME)
