// The page: from its data to what stands in it, once, or again and again where a run is watched.

const SECONDS_BETWEEN = 1;
const parts = { cuts: [], timelines: [] };
let shown = null;  // of the text sections, as they stand

function fill(id, contents) {
  const section = document.getElementById(id);
  section.replaceChildren(section.querySelector("h2"), ...contents);
  section.hidden = !contents.length;
}

function showTexts(runs, comparison) {
  const heading = (run) => (runs.length > 1 ? run.label : "");
  const now = JSON.stringify([runs.map((run) => [run.plan, run.skipped])]);
  if (now !== shown) {
    fill("plans", runs.flatMap((run) => planOf(run, heading(run))));
    fill("skipped", runs.flatMap((run) => skippedOf(run, heading(run))));
    if (comparison) fill("comparison", [element("pre", { tabindex: "0" }, comparison)]);
    shown = now;
  }
  const numbers = document.getElementById("numbers");
  if (!numbers.querySelector("details[open]") && !numbers.contains(document.activeElement)) {
    fill("numbers", runs.flatMap((run) => numbersOf(run, heading(run))));
  }
}

function showParts(name, Part, runs) {
  runs.forEach((run, place) => {
    parts[name][place] ??= new Part(document.getElementById(name), runs.length > 1 ? run.label : "");
    parts[name][place].news(run);
  });
}

function label(runs) {
  const same = new Set(runs.map((run) => run.name)).size < runs.length;
  runs.forEach((run, place) => { run.label = same ? `${run.name} (${place + 1})` : run.name; });
}

function show({ runs, comparison }) {
  label(runs);
  document.querySelector("h1").textContent = runs.map((run) => run.label).join(" and ");
  document.getElementById("status").textContent = runs.map((run) => (runs.length > 1 ? `${run.label}: ` : "") + statusText(run)).join(" — ");
  showFacts(runs);
  showCharts(runs);
  showParts("cuts", Cuts, runs);
  document.getElementById("cuts").hidden = runs.every((run) => !run.cuts.step.length);
  showParts("timelines", Timelines, runs);
  showTexts(runs, comparison);
}

// A run that is watched: what is new is asked of whoever serves this page, until it answers no more.
async function follow(mark) {
  const status = document.getElementById("status");
  status.classList.add("live");
  for (let misses = 0; misses < 3;) {
    await new Promise((done) => setTimeout(done, 1000 * SECONDS_BETWEEN));
    try {
      const answer = await fetch(`data?seen=${encodeURIComponent(mark)}`, { cache: "no-store" });
      misses = 0;
      if (answer.status !== 200) continue;
      const news = await answer.json();
      mark = news.mark;
      show(news);
    } catch (problem) {
      misses += 1;
    }
  }
  status.classList.add("ended");
  status.textContent += " · nobody serves this page any more";
}

const data = JSON.parse(document.getElementById("data").textContent);
show(data);
document.documentElement.dataset.ready = "true";
if (data.is_live) follow(data.mark);
