// Curves over the updates or the training time, drawn by uPlot; what they say stands beside their names.

const RUN_COLORS = ["--accent", "--warm", "--leaf", "--plum", "--rose", "--teal"];  // further runs are dashed
const SET_COLORS = ["--warm", "--leaf", "--plum", "--teal", "--rose"];
const CURVES = [
  ["reward", "mean reward of rollouts"],
  ["grad_norm", "gradient norm before clipping"], ["lr", "learning rate"],
  ["tokens_per_second", "real tokens per second"], ["samples_per_second", "samples per second"],
  ["mfu", "MFU, share of the device's peak"], ["memory_gib", "most memory of a rank (GiB)"], ["padding", "padding, share of computed tokens"],
  ["slowest_over_mean", "slowest rank over the mean, predicted"],
  ["measured_slowest_over_mean", "slowest rank over the mean, measured"],
];
const MANY = 200;    // updates that are a line of their own; more are drawn faintly, with their running mean
const WINDOWS = 60;  // over the whole, each as wide as what a running mean takes in
const charts = [];
const axes = document.getElementById("axes");
let axis = "step", drawnRuns = [];  // the column along which is drawn: "step" or "seconds"
const styles = getComputedStyle(document.documentElement);
const color = (name) => styles.getPropertyValue(name).trim();

function runningMean(values, window) {
  const means = [];
  let total = 0, number = 0;
  values.forEach((value, place) => {
    if (value != null) { total += value; number += 1; }
    const left = values[place - window];
    if (left != null) { total -= left; number -= 1; }
    means.push(value == null || !number ? null : total / number);
  });
  return means;
}

// A run's column as a line, or as a faint line under its running mean; beside other runs the mean alone.
function curve(run, key, name, look, isAlone) {
  const x = run.updates[axis] || [], y = run.updates[key];
  if (!y || !y.some((each) => each != null)) return [];
  if (x.length <= MANY) return [{ name, x, y, ...look }];
  const mean = runningMean(y, Math.max(2, Math.floor(x.length / WINDOWS)));
  if (!isAlone) return [{ name, x, y: mean, ...look }];
  return [{ name, x, y, ...look, faint: true }, { name: `${name ? `${name}, ` : ""}running mean`, x, y: mean, ...look }];
}

// A number that few updates have, as points and the line between them.
function sparse(run, key, name, look) {
  const y = run.updates[key] || [], there = y.flatMap((value, place) => (value == null ? [] : [place]));
  return there.length ? [{ name, x: there.map((place) => run.updates[axis][place]), y: there.map((place) => y[place]), ...look, points: true }] : [];
}

const lookOf = (number) => ({ hue: RUN_COLORS[number % RUN_COLORS.length], dashed: number % (2 * RUN_COLORS.length) >= RUN_COLORS.length });
const setNames = (runs) => [...new Set(runs.flatMap((run) => Object.keys(run.sets)))];

// A number of the evaluated sets of a run, or of one set of several runs.
function setCurves(runs, key, names) {
  return names.flatMap((name, place) => runs.flatMap((run, number) => (run.sets[name]?.[key] ? [{
    name: runs.length > 1 ? run.name : name, x: run.sets[name][axis], y: run.sets[name][key], points: true,
    ...(runs.length > 1 ? lookOf(number) : { hue: SET_COLORS[place % SET_COLORS.length] }),
  }] : [])));
}

// The losses: those of one run in one chart; of several runs a chart for each set, and one for training.
function lossSpecs(runs, of) {
  const title = runs.every((run) => run.is_in_nats) ? "loss per target token (nats)" : "loss", names = setNames(runs);
  if (runs.length === 1) {
    return [{ key: "loss", wide: true, title, series: [...curve(runs[0], "loss", "update", lookOf(0), true), ...setCurves(runs, "loss", names)] }];
  }
  return [...names.map((name) => ({ key: `set-${name}-loss`, wide: true, title: `${title}, ${name}`, series: setCurves(runs, "loss", [name]) })),
    { key: "loss", wide: true, title: `${title}, training`, series: of("loss") }];
}

