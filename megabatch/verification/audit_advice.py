"""Advice of an audit: one change, as a line and as a diff for the loop and the trainer that were seen."""

from dataclasses import dataclass

from megabatch.verification.audit_report import MEANS, MEGABATCH, Audit, largest_microbatch

NOT_COMPILED = "TORCH_COMPILE_DISABLE=1"
MIXIN = """\
+from megabatch.integrations.transformers import MegabatchTrainer
+
+class Exact(MegabatchTrainer, {trainer}):
+    pass
+
-trainer = {trainer}(...)
+trainer = Exact(..., max_microbatch_tokens={limit})"""
SENTENCE_TRANSFORMERS = """\
+from megabatch.integrations.sentence_transformers import MegabatchSentenceTransformerTrainer
-trainer = {trainer}(...)
+trainer = MegabatchSentenceTransformerTrainer(...)"""
ACCELERATE = """\
+from megabatch import losses
+from megabatch.integrations.accelerate import learner
-model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
+model, optimizer = accelerator.prepare(model, optimizer)
+exact = learner(accelerator, model, optimizer, max_norm=1.0, max_microbatch_tokens={limit})
 for batch in loader:  # a list of the samples of an update: UpdateSampler, collate_fn=list
-    with accelerator.accumulate(model):
-        accelerator.backward(model(**batch).loss)
-        optimizer.step()
-        optimizer.zero_grad()
+    exact.forward_backward(batch, losses.next_token)
+    exact.optim_step()"""
LIGHTNING = """\
+from megabatch import losses
+from megabatch.integrations.lightning import ExactUpdates
-class {trainer}(LightningModule):
+class {trainer}(ExactUpdates, LightningModule):
     def __init__(self):
-        super().__init__()
+        super().__init__(losses.next_token, batches_per_update={number}, max_microbatch_tokens={limit})
-    def training_step(self, batch, batch_idx): ...
-loader = DataLoader(data, collate_fn=pad)
+loader = DataLoader(data, collate_fn=list)
-Trainer(accumulate_grad_batches={number})
+Trainer()"""
TORCHTITAN = """\
-from torchtitan.trainer import Trainer
+from megabatch.integrations.torchtitan import ExactTrainer as Trainer"""
LOOP = """\
+from megabatch import GradientAccumulator
+gradient = GradientAccumulator(model)
 for index in range({number}):
-    loss = loss_of(model, batch) / {number}
-    loss.backward()
+    with gradient.microbatch(index, of={number}, mean_over=(labels != -100).sum()) as part:
+        loss = loss_of(model, batch)  # as it was, not divided
+        part.scale(loss).backward()
-clip_grad_norm_(model.parameters(), max_norm)
+gradient.finalize(max_norm=max_norm)
 {step}"""
# By library, its diff, and the words for the line.
DIFFS = {
    "TRL": (MIXIN, "class Exact(MegabatchTrainer, {trainer}): pass"),
    "Trainer": (MIXIN, "class Exact(MegabatchTrainer, {trainer}): pass"),
    "sentence-transformers": (SENTENCE_TRANSFORMERS, "MegabatchSentenceTransformerTrainer in place of {trainer}"),
    "Accelerate": (ACCELERATE, "megabatch.integrations.accelerate.learner(accelerator, model, optimizer)"),
    "Lightning": (LIGHTNING, "class {trainer}(ExactUpdates, LightningModule)"),
    "torchtitan": (TORCHTITAN, "megabatch.integrations.torchtitan.ExactTrainer in place of Trainer"),
    "": (LOOP, "gradient.microbatch(index, of={number}, mean_over=targets) around forward and backward"),
}
TRAINERS_PAGE = "docs/integrations.md"


@dataclass
class Advice:
    """One change, as a line and as the lines of a diff, if there is a change to show."""

    text: str
    diff: str = ""


def advise(audit: Audit) -> Advice:
    """Return the change that makes every token weigh the same, or the step that tells more."""
    if not audit.updates:
        return Advice(f"{NOT_COMPILED} megabatch audit {_command(audit)} if torch.compile runs the whole step")
    if audit.ok:
        return Advice("nothing; the gradient is exact")
    is_unknown = not audit.is_counted or not all(update.weights for update in audit.updates)
    if is_unknown and any(update.is_compiled for update in audit.updates):
        return Advice(f"the loss is inside torch.compile; run {NOT_COMPILED} megabatch audit {_command(audit)}")
    if audit.loop.library == MEGABATCH:
        return Advice("none of the loop, which is megabatch's; see the lines below")
    if audit.problems:
        return _change(audit, "every microbatch would count once with")
    if audit.is_signed:
        page = f"; {TRAINERS_PAGE} lists which losses of TRL are exact" * (audit.loop.library == "TRL")
        return Advice(f"cannot tell from weights{page}; megabatch.verify compares your loss with and without a split")
    if is_unknown:
        return Advice("cannot tell; megabatch.verify compares your loss with and without a split")
    if audit.may_be_mean_of_means:
        return _change(audit, "nothing if you mean one weight for each sample; for one of each token")
    if not audit.is_length_known and audit.is_near(*MEANS.values()):
        return Advice("cannot tell; the direction is exact, and the length is not known")
    return _change(audit, "every token would weigh 1.00 with")


def _command(audit: Audit) -> str:
    return f"-- {audit.command or 'python train.py'}"


def _change(audit: Audit, reason: str) -> Advice:
    loop, first = audit.loop, audit.updates[0]
    if loop.library not in DIFFS:
        return Advice(f"{reason}: what docs/coming-from.md shows for {loop.library}")
    diff, line = DIFFS[loop.library]
    words = {
        "trainer": loop.trainer or "Trainer",
        "number": max(1, len(first.microbatches) // first.world),
        # The padding that the audit promises is that of microbatches no larger than the largest of this loop.
        "limit": largest_microbatch(audit.updates) or 8192,
        "step": loop.code or "optimizer.step()",
    }
    place = f"--- {loop.file}, line {loop.line}\n" if loop.file else ""
    return Advice(f"{reason}: {line.format(**words)}", place + diff.format(**words))
