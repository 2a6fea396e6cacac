"""Bugs to plant in the trainer: a text that occurs once in the library, what is planted instead, and the check that
must then fail. Texts are looked for in all files, so that a file may be moved."""

import shutil
from pathlib import Path
from typing import NamedTuple

import megabatch

LIBRARY = Path(megabatch.__file__).parent


class Bug(NamedTuple):
    name: str
    texts: dict[str, str]  # one of them is in the library → what is planted instead
    check: str


def plant(bug: Bug, folder: Path) -> None:
    """Make a copy of the library with the bug."""
    copy = folder / "megabatch"
    shutil.copytree(LIBRARY, copy, ignore=shutil.ignore_patterns("__pycache__", "assets"))
    sources = read_sources(copy)
    path, text = place_of(bug, sources)
    path.write_text(sources[path].replace(text, bug.texts[text]))


def read_sources(library: Path = LIBRARY) -> dict[Path, str]:
    return {path: path.read_text() for path in library.rglob("*.py")}


def place_of(bug: Bug, sources: dict[Path, str]) -> tuple[Path, str]:
    """Return the file and the text of a bug, which occurs once."""
    found = [(path, text) for path, source in sources.items() for text in bug.texts for _ in range(source.count(text))]
    assert len(found) == 1, f"{list(bug.texts)} occur {len(found)} times: {found}"
    return found[0]


PLAIN, NUMBERS = "updates_are_those_of_a_plain_loop", "numbers_are_those_of_the_samples"
EPOCHS, TAILS = "every_sample_comes_once_an_epoch", "tails_are_as_asked"
SEEDS, EVALUATION = "seeds_decide_the_order", "evaluations_are_exact"
RESUMED, SKIPPED = "a_killed_run_resumes_as_if_nothing_had_happened", "a_skipped_update_leaves_everything_as_it_was"
STOPS, TWO = "a_run_that_no_longer_improves_stops", "two_ranks_do_what_one_does"
BUGS = (
    # What is said of an update
    Bug("count padding in tokens a second",
        {'"] = update.num_tokens / seconds': '"] = sums.padded_tokens / seconds'}, NUMBERS),
    Bug("count evaluations in the throughput",
        {"heartbeat.wait_for_samples(context.step + 1)\n        context.started = time.perf_counter()":
             "context.started = context.started or time.perf_counter()"}, NUMBERS),
    Bug("log the norm after clipping",
        {'scalars["grad_norm"] = update.grad_norm': 'scalars["grad_norm"] = update.grad_norm.clamp(max=0.5)'}, PLAIN),
    Bug("log the padding of real tokens",
        {"1 - update.num_tokens / sums.padded_tokens": "sums.padded_tokens / update.num_tokens - 1"}, NUMBERS),
    Bug("count the step before",
        {'return {"step": context.learner.step, "lr"': 'return {"step": context.learner.step - 1, "lr"'}, PLAIN),
    Bug("log the mean over samples",
        {'{"loss": values["loss"] if values["weight"]':
             '{"loss": values["loss"] * update.num_samples / 4 if values["weight"]'}, PLAIN),
    # How fast, and what moves the model
    Bug("begin the warm-up at zero",
        {"(step + 1) / (config.warmup_steps + 1)": "step / (config.warmup_steps + 1)"}, PLAIN),
    Bug("end the warm-up a step late",
        {"if step < config.warmup_steps:": "if step <= config.warmup_steps:"}, PLAIN),
    Bug("fall a step early", {"max(0, step - start)": "max(0, step + 1 - start)"}, PLAIN),
    Bug("fall to nothing",
        {"return config.final_lr_share + (1 - config.final_lr_share) * height": "return height"}, PLAIN),
    Bug("decay norms and biases", {'"weight_decay": 0.0}': '"weight_decay": weight_decay}'}, PLAIN),
    Bug("decay nothing", {'>= 2], "weight_decay": weight_decay}': '>= 2], "weight_decay": 0.0}'}, PLAIN),
    Bug("swap the betas", {'{"betas": config.betas} if': '{"betas": config.betas[::-1]} if'}, PLAIN),
    Bug("clip to twice the norm",
        {"max_norm=max_norm_of(config.update)": "max_norm=2 * max_norm_of(config.update)"}, PLAIN),
    # Which samples
    Bug("train on what is held out",
        {"np.setdiff1d(np.arange(len(samples)), held_out_ids)": "np.arange(len(samples))"}, EPOCHS),
    Bug("shuffle by no seed", {"seed=config.run.seed,\n        dp_rank": "seed=0,\n        dp_rank"}, SEEDS),
    Bug("drop a sample of each update",
        {'state["updates"]) for number in ids]': 'state["updates"]) for number in ids[1:]]'}, EPOCHS),
    Bug("step every tail", {"tail=config.update.tail,": 'tail="step",'}, TAILS),
    # Evaluation
    Bug("leave the model in evaluation mode", {"module.training = training": "pass"}, EVALUATION),
    Bug("evaluate in training mode",
        {"            model.eval()\n            yield": "            yield"}, EVALUATION),
    Bug("evaluate the weights and not their average",
        {"context.evaluated_weights = self._average.swapped": "pass"}, EVALUATION),
    Bug("go on with the average", {"            self._put(weights)": "            pass"}, EVALUATION),
    Bug("decay the average the wrong way",
        {"get_ema_multi_avg_fn(decay)": "get_ema_multi_avg_fn(1 - decay / 2)"}, EVALUATION),
    Bug("take a perplexity to the base two", {"math.exp(loss)": "2**loss"}, EVALUATION),
    Bug("compare with the token before",
        {"argmax(-1) == targets": "argmax(-1) == targets.roll(1, 1)"}, EVALUATION),
    Bug("keep the last microbatch alone",
        {"found_of.setdefault(name, []).extend([torch.stack(pair)] if counted else [])":
             "found_of[name] = [torch.stack(pair)] if counted else []"}, TWO),
    Bug("evaluate this rank's part alone",
        {"[pair for pairs, _ in parts for pair in pairs.get(name, [])]":
             "[pair for pairs, _ in parts[-1:] for pair in pairs.get(name, [])]"}, TWO),
    Bug("count a dummy microbatch of an evaluation", {"counted=bool(rows)": "counted=True"}, TWO),
    Bug("stop an evaluation late",
        {"self._num_worse >= self._patience": "self._num_worse > self._patience"}, STOPS),
    # Skipped updates
    Bug("average the weights of a skipped update",
        {'if context.values["finite"]:\n            self._average.update()':
             "if True:\n            self._average.update()"}, SKIPPED),
    Bug("count a skipped update's samples as none",
        {'context.row["skipped_samples"] = 0, len(names)': 'context.row["skipped_samples"] = 0, 0'}, SKIPPED),
    # Resuming
    Bug("resume with the first samples",
        {"part.load_state_dict(meta[name])": "pass"}, RESUMED),
    Bug("skip an update on resume",
        {"sampler.load_state_dict(state)\n        n":
             "sampler.load_state_dict(state)\n        state['updates'] and next(iter(sampler))\n        n"}, RESUMED),
    Bug("resume with new weights",
        {"load(checkpoint, context.saved)": "pass"}, RESUMED),
    Bug("draw other dropout after a resume",
        {'f"{seed} {update} {name}"': "str(__import__('time').time_ns())"}, RESUMED),
    Bug("keep the rows after the checkpoint", {'row["step"] < step or': "True or"}, RESUMED),
    Bug("forget the average on resume", {"average.copy_(state[name])": "pass"}, RESUMED),
)  # fmt: skip
