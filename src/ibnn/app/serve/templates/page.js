'use strict';
const $ = id => document.getElementById(id);
const make = (tag, kind, text) => { const e = document.createElement(tag); if (kind) e.className = kind;
  if (text !== undefined) e.textContent = text; return e; };
const percent = p => (100 * p).toFixed(p > 0.0995 && p < 0.9995 ? 1 : 2) + ' %';
let newest = 0, shown = null;

async function predict(request, show) {
  const mine = ++newest;
  $('status').className = 'soft'; $('status').textContent = 'Predicting…';
  try {
    const reply = await fetch('predict' + document.body.dataset.query, { method: 'POST', ...request });
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

function predictImage(file) {
  const form = new FormData();
  form.append('image', file, file.name || 'pasted image');
  predict({ body: form }, found => {
    if (shown) URL.revokeObjectURL(shown);
    shown = URL.createObjectURL(file);
    $('picture').src = shown; $('picture').alt = 'The image: ' + (file.name || 'pasted');
    $('note').textContent = found.rows[0].note ? 'The image was ' + found.rows[0].note : '';
    showLabel(found);
  });
}

function predictRow() {
  const row = Object.fromEntries(fields.map(field => [field.dataset.column, field.valueAsNumber]));
  const body = JSON.stringify({ inputs: [row] });
  predict({ headers: { 'Content-Type': 'application/json' }, body }, $('line') ? showNumber : showLabel);
}

function showLabel(found) {
  const row = found.rows[0], order = row.probabilities.map((p, i) => i)
    .sort((a, b) => row.probabilities[b] - row.probabilities[a]);
  $('label').textContent = row.label;
  $('said').textContent = 'Probability ' + percent(row.probability) + '.' + novelty(row);
  abstain(row, found.risk);
  $('status').className = 'hidden';  // for screen readers
  $('status').textContent = row.label + ', ' + percent(row.probability) + (row.abstain ? ', abstains.' : '.');
  bars(found.classes, row.probabilities, order);
  if (row.draws) draws(found.classes, row.draws, order);
  const most = Math.log(row.probabilities.length);
  split(row, most);
  $('entropies').textContent = 'Total ' + row.total.toFixed(3) + ' nats of at most ' + most.toFixed(3) + ' = aleatoric '
    + row.aleatoric.toFixed(3) + ' + epistemic ' + row.epistemic.toFixed(3) + '.';
}

const novelty = row => row.p_value === null ? '' : ' Novelty: p = ' + row.p_value.toPrecision(2) + '.';

function abstain(row, risk) {
  const reasons = { novel: 'the input is unlike those that the model knows',
    uncertain: 'with answers as uncertain as this one, more than ' + percent(risk) + ' of the answers could be wrong' };
  const told = (row.withheld || '').split(' and ').map(why => reasons[why]).join(', and ');
  $('abstain').hidden = !row.abstain;
  $('abstain').textContent = 'Abstains: ' + told + '.';
}

function showNumber(found) {
  const row = found.rows[0], each = row.draws || [], short = x => String(Number(x.toPrecision(4)));
  $('label').textContent = short(row.mean) + ' ± ' + short(row.std);
  $('said').textContent = '90 % interval: ' + short(row.low) + ' to ' + short(row.high) + '.' + novelty(row);
  abstain(row);
  $('status').className = 'hidden';
  $('status').textContent = short(row.mean) + ', from ' + short(row.low) + ' to ' + short(row.high)
    + (row.abstain ? ', abstains.' : '.');
  const ends = [Math.min(row.low, ...each), Math.max(row.high, ...each)], wide = ends[1] - ends[0] || 1;
  const at = x => 100 * (x - ends[0]) / wide + '%', band = make('div', 'band');
  band.style.left = at(row.low); band.style.width = 100 * (row.high - row.low) / wide + '%';
  const tick = x => { const line = make('div', 'tick'); line.style.left = at(x); return line; };
  $('line').replaceChildren(band, ...each.map(tick));
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
  if (!shift) { place.textContent = 'Inputs are not monitored for a shift.'; return; }
  place.className = shift.alarm ? 'warn' : 'soft';
  place.textContent = shift.alarm
    ? 'Shift detected at input ' + shift.alarm_at + ': inputs differ from the ' + shift.against
      + ' (' + shift.score + (shift.score === 'novelty' ? '' : ' uncertainty') + ' is ' + shift.direction + ').'
    : 'No shift found in ' + shift.seen + (shift.seen === 1 ? ' input' : ' inputs')
      + ', compared with ' + shift.against + ' (p = ' + shift.p_value.toPrecision(2) + ').';
}

function fill(event) {  // spreads a row that was pasted into any field
  const cells = event.clipboardData.getData('text').trim().split(/[\s,;]+/);
  if (cells.length !== fields.length || cells.length === 1) return;
  event.preventDefault();
  fields.forEach((field, i) => { field.value = cells[i]; });
}

const components = Number(document.body.dataset.components), fields = [...document.querySelectorAll('[data-column]')];
if ($('form')) {
  $('form').addEventListener('submit', event => { event.preventDefault(); predictRow(); });
  $('form').addEventListener('paste', fill);
} else if ($('raw')) {
  $('raw').addEventListener('submit', event => {
    event.preventDefault();
    const body = '{"inputs": ' + $('inputs').value + '}';
    predict({ headers: { 'Content-Type': 'application/json' }, body }, found => {
      $('status').textContent = ''; $('answer').replaceChildren(make('pre', '', JSON.stringify(found, null, 1)));
    });
  });
} else {
  $('file').addEventListener('change', event => event.target.files[0] && predictImage(event.target.files[0]));
  for (const kind of ['dragover', 'dragleave', 'drop']) document.addEventListener(kind, event => {
    event.preventDefault();
    $('drop').classList.toggle('over', kind === 'dragover');
    if (kind === 'drop' && event.dataTransfer.files[0]) predictImage(event.dataTransfer.files[0]);
  });
  document.addEventListener('paste', event => {
    if (event.clipboardData.files[0]) predictImage(event.clipboardData.files[0]);
  });
}
watch();
