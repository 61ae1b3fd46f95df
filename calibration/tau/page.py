"""The HTML report: one file without links to anything, light or dark as its reader likes it."""

from __future__ import annotations

from html import escape

from .examples import Example
from .report import COLUMNS, Report

STYLE = """
:root { color-scheme: light dark;
  --ink: #24292f; --quiet: #656d76; --line: #d8dee4; --paper: #ffffff; --card: #f6f8fa; --run: #ffe3a3; --run2: #bfe3ff; --good: #1a7f37 }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e6edf3; --quiet: #8d96a0; --line: #30363d; --paper: #0d1117; --card: #161b22; --run: #6b4e00; --run2: #0b4a75; --good: #3fb950 } }
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 Inter, -apple-system, "Segoe UI", "Helvetica Neue", Arial, "DejaVu Sans", sans-serif }
main { max-width: 66rem; margin: 0 auto; padding: 3rem 1.5rem 5rem }
h1 { font-size: 1.7rem; line-height: 1.3; font-weight: 650; margin: 0 0 .6rem; letter-spacing: -.01em }
h2 { font-size: 1.1rem; font-weight: 650; margin: 2.8rem 0 .8rem }
p { margin: .4rem 0; max-width: 46rem }
.quiet { color: var(--quiet) }
figure { margin: 1.4rem 0 0 }
figure svg { width: 100%; height: auto; display: block }
figcaption { color: var(--quiet); font-size: .88rem; max-width: 46rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; width: 100% }
th, td { text-align: right; border-bottom: 1px solid var(--line); padding: .38rem .55rem; white-space: nowrap }
th { font-weight: 500; color: var(--quiet) }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left }
tr.chosen td { font-weight: 650 }
tr.chosen td:last-child { color: var(--good) }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.4rem; font-size: .92rem; margin: 0 }
dt { color: var(--quiet) }
dd { margin: 0; overflow-wrap: anywhere }
.example { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 1rem 1.2rem; margin: 0 0 1rem }
.example pre { font: .87rem/1.85 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; margin: .5rem 0 0 }
.run { background: var(--run); border-radius: 3px; padding: .12em 0; box-decoration-break: clone; -webkit-box-decoration-break: clone }
.run.other { background: var(--run2) }
"""


def render(report: Report, picture: str) -> str:
    """The whole page; `picture` is the figure as inline SVG."""
    options = report.calibration.options
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    confirmed = f"<p>{escape(report.confirmed)}</p>" if report.confirmed else ""
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in report.facts)
    title, _, result = report.headline.partition(": ")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Calibration of {escape(title)}</title><style>{STYLE}</style></head><body><main>
<p class="quiet">Calibration of tau &middot; {escape(title)}</p>
<h1>{escape(result[:1].upper() + result[1:])}</h1>
{confirmed}
<figure>{picture}<figcaption>Left: real decodes, with {100 * options.confidence:g} % intervals; filled points passed the test, the ringed one
was chosen. Right: lines are predicted from one pass in one-token mode, points are the real decodes.</figcaption></figure>
<h2>Settings tested, from safe to fast</h2>
<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(_row(cells) for cells in report.table)}</tbody></table></div>
<p class="quiet">Drops are paired: the same rows at tau and in one-token mode. &ldquo;Below&rdquo; is the upper confidence bound
of the drop; &ldquo;predicted&rdquo; are the tokens per forward that the record pass told beforehand.
Testing ends at the first setting that is not shown to keep the bound.</p>
{_examples(report.examples)}
<h2>What it rests on</h2>
<dl>{facts}</dl>
</main></body></html>
"""


def _row(cells: tuple[str, ...]) -> str:
    mark = ' class="chosen"' if cells[-1] == "chosen" else ""
    return f"<tr{mark}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _examples(examples: tuple[Example, ...]) -> str:
    if not examples:
        return ""
    cards = "".join(_card(example) for example in examples)
    return f'<h2>A few answers at tau {examples[0].tau:g}</h2><p class="quiet">Each shade is one run of tokens accepted in a single forward.</p>{cards}'


def _card(example: Example) -> str:
    pieces = []
    runs = 0
    for run in example.runs:
        if run.num_tokens > 1:
            runs += 1
            shade = "run other" if runs % 2 else "run"
            pieces.append(
                f'<span class="{shade}" title="{run.num_tokens} tokens in one forward">{escape(run.text)}</span>'
            )
        else:
            pieces.append(escape(run.text))
    note = f"{example.num_tokens} tokens in {len(example.runs)} forwards"
    return f'<div class="example"><div>{escape(example.prompt)}</div><pre>{"".join(pieces)}</pre><p class="quiet">{note}</p></div>'
