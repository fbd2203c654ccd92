"""Which module may import which, and what `import ibnn` loads."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import ibnn

SOURCE = Path(ibnn.__file__).parent
# A module imports from the lines above its own and from its own room (folder), inside of functions too.
RINGS = [
    {"_version", "errors"},
    {"check"},
    {"inputs", "progress", "normal", "metrics", "mixture", "objective", "nets", "generators"},
    {"units", "batches", "threads"},
    {"draws", "kernels"},
    {"layers"},
    {"latent", "prediction"},
    {"likelihood", "noise"},
    {"monitoring"},
    {"network"},
    {"novelty"},
    {"convert"},
    {"budget", "calibration"},
    {"files"},
    {"sampling", "contrib", "transformers"},
    {"diagnosis"},
    {"training"},
    {"pruning"},
    {"baselines"},
    {"one_pass"},
    {"sklearn", "data"},
    {"lab"},
    {"app"},
    {"__init__", "__main__"},  # the doors
]
# What is imported upwards, inside of a function that runs only where it is asked for.
ON_DEMAND = {
    ("convert", "contrib"),  # latents on outputs and biases
    ("files.saving", "contrib"),
    ("network", "files"),  # save_pretrained
    ("network", "transformers"),  # model.generate
    ("network", "novelty"),  # a state with a reference
    ("prediction.predict", "novelty"),
}
LEVEL = {room: number for number, ring in enumerate(RINGS) for room in ring}
# Packages that only some rings may import, and the modules below that do so when they draw a figure.
LOWEST = {"transformers": "transformers", "accelerate": "training", "pydantic": "files", "matplotlib": "lab"}
PLOTS = {("calibration", "matplotlib"), ("sampling", "matplotlib"), ("training", "matplotlib")}


@cache
def modules() -> dict[str, ast.Module]:
    """Every module's tree by its name without "ibnn.", such as "layers.registry"; a package is its "__init__"."""
    paths = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in SOURCE.rglob("*.py")}
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in sorted(paths.items())}


def imports(node: ast.AST) -> Iterator[str]:
    """Full names that a module imports anywhere, but for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        yield from imports(child)


def room(name: str) -> str:
    return name.split(".")[0]


def assert_none(found: set[str]) -> None:
    assert not found, "\n".join(sorted(found))


def test_imports_only_go_down() -> None:
    found = set()
    for module, tree in modules().items():
        for name in imports(tree):
            if room(name) != "ibnn":
                continue
            target = room(name.partition(".")[2] or "__init__")
            target = target if target in LEVEL else "__init__"  # a name of the package itself
            upwards = target != room(module) and LEVEL[target] >= LEVEL[room(module)]
            if upwards and (module, target) not in ON_DEMAND:
                found.add(f"{module} imports {name}")
    assert_none(found)


def test_heavy_packages_stay_in_the_upper_rings() -> None:
    uses = {(module, room(name)) for module, tree in modules().items() for name in imports(tree)}
    below = {(m, p) for m, p in uses if p in LOWEST and LEVEL[room(m)] < LEVEL[LOWEST[p]] and (room(m), p) not in PLOTS}
    assert_none({f"{module} imports {package}" for module, package in below})


def test_every_module_has_a_ring() -> None:
    assert {room(module) for module in modules()} == set(LEVEL)


# ----------------------------------------------------------------------------------------------- in a fresh process


@pytest.fixture(scope="module")
def imported() -> dict[str, list[str]]:
    """What `import ibnn` loads beside torch, and the processes that imports of the lab, then of all modules start."""
    names = [f"ibnn.{module}".removesuffix(".__init__") for module in modules() if module != "__main__"]
    code = f"""if True:
        import importlib, json, sys
        started = []
        sys.addaudithook(lambda event, args: started.append(str(args)) if event == "subprocess.Popen" else None)
        import torch
        before = set(sys.modules)
        import ibnn
        new = sorted(m for m in set(sys.modules) - before if m.split(".")[0] not in sys.stdlib_module_names)
        import ibnn.lab.jobs, ibnn.lab.demo, ibnn.app.cli
        by_lab = list(started)
        for name in {names!r}:
            importlib.import_module(name)
        print(json.dumps(dict(loaded=new, by_lab=by_lab, by_all=started)))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_import_loads_torch_and_the_paper(imported: dict[str, list[str]]) -> None:
    found = imported["loaded"]
    assert {room(name) for name in found} == {"ibnn"}
    rooms = {room(name.partition(".")[2]) for name in found if "." in name}
    assert not rooms & {"training", "pruning", "baselines", "sklearn", "data", "lab", "app"}


def test_importing_the_lab_starts_no_process(imported: dict[str, list[str]]) -> None:
    assert imported["by_lab"] == []


def test_no_import_runs_git(imported: dict[str, list[str]]) -> None:
    found = any("'git'" in words for words in imported["by_all"])
    assert_none({"something runs git when it is imported"} if found else set())
