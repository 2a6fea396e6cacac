// When one update went forward and backward and waited, a lane for each rank.

const KINDS = {
  forward: ["forward", "--accent-soft"], backward: ["backward", "--accent"],
  reduce: ["reduce, norm and clip", "--warm"], step: ["step of the optimizer", "--leaf"],
  "dummy microbatch": ["dummy microbatch", "--plum"], rest: ["further microbatches", "--muted"], idle: ["idle", "--quiet"],
};
const nameOf = (kind, recorded) => (kind === "reduce" && recorded.num_ranks === 1 ? "norm and clip" : (KINDS[kind] || [kind])[0]);
const LANES = { left: 58, foot: 26, high: 26, low: 10, few: 16 };

// Milliseconds of each kind, the mean over the ranks.
function meansOf(recorded) {
  const means = {};
  for (const { kinds, ms } of recorded.ranks) {
    kinds.forEach((kind, place) => { means[kind] = (means[kind] || 0) + (ms[place + 1] - ms[place]) / recorded.ranks.length; });
  }
  return means;
}

const msText = (ms) => numberText(+ms.toPrecision(3));
const endOf = (recorded) => Math.max(0, ...recorded.ranks.map((rank) => rank.ms.at(-1)));

function timelineText(recorded) {
  const means = meansOf(recorded), total = sum(Object.values(means)) || 1;
  const parts = Object.keys(KINDS).filter((kind) => means[kind]).map((kind) => `${nameOf(kind, recorded)} ${percentText(means[kind] / total)}`);
  return `update ${recorded.step}: ${msText(endOf(recorded))} ms on ${countText(recorded.num_ranks, "rank")} (${recorded.device}); ${parts.join(", ")}`;
}

function drawLanes(recorded, room) {
  const ranks = recorded.ranks, lane = ranks.length > LANES.few ? LANES.low : LANES.high, each = lane + (lane < 12 ? 2 : 4);
  const left = ranks.length > 1 ? LANES.left : 2, height = each * ranks.length + LANES.foot;
  const ticks = niceTicks(endOf(recorded), room < 500 ? 4 : 8).filter((tick) => tick <= endOf(recorded));
  const x = (ms) => left + ((room - left - 30) * ms) / (endOf(recorded) || 1);
  const svg = drawn("svg", { width: room, height, role: "img", "aria-label": timelineText(recorded) });
  for (const tick of ticks) {
    svg.append(drawn("line", { x1: x(tick), x2: x(tick), y1: 0, y2: height - LANES.foot + 4 }),
      drawn("text", { x: x(tick), y: height - 8, "text-anchor": tick ? "middle" : "start" }, `${numberText(tick)}${tick === ticks.at(-1) ? " ms" : ""}`));
  }
  ranks.forEach((rank, place) => {
    const y = place * each, every = lane < 12 ? 8 : 1;
    if (ranks.length > 1 && place % every === 0) svg.append(drawn("text", { x: 0, y: y + lane / 2 + 4 }, `rank ${place}`));
    rank.kinds.forEach((kind, number) => {
      const [from, to] = [rank.ms[number], rank.ms[number + 1]], gap = x(to) - x(from) > 4 ? 1 : 0;
      const shape = drawn("rect", { x: x(from), y, width: Math.max(0.4, x(to) - x(from) - gap), height: lane, class: kind });
      svg.append(titled(shape, `rank ${place}: ${nameOf(kind, recorded)}, ${msText(to - from)} ms, from ${numberText(from)} ms on`));
    });
  });
  return svg;
}

class Timelines {
  constructor(parent) {
    this.select = element("select", { "aria-label": "recorded update" });
    this.controls = element("div", { class: "controls" }, "update", this.select);
    this.words = element("p", { "aria-live": "polite" });
    this.keys = element("ul", { class: "keys" });
    this.lanes = element("div", { class: "lanes" });
    this.table = tableOf("The spans as a table", ["rank", "~what", "from ms", "ms"], () => this.rows().slice(0, 2000));
    parent.append(this.controls, this.words, this.keys, this.lanes, this.table);
    this.select.addEventListener("change", () => this.show(this.select.value * 1));
    new ResizeObserver(() => { if (this.room !== this.lanes.clientWidth) this.draw(); }).observe(this.lanes);
  }
  news(run) {
    if (this.recorded && this.recorded.length === run.timelines.length) return;
    this.recorded = run.timelines;
    this.controls.hidden = this.recorded.length < 2;
    this.table.hidden = !this.recorded.length;
    this.select.replaceChildren(...this.recorded.map((each, place) => element("option", { value: place }, String(each.step))));
    if (this.recorded.length) this.show(this.recorded.length - 1);
    else this.words.textContent = "Nothing is recorded: it is the third update of a start that is, and none of a pipeline.";
  }
  show(at) {
    this.at = at;
    this.select.value = at;
    const recorded = this.recorded[at], means = meansOf(recorded), total = sum(Object.values(means)) || 1;
    this.words.textContent = `Update ${recorded.step} took ${msText(endOf(recorded))} ms on ${countText(recorded.num_ranks, "rank")} (${recorded.device}).` +
      (recorded.num_ranks > recorded.ranks.length ? ` The first ${recorded.ranks.length} ranks are shown.` : "");
    this.keys.replaceChildren(...Object.entries(KINDS).filter(([kind]) => means[kind]).map(([kind, [, hue]]) =>
      keyOf(nameOf(kind, recorded), hue, ` ${percentText(means[kind] / total)}, ${msText(means[kind])} ms`)));
    this.table.open = false;
    this.draw();
  }
  draw() {
    this.room = this.lanes.clientWidth;
    if (this.recorded?.length && this.room) this.lanes.replaceChildren(drawLanes(this.recorded[this.at], this.room));
  }
  rows() {
    const recorded = this.recorded[this.at];
    return recorded.ranks.flatMap(({ kinds, ms }, rank) => kinds.map((kind, place) =>
      [rank, nameOf(kind, recorded), ms[place], ms[place + 1] - ms[place]]));
  }
}
