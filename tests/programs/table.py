"""All programs by name, with the numbers of ranks and the ways in which each runs."""

from dataclasses import dataclass

from tests.programs import language, retrieval, science, training, vision
from tests.programs.setting import Errors, Program, run

ONE = ((1, "plain"),)
RANKS = (*ONE, (2, "plain"), (2, "ddp"))


@dataclass(frozen=True)
class Entry:
    """A program, where it runs, and if it belongs to the quick tier on one rank."""

    program: Program
    places: tuple[tuple[int, str], ...] = RANKS  # numbers of ranks and ways
    is_quick: bool = False


PROGRAMS = {
    "PPO in two calls": Entry(language.ppo),
    "sums that nothing divides": Entry(language.plain_sums),
    "adapters on one base": Entry(language.adapters, ONE),
    "a trainer's mean over sequences": Entry(language.mean_over_sequences, ONE),
    "CLIP, SigLIP and captions": Entry(retrieval.images_and_texts, is_quick=True),
    "sentence encoder": Entry(retrieval.sentences),
    "sentence encoder in a trainer": Entry(language.sentences_in_a_trainer, ONE),
    "ColBERT": Entry(retrieval.tokens),
    "DETR": Entry(vision.boxes),
    "frozen batch norm": Entry(vision.frozen_batch_norm),
    "EMA teacher": Entry(training.teacher),
    "CTC in a trainer": Entry(language.speech, ONE),
    "Whisper in a trainer": Entry(language.whisper, ONE),
    "energies and forces": Entry(
        science.energy_and_forces, (*RANKS, (2, "plain, a rank without molecules")), is_quick=True
    ),
    "sharded evaluation of forces": Entry(science.sharded_evaluation, ((2, "fsdp2"),)),
    "PINN with LBFGS": Entry(science.differential_equation, (*ONE, (2, "plain"))),
    "MAML": Entry(science.inner_steps),
    "SAM": Entry(training.sharpness_aware, is_quick=True),
    "GAN with R1": Entry(training.adversarial, is_quick=True),
    "sparse embeddings": Entry(training.sparse_embeddings),
    "heads for several data sets": Entry(
        vision.several_data_sets, (*RANKS, (2, "ddp, a rank without one")), is_quick=True
    ),
    "per-sample gradients": Entry(training.per_sample_gradients, ONE),
    "diffusion buckets": Entry(vision.buckets),
    "batch dice": Entry(vision.batch_dice, is_quick=True),
    "DiLoCo": Entry(training.local_steps, ((2, "plain"),)),
    "learned weights and penalties": Entry(
        training.learned_weights, (*RANKS, (2, "plain, a rank without samples"), (2, "ddp, a rank without samples"))
    ),
}  # fmt: skip


def jobs(world: int) -> list[str]:
    """Return ``program|way`` of all that runs on so many ranks."""
    return [f"{name}|{way}" for name, entry in PROGRAMS.items() for size, way in entry.places if size == world]


def run_job(job: str) -> Errors:
    """Run a program on this rank; return its errors by what was compared."""
    name, way = job.split("|")
    return run(PROGRAMS[name].program, way)
