"""The page of an audit: a verdict, a picture of the weights, one change, and the details folded. It loads nothing."""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from html import escape

import torch

from megabatch.verification.audit_advice import advise
from megabatch.verification.audit_report import SAME, TOKEN, Audit, UpdateFindings
from megabatch.verification.audit_text import UNKNOWN, percent, span, verdict_of, weights_text

MAX_BARS, MAX_NUMBERED = 160, 16
# A picture of more shares has no room for the number 0 beside 1.00.
ROOM = 12
# The colours of report.html: megabatch/train/report/assets/page.css.
STYLE = """
:root { --ground: #ffffff; --raised: #f6f7f9; --ink: #1d2733; --muted: #5d6a78; --line: #dfe3e8; --accent: #2463a8;
  --warm: #b4600f; --leaf: #3c7d54; --plum: #7a4f9c; --rose: #b03a5b; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #12161b; --raised: #1a2027; --ink: #e4e9ee; --muted: #9aa6b2; --line: #2b343d; --accent: #74b0f2;
    --warm: #eb9d4d; --leaf: #74bd8d; --plum: #b796d6; --rose: #ea839f; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 28px 24px 48px; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif; }
header { display: grid; grid-template-columns: auto minmax(0, 1fr); gap: 0 16px; align-items: center; }
.mark { grid-row: span 2; width: 52px; height: 52px; border-radius: 50%; border: 3px solid var(--tone);
  color: var(--tone); font-size: 28px; font-weight: 700; display: grid; place-items: center; }
.good { --tone: var(--leaf); } .bad { --tone: var(--rose); } .open { --tone: var(--warm); }
h1 { margin: 0; font-size: 26px; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 0 0 4px; font-size: 18px; }
section { margin-top: 36px; }
p { margin: 4px 0; max-width: 78ch; overflow-wrap: anywhere; }
.hint, footer, header p { color: var(--muted); font-size: 13px; overflow-wrap: anywhere; }
footer { margin-top: 48px; border-top: 1px solid var(--line); padding-top: 12px; }
figure { margin: 12px 0 0; }
.plot { position: relative; height: 240px; margin: 0 0 0 44px; font-size: 12px; color: var(--muted); }
.bars { position: absolute; inset: 0; display: flex; gap: 18px; }
.update { position: relative; display: flex; gap: 2px; flex: var(--number) 1 0; min-width: 0;
  max-width: calc(var(--number) * 84px); border-left: 1px solid var(--line); }
.update > b { position: absolute; top: 100%; left: 0; padding-top: 4px; font-weight: 400; white-space: nowrap; }
.bar { position: relative; flex: 1 1 0; min-width: 0; }
.bar i { position: absolute; left: 0; right: 0; border-radius: 2px; background: var(--color); }
.bar u { position: absolute; left: calc(50% - 1px); width: 2px; background: var(--ink); opacity: .55; }
.bar s { position: absolute; left: -20px; right: -20px; width: max-content; margin: 2px auto; padding: 0 3px;
  z-index: 2; background: var(--ground); color: var(--ink); text-decoration: none; font-variant-numeric: tabular-nums; }
.same { --color: var(--accent); } .off { --color: var(--warm); } .negative { --color: var(--plum); }
.level { position: absolute; left: 0; right: 0; border-top: 1px solid var(--line); }
.level.one { border-top: 2px dashed var(--ink); z-index: 1; }
.level span { position: absolute; right: 100%; top: -9px; padding-right: 8px; white-space: nowrap; }
.level.one span { color: var(--ink); font-weight: 600; }
figcaption { margin: 30px 0 0; font-size: 13px; color: var(--muted); display: flex; flex-wrap: wrap; gap: 2px 18px; }
.key { white-space: nowrap; }
.key i { display: inline-block; width: 10px; height: 10px; margin-right: 6px; border-radius: 2px;
  background: var(--color); }
pre { overflow-x: auto; padding: 10px 12px; border-radius: 6px; background: var(--raised); font-size: 13px; }
pre span { display: block; }
.fact { white-space: pre-wrap; padding-left: 12ch; text-indent: -12ch; }
.plus { color: var(--leaf); } .minus { color: var(--rose); } .place { color: var(--muted); }
details { margin-top: 8px; } summary { width: fit-content; padding: 4px 0; color: var(--accent); cursor: pointer; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { font-weight: 600; color: var(--muted); } td:first-child, th:first-child { text-align: left; }
@media (max-width: 700px) {
  body { padding: 18px 14px 36px; } h1 { font-size: 20px; }
  .plot { height: 200px; margin-left: 36px; } .bar s { display: none; }
  .bars { gap: 10px; }
}
"""
KINDS = {"---": "place", "+": "plus", "-": "minus", " ": ""}
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def page_of(audit: Audit) -> str:
    """Return the page as HTML."""
    verdict = verdict_of(audit)
    mark, tone = ("✓", "good") if audit.ok else ("?", "open")
    if audit.problems or verdict.startswith("NOT"):
        mark, tone = "✗", "bad"
    command = audit.command or "a training loop"
    title = escape(f"Audit of {command}: {verdict}")
    body = [
        f'<header class="{tone}"><div class="mark" aria-hidden="true">{mark}</div>',
        f"<h1>{escape(_sentence(verdict))}</h1>",
        f"<p>megabatch audit of {escape(command)}</p></header><main>",
        # The first line is the heading.
        "<pre>",
        *(f'<span class="fact">{escape(line)}</span>' for line in str(audit).splitlines()[1:]),
        "</pre>",
        *_picture(audit),
        *_change(audit),
        *_details(audit),
        "</main><footer>docs/audit.md explains each line and how the audit knows it.</footer>",
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<link rel="icon" href="data:,"><title>{title}</title><style>{STYLE}</style>'
    )
    return f'<!doctype html><html lang="en" data-ready><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _picture(audit: Audit) -> Iterator[str]:
    updates = [update for update in audit.updates if update.weights]
    if not updates:
        return
    num_bars = list(itertools.accumulate(len(update.weights) for update in updates))
    num_shown = max(1, bisect.bisect_right(num_bars, MAX_BARS))
    weights = torch.cat([update.all_weights for update in updates[:num_shown]])
    scale = _Scale(min(0.0, float(weights.min()) * 1.12), max(1.2, float(weights.max()) * 1.12))
    is_numbered = num_bars[num_shown - 1] <= MAX_NUMBERED
    groups = "".join(_bars(update, scale, is_numbered=is_numbered) for update in updates[:num_shown])
    names = {"same": "1.00: each token counts the same", "off": "counts more or less"}
    if audit.is_signed:
        names = {"same": "positive: made likelier", "negative": "negative: made less likely"}
    keys = [f'<span class="key {kind}"><i></i>{name}</span>' for kind, name in names.items()]
    if "<u " in groups:
        keys.append("<span>thin line: least to largest inside the microbatch</span>")
    if num_shown < len(updates):
        keys.append(f"<span>the first {num_shown} of {len(updates)} updates</span>")
    sentence = escape(weights_text(updates))
    yield '<section><h2>What a token weighs, by microbatch</h2><p class="hint">Mean over the tokens of a microbatch. '
    yield "At 1.00 every target token of the optimizer step counts the same.</p>"
    yield f'<figure><div class="plot" role="img" aria-label="{sentence}">{_levels(scale)}'
    yield f'<div class="bars">{groups}</div></div><figcaption>{"".join(keys)}</figcaption></figure></section>'


