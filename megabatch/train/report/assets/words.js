// Words and numbers as a person reads them, and elements of the page.

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function drawn(tag, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== "") made.textContent = text;
  return made;
}

function titled(shape, text) {
  shape.append(drawn("title", {}, text));
  return shape;
}

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const some = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 4 });

function numberText(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
  return size >= 1e4 ? whole.format(value) : some.format(value);
}

function tickText(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${some.format(value / 1e6)}M`;
  if (size >= 1e3) return `${some.format(value / 1e3)}k`;
  if (size !== 0 && size < 1e-3) return value.toExponential(1).replace(".0e", "e");
  return some.format(value);
}

function percentText(share) {
  if (share > 0 && share < 0.0005) return "<0.1%";
  return `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)}%`;
}

// A time in its two largest units.
function durationText(seconds) {
  const minutes = Math.round(seconds / 60), hours = Math.floor(minutes / 60);
  if (seconds < 59.5) return `${Math.round(seconds)} s`;
  if (seconds < 3599.5) return `${Math.floor(Math.round(seconds) / 60)} min ${Math.round(seconds) % 60} s`;
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

// A place on the axis of time: whole units where they are whole.
const timeTick = (seconds) => durationText(seconds).replace(/ 0 (s|min|h)$/, "");

const dateText = (date) => new Date(date).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });

const countText = (number, one, many = `${one}s`) => `${whole.format(number)} ${number === 1 ? one : many}`;
const sum = (numbers) => numbers.reduce((before, each) => before + each, 0);

function median(values) {
  const there = values.filter((each) => each != null).sort((a, b) => a - b);
  return there.length ? there[there.length >> 1] : null;
}

const lastOf = (column) => (column || []).findLast((each) => each != null) ?? null;

// Steps of one, two or five between 0 and a little more than `most`.
function niceTicks(most, about) {
  if (!(most > 0)) return [0, 1];
  const rough = most / about, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= rough);
  return Array.from({ length: Math.ceil(most / step - 1e-9) + 1 }, (_, place) => +(place * step).toPrecision(12));
}

// A table that is made when it is opened, of as many rows as can be read.
function tableOf(title, columns, rows, note = "") {
  const scroll = element("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": title });
  const details = element("details", {}, element("summary", {}, title), scroll);
  details.addEventListener("toggle", () => {
    if (details.open) scroll.replaceChildren(tableElement(title + note, columns, rows()));
  });
  return details;
}

function tableElement(title, columns, rows) {
  const isWords = (name) => name.startsWith("~");
  const head = columns.map((name) =>
    element("th", { scope: "col", class: isWords(name) ? "words" : null }, name.replace("~", "")));
  const cell = (value, place) => isWords(columns[place])
    ? element("td", { class: "words" }, value) : element("td", {}, numberText(value));
  return element("table", {}, element("caption", {}, title), element("thead", {}, element("tr", {}, ...head)),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map(cell)))));
}
