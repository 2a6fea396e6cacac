"""More bugs to plant in the trainer, each with a quick test that must then fail; `python -m tests.trainer.planted`
plants them all, one at a time, and writes planted.json; with words after it, those whose names have one.

It is not in the quick tier: the tests that it runs are. A child is forked for each bug, with torch imported.
"""

import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from tests.trainer.checks import CHECKS
from tests.trainer.mutations import EVALUATION, PLAIN, TWO, Bug, plant

ROOT, RESULT = Path(__file__).parents[2], Path(__file__).with_name("planted.json")
NAMED = ("recipes", "docs", "examples", "benchmarks", "pyproject.toml", "README.md")  # that tests read
OPTIONS = ("-q", "-x", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")


def of_trainer(check: str) -> str:
    """Return the test of a check of the trainer."""
    assert check in CHECKS
    return f"trainer/test_trainer.py::test_the_trainer_passes[{check}]"


def unit(file: str, test: str) -> str:
    """Return a test of the trainer's parts."""
    return f"train/test_{file}.py::test_{test}"


DATA, KEPT = "load", "the_last_and_the_best_are_kept"
EXTRA_BUGS = (
    # The loop
    Bug("step the schedule twice",
        {"context.update = context.learner.optim_step()":
             "context.update = context.learner.optim_step()\n    context.learner.scheduler.step()"}, of_trainer(PLAIN)),
    Bug("log the learning rate of the next update",
        {'"lr": self._lr, **row': '"lr": context.learner.optimizer.param_groups[0]["lr"], **row'}, of_trainer(PLAIN)),
    Bug("evaluate an update late",
        {"(callback.every and step % callback.every == 0)": "(callback.every and step % callback.every == 1)"},
        of_trainer(EVALUATION)),
    Bug("average the weights an update late",
        {"            self._average.update()":
             "            self._seen = getattr(self, '_seen', 0) + 1\n"
             "            self._average.update() if self._seen > 1 else None"}, of_trainer(EVALUATION)),
    Bug("let the innermost callback be the outermost",
        {"for callback in context.callbacks.around_backward:\n":
             "for callback in reversed(context.callbacks.around_backward):\n"},
        unit("callbacks", "the_last_callback_surrounds_the_others")),
    # Batch sizes and the learning rate
    Bug("grow an update late",
        {"self.sizes[bisect_right(self.points,": "self.sizes[__import__('bisect').bisect_left(self.points,"},
        unit("batch_size", "a_size_holds_from_its_point_on")),
    Bug("let the rate follow the size itself", {"math.sqrt(size / sizes.sizes[0])": "size / sizes.sizes[0]"},
        unit("batch_size", "a_rate_goes_with_the_root_of_the_size")),
    Bug("multiply the rate by every factor so far",
        {"zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True)":
             'zip(optimizer.param_groups, [group["lr"] for group in optimizer.param_groups], strict=True)'},
        unit("batch_size", "a_rate_is_multiplied_once")),
    Bug("let wsd fall before the warmup ends",
        {"start = max(start, decay_steps - (": "start = min(decay_steps, decay_steps - ("},
        unit("optim", "wsd_never_falls_before_the_warmup_is_over")),
    Bug("carry no samples over",
        {"of_data = epochs * num_samples // size": "of_data = epochs * (num_samples // size)"},
        unit("updates", "updates_are_counted")),
    # Samples
    Bug("hold out half of a source", {"[: size // 10]": "[: size // 2]"}, unit(DATA, "at_most_a_tenth_is_held_out")),
    Bug("hold out the same samples for every seed",
        {"default_rng([seed, 0, 0, SPLIT])": "default_rng([0, 0, 0, SPLIT])"},
        unit(DATA, "held_out_samples_are_chosen_by_the_seed_and_never_trained_on")),
    Bug("learn the first token of a packed document", {"labels[:1] = IGNORED_LABEL": "pass"},
        unit("updates", "the_tokens_of_the_rows_are_those_of_the_documents")),
    Bug("count positions on in a packed row",
        {'"position_ids": torch.arange(length)': '"position_ids": torch.arange(start, start + length)'},
        unit("updates", "borders")),
    Bug("begin a mixture's sources anew in each epoch",
        {"start, stop = epoch * count, (epoch + 1) * count": "start, stop = 0, count"},
        unit("updates", "samples_of_a_source_are_seen_equally_often")),
    Bug("weigh a mixture's sources alike", {"round(scale * weight)": "round(scale)"},
        unit("updates", "counts_are_in_proportion_and_as_large_as_the_sources")),
    Bug("learn the prompt", {"np.full(len(context), IGNORED_LABEL)": "np.array(context)"},
        unit("samples", "the_prompt_is_given_and_the_response_and_the_end_are_learned")),
    Bug("skip what was read ahead",
        {"first, later = self._ahead or (None,": "first, later = (None, self._ahead[1]) if self._ahead else (None,"},
        unit("updates", "a_look_ahead_consumes_nothing")),
    Bug("draw the same numbers for a sample in every epoch",
        {"with drawing(self._seed, update, number):": "with drawing(self._seed, 0, number):"},
        unit("updates", "a_sample_that_draws_random_numbers_draws_new_ones_each_epoch")),
    # Evaluation
    Bug("follow every set", {'if context.row["set"] == self._watch.name:': "if True:"},
        unit("watch", "only_the_watched_set_counts")),
    Bug("follow the first set", {"return config.watch or (HELD_OUT": "return (HELD_OUT"},
        unit("watch", "the_set_is_the_one_asked_for_or_the_held_out_one_or_the_first")),
    Bug("take an equal loss for a better one",
        {"self.best is None or loss < self.best": "self.best is None or loss <= self.best"},
        unit("watch", "the_lowest_loss_is_best_and_its_equal_is_not")),
    Bug("remember an evaluation out of turn",
        {"if step == 0 or (self._every is not None and step % self._every == 0):\n            self._state":
             "if True:\n            self._state"}, unit("watch", "the_last_evaluation_of_a_run_can_be_the_best_of_it")),
    Bug("draw from the run's random numbers", {"stack.enter_context(torch.random.fork_rng(devices))": "pass"},
        unit("evaluation", "two_evaluations_draw_the_same_and_leave_the_random_numbers_alone")),
    # Checkpoints
    Bug("keep one checkpoint more",
        {"if num_valid == keep_last:": "if keep_last and num_valid > keep_last:"}, unit("checkpoint", KEPT)),
    Bug("delete the best checkpoint",
        {"for name in (POINTER, BEST)]": "for name in (POINTER, POINTER)]"}, unit("checkpoint", KEPT)),
    Bug("count damaged checkpoints among the last", {"num_valid += self.damage(step, ranks) is None": "num_valid += 1"},
        unit("checkpoint", "only_whole_ones_are_counted_among_the_last_to_keep")),
    Bug("resume from beyond the pointer", {"if named is not None and step > named:": "if False:"},
        unit("checkpoint", "what_lies_beyond_the_pointer_is_never_taken")),
    Bug("write the state and no copy of it", {"states = staged(request.states)": "states = request.states"},
        unit("background", "what_is_written_is_the_state_of_its_step_though_updates_go_on")),
    Bug("try a checkpoint after every update", {"2 * self._retry_gap": "self._retry_gap"},
        unit("background", "what_cannot_be_written_is_warned_of_and_wanted_again")),
    Bug("export the weights and not their average",
        {"Checkpointed({**tensors, **rounded}": "Checkpointed({**rounded, **tensors}"},
        unit("export", "the_average_is_what_is_exported")),
    # Logs
    Bug("keep lines after the checkpoint", {'return row["step"] <= step': "return True"},
        "page/test_recording.py::test_cuts_are_cut_back_with_the_run"),
    Bug("count seconds from zero after a resume",
        {'max((row.get("seconds", 0.0) for row in rows), default=0.0)': "0.0"},
        unit("metrics", "seconds_go_on_where_the_kept_rows_end")),
    Bug("count padding twice", {"padding = [total - real_tokens for": "padding = [total for"},
        "page/test_recording.py::test_a_cut_has_samples_real_tokens_and_padding"),
    Bug("write metrics on every rank",
        {"context.folder, enabled=context.ranks.is_main, eval_every": "context.folder, enabled=True, eval_every"},
        of_trainer(TWO)),
    # Files that are damaged: the full tier has whole runs on them
    Bug("believe a table of tokens", {'sha256_of_file(folder / TABLE) != sealed["table_sha256"]': "False"},
        unit("cache", "an_entry_that_is_damaged_is_made_again_and_that_is_said")),
    Bug("believe a summary of tokens", {"check_seal(sealed)": "pass"},
        unit("cache", "an_entry_that_is_damaged_is_made_again_and_that_is_said")),
    Bug("name the place of samples in their fingerprint",
        {'"fingerprint": content.hexdigest()': '"fingerprint": content.hexdigest() + str(folder)'},
        unit("cache", "the_fingerprint_is_of_the_samples_and_not_of_where_they_were")),
    Bug("stop at an empty list of starts",
        {"with contextlib.suppress(NotAFileError, ValueError, RecursionError, KeyError, TypeError):": "if True:"},
        unit("starting", "a_damaged_list_of_starts_is_kept_aside")),
    Bug("leave a damaged log in its place",
        {"            aside = move_aside(self._file)": "            aside = self._file"},
        unit("starting", "broken_metrics_keep_their_other_rows")),
    Bug("keep the first of several rows",
        {'resumed_rows = [*{(row["step"], row.get("set")): row for row in resumed_rows}.values()]':
             'resumed_rows = [*{(row["step"], row.get("set")): row for row in reversed(resumed_rows)}.values()][::-1]'},
        unit("starting", "broken_metrics_keep_their_other_rows")),
    # Updates that are not finite
    Bug("leave buffers as a bad update left them",
        {"        for snapshot in self._kept:\n            snapshot.put_back()\n": ""},
        "elastic/test_nonfinite.py::test_buffers_have_seen_the_other_updates_only"),
)  # fmt: skip


def copy_tree(folder: Path) -> None:
    """Lay the tests, and what they read, beside a copy of the library."""
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in NAMED:
        (folder / name).symlink_to(ROOT / name)
    assets = Path("megabatch/train/report/assets")  # which `plant` leaves out
    (folder / assets).symlink_to(ROOT / assets)


def status_of(tests: Sequence[str], folder: Path) -> int:
    """Run tests in a fork, with the library of the folder; return pytest's status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    sys.path = [str(folder), *(each for each in sys.path if each not in ("", str(ROOT)))]
    os.environ["PYTHONPATH"] = str(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("megabatch", "tests")]:
        del sys.modules[name]
    import pytest

    try:
        os._exit(int(pytest.main([*OPTIONS, *(f"tests/{each}" for each in tests)])))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(70)


def are_passed(tests: Sequence[str], bug: Bug) -> bool:
    """Return True if all tests pass with the bug."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plant(bug, folder)
        copy_tree(folder)
        status = status_of(tests, folder)
        if status not in (0, 1):
            raise SystemExit(f"{bug.name}: pytest ended with {status}: {(folder / 'log.txt').read_text()[-2000:]}")
        return status == 0


def main() -> None:
    """Plant each bug, print a table and write it."""
    for module in ("torch", "transformers.models.llama.modeling_llama"):
        import_module(module)  # once, and not in every child

    wanted = [bug for bug in EXTRA_BUGS if not sys.argv[1:] or any(word in bug.name for word in sys.argv[1:])]
    nothing = Bug("nothing", dict.fromkeys(wanted[0].texts, next(iter(wanted[0].texts))), "")
    assert are_passed(sorted({bug.check for bug in wanted}), nothing), "a test fails without a bug"
    found: dict[str, str] = {}
    for bug in wanted:
        found[bug.name] = "missed" if are_passed([bug.check], bug) else "caught"
        print(f"{found[bug.name]:8}{bug.name:50}{bug.check}", flush=True)
    before = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    told = {bug.name: (before | found)[bug.name] for bug in EXTRA_BUGS if bug.name in before | found}
    RESULT.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
