"""SERVICE PAGES: one to try the model in a browser, and one that documents the routes. They load nothing else."""

import base64
import hashlib
import json
import math
from functools import partial
from typing import Any

from ibnn.app.asking.run import Asked
from ibnn.lab.pages import environment, inlined, style

_PACKAGE = "ibnn.app.serve"
_STYLE, _SCRIPT = style(_PACKAGE, "serve.css"), inlined(_PACKAGE, "page.js")
_TEMPLATES = environment(_PACKAGE)
_TEMPLATES.globals |= {"style": _STYLE, "script": _SCRIPT, "json": partial(json.dumps, indent=1)}


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = {
    "Content-Security-Policy": f"default-src 'none'; script-src {_hash(_SCRIPT)}; style-src {_hash(_STYLE)}; "
    "img-src blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}


def front(asked: Asked) -> str:
    """Returns the page where a user drops an image or fills in a row; fields start at the mean of the training rows."""
    units, fields = asked.units, []
    if units is not None:
        means = [_rounded(centre, scale) for centre, scale in zip(units.centre, units.scale, strict=True)]
        fields = list(zip(units.columns, means, strict=True))
    return _TEMPLATES.get_template("front.html.j2").render(
        job=asked.run.job,
        run=asked.run.result["name"],
        classes=asked.classes,
        components=asked.run.model.components,
        form=asked.form if units is None else None,
        fields=fields,
    )


def _rounded(mean: float, std: float) -> str:
    """Rounds a mean to about a hundredth of the standard deviation."""
    return f"{round(mean, 2 - math.floor(math.log10(std))):.12g}"


def reference(schema: dict[str, Any]) -> str:
    """Returns the page that documents the routes of an OpenAPI schema."""
    return _TEMPLATES.get_template("docs.html.j2").render(schema=schema)
