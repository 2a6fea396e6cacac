"""Who takes part: names, what runs them, what they need, and what their update is."""

from dataclasses import dataclass

from benchmarks import result


@dataclass(frozen=True)
class Contestant:
    """One way to make the same update, or nearly the same."""

    title: str
    function: str  # "module:name" below benchmarks.speed, called with a Task
    libraries: tuple[str, ...] = ()
    samples: str = "drawn"  # "grouped": other samples share an update
    weighs: str = "targets"  # "microbatches": a mean of their means
    cut: str = "length"  # what shares a forward: samples of one length, "arrival": the next ones, "packs": full rows
    counts: bool = True  # a forward has a number of samples, which is searched for; else a number of tokens

    @property
    def comparable(self) -> bool:
        """Whether an update has the samples that everybody's has."""
        return self.samples == "drawn" and self.cut != "packs"

    def missing(self) -> list[str]:
        """Libraries that are not installed."""
        return [name for name in self.libraries if result.version(name) is None]


TRAINER = ("transformers", "accelerate")
CONTESTANTS = {
    "megabatch": Contestant("megabatch", "loops:megabatch", counts=False),
    "hf_rebalance": Contestant('Trainer, `"batch_rebalance"`', "trainers:batch_rebalance", TRAINER),
    "hf": Contestant("Trainer, default", "trainers:hugging_face", TRAINER, cut="arrival"),
    "accelerate": Contestant(
        "Accelerate, `accumulate`", "trainers:accelerate", ("accelerate",), weighs="microbatches", cut="arrival"
    ),
    "lightning": Contestant("Lightning", "trainers:lightning", ("lightning",), weighs="microbatches", cut="arrival"),
    "torchtune": Contestant("torchtune's loop, rewritten", "loops:torchtune", cut="arrival"),
    "plain": Contestant("plain loop, `loss / N`", "loops:plain", weighs="microbatches", cut="arrival"),
    "sorted": Contestant("plain loop over sorted samples", "loops:sorted_by_length"),
    "hf_group": Contestant('Trainer, `"group_by_length"`', "trainers:hugging_face", TRAINER, samples="grouped"),
    "trl": Contestant("TRL, packing", "trainers:trl", ("trl", *TRAINER), cut="packs", counts=False),
}
DROP_INS = {  # the same loops with exact updates in them; asked for by name
    "hf_exact": Contestant("MegabatchTrainer", "dropins:trainer", TRAINER, counts=False),
    "accelerate_exact": Contestant("Accelerate, `learner`", "dropins:accelerate", ("accelerate",), counts=False),
    "lightning_exact": Contestant("Lightning, `ExactUpdates`", "dropins:lightning", ("lightning",), counts=False),
}
EVERYBODY = CONTESTANTS | DROP_INS
