// The page: from its data to what stands in it, once, or again and again where a run is watched.

const SECONDS_BETWEEN = 1;
const parts = {};
let shown = null;  // of the text sections, as they stand

function fill(id, contents) {
  const section = document.getElementById(id);
  section.replaceChildren(section.querySelector("h2"), ...contents);
  section.hidden = !contents.length;
}

function showTexts(run) {
  const now = JSON.stringify([run.plan, run.skipped]);
  if (now !== shown) {
    fill("plans", planOf(run));
    fill("skipped", skippedOf(run));
    shown = now;
  }
  const numbers = document.getElementById("numbers");
  if (!numbers.querySelector("details[open]") && !numbers.contains(document.activeElement)) fill("numbers", numbersOf(run));
}

function showPart(name, Part, run) {
  parts[name] ??= new Part(document.getElementById(name));
  parts[name].news(run);
}

function showOne(run) {
  document.querySelector("h1").textContent = run.name;
  document.getElementById("status").textContent = statusText(run);
  showFacts(run);
  showCharts([run]);
  showPart("cuts", Cuts, run);
  document.getElementById("cuts").hidden = !run.cuts.step.length;
  showPart("timelines", Timelines, run);
  showTexts(run);
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
