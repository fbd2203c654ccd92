"""PAGES: where an image is dropped or a row filled in and the answer seen, and a reference of the routes.

They load nothing from afar.
"""

import base64
import hashlib
import json
import math
from html import escape
from typing import Any

from ibnn.app.asking.inputs import Form
from ibnn.app.asking.run import Asked
from ibnn.data import Units

CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #515a65; --paper: #fbfbfa; --card: #fff; --line: #cfd4da;
  --link: #0b57a4; --warn: #8a3b00; --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #bbb;
  --c5: #56b4e9; --c6: #e69f00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --soft: #b3bac3; --paper: #14171b; --card: #1d2126;
  --line: #5a636e; --link: #8cc2ff; --warn: #ffb784; --c0: #3f9fdc; --c4: #777; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 52rem; padding: 1rem; background: var(--paper); color: var(--ink);
  overflow-wrap: anywhere; font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
a { color: var(--link); }
:focus-visible, .drop:focus-within { outline: 3px solid var(--link); outline-offset: 2px; }
h1 { font-size: clamp(1.4rem, 5vw, 2rem); line-height: 1.2; margin: .3rem 0; }
h2 { font-size: 1.1rem; margin: 1.4rem 0 .3rem; }
p { margin: .3rem 0 .7rem; }
.soft { color: var(--soft); font-size: .92rem; }
.warn { color: var(--warn); font-weight: 600; }
.heard { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.drop { display: block; border: 2px dashed var(--line); border-radius: .6rem; background: var(--card);
  padding: 1.2rem; text-align: center; cursor: pointer; }
.drop.over { border-color: var(--link); border-style: solid; }
.drop input { display: block; margin: .8rem auto 0; max-width: 100%; font: inherit; color: inherit; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: 1rem; margin: 1rem 0; }
.head { display: flex; gap: 1rem; align-items: center; flex-wrap: wrap; }
.head img { width: 7rem; height: 7rem; object-fit: contain; border: 1px solid var(--line); image-rendering: pixelated;
  background: var(--paper); }
.label { font-size: 1.9rem; font-weight: 700; line-height: 1.15; margin: 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .15rem .6rem .15rem 0; font-weight: 400; vertical-align: middle; }
td.bar { width: 60%; padding-right: 0; }
td.number { text-align: right; white-space: nowrap; }
.fill { height: .9rem; border-radius: .2rem; background: var(--c0); min-width: 1px; }
.draws { display: flex; height: 8rem; gap: 1px; border: 1px solid var(--line); }
.draws > div { flex: 1 1 0; display: flex; flex-direction: column; min-width: 1px; }
.draws > .first { margin-left: 3px; }
.legend { list-style: none; margin: .4rem 0; padding: 0; display: flex; flex-wrap: wrap; gap: .1rem 1rem; }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: .15em; margin-right: .35em; }
.split { display: flex; height: 1.4rem; border: 1px solid var(--line); }
.c0 { background: var(--c0); } .c1 { background: var(--c1); } .c2 { background: var(--c2); }
.c3 { background: var(--c3); } .c4 { background: var(--c4); } .c5 { background: var(--c5); }
.c6 { background: var(--c6); }
.fields { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: .5rem .8rem;
  align-items: end; }
.fields label { font-size: .92rem; }
.fields input { display: block; width: 100%; font: inherit; padding: .25rem .4rem; color: inherit;
  background: var(--paper); border: 1px solid var(--line); border-radius: .3rem; }
button { font: inherit; padding: .35rem 1.2rem; margin: .8rem 0 0; border: 1px solid var(--link); border-radius: .3rem;
  background: var(--link); color: var(--paper); cursor: pointer; }