class _Scale:
    """Percent from the top of the picture."""

    def __init__(self, bottom: float, top: float) -> None:
        self.bottom, self.top = bottom, top

    def place(self, value: float) -> float:
        return 100 * (self.top - value) / (self.top - self.bottom)

    def between(self, low: float, high: float) -> str:
        return f"top:{self.place(high):.2f}%;height:{self.place(low) - self.place(high):.2f}%"


def _levels(scale: _Scale) -> str:
    """Return lines at 0, at 1, and at whole steps that leave room for their numbers."""
    height = scale.top - scale.bottom
    steps = (1, 2, 5, 10, 20, 50, 100, 1000, 10**9)
    step = next(step for step in steps if height <= 8 * step)
    multiples = range(int(scale.bottom / step) * step, int(scale.top) + 1, step)
    lines = [_level(value, f"{value:g}", scale) for value in multiples if value and abs(value - 1) > height / 12]
    zero = "0" if height <= ROOM else ""
    return "".join([_level(0, zero, scale), _level(1, "1.00", scale, " one"), *lines])


def _level(value: float, number: str, scale: _Scale, kind: str = "") -> str:
    return f'<div class="level{kind}" style="top:{scale.place(value):.2f}%"><span>{number}</span></div>'


def _bars(update: UpdateFindings, scale: _Scale, *, is_numbered: bool) -> str:
    bars: list[str] = []
    for number, weights in enumerate(update.weights, 1):
        # A microbatch without a target has a bar of no height.
        weights = weights if weights.numel() else torch.zeros(1)
        mean, lowest, highest = (float(value) for value in (weights.mean(), weights.min(), weights.max()))
        kind = "same" if update.is_signed or abs(mean - 1) <= SAME else "off"
        edge = f"bottom:{100 - scale.place(mean):.2f}%"
        if mean < 0:
            kind, edge = "negative", f"top:{scale.place(mean):.2f}%"
        parts = [f'<i style="{scale.between(min(0.0, mean), max(0.0, mean))}"></i>']
        if highest - lowest > SAME:
            parts.append(f'<u style="{scale.between(lowest, highest)}"></u>')
        if is_numbered:
            parts.append(f'<s style="{edge}">{mean:.2f}</s>')
        label = f"update {update.number}, microbatch {number}: {mean:.2f}"
        bars.append(f'<div class="bar {kind}" title="{label}">{"".join(parts)}</div>')
    return f'<div class="update" style="--number:{len(bars)}"><b>update {update.number}</b>{"".join(bars)}</div>'


