"""CostModel: what a microbatch of given lengths costs, in seconds and bytes."""

from dataclasses import dataclass

from megabatch.errors import PlanError


@dataclass(frozen=True)
class CostModel:
    """Seconds and bytes of one microbatch of ``rows`` samples padded to ``longest`` tokens.

    ``seconds = seconds_per_microbatch + tokens * (seconds_per_token + longest * seconds_per_pair)`` and
    ``bytes = bytes_fixed + tokens * bytes_per_token`` with ``tokens = rows * longest``: a launch cost, the
    matrix products that are linear in the tokens, and attention, which is quadratic in the length.

    The defaults are relative, not measured: one token costs 1, and attention as much as the rest at 4096 tokens.
    They choose sensible cuts; they do not predict a time.
    """

    seconds_per_microbatch: float = 0.0
    seconds_per_token: float = 1.0
    seconds_per_pair: float = 1 / 4096
    bytes_fixed: float = 0.0
    bytes_per_token: float = 0.0

    def seconds(self, rows: int, longest: int) -> float:
        """Price of one forward and backward of ``rows`` x ``longest`` padded tokens."""
        tokens = rows * longest
        return self.seconds_per_microbatch + tokens * (self.seconds_per_token + longest * self.seconds_per_pair)

    def sample_seconds(self, length: int) -> float:
        """Price of one sample's own tokens, without the launch and the padding that its company brings."""
        return self.seconds(1, length) - self.seconds_per_microbatch

    def peak_bytes(self, rows: int, longest: int) -> float:
        """Memory that one microbatch of ``rows`` x ``longest`` padded tokens needs at its peak."""
        return self.bytes_fixed + rows * longest * self.bytes_per_token


def check_cost(cost: object) -> None:
    """Raise `PlanError` for what is neither a `CostModel` nor None."""
    if cost is not None and not isinstance(cost, CostModel):
        raise PlanError(
            f'cost is {cost!r}; expected a CostModel, or leave it out: with max_microbatch_tokens="auto" it is measured'
        )