.line { position: relative; height: 2.2rem; border: 1px solid var(--line); }
.line > div { position: absolute; top: 0; bottom: 0; }
.line > .band { background: var(--c5); opacity: .35; }
.line > .tick { width: 2px; margin-left: -1px; background: var(--c0); opacity: .7; }
.ends { display: flex; justify-content: space-between; font-variant-numeric: tabular-nums; }
pre { white-space: pre-wrap; background: var(--card); border: 1px solid var(--line); border-radius: .4rem;
  padding: .7rem; font: .85rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
summary { cursor: pointer; padding: .2rem 0; }
[hidden] { display: none; }
""".strip()

SCRIPT = """
'use strict';
const $ = id => document.getElementById(id);
const make = (tag, kind, text) => { const e = document.createElement(tag); if (kind) e.className = kind;
  if (text !== undefined) e.textContent = text; return e; };
const percent = p => (100 * p).toFixed(p > 0.0995 && p < 0.9995 ? 1 : 2) + ' %';
let newest = 0, shown = null;

async function ask(request, show) {
  const mine = ++newest;
  $('status').className = 'soft'; $('status').textContent = 'Asking…';
  try {
    const reply = await fetch('predict?draws=true', { method: 'POST', ...request });
    const found = await reply.json();
    if (mine !== newest) return;
    if (!reply.ok) throw new Error(found.detail || reply.statusText);
    show(found);
    $('answer').hidden = false;
    watch();
  } catch (error) {
    if (mine !== newest) return;
    $('answer').hidden = true;
    $('status').className = 'warn'; $('status').textContent = String(error.message || error);
  }
}

function askImage(file) {
  const form = new FormData();
  form.append('image', file, file.name || 'pasted image');
  ask({ body: form }, found => {
    if (shown) URL.revokeObjectURL(shown);
    shown = URL.createObjectURL(file);
    $('picture').src = shown; $('picture').alt = 'The image: ' + (file.name || 'pasted');
    $('note').textContent = found.rows[0].note ? 'The image was ' + found.rows[0].note : '';
    showLabel(found);
  });
}

function askRow() {
  const row = Object.fromEntries(fields.map(field => [field.dataset.column, field.valueAsNumber]));
  const body = JSON.stringify({ inputs: [row] });
  ask({ headers: { 'Content-Type': 'application/json' }, body }, $('line') ? showNumber : showLabel);
}

function showLabel(found) {
  const row = found.rows[0], order = row.probabilities.map((p, i) => i)
    .sort((a, b) => row.probabilities[b] - row.probabilities[a]);
  $('label').textContent = row.label;
  $('said').textContent = percent(row.probability) + ' probable.';
  $('abstain').hidden = !row.abstain;
  $('abstain').textContent = 'Abstains: too uncertain to keep the errors among its answers at or below '
    + percent(found.risk) + '.';
  $('status').className = 'heard';  // by those who do not see the card
  $('status').textContent = row.label + ', ' + percent(row.probability) + (row.abstain ? ', abstains.' : '.');
  bars(found.classes, row.probabilities, order);
  draws(found.classes, row.draws, order);
  const most = Math.log(row.probabilities.length);
  split(row, most);
  $('entropies').textContent = 'Total ' + row.total.toFixed(3) + ' nats of at most ' + most.toFixed(3) + ' = aleatoric '
    + row.aleatoric.toFixed(3) + ' + epistemic ' + row.epistemic.toFixed(3) + '.';
}

function showNumber(found) {
  const row = found.rows[0], short = x => String(Number(x.toPrecision(4)));
  $('label').textContent = short(row.mean) + ' ± ' + short(row.std);
  $('said').textContent = 'With 90 % probability from ' + short(row.low) + ' to ' + short(row.high) + '.';
  $('status').className = 'heard';
  $('status').textContent = short(row.mean) + ', from ' + short(row.low) + ' to ' + short(row.high) + '.';
  const ends = [Math.min(row.low, ...row.draws), Math.max(row.high, ...row.draws)], wide = ends[1] - ends[0] || 1;
  const at = x => 100 * (x - ends[0]) / wide + '%', band = make('div', 'band');
  band.style.left = at(row.low); band.style.width = 100 * (row.high - row.low) / wide + '%';
  const tick = x => { const line = make('div', 'tick'); line.style.left = at(x); return line; };
  $('line').replaceChildren(band, ...row.draws.map(tick));
  $('ends').replaceChildren(...ends.map(x => make('span', '', short(x))));
  split(row, row.aleatoric + row.epistemic);
  $('entropies').textContent = 'Variance ' + short(row.std ** 2) + ' = aleatoric ' + short(row.aleatoric)
    + ' + epistemic ' + short(row.epistemic) + '.';
}

function bars(classes, probabilities, order) {
  $('classes').replaceChildren(...order.slice(0, 10).map(i => {
    const line = make('tr'), name = make('th', '', classes[i]), bar = make('td', 'bar'), fill = make('div', 'fill');
    name.scope = 'row'; fill.style.width = 100 * probabilities[i] + '%'; bar.append(fill);
    line.append(name, bar, make('td', 'number', percent(probabilities[i])));
    return line;
  }));
}

function draws(classes, each, order) {
  const top = order.slice(0, 4), per = each.length / components, votes = new Map();
  $('draws').replaceChildren(...each.map((p, j) => {
    const column = make('div', j && j % per === 0 ? 'first' : ''), most = p.indexOf(Math.max(...p));
    votes.set(most, (votes.get(most) || 0) + 1);
    const parts = [...top.map(i => p[i]), 1 - top.reduce((sum, i) => sum + p[i], 0)];
    column.append(...parts.map((share, rank) => {
      const piece = make('div', 'c' + (rank < top.length ? rank : 4));
      piece.style.height = 100 * Math.max(0, share) + '%';
      return piece;
    }));
    return column;
  }));
  const tally = [...votes].sort((a, b) => b[1] - a[1]).map(([i, n]) => n + ' say ' + classes[i]);
  $('tally').textContent = 'Of ' + each.length + ' draws ' + tally.join(', ') + '.';
  $('draws').setAttribute('aria-label', $('tally').textContent);
  const entries = [...top.map((i, rank) => [classes[i], rank]), ...(classes.length > 4 ? [['all others', 4]] : [])];
  $('legend').replaceChildren(...entries.map(([name, rank]) => {
    const item = make('li'); item.append(make('span', 'swatch c' + rank), name); return item; }));
}

function split(row, most) {
  $('aleatoric').style.width = 100 * row.aleatoric / most + '%';
  $('epistemic').style.width = 100 * row.epistemic / most + '%';
}

async function watch() {
  const shift = (await (await fetch('health')).json()).shift, place = $('shift');
  if (!shift) { place.textContent = 'The inputs are not watched for a shift.'; return; }
  place.className = shift.alarm ? 'warn' : 'soft';
  place.textContent = shift.alarm
    ? 'Shift: since input ' + shift.alarm_at + ' there is evidence that inputs are unlike the ' + shift.against
      + ' (' + shift.score + ' uncertainty is ' + shift.direction + ').'
    : 'No shift found in ' + shift.seen + (shift.seen === 1 ? ' input' : ' inputs')
      + ', compared with ' + shift.against + ' (p = ' + shift.p_value.toPrecision(2) + ').';
}

function fill(event) {  // a row of a table, pasted into any field
  const cells = event.clipboardData.getData('text').trim().split(/[\\s,;]+/);
  if (cells.length !== fields.length || cells.length === 1) return;
  event.preventDefault();
  fields.forEach((field, i) => { field.value = cells[i]; });
}

const components = Number(document.body.dataset.components), fields = [...document.querySelectorAll('[data-column]')];
if ($('form')) {
  $('form').addEventListener('submit', event => { event.preventDefault(); askRow(); });
  $('form').addEventListener('paste', fill);
} else {
  $('file').addEventListener('change', event => event.target.files[0] && askImage(event.target.files[0]));
  for (const kind of ['dragover', 'dragleave', 'drop']) document.addEventListener(kind, event => {
    event.preventDefault();
    $('drop').classList.toggle('over', kind === 'dragover');
    if (kind === 'drop' && event.dataTransfer.files[0]) askImage(event.dataTransfer.files[0]);
  });
  document.addEventListener('paste', event => {
    if (event.clipboardData.files[0]) askImage(event.clipboardData.files[0]);
  });
}
watch();
""".strip()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = {
    "Content-Security-Policy": f"default-src 'none'; script-src {_hash(SCRIPT)}; style-src {_hash(CSS)}; "
    "img-src blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}


def _page(title: str, body: str, attributes: str = "") -> str:
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<style>{CSS}</style>\n</head>\n<body{attributes}>\n{body}</body>\n</html>\n"
    )


def front(asked: Asked) -> str:
    """Where an image is dropped, or a row filled in."""
    what, classes = asked.run.job.data, asked.classes
    name = f"Classifier for {what}" if classes else f"Regression on {what}"
    listed = ", ".join(classes[:12]) + (f" and {len(classes) - 12} more" if len(classes) > 12 else "")
    target = f"Predicts {asked.run.job.target or 'a number'}."
    knows = f"Knows {len(classes)} classes: {listed}." if classes else target
    sees, asking = _image(asked.form) if asked.units is None else _row(asked.units)
    noise = "classes that look alike" if classes else "noise of the target"
    picture = '<img id="picture" alt="">' if asked.units is None else ""
    body = f"""<header>
<h1>{escape(name)}</h1>
<p class="soft">{escape(knows)} {escape(sees)} Run: {escape(str(asked.run.result["name"]))}.
<a href="docs">How to ask it from a program</a></p>
</header>
<main>
{asking}<p id="status" class="soft" role="status"></p>
<section id="answer" class="card" aria-label="Answer" hidden>
<div class="head">{picture}<div>
<p class="label" id="label"></p><p id="said"></p><p class="warn" id="abstain" hidden></p></div></div>
<p class="soft" id="note"></p>
{_OF_CLASSES if classes else _OF_NUMBERS}<h2>Uncertainty</h2>
<div class="split" aria-hidden="true"><div class="c5" id="aleatoric"></div><div class="c6" id="epistemic"></div></div>
<ul class="legend"><li><span class="swatch c5"></span>aleatoric: {noise}</li>
<li><span class="swatch c6"></span>epistemic: draws that disagree</li></ul>
<p id="entropies"></p>
</section>
<p id="shift" class="soft"></p>
</main>
<script>{SCRIPT}</script>
"""
    return _page(f"{name} · ibnn", body, f' data-components="{asked.run.model.components}"')


_OF_CLASSES = """<h2>Probabilities</h2>
<table><tbody id="classes"></tbody></table>
<h2>What each draw says</h2>
<p class="soft">Each bar is one of the networks it averages; gaps are between components. Where they disagree, it does
not know.</p>
<div class="draws" id="draws" role="img"></div>
<ul class="legend" id="legend"></ul>
<p id="tally" class="soft"></p>
"""
_OF_NUMBERS = """<h2>What each draw says</h2>
<p class="soft">Each line is one of the networks it averages; the band is the 90 % interval, noise included. Where the
lines are apart, it does not know.</p>
<div class="line" id="line" aria-hidden="true"></div>
<div class="ends soft" id="ends"></div>
"""


def _image(form: Form) -> tuple[str, str]:
    """What the network sees, and where it is given."""
    kind = "grey" if form.channels == 1 else "colour"
    sees = f"Sees {kind} images of {form.width}×{form.height} pixels; others are resized."
    return sees, (
        '<label class="drop" id="drop">Drop an image here, paste one, or choose a file:\n'
        '<input type="file" id="file" accept="image/*"></label>\n'
    )


def _row(units: Units) -> tuple[str, str]:
    """What the network sees, and where it is given; the fields begin at the mean of the training rows."""
    sees = f"Sees {len(units.columns)} column{'s' * (len(units.columns) > 1)}."
    fields = "".join(
        f'<label>{escape(name)}<input type="number" step="any" required value="{_rounded(centre, scale)}" '
        f'data-column="{escape(name)}"></label>\n'
        for name, centre, scale in zip(units.columns, units.centre, units.scale, strict=True)
    )
    words = "The fields start at the means of the training rows. A row pasted into one of them fills them all."
    fields += f'</div>\n<p class="soft">{words}</p>\n<button>Ask</button>\n'
    return sees, f'<form id="form" class="card">\n<div class="fields">\n{fields}</form>\n'


def _rounded(centre: float, scale: float) -> str:
    """A mean, to about a hundredth of the deviation."""
    return f"{round(centre, 2 - math.floor(math.log10(scale))):.12g}"


def reference(schema: dict[str, Any]) -> str:
    """The routes of an OpenAPI schema, and how to call them."""
    parts = [
        f"<h1>{escape(schema['info']['title'])} {escape(schema['info']['version'])}</h1>\n"
        f"<p>{escape(schema['info']['description'])}</p>\n"
        '<p>For programs: <a href="openapi.json">openapi.json</a>, which any OpenAPI viewer reads. '
        '<a href="./">Back to the page</a></p>\n'
    ]
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            parts.append(f"<h2>{method.upper()} {escape(path)}</h2>\n<p>{escape(route['summary'])}.</p>\n")
            parts += [_parameter(parameter) for parameter in route.get("parameters", [])]
            content = route.get("requestBody", {}).get("content", {})
            parts += [_folded(f"Body: {kind}", body["schema"]) for kind, body in content.items()]
            replies = {status: reply["description"] for status, reply in route["responses"].items()}
            parts.append("<p>Answers: " + "; ".join(f"{s} {escape(d)}" for s, d in replies.items()) + "</p>\n")
    post, address = schema["paths"]["/predict"]["post"], "http://127.0.0.1:8000/predict"
    risk = "?risk=0.02" if any(each["name"] == "risk" for each in post["parameters"]) else ""
    calls = [f"curl -H 'Content-Type: application/json' -d '{{\"inputs\": […]}}' {address}{risk}"]
    if "multipart/form-data" in post["requestBody"]["content"]:
        calls.insert(0, f"curl -F image=@a.png {address}")
    parts.append("<h2>From a shell</h2>\n<pre>" + "\n".join(calls) + "</pre>\n")
    parts += ["<h2>Schemas</h2>\n", *(_folded(*each) for each in schema["components"]["schemas"].items())]
    return _page("ibnn: routes", "".join(parts))


def _parameter(parameter: dict[str, Any]) -> str:
    default = parameter["schema"].get("default")
    words = f"{parameter.get('description', '')} Default {json.dumps(default)}."
    return f"<p><code>?{escape(parameter['name'])}=</code> {escape(words)}</p>\n"


def _folded(title: str, value: Any) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(json.dumps(value, indent=1))}</pre></details>\n"
