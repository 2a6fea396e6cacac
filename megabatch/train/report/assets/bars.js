// An update as it was cut: a bar a microbatch, in groups by data rank; real tokens below, padding above.

const BARS = { height: 230, left: 58, top: 22, bottom: 40, between: 18, narrow: 5, broad: 54 };

// Where each update's numbers begin in the lists that have those of all.
function cutsOf(run) {
  const { step, counts, left_out, samples, real, padding } = run.cuts;
  let next = 0;
  return step.map((number, place) => {
    const ranks = counts[place].map((count) => {
      const [from, to] = [next, (next += count)];
      const heights = run.counts_tokens ? real.slice(from, to) : samples.slice(from, to);
      const rest = run.counts_tokens ? padding.slice(from, to) : heights.map(() => 0);
      return { samples: samples.slice(from, to), real: heights, padding: rest };
    });
    return { step: number, ranks, left_out: left_out[place] };
  });
}

function cutText(cut, unit) {
  const all = (name) => sum(cut.ranks.map((rank) => sum(rank[name])));
  const microbatches = Math.max(0, ...cut.ranks.map((rank) => rank.samples.length));
  const [real, padding] = [all("real"), all("padding")];
  const tokens = unit === "tokens" && real ? `, ${whole.format(real)} real tokens, ${percentText(padding / (real + padding))} padding` : "";
  const rest = cut.left_out ? `; ${countText(cut.left_out, "microbatch", "microbatches")} more are not written down` : "";
  const ranks = cut.ranks.length > 1 ? ` on each of ${countText(cut.ranks.length, "data rank")}` : "";
  const work = cut.ranks.map((rank) => sum(rank.real) + sum(rank.padding));
  const busiest = work.length > 1 && sum(work) && !cut.left_out
    ? `; the busiest rank computes ${numberText((Math.max(...work) * work.length) / sum(work))} times the mean` : "";
  return `update ${cut.step}: ${countText(all("samples"), "sample")} in ${countText(microbatches, "microbatch", "microbatches")}${ranks}${tokens}${busiest}${rest}`;
}

function drawBars(cut, unit, most, room) {
  const number = sum(cut.ranks.map((rank) => rank.samples.length)), gaps = BARS.between * (cut.ranks.length - 1);
  const each = Math.min(BARS.broad, Math.max(BARS.narrow, (room - BARS.left - 8 - gaps) / Math.max(1, number)));
  const width = Math.max(room, BARS.left + gaps + each * number + 8), foot = BARS.height - BARS.bottom;
  const svg = drawn("svg", { width, height: BARS.height, role: "img", "aria-label": cutText(cut, unit) });
  const ticks = niceTicks(most, 4), y = (value) => foot - ((foot - BARS.top) * value) / ticks.at(-1);
  for (const tick of ticks) {
    svg.append(drawn("line", { x1: BARS.left, x2: width, y1: y(tick), y2: y(tick) }),
      drawn("text", { x: BARS.left - 8, y: y(tick) + 4, "text-anchor": "end" }, tickText(tick)));
  }
  svg.append(drawn("text", { x: 0, y: 12 }, unit));
  let x = BARS.left;
  cut.ranks.forEach((rank, place) => {
    drawRank(svg, rank, { x, each, y, unit, place });
    const middle = x + (each * rank.samples.length) / 2, only = cut.ranks.length === 1;
    svg.append(drawn("text", { x: only ? x : middle, y: foot + 32, "text-anchor": only ? "start" : "middle" },
      only ? "microbatch, with its number of samples on top" : `rank ${place}`));
    x += each * rank.samples.length + BARS.between;
  });
  return svg;
}

function drawRank(svg, rank, { x, each, y, unit, place }) {
  const gap = each > 12 ? 4 : 1, every = Math.ceil(26 / each);
  rank.samples.forEach((samples, number) => {
    const [real, padding] = [rank.real[number], rank.padding[number]], left = x + number * each + gap / 2;
    const words = `rank ${place}, microbatch ${number + 1}: ${samples ? countText(samples, "sample") : "a dummy microbatch, which counts nothing"}` +
      (unit === "tokens" ? `, ${whole.format(real)} real tokens, ${whole.format(padding)} of padding` : "");
    for (const [from, height, kind] of [[0, real, "real"], [real, padding, "padding"]]) {
      if (height) svg.append(titled(drawn("rect", { x: left, y: y(from + height), width: each - gap, height: y(from) - y(from + height), class: kind }), words));
    }
    const middle = left + (each - gap) / 2;
    if (each >= 18) svg.append(drawn("text", { x: middle, y: y(real + padding) - 5, "text-anchor": "middle", class: "value" }, samples || "–"));
    if (number % every === 0) svg.append(drawn("text", { x: middle, y: y(0) + 15, "text-anchor": "middle" }, number + 1));
  });
}

