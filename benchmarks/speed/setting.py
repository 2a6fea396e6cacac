"""Setting: the model and the samples, the same for all contestants, in two regimes.

In the compute-bound regime the processor is busy from a few dozen tokens a forward on, as a CPU is with any model. In
the launch-bound regime a forward has a fixed cost of about a sample, since the model is deep and thin and the samples
are short. A GPU with a model of 0.6B to 1B parameters is in that regime.
"""

from dataclasses import dataclass, replace

VOCABULARY = 384  # bytes, and ByT5's few others
MICRO_BATCH_SIZES = (1, 2, 4, 8, 16, 32)  # samples in a forward; each peer runs at its best of these
SLOWER = 1.25  # a size that is slower than the best by this factor ends the search
LEAST_TOKENS = 4
NUM_MEASURED = 2  # updates, after one of the same samples at a quarter of their lengths


@dataclass(frozen=True)
class Setting:
    """The model, the update, and how samples are shortened."""

    hidden: int = 192
    layers: int = 2
    heads: int = 6
    intermediate: int = 512
    update_size: int = 64  # samples, over all ranks
    micro_batch_size: int = 8  # samples in a forward of the contestants that count samples, outside of the search
    max_microbatch_tokens: int = 2048  # and in one of those that count tokens; no sample is longer
    shrink: int = 1  # a sample keeps 1 / shrink of its tokens
    dtype: str = "float32"
    learning_rate: float = 1e-3

    def proof(self) -> "Setting":
        """The same updates in small and in float64: a quarter of each sample, under a quarter of the bound."""
        return replace(
            self, hidden=min(self.hidden, 32), heads=2, intermediate=64, dtype="float64", shrink=4 * self.shrink,
            max_microbatch_tokens=self.max_microbatch_tokens // 4,
        )  # fmt: skip

    def dry(self) -> "Setting":
        """Next to nothing, so that what code and libraries need is loaded before memory and time are looked at."""
        return replace(self.proof(), dtype=self.dtype, shrink=32 * self.shrink)

    def length(self, tokens: int) -> int:
        """Of a sample, as it is used."""
        return max(LEAST_TOKENS, tokens // self.shrink)

    def steps(self, world: int) -> int:
        """Microbatches of a rank's update, where they are counted in samples."""
        return self.update_size // self.micro_batch_size // world


REGIMES = {
    "compute": Setting(),
    "launch": Setting(hidden=8, layers=40, heads=2, intermediate=32, shrink=8),
}
TINY = {
    "compute": Setting(32, 1, 2, 64, update_size=16, micro_batch_size=4, max_microbatch_tokens=256, shrink=8),
    "launch": Setting(8, 4, 2, 16, update_size=16, micro_batch_size=4, max_microbatch_tokens=256, shrink=8),
}
