// The page: from its data to what stands in it. The page of a run that goes on reloads itself.

const SECONDS_UNTIL_SILENT = 600;

function fill(id, contents) {
  const section = document.getElementById(id);
  section.replaceChildren(section.querySelector("h2"), ...contents);
  section.hidden = !contents.length;
}

function showOne(run) {
  document.querySelector("h1").textContent = run.name;
  document.getElementById("status").textContent = statusText(run);
  showFacts(run);
  showCharts([run]);
  new Cuts(document.getElementById("cuts")).news(run);
  document.getElementById("cuts").hidden = !run.cuts.step.length;
  new Timelines(document.getElementById("timelines")).news(run);
  fill("plans", planOf(run));
  fill("skipped", skippedOf(run));
  fill("numbers", numbersOf(run));
}

// Several runs: their table and their curves. The rest is on the page of each.
function showSeveral(runs, comparison) {
  document.querySelector("h1").textContent = runs.length > 4 ? countText(runs.length, "run") : runs.map((run) => run.name).join(", ");
  fill("comparison", comparisonOf(comparison));
  showCharts(runs);
  for (const id of ["facts", "status", "cuts", "timelines", "plans", "numbers"]) document.getElementById(id).hidden = true;
}

function show({ runs, comparison }) {
  if (comparison) showSeveral(runs, comparison);
  else showOne(runs[0]);
}

// A run that goes on writes this file again, and the page waits while a person uses a control of it.
function follow({ written, reload_seconds }) {
  const status = document.getElementById("status");
  if (Date.now() / 1000 - written > SECONDS_UNTIL_SILENT) {
    status.textContent += ` · this page was last written ${dateText(new Date(1000 * written).toISOString())}`;
    return;
  }
  status.classList.add("live");
  setInterval(() => {
    if (document.activeElement === document.body) location.reload();
  }, 1000 * reload_seconds);
}

const data = JSON.parse(document.getElementById("data").textContent);
show(data);
document.documentElement.dataset.ready = "true";
if (data.reload_seconds) follow(data);
