"""STYLE: the page's CSS. In a Python file, so that every way of installing brings it along."""

CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #515a65; --paper: #fbfbfa; --card: #fff; --line: #cfd4da;
  --mark: #e3eefb; --link: #0b57a4; --warn: #8a3b00; --shade: #0000003d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --soft: #b3bac3; --paper: #14171b; --card: #1d2126;
  --line: #3d444d; --mark: #17324f; --link: #8cc2ff; --warn: #ffb784; --shade: #000; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; scroll-padding-top: 1rem; }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
body { margin: 0; background: var(--paper); color: var(--ink); overflow-wrap: anywhere;
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
.skip { position: absolute; left: -999rem; }
.skip:focus { left: .5rem; top: .5rem; background: var(--card); padding: .5rem .8rem; z-index: 2; }
a { color: var(--link); }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
.layout { max-width: 82rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: clamp(1.5rem, 5vw, 2.1rem); line-height: 1.2; margin: .5rem 0; }
h2 { font-size: 1.35rem; line-height: 1.25; margin: 0 0 .5rem; }
h3 { font-size: 1.05rem; margin: 1.2rem 0 .5rem; }
h4 { font-size: .95rem; margin: 1rem 0 .4rem; }
section { margin: 0 0 3rem; }
p { margin: .4rem 0 .8rem; max-width: 46rem; }
.lead { font-size: 1.1rem; }
.note, figcaption, .small { color: var(--soft); font-size: .9rem; }
.warn { color: var(--warn); }
nav ol { margin: 0 0 1.5rem; padding: 0; list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1rem; }
nav a { display: inline-block; padding: .25rem 0; }
@media (min-width: 64rem) {
  .layout { display: grid; grid-template-columns: 12rem minmax(0, 1fr); column-gap: 2.5rem; }
  header { grid-column: 1 / -1; }
  nav ol { position: sticky; top: 1rem; display: block; }
}
.scroll { position: relative; overflow-x: auto; border: 1px solid var(--line); border-radius: .4rem; margin: .6rem 0;
  background: linear-gradient(to left, var(--card) 40%, transparent) right / 3rem 100% no-repeat local,
    linear-gradient(to left, var(--shade), transparent) right / 1.2rem 100% no-repeat scroll, var(--card); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .92rem;
  overflow-wrap: normal; }
caption { text-align: left; padding: .6rem .6rem .4rem; font-weight: 600; }
th, td { padding: .4rem .6rem; text-align: right; white-space: nowrap; border-top: 1px solid var(--line); }
caption span { position: sticky; left: .6rem; display: inline-block; max-width: calc(100vw - 4rem); }
thead th { font-weight: 600; vertical-align: bottom; white-space: normal; line-height: 1.3; }
td.word, thead:has(+ tbody td.word) th:nth-child(2) { text-align: left; }
th[scope=row], thead th:first-child { text-align: left; position: sticky; left: 0; background: var(--card);
  white-space: normal; min-width: 7.5rem; max-width: 15rem; overflow-wrap: anywhere; font-weight: 600; }
@media (min-width: 64rem) { th[scope=row] { min-width: 14rem; max-width: 20rem; } }
td.best { background: var(--mark); }
td .range { display: block; color: var(--soft); font-size: .85em; font-weight: 400; }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: .15em; margin-right: .4em;
  border: 1px solid #0006; }
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 19rem), 1fr)); gap: 1rem;
  margin: .8rem 0; }
figure { margin: 0; background: #fff; color: #1b1f24; border: 1px solid var(--line); border-radius: .4rem;
  padding: .8rem; }
.cards figure { display: grid; grid-row: span 2; grid-template-rows: subgrid; row-gap: 0; align-items: start; }
figure figcaption { color: #515a65; margin-bottom: .4rem; }
figure figcaption strong { color: #1b1f24; display: block; font-size: .95rem; line-height: 1.35; text-wrap: balance; }
figure img { display: block; width: 100%; max-width: 30rem; height: auto; margin: 0 auto; }
.wide { max-width: 34rem; }
.examples { list-style: none; padding: 0; margin: .4rem 0; display: grid; gap: .8rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 17rem), 1fr)); }
.examples > li { background: #fff; color: #1b1f24; border: 1px solid var(--line); border-radius: .4rem;
  padding: .7rem;
  font-size: .88rem; }
.pair { display: grid; grid-template-columns: 72px minmax(0, 1fr); gap: .7rem; align-items: start; }
.pair img { width: 100%; image-rendering: pixelated; display: block; border: 1px solid #d5d9de; }
.pair .photo { height: auto; }
.pair .strips:only-child { grid-column: 1 / -1; }
.examples p { margin: .5rem 0 .2rem; }
.legend .small { white-space: nowrap; }
.legend { list-style: none; padding: 0; margin: .3rem 0 0; }
.examples .small { color: #515a65; }
pre { white-space: pre-wrap; background: var(--card); border: 1px solid var(--line); border-radius: .4rem;
  padding: .8rem;
  margin: .4rem 0 1rem; font: .85rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
details { border: 1px solid var(--line); border-radius: .4rem; padding: .5rem .8rem; margin: .6rem 0;
  background: var(--card); }
summary { cursor: pointer; font-weight: 600; padding: .2rem 0; }
dl { margin: .4rem 0; }
dt { font-weight: 600; margin-top: .6rem; }
dd { margin: 0 0 .2rem; max-width: 46rem; }
dl.facts { display: grid; grid-template-columns: minmax(5rem, auto) minmax(0, 1fr); gap: .15rem 1rem;
  font-size: .9rem; }
dl.facts dt, dl.facts dd { margin: 0; }
@media print {
  :root { --ink: #000; --soft: #333; --paper: #fff; --card: #fff; --line: #999; --mark: #eee; --link: #000;
  --warn: #000;
    color-scheme: light; }
  nav, .skip { display: none; }
  .layout { display: block; max-width: none; padding: 0; }
  .scroll { overflow: visible; }
  table { font-size: .7rem; }
  th, td { padding: .2rem .3rem; white-space: normal; }
  figure, .examples > li, tr { break-inside: avoid; }
  h2, h3, h4, section > p { break-after: avoid; }
  .swatch { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  details::details-content { content-visibility: visible; block-size: auto; }
}
""".strip()
