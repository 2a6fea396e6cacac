// The run in words and numbers: what stands above the curves, its plan, what it left out, and tables.

const MOST_ROWS = 400;  // of a table; of more, every so manieth and the last

const gibText = (gib) => `${gib.toPrecision(3)} GiB`;

function factsOf(run) {
  const { updates, sets, memory, model, settings } = run;
  const facts = [];
  if (model.parameters) facts.push(["parameters", model.parameters, model.name]);
  if (settings.global_batch_size) facts.push(["samples an update", settings.global_batch_size, ""]);
  if (settings.lr) facts.push(["learning rate", numberText(+settings.lr), settings.name || ""]);
  facts.push(["updates", whole.format(lastOf(updates.step) || 0), run.planned ? `of ${whole.format(run.planned)}` : ""]);
  facts.push(["loss of the last update", numberText(lastOf(updates.loss)), ""]);
  for (const [name, set] of Object.entries(sets).slice(0, 3)) {
    const there = (set.loss || []).filter((each) => each != null);
    if (!there.length) continue;
    const best = there.reduce((a, b) => Math.min(a, b));
    facts.push([`loss, ${name}`, numberText(there.at(-1)), best < there.at(-1) ? `lowest ${numberText(best)} at ${set.step[set.loss.indexOf(best)]}` : ""]);
  }
  const unit = run.counts_tokens ? "tokens" : "samples";
  facts.push([run.counts_tokens ? "real tokens per second" : "samples per second", numberText(median(updates[`${unit}_per_second`] || [])), "median"]);
  if (Number(run.start.num_ranks) > 1 && run.counts_tokens) facts.push(["tokens per second and device", numberText(median(updates.tokens_per_second_per_device || [])), "median"]);
  if (updates.mfu) facts.push(["MFU", percentText(median(updates.mfu)), model.peak]);
  if (run.counts_tokens) facts.push(["padding", updates.padding ? percentText(median(updates.padding)) : "–", "median"]);
  if (updates.slowest_over_mean) {
    const measured = updates.measured_slowest_over_mean ? `, ${numberText(median(updates.measured_slowest_over_mean))} measured` : "";
    facts.push(["busiest rank over the mean", numberText(median(updates.slowest_over_mean)), `predicted${measured}, medians`]);
  }
  if (run.seconds != null) facts.push(["training time", durationText(run.seconds), leftText(run)]);
  facts.push(["most memory of a rank", updates.memory_gib ? gibText(lastOf(updates.memory_gib)) : "–",
    memory.peak_gib ? `update ${memory.step}: ${gibText(memory.peak_gib)} of ${gibText(memory.predicted_peak_gib)} predicted` : ""]);
  return facts;
}

function leftText(run) {
  const left = (run.planned || 0) - (lastOf(run.updates.step) || 0);
  return run.state === "running" && left > 0 && run.seconds_per_update ? `about ${durationText(left * run.seconds_per_update)} left` : "";
}

function showFacts(run) {
  document.getElementById("facts").replaceChildren(...factsOf(run).map(([name, value, more]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value, " ", element("small", {}, more)))));
}

function statusText(run) {
  const made = lastOf(run.updates.step) || 0;
  const which = Object.entries(run.start).map(([name, value]) => `${name.replace("num_ranks", "ranks").replace("devices", "on")} ${value}`).join(" · ");
  const silent = { running: "running", ended: "all updates were made" }[run.state] || `${run.state} without a word`;
  const how = run.state !== "running" && run.ended ? run.ended : made ? silent : "no update yet";
  return [how, run.started && `started ${dateText(run.started)}`, which].filter(Boolean).join(" · ");
}

function thinnedRows(columns, keys) {
  const number = columns.step?.length || 0, every = Math.max(1, Math.ceil(number / MOST_ROWS));
  const places = Array.from({ length: number }, (_, place) => place).filter((place) => place % every === 0 || place === number - 1);
  return places.map((place) => keys.map((key) => columns[key][place]));
}

function numbersOf(run) {
  const tables = [["Updates", run.updates], ...Object.entries(run.sets).map(([name, set]) => [`Held out: ${name}`, set])]
    .filter(([, columns]) => columns.step?.length);
  return tables.map(([name, columns]) => {
    const keys = Object.keys(columns), every = Math.ceil(columns.step.length / MOST_ROWS);
    return tableOf(name, keys.map((key) => key.replaceAll("_", " ")), () => thinnedRows(columns, keys), every > 1 ? `, one in ${every} and the last` : "");
  });
}

function skippedOf(run) {
  if (!run.skipped.length) return [];
  const rows = run.skipped.map((each) => [each.step, each.num_samples, each.reason,
    each.samples.join(", ") + (each.num_samples > each.samples.length ? ", ..." : "")]);
  const table = tableElement("Skipped updates that were not finite, the last first; skipped.jsonl names every sample.", ["update", "samples", "~reason", "~which samples"], rows);
  return [element("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "samples left out" }, table)];
}

const CHOSEN = /max_microbatch_tokens|micro_batch_size|the bound|sync |wrapper |gradient accumulation/;

function planOf(run) {
  const lines = run.plan.map((line) => element("li", { class: CHOSEN.test(line) ? "chosen" : null }, line));
  const none = element("p", { class: "note" }, "The run has written no plan.txt.");
  const note = element("p", { class: "hint" }, "What was derived before the first update of the last start. Marked: what was chosen, and why.");
  return lines.length ? [note, element("ul", { class: "lines" }, ...lines)] : [none];
}

// Several runs in a table, the best marked, and below it what else is to be known.
function comparisonOf({ head, rows, best, notes }) {
  const classOf = (name) => (name.startsWith(">") ? null : "words");
  const table = element("table", {}, element("thead", {}, element("tr", {}, element("th", {}), ...head.map((name) => element("th", { scope: "col", class: classOf(name) }, name.replace(">", ""))))),
    element("tbody", {}, ...rows.map((row, place) => element("tr", { class: place === best ? "best" : null }, keyCell(place), ...row.map((cell, column) => element("td", { class: column ? classOf(head[column]) : "name" }, cell))))));
  return [element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "the runs" }, table),
    ...notes.map((line) => element("p", {}, line))];
}

// The color of a run's curves.
function keyCell(place) {
  const key = element("span", { class: `key line${lookOf(place).dashed ? " dashed" : ""}` }, element("i"));
  key.style.setProperty("--color", `var(${lookOf(place).hue})`);
  return element("td", {}, key);
}