class Cuts {
  constructor(parent) {
    this.range = element("input", { type: "range", min: 0, step: 1, "aria-label": "update, along the run" });
    this.field = element("input", { type: "number", step: 1, "aria-label": "update, by its number" });
    const [before, after] = [["‹", "the update before"], ["›", "the update after"]].map(([sign, words]) => element("button", { type: "button", "aria-label": words }, sign));
    this.words = element("p", { class: "words", "aria-live": "polite" });
    this.note = element("p", { class: "note" });
    this.scroll = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "bars of the update" });
    const keys = element("ul", { class: "keys" });
    this.keys = keys;
    const controls = element("div", { class: "controls" }, element("span", {}, "update"), before, this.field, after, this.range);
    this.table = tableOf("The bars as a table", ["rank", "microbatch", "samples", "real", "padding"], () => this.rows());
    this.whole = element("div", { class: "cut" }, controls, this.words, keys, this.scroll, this.table, this.note);
    parent.append(this.whole);
    this.range.addEventListener("input", () => this.show(this.range.value * 1));
    this.field.addEventListener("change", () => this.showStep(this.field.value * 1));
    before.addEventListener("click", () => this.show(this.at - 1));
    after.addEventListener("click", () => this.show(this.at + 1));
    new ResizeObserver(() => { if (this.room !== this.scroll.clientWidth) this.draw(); }).observe(this.scroll);
  }
  news(run) {
    const follows = this.cuts === undefined || this.at === this.cuts.length - 1;
    this.unit = run.counts_tokens ? "tokens" : "samples";
    this.cuts = cutsOf(run);
    this.whole.hidden = !this.cuts.length;
    if (!this.cuts.length) return;
    this.most = Math.max(1, ...this.cuts.map((cut) => Math.max(0, ...cut.ranks.flatMap((rank) => rank.real.map((real, place) => real + rank.padding[place])))));
    this.range.max = this.cuts.length - 1;
    this.field.min = this.cuts[0].step;
    this.field.max = this.cuts.at(-1).step;
    this.keys.replaceChildren(...(this.unit === "tokens" ? [["real", "real tokens", "--accent"], ["padding", "padding", "--sand"]] : [["real", "samples", "--accent"]])
      .map(([, name, hue]) => keyOf(name, hue)));
    this.note.textContent = run.cuts.every > 1 ? `Of this run one update in ${run.cuts.every} is here, and the last; cuts.jsonl has all of them.` : "";
    this.show(follows ? this.cuts.length - 1 : this.at);
  }
  showStep(step) {
    const near = this.cuts.findIndex((cut) => cut.step >= step);
    this.show(near < 0 ? this.cuts.length - 1 : near);
  }
  show(at) {
    this.at = Math.min(Math.max(at, 0), this.cuts.length - 1);
    this.range.value = this.at;
    this.range.setAttribute("aria-valuetext", `update ${this.cuts[this.at].step}`);
    this.field.value = this.cuts[this.at].step;
    this.words.textContent = cutText(this.cuts[this.at], this.unit);
    this.table.open = false;
    this.draw();
  }
  draw() {
    this.room = this.scroll.clientWidth;
    if (this.cuts?.length && this.room) this.scroll.replaceChildren(drawBars(this.cuts[this.at], this.unit, this.most, this.room));
  }
  rows() {
    return this.cuts[this.at].ranks.flatMap((rank, place) => rank.samples.map((samples, number) =>
      [place, number + 1, samples, rank.real[number], rank.padding[number]]));
  }
}

function keyOf(name, hue, more = "") {
  const key = element("li", { class: "key" }, element("i"), name, more);
  key.style.setProperty("--color", `var(${hue})`);
  return key;
}