def _change(audit: Audit) -> Iterator[str]:
    advice = advise(audit)
    yield f"<section><h2>Change</h2><p>{escape(_sentence(advice.text))}.</p>"
    if advice.diff:
        lines = [
            f'<span class="{KINDS.get(line[:3], KINDS[line[0]])}">{escape(line)}</span>'
            for line in advice.diff.splitlines()
        ]
        yield f"<pre>{''.join(lines)}</pre>"
    yield "</section>"


def _details(audit: Audit) -> Iterator[str]:
    yield "<section><h2>Details</h2>"
    if any(update.distances for update in audit.updates):
        yield _folded("How far the gradient is from each mean", _distances(audit.updates))
    for update in audit.updates:
        yield _folded(f"Microbatches of update {update.number}", _microbatches(update))
    yield "</section>"


def _folded(title: str, inner: str) -> str:
    return f'<details><summary>{title}</summary><div class="scroll">{inner}</div></details>'


def _table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in names)
    lines = ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    return f"<table><tr>{'</tr><tr>'.join([head, *lines])}</tr></table>"


def _distances(updates: Sequence[UpdateFindings]) -> str:
    rows: list[tuple[str, int, str, str, str]] = []
    for update in updates:
        for name, distance in update.distances.items():
            length = f"{distance.length:.2f} times"
            rows.append((name, update.number, percent(distance.error), length, percent(distance.direction)))
    rows.sort(key=lambda row: (row[0] != TOKEN, row))
    return _table(["mean", "update", "gradient off", "length", "direction off"], rows)


def _microbatches(update: UpdateFindings) -> str:
    unknown = [UNKNOWN] * len(update.microbatches)
    counts = [f"{count:.2f}" for count in update.relative_counts] or unknown
    weights = [span(part) if part.numel() else UNKNOWN for part in update.weights] or unknown
    rows: list[Sequence[object]] = []
    for number, (rank, record) in enumerate(update.microbatches):
        sizes = (number + 1, rank, record.num_targets, len(record.row_hashes))
        rows.append((*sizes, weights[number], counts[number]))
    return _table(["microbatch", "rank", "targets", "samples", "a token weighs", "times in the gradient"], rows)