// Every chart that there is something to draw of.
function specsOf(runs) {
  const named = (run) => (runs.length > 1 ? run.name : ""), isAlone = runs.length === 1;
  const of = (key) => runs.flatMap((run, number) => curve(run, key, named(run), lookOf(number), isAlone));
  const specs = lossSpecs(runs, of);
  const others = [...new Set(runs.flatMap((run) => Object.values(run.sets).flatMap(Object.keys)))]
    .filter((key) => !["step", "seconds", "loss", "perplexity", "num_target_tokens", "num_samples", "weight"].includes(key));
  for (const key of others) {
    const groups = isAlone ? [setNames(runs)] : setNames(runs).map((name) => [name]);
    for (const names of groups) specs.push({ key: `set-${isAlone ? "" : `${names[0]}-`}${key}`, title: `${key}, ${isAlone ? "held out" : names[0]}`, series: setCurves(runs, key, names) });
  }
  for (const [key, title] of CURVES) specs.push({ key, title, series: of(key), memory: key === "memory_gib" && isAlone && levelOf(runs[0]) });
  specs.push({ key: "noise_scale_samples", title: "samples up to which gradients agree (noise scale)",
    series: runs.flatMap((run, number) => sparse(run, "noise_scale_samples", named(run), lookOf(number))) });
  const terms = [...new Set(runs.flatMap((run) => Object.keys(run.updates)))].filter((key) => key.startsWith("loss_"));
  for (const key of terms) specs.push({ key, title: `loss term ${key.slice(5)}`, series: of(key) });
  const marks = isAlone ? marksOf(runs[0]) : [];
  return specs.filter((spec) => spec.key === "loss" || spec.series.length).map((spec) => ({ ...spec, marks }));
}

// The predicted and the measured peak of an update, and its place on the axis.
function levelOf({ memory, updates }) {
  const place = (updates.step || []).indexOf(memory.step);
  return memory.predicted_peak_gib && place >= 0 && { ...memory, at: updates[axis][place] };
}

// Where the run was resumed, and where epochs after the first begin: their updates and their places on the axis.
function marksOf(run) {
  const steps = run.updates.step || [], epochs = run.updates.epoch || [], last = Math.ceil(lastOf(epochs) || 0);
  const mark = (place, text) => ({ text, step: steps[place], at: run.updates[axis][place] });
  const resumed = run.resumes.map((step) => mark(Math.max(0, steps.findLastIndex((each) => each <= step)), "resumed"));
  const begun = Array.from({ length: Math.max(0, last - 1) }, (_, number) => number + 1)
    .map((epoch) => mark(epochs.findIndex((each) => each != null && each >= epoch), `epoch ${epoch + 1}`)).filter((each) => each.step != null);
  return [...resumed, ...begun].filter((each) => each.at != null);
}

function marksText(marks) {
  const steps = (isResume) => marks.filter((each) => (each.text === "resumed") === isResume).map((each) => each.step);
  const some = (list) => (list.length > 12 ? `${list.slice(0, 12).join(", ")}, ...` : list.join(", "));
  const [resumes, epochs] = [steps(true), steps(false)];
  return [resumes.length ? `resumed after update ${some(resumes)}` : "", epochs.length ? `new epochs after update ${some(epochs)}` : ""].filter(Boolean).join("; ");
}

