"""MARKUP: small pieces of HTML. What these functions take as text they escape; what they take as `html` they do not."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from ibnn.lab.report.figures import COLOURS, Picture
from ibnn.metrics import Interval


def text(value: object) -> str:
    """Escapes a string and drops control characters.

    >>> text("<b>" + chr(0))
    '&lt;b&gt;'
    """
    return escape("".join(c for c in str(value) if c >= " " or c in "\n\t"))


def paragraph(words: str, kind: str = "") -> str:
    """A paragraph of text."""
    return f'<p class="{kind}">{text(words)}</p>\n' if kind else f"<p>{text(words)}</p>\n"


def nothing(what: str) -> str:
    """Says that a section has nothing to show."""
    return paragraph(f"None of the runs has stored {what}.", "note")


def section(name: str, heading: str, explanation: str, html: Iterable[str]) -> str:
    """A part of the page with its heading and how to read it."""
    head = f'<section id="{name}" aria-labelledby="{name}-heading">\n<h2 id="{name}-heading">{text(heading)}</h2>\n'
    return head + (paragraph(explanation) if explanation else "") + "".join(html) + "</section>\n"


def run_name(name: str, number: int) -> str:
    """A run's name after its colour."""
    return f'<span class="swatch" style="background:{COLOURS[number % 6]}"></span>{text(name)}'


def table(name: str, caption: str, head: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """A table in a region of its own that scrolls; `rows` are the HTML of a heading and of whole cells."""
    columns = "".join(f'<th scope="col">{text(column)}</th>' for column in head)
    body = "".join(f'<tr><th scope="row">{first}</th>{"".join(cells)}</tr>\n' for first, cells in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-labelledby="{name}-caption">\n<table>\n'
        f'<caption id="{name}-caption"><span>{text(caption)}</span></caption>\n'
        f"<thead><tr>{columns}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\n</div>\n"
    )


def cell(value: object) -> str:
    """A cell of a table."""
    return f"<td>{text(value)}</td>"


def word(value: object) -> str:
    """A cell of a table that holds a word."""
    return f'<td class="word">{text(value)}</td>'


def interval_cell(interval: Interval, digits: int, *, best: bool) -> str:
    """A value over its interval; the best one is marked by a star, by weight and in words."""
    value, low, high = (f"{number:.{digits}f}" for number in interval)
    shown = f'<strong>★ {value}<span class="hidden"> (best)</span></strong>' if best else value
    start = '<td class="best">' if best else "<td>"
    return f'{start}{shown}<span class="range">{low}–{high}</span></td>'


def image(picture: Picture, alt: str, kind: str = "") -> str:
    """An image from within the page."""
    style = f' class="{kind}"' if kind else ""
    return f'<img{style} src="{picture.src}" width="{picture.width}" height="{picture.height}" alt="{text(alt)}">'


def figure(picture: Picture, alt: str, caption: str, note: str = "", kind: str = "") -> str:
    """A picture on a light card; `alt` has its main number."""
    words = f"<strong>{text(caption)}</strong>{text(note)}"
    style = f' class="{kind}"' if kind else ""
    return f"<figure{style}><figcaption>{words}</figcaption>{image(picture, alt)}</figure>\n"


def cards(html: Iterable[str]) -> str:
    """Figures side by side, as many as fit."""
    return f'<div class="cards">\n{"".join(html)}</div>\n'


def facts(values: Mapping[str, object]) -> str:
    """Names and values."""
    items = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>\n" for name, value in values.items())
    return f'<dl class="facts">\n{items}</dl>\n'
