"""Compares times, prints a benchmark's result, and writes it to a file if one is named."""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ibnn.files.atomic import write_atomically
from ibnn.lab import bench
from ibnn.lab.provenance import provenance


def parser(doc: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, help="write the result to this file")
    return made


def compared(pairs: Sequence[tuple[float, float]], ours: str, theirs: str) -> dict[str, float]:
    """Median ratio of pairs of seconds, and both medians in milliseconds, by name."""
    both = [list(column) for column in zip(*pairs, strict=True)]
    times = {name: round(1e3 * statistics.median(s), 3) for name, s in zip((ours, theirs), both, strict=True)}
    return {"ratio": bench.ratio(*both), **times}


def tell(result: dict[str, Any], path: Path | None, *packages: str) -> None:
    text = json.dumps(result | {"versions": provenance(*(packages or ("accelerate",)))}, indent=1)
    print(text)
    if path:
        write_atomically(path, text.encode() + b"\n")