function drawMarks(u, marks, isWide) {
  const { ctx, bbox } = u, ratio = devicePixelRatio;
  let free = -Infinity;
  ctx.save();
  ctx.font = `${11 * ratio}px system-ui, sans-serif`;
  for (const { at, text } of [...marks].sort((a, b) => a.at - b.at)) {
    const x = Math.round(u.valToPos(at, "x", true)), hue = color(text === "resumed" ? "--rose" : "--muted");
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    Object.assign(ctx, { strokeStyle: hue, fillStyle: hue, lineWidth: ratio, textBaseline: "top", textAlign: "left" });
    ctx.setLineDash([3 * ratio, 4 * ratio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    if (!isWide || x < free) continue;
    ctx.fillText(text, x + 4 * ratio, bbox.top);
    free = x + 12 * ratio + ctx.measureText(text).width;
  }
  ctx.restore();
}

// What was predicted for an update as a level, and what it came to as a point.
function withLevel(spec) {
  if (!spec.memory) return spec.series;
  const all = spec.series.flatMap((each) => [each.x[0], each.x.at(-1)]), y = spec.memory.predicted_peak_gib;
  const x = [...new Set([Math.min(...all), Math.max(...all)])];
  return [...spec.series, { name: "predicted peak of an update", x, y: x.map(() => y), hue: "--muted", dashed: true },
    { name: `measured in update ${spec.memory.step}`, x: [spec.memory.at], y: [spec.memory.peak_gib], hue: "--warm", points: true }];
}

const dataOf = (series) => (series.length ? uPlot.join(series.map((each) => [each.x, each.y])) : [[], []]);

// From zero where nothing is below it; a loss, whose small steps count, only where it comes near zero itself.
function rangeOf(isLoss) {
  return (u, low, high) => {
    if (low == null || high == null) return [0, 1];
    const room = (high - low || Math.abs(high) || 1) * 0.06, isNear = !isLoss || low < 0.6 * high;
    return [low >= 0 && isNear ? 0 : low - room, high + room];
  };
}

function describe(spec, series) {
  if (!series.length) return `${spec.title}: nothing was measured yet`;
  return `${spec.title}, by ${axis === "step" ? "update" : "training time"}. ` + series.map(({ name, x, y }) => {
    const there = y.filter((each) => each != null);
    if (!there.length) return `${name}: no finite number`;
    const low = there.reduce((a, b) => Math.min(a, b)), high = there.reduce((a, b) => Math.max(a, b));
    return `${name || "value"}: ${numberText(there[0])} first, ${numberText(there.at(-1))} last, lowest ${numberText(low)}, ` +
      `highest ${numberText(high)}, ${axis === "step" ? `updates ${x[0]} to ${x.at(-1)}` : `${durationText(x[0])} to ${durationText(x.at(-1))}`}`;
  }).join("; ");
}

const whereText = (x) => (axis === "step" ? `update ${x}` : durationText(x));

function optionsOf(series, plot, shown, marksNow) {
  const look = { stroke: () => color("--muted"), grid: { stroke: () => color("--line"), width: 1 }, ticks: { show: false },
    font: "12px system-ui, sans-serif" };
  const lines = series.map((each) => ({
    stroke: () => color(each.hue), width: each.faint ? 1 : 1.8, alpha: each.faint ? 0.3 : 1, dash: each.dashed ? [6, 4] : undefined,
    points: { show: (Boolean(each.points) && each.x.length < MANY) || each.x.length === 1, size: 6, fill: () => color(each.hue), stroke: () => color(each.hue) },
  }));
  const steps = [1, 2, 5].flatMap((each) => [0, 1, 2, 3, 4, 5, 6].map((power) => each * 10 ** power)).sort((a, b) => a - b);
  const times = [1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 432000];
  return {
    width: Math.max(plot.clientWidth, 200), height: plot.dataset.height * 1, legend: { show: false },
    cursor: { sync: { key: "updates" }, drag: { x: true, y: false }, y: false, points: { size: 7 } },
    scales: { x: { time: false }, y: { range: rangeOf(plot.dataset.of === "loss") } },
    axes: [{ ...look, size: 28, incrs: axis === "step" ? steps : times, space: axis === "step" ? 50 : 80, values: (u, splits) => splits.map(axis === "step" ? tickText : timeTick) },
      { ...look, size: 54, values: (u, splits) => splits.map(tickText) }],
    series: [{}, ...(lines.length ? lines : [{ show: false }])],
    hooks: { draw: [(u) => drawMarks(u, marksNow(), plot.dataset.height > 200)], setCursor: [(u) => shown(u.cursor.idx)] },
  };
}

class Chart {
  constructor(spec, parent) {
    this.caption = element("figcaption");
    this.plot = element("div", { class: "plot", tabindex: "0", role: "img", "data-height": spec.wide ? 300 : 190, "data-of": spec.key });
    this.figure = element("figure", { class: spec.wide ? "wide" : null, "data-key": spec.key }, this.caption, this.plot);
    parent.append(this.figure);
    this.take(spec);
    this.u = new uPlot(optionsOf(this.series, this.plot, (index) => this.say(index), () => this.spec.marks), dataOf(this.series), this.plot);
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.plot.addEventListener("blur", () => this.u.setCursor({ left: -10, top: -10 }));
    new ResizeObserver(() => this.resize()).observe(this.plot);
  }
  take(spec) {
    this.spec = spec;
    this.series = withLevel(spec);
    this.plot.setAttribute("aria-label", describe(spec, this.series));
    this.plot.dataset.points = Math.max(0, ...this.series.map((each) => each.x.length));
    this.say(null);
  }
  news(spec) {
    const all = this.u.data[0], isZoomed = all.length > 1 && (this.u.scales.x.min > all[0] || this.u.scales.x.max < all.at(-1));
    this.take(spec);
    this.u.setData(dataOf(this.series), !isZoomed);
    if (isZoomed) this.u.redraw();
  }
  resize() {
    const width = this.plot.clientWidth;
    if (width > 0 && width !== this.u.width) this.u.setSize({ width, height: this.u.height });
  }
  // What stood at the cursor's update, or at the last one: of what is not measured at each, the one before.
  values(index) {
    return this.series.map((each, place) => {
      if (index == null) return lastOf(each.y);
      for (let at = index; at >= 0; at -= 1) if (this.u.data[place + 1][at] != null) return this.u.data[place + 1][at];
      return null;
    });
  }
  say(index) {
    const values = this.values(index ?? null);
    const keys = this.series.map((each, place) => {
      const key = element("span", { class: `key line${each.dashed ? " dashed" : ""}` }, element("i"), each.name ? `${each.name} ` : "", element("b", {}, numberText(values[place])));
      key.style.setProperty("--color", `var(${each.hue})`);
      return key;
    }).filter((_, place) => !this.series[place].faint || index != null);
    const where = index == null ? [] : [whereText(this.u.data[0][index])];
    const nothing = this.series.length ? [] : ["nothing was measured yet"];
    this.caption.replaceChildren(element("b", {}, this.spec.title), ...keys, ...where, ...nothing);
  }
  key(event) {
    const x = this.u.data[0], last = x.length - 1, here = this.u.cursor.idx ?? last;
    const far = event.shiftKey ? Math.max(1, Math.round(last / 20)) : 1;
    const to = { ArrowLeft: here - far, ArrowRight: here + far, Home: 0, End: last }[event.key];
    if (to != null && last >= 0) this.moveTo(Math.min(Math.max(to, 0), last));
    else if (event.key === "+" || event.key === "-") this.zoom(x[here], event.key === "+" ? 0.5 : 2);
    else if (event.key === "Escape") eachChart((chart) => chart.u.setScale("x", { min: chart.u.data[0][0], max: chart.u.data[0].at(-1) }));
    else return;
    event.preventDefault();
  }
  moveTo(index) {
    this.u.setCursor({ left: this.u.valToPos(this.u.data[0][index], "x"), top: 10 });
    const words = this.values(index).map((value, place) => `${this.series[place].name} ${numberText(value)}`);
    document.getElementById("spoken").textContent = `${whereText(this.u.data[0][index])}: ${words.join(", ")}`;
  }
  zoom(middle, factor) {
    const all = this.u.data[0], { min, max } = this.u.scales.x, half = Math.max(1, ((max - min) * factor) / 2);
    const range = { min: Math.max(all[0], middle - half), max: Math.min(all.at(-1), middle + half) };
    eachChart((chart) => chart.u.setScale("x", range));
  }
}

function eachChart(act) {
  charts.forEach((chart) => { if (chart.u.data[0].length > 1) act(chart); });
}

// The same charts with new numbers; others where a set or a number has come that was not there.
function showCharts(runs) {
  drawnRuns = runs;
  const isTimed = (columns) => Boolean(columns.seconds) && !columns.seconds.includes(null);
  const hasTime = runs.every((run) => [run.updates, ...Object.values(run.sets)].every((columns) => !columns.step?.length || isTimed(columns)));
  if (!hasTime) axis = "step";
  axes.hidden = !hasTime || runs.every((run) => !run.updates.step?.length);
  for (const button of axes.querySelectorAll("button")) button.setAttribute("aria-pressed", button.dataset.axis === axis);
  const words = runs.length === 1 ? marksText(marksOf(runs[0])) : "", marks = document.getElementById("marks");
  marks.textContent = words && `Dashed: ${words}.`;
  marks.hidden = !words;
  const specs = specsOf(runs), parent = document.querySelector("#curves .grid");
  const shapeOf = (spec) => JSON.stringify([axis, spec.key, spec.title, withLevel(spec).map((each) => [each.name, each.faint, each.x.length === 1])]);
  if (charts.length === specs.length && charts.every((chart, place) => shapeOf(chart.spec) === shapeOf(specs[place]))) {
    charts.forEach((chart, place) => chart.news(specs[place]));
    return;
  }
  charts.splice(0).forEach((chart) => { chart.u.destroy(); chart.figure.remove(); });
  specs.forEach((spec) => charts.push(new Chart(spec, parent)));
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((chart) => chart.u.redraw(false)));
axes.addEventListener("click", (event) => {
  if (!event.target.dataset.axis) return;
  axis = event.target.dataset.axis;
  showCharts(drawnRuns);
});
