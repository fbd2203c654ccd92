"""Prints a benchmark's result, and writes it to a file if one is named."""

import argparse
import json
from pathlib import Path
from typing import Any

from ibnn.files.atomic import write_atomically
from ibnn.lab.provenance import provenance


def parser(doc: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, help="write the result to this file")
    return made


def tell(result: dict[str, Any], path: Path | None, *packages: str) -> None:
    text = json.dumps(result | {"versions": provenance(*(packages or ("accelerate",)))}, indent=1)
    print(text)
    if path:
        write_atomically(path, text.encode() + b"\n")
