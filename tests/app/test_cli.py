import csv
import gzip
import io
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from typer.testing import CliRunner

import ibnn
from ibnn import data, nets
from ibnn.app.cli import screen
from ibnn.app.cli.app import app
from ibnn.app.cli.screen import Screen
from ibnn.app.cli.train import names as recipe_names
from ibnn.app.cli.train import parsed, read_job
from ibnn.lab import jobs, parts
from ibnn.lab.parts import make_data
from ibnn.lab.runs import RunFolder

COMMANDS = [
    "demo",
    "plan",
    "data",
    "data list",
    "data get",
    "train",
    "predict",
    "evaluate",
    "report",
    "prune",
    "export",
    "serve",
]
TINY = ["--set", "train.steps=12", "--set", "method_options.components=2", "--set", "net_options.hidden=32"]
TINY += ["--set", "samples=3"]
UMASK = 0o027  # of a run, and of what is made of it
FIELDS = ["file", "row", "label", "probability", "total", "aleatoric", "epistemic", "p_value", "abstain", "withheld"]


def call(*words: object, code: int = 0) -> Any:
    result = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "200"}).invoke(app, list(map(str, words)), prog_name="ibnn")
    assert result.exit_code == code, (result.exit_code, result.stdout, result.stderr, result.exception)
    assert "Traceback" not in result.stderr
    return result


@contextmanager
def masked() -> Iterator[None]:
    before = os.umask(UMASK)
    try:
        yield
    finally:
        os.umask(before)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "digits"
    with masked():
        result = call("train", "digits-mlp", *TINY, "--out", folder)
    assert all(words in result.stdout for words in ("test", "AUROC", "numbers stored"))
    assert f"ibnn report {folder}" in result.stderr
    return folder


@pytest.fixture(scope="module")
def pixels() -> np.ndarray[Any, Any]:
    test = data.load("digits").test
    assert isinstance(test, data.Split)
    images: np.ndarray[Any, Any] = test.images[:5, 0].numpy()
    return images


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


# ------------------------------------------------------------------------------------------------------- help and plan


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    assert "Usage: ibnn" in call(*command.split(), "--help").stdout


def test_version_and_usage() -> None:
    assert call("--version").stdout == f"ibnn {ibnn.__version__}\n"
    assert "frobnicate" in call("frobnicate", code=2).stderr
    assert "--frob" in call("plan", "--frob", code=2).stderr
    assert "MODEL" in call("predict", code=2).stderr


@pytest.mark.parametrize("net", nets.names())
def test_plan_of_every_net(net: str) -> None:
    found = json.loads(call("plan", "--net", net, "--json").stdout)
    assert found["nodes"] == sum(layer["nodes"] for layer in found["layers"])


def test_plan_of_the_papers_network() -> None:
    assert "24,579 nodes, 25,557,032 weights" in call("plan", "--net", "resnet50").stdout  # Table 1


def test_plan_options() -> None:
    narrow = json.loads(call("plan", "--net", "wideresnet", "--option", "width=1", "--classes", "3", "--json").stdout)
    assert narrow["weights"] < 1_000_000
    assert "skipped  excluded" in call("plan", "--net", "lenet", "--exclude", "fc*").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--net", "resnet5"], "Did you mean 'resnet50'?"),
        (["--net", "lenet", "--option", "widht=2"], "Did you mean 'width'?"),
        (["--net", "lenet", "--option", "width=wide"], "`width`"),
        (["--net", "lenet", "--option", "width"], "key=value"),
        (["--net", "lenet", "--option", "width=-1"], "`width`"),
        (["--net", "vgg16-small", "--option", "dropout=-1"], "`dropout`"),
        (["--net", "lenet", "--include", "layer9"], "`include`"),
    ],
)
def test_wrong_plans(words: list[str], message: str) -> None:
    result = call("plan", *words, code=2)
    assert message in result.stderr
    assert result.stdout == ""


# ---------------------------------------------------------------------------------------------------------------- data


def test_data_list(tmp_path: Path) -> None:
    rows = {row["name"]: row for row in json.loads(call("data", "list", "--data", tmp_path, "--json").stdout)}
    assert list(rows) == [*data.names(), "toy-regression", "two-moons"]
    assert [name for name, row in rows.items() if row["found"]] == ["digits", "toy-regression", "two-moons"]
    assert rows["two-moons"]["where"] == "ibnn"
    result = call("data", "list", "--data", tmp_path)
    assert str(tmp_path) in result.stdout
    assert "ibnn data get mnist" in result.stderr


def test_data_get(tmp_path: Path) -> None:
    found = call("data", "get", "digits", "two-moons", "--data", tmp_path).stdout
    assert found == "digits: scikit-learn\ntwo-moons: ibnn\n"
    assert "Did you mean 'mnist'?" in call("data", "get", "mnst", code=2).stderr
    assert "http" in call("data", "get", "mnist", "--data", tmp_path, "--mirror", "ftp://x", code=2).stderr


def test_a_folder_of_images_is_a_set_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "mine" / "train" / "cat").mkdir(parents=True)
    rows = {row["name"]: row for row in json.loads(call("data", "list", "--data", tmp_path, "--json").stdout)}
    assert rows["mine"] == {"name": "mine", "found": True, "bytes": 0, "where": str(tmp_path / "mine")}
    assert call("data", "get", "mine", "--data", tmp_path).stdout == f"mine: {tmp_path / 'mine'}\n"


# --------------------------------------------------------------------------------------------------------------- train


def test_settings() -> None:
    found = parsed(["train.lr=0.01", "net=lenet", 'data="a b"', "augment=true", "train.steps = 3", "x=a=b"], "--set")
    assert found == {"train": {"lr": 0.01, "steps": 3}, "net": "lenet", "data": "a b", "augment": True, "x": "a=b"}
    for wrong in (["seed"], ["=3"], ["a..b=1"], ["a=1", "a.b=2"]):
        with pytest.raises(ValueError, match="Expected `--set`"):
            parsed(wrong, "--set")


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_are_jobs(name: str) -> None:
    job = read_job(name, ["seed=3", "train.steps=2"])
    assert job.seed == 3
    assert job.full_recipe().steps == 2  # in place of the recipe's epochs
    assert job.full_recipe().epochs is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digits-mpl"], "Did you mean 'digits-mlp'?"),
        (["digits-mlp", "--set", "train.lrr=1"], "Did you mean 'lr'?"),
        (["digits-mlp", "--set", "train.lr=fast"], "Expected `train.lr`"),
        (["digits-mlp", "--set", "method_options.component=4"], "Did you mean 'components'?"),
        (["digits-mlp", "--set", "net_options.hiden=4"], "Did you mean 'hidden'?"),
        (["digits-mlp", "--set", "method=ibn"], "Did you mean 'ibnn'?"),
        (["digits-mlp", "--set", "data=digit"], "name of a set"),
        (["digits-mlp", "--set", "seed"], "key=value"),
        (["digits-mlp", "--set", "dataa=digits"], "a field of a job, but got 'digits'. Did you mean 'data'?"),
        (["digits-mlp", "--set", "lr=0.1"], "Did you mean 'train.lr'?"),
        (["digits-mlp", "--set", "net_options.inputs=63"], "net_options.inputs = 64"),
        (["digits-mlp", "--set", "method_options.components=0"], "`components`"),
        (["digits-mlp", "--set", "valid=9999"], "`valid`"),
        (["digits-mlp", "--set", "examples=9999"], "`examples`"),
        (["digits-mlp", "--set", "train.seed=5"], "Set seed = 5 instead (--set seed=5)."),
        (["digits-mlp", "--set", "weights=none"], "no file none"),
        (["digits-mlp", "--lr", "0.1"], "--lr"),
        (["digits-mlp", "--outt", "there"], "--out"),
        (["digits-mlp", "--data", "nowhere"], "does not exist"),
        (["digits-mlp", "--set", "data=none.csv", "--set", "target=y"], "`data`"),
        (["digits-mlp", "--set", "data=none.csv"], "`target`"),
        (["digits-mlp", "--set", "net=nowhere:make"], "has no module 'nowhere'"),
    ],
)
def test_wrong_trainings(words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("train", *words, code=2)
    assert message in result.stderr
    assert not list(tmp_path.iterdir())


def test_broken_recipe_and_missing_data(tmp_path: Path) -> None:
    for content, words in (
        (b'data = "digits"\nnet = ', "my.toml` to be TOML, but got an error: Invalid value (at the end, line 2)"),
        (b"net = 3 4\n", "(at line 1, column 9)"),
        (b"", "`net`"),
        (b'net = "mlp"', "`data`"),
        (b"\xff", "my.toml` to be text in UTF-8"),
    ):
        (tmp_path / "my.toml").write_bytes(content)
        assert words in call("train", tmp_path / "my.toml", code=2).stderr
    result = call("train", "fashion-mnist-lenet", "--data", tmp_path, "--out", tmp_path / "run", code=1)
    assert "ibnn data get fashion-mnist" in result.stderr


def test_a_finished_run_is_read_and_another_job_refused(run: Path) -> None:
    before = (run / "result.json").stat().st_mtime_ns
    result = json.loads(call("train", "digits-mlp", *TINY, "--out", run, "--json").stdout)
    assert result == RunFolder(run).result
    assert "--fresh" in call("train", "digits-mlp", *TINY, "--set", "seed=1", "--out", run, code=2).stderr
    assert (run / "result.json").stat().st_mtime_ns == before


def test_a_finished_run_in_a_read_only_folder_is_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda _, mode, **__: not mode & os.W_OK)  # root may write
    read = json.loads(call("train", "digits-mlp", *TINY, "--out", run, "--json").stdout)
    assert read["scores"] == RunFolder(run).result["scores"]
    assert "`--out`" in call("train", "digits-mlp", *TINY, "--out", run, "--fresh", code=2).stderr


def test_a_misspelt_job_suggests_the_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "wine.toml").write_text('net = "mlp"')
    assert f"{tmp_path / 'wine.toml'}" in call("train", tmp_path / "wnie.toml", code=2).stderr
    assert "Did you mean 'digits-mlp'" in call("train", "digit-mlp", code=2).stderr
    assert "Did you mean" not in call("train", "something-else", code=2).stderr


def test_a_device_that_does_not_exist_is_refused_first(tmp_path: Path) -> None:
    for words in (["predict", "nowhere", "nothing"], ["serve", "nowhere"], ["evaluate", "nowhere"]):
        assert "`--device`" in call(*words, "--device", "cuda:77", code=2).stderr
    train = ["train", "digits-mlp", "--out", tmp_path / "run", "--set"]
    assert "`device`" in call(*train, "device=cuda:77", code=2).stderr
    assert not (tmp_path / "run").exists()


def test_what_is_missing_is_said_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(screen, "find_spec", lambda name: None)
    for words in (["demo", "--out", tmp_path / "demo"], ["serve", "nowhere"], ["report", "nowhere"]):
        error = call(*words, code=1).stderr
        assert "pip install -c constraints.txt '.[" in error
        assert "matplotlib" in error or "starlette" in error
    assert not (tmp_path / "demo").exists()


def test_fresh_starts_anew_and_own_files_work(tmp_path: Path, curve: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text((curve / "job.toml").read_text())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    first = json.loads(call("train", file, "--out", tmp_path / "out", "--json", "--quiet").stdout)
    old = json.loads((curve / "result.json").read_text())
    assert first["scores"] == old["scores"]  # the same job, the same bits
    words = ["--out", tmp_path / "out", "--fresh", "--set", "seed=5", "--json"]
    result = call("train", file, *words, "--quiet")
    assert json.loads(result.stdout)["job"]["seed"] == 5
    assert result.stderr == ""
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("how", [[], ["--fresh"]])
def test_a_folder_with_files_of_others_is_refused(how: list[str], tmp_path: Path) -> None:
    (tmp_path / "history.csv").write_text("mine")
    message = call("train", "toy-regression", *TINY, "--out", tmp_path, *how, code=2).stderr
    assert f"{tmp_path}, which has history.csv but no job.toml. Choose another folder" in message
    assert "--fresh" not in message
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_fresh_waits_for_a_folder_in_use_and_says_so(
    curve: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, lock, said = shutil.copytree(curve, tmp_path / "run"), ExitStack(), []
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}

    def hear(screen: Screen, words: str) -> None:
        note(screen, words)
        if "is in use" in words:
            said.append(words)
            assert {path: path.read_bytes() for path in before} == before  # nothing was cleared
            os.utime(copy / "result.json", (0, 0))
            lock.close()  # the other process has finished

    note = Screen.note
    monkeypatch.setattr(Screen, "note", hear)
    lock.enter_context(RunFolder(copy).lock())
    result = call("train", "toy-regression", *TINY, "--out", copy, "--fresh")
    assert said == [f"{copy} is in use: waiting for process {os.getpid()} to finish."]
    assert said[0] in result.stderr.splitlines()
    assert (copy / "result.json").stat().st_mtime > 0
    assert not list(tmp_path.rglob("*.lock"))


@pytest.mark.slow
def test_permissions_are_what_the_umask_leaves(run: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((1, 8, 8)))
    out, x = tmp_path / "out", torch.randn(8, 3)
    with masked():
        shutil.copytree(run, out / "run")  # with the permissions of its files
        call("predict", out / "run", tmp_path / "a.npy", "-o", out / "a.csv")
        call("report", out / "run", "-o", out / "report.html")
        call("export", out / "run", "-o", out / "model.pt2", "--format", "torch", "--samples", 1)
        ibnn.fit(
            ibnn.convert(torch.nn.Linear(3, 2)), (x, x[:, 0].gt(0).long()), epochs=1, run_dir=out / "fit", quiet=True
        )
    found = {path.relative_to(out): path.stat().st_mode & 0o777 for path in out.rglob("*") if path.is_file()}
    names = {path.name for path in found}
    assert {"model.safetensors", "answers.safetensors", "report.html", "model.pt2"} <= names
    assert any("checkpoints" in str(path) for path in found)
    assert {path: has for path, has in found.items() if has != 0o666 & ~UMASK} == {}


def test_the_first_training_stays_in_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "toy-regression", *TINY, "--set", "first.epochs=1", "--out", "solo"]
    call(*words)
    assert [path.name for path in tmp_path.iterdir()] == ["solo"]
    assert jobs.read_run("solo/first").job.method == "sgd"
    call(*words, "--set", "first.lr=0.5", "--fresh")
    assert jobs.read_run("solo/first").job.train == {"epochs": 1, "lr": 0.5}


@pytest.mark.slow
def test_interrupted_training_goes_on(tmp_path: Path) -> None:
    words = ["train", "digits-mlp", *TINY, "--set", "train.steps=40000", "--set", "train.checkpoint_every=5"]
    words += ["--out", str(tmp_path / "run"), "--fresh"]
    command = [sys.executable, "-m", "ibnn", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "epoch" in line:
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    hint = next(line for line in err.splitlines() if line.startswith("To go on: ibnn train digits-mlp"))
    assert "--fresh" not in hint
    assert err.count("o go on") == 1
    assert list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "Interrupted. To go on: ibnn train digits-mlp"),
        (ValueError("too bad"), 1, "Error: too bad"),
        (MemoryError("all"), 1, "unexpected MemoryError: all"),
        (
            ModuleNotFoundError("No module named 'sklearn'", name="sklearn"),
            1,
            "pip install -c constraints.txt '.[demo]'",
        ),
    ],
)
def test_errors_while_working(
    error: BaseException, code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(jobs, "run", fail)
    result = call("train", "digits-mlp", "--out", tmp_path / "run", code=code)
    assert words in result.stderr
    runner = CliRunner().invoke(app, ["train", "digits-mlp", "--out", str(tmp_path / "run"), "--debug"])
    assert runner.exit_code == code
    assert "Traceback" in runner.stderr


# ------------------------------------------------------------------------------------------------------------ evaluate


def test_evaluate_agrees_with_the_run(run: Path) -> None:
    stored = json.loads((run / "result.json").read_text())
    found = json.loads(call("evaluate", run, "--json").stdout)
    assert found["scores"] == pytest.approx(stored["scores"])
    assert found["tempered"]["scores"] == pytest.approx(stored["tempered"]["scores"])
    assert f"{100 * stored['scores']['error']:.2f}" in call("evaluate", run).stdout


def test_wrong_evaluations(run: Path, tmp_path: Path) -> None:
    assert "job.toml" in call("evaluate", tmp_path, code=2).stderr


def _idx(folder: Path, name: str) -> None:
    """A tiny set in the files of MNIST."""
    generator = np.random.default_rng(len(name))
    (folder / name).mkdir()
    for part, rows in (("train", 40), ("t10k", 20)):
        for kind, content in (
            ("images-idx3", struct.pack(">BBBBIII", 0, 0, 8, 3, rows, 28, 28) + generator.bytes(rows * 28 * 28)),
            ("labels-idx1", struct.pack(">BBBBI", 0, 0, 8, 1, rows) + bytes(i % 10 for i in range(rows))),
        ):
            (folder / name / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(content))


def test_images_of_another_kind_are_outsiders(tmp_path: Path) -> None:
    for name in ("mnist", "fashion-mnist"):
        _idx(tmp_path, name)
    settings = ["data=fashion-mnist", "net_options.inputs=784", "train.steps=1", "valid=0"]
    words = [word for setting in settings for word in ("--set", setting)]
    call("train", "digits-mlp", *TINY, *words, "--data", tmp_path, "--out", tmp_path / "run")

    found = json.loads(call("evaluate", tmp_path / "run", "--data", tmp_path, "--json").stdout)
    assert (found["name"], found["data"]) == ("ibnn mlp fashion-mnist seed 0", "fashion-mnist")
    assert list(found["outsiders"]) == ["corrupted 5", "mnist"]


# ------------------------------------------------------------------------------------------------------------- predict


def _png(folder: Path, pixels: np.ndarray[Any, Any]) -> list[Path]:
    paths = [folder / f"{number}.png" for number in range(len(pixels))]
    for path, image in zip(paths, pixels, strict=True):
        Image.fromarray(image).save(path)
    return paths


def _folder(folder: Path, pixels: np.ndarray[Any, Any]) -> list[Path]:
    _png(folder, pixels)
    (folder / "readme.txt").write_text("not an image")
    return [folder]


def _npy(change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> Callable[..., list[Path]]:
    def write(folder: Path, pixels: np.ndarray[Any, Any]) -> list[Path]:
        np.save(folder / "a.npy", change(pixels))
        return [folder / "a.npy"]

    return write


def _csv(scale: float, header: str = "") -> Callable[..., list[Path]]:
    def write(folder: Path, pixels: np.ndarray[Any, Any]) -> list[Path]:
        lines = [",".join(repr(float(v) / scale) for v in image.flatten()) for image in pixels]
        (folder / "a.csv").write_text("\n".join([*([header] if header else []), *lines]) + "\n")
        return [folder / "a.csv"]

    return write


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(_png, id="png"),
        pytest.param(_folder, id="folder"),
        pytest.param(_npy(lambda x: x), id="npy NHW"),
        pytest.param(_npy(lambda x: x[:, None]), id="npy NCHW"),
        pytest.param(_npy(lambda x: x[:, None].astype(np.float64) / 255), id="npy floats"),
        pytest.param(_npy(lambda x: x.reshape(len(x), -1)), id="npy flat"),
        pytest.param(_csv(255), id="csv"),
        pytest.param(_csv(255, ",".join(f"pixel{i}" for i in range(64))), id="csv header"),
    ],
)
def test_predict_reads_all_kinds_alike(
    write: Callable[..., list[Path]], run: Path, pixels: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    result = call("predict", run, *write(tmp_path, pixels), "--risk", 1)
    rows = rows_of(result.stdout)
    model = jobs.read_run(run).model
    expected = model.predict(data.load("digits").normalise(torch.from_numpy(pixels)[:, None]), samples=3, seed=0)
    assert list(rows[0]) == FIELDS
    assert [row["label"] for row in rows] == [str(int(label)) for label in expected.labels]
    named = {name: getattr(expected, name) for name in ("total", "aleatoric", "epistemic")}
    for name, values in ({"probability": expected.probs.amax(1)} | named).items():
        assert [float(row[name]) for row in rows] == pytest.approx(values.tolist(), rel=1e-4, abs=1e-6), name
    assert {row["abstain"] for row in rows} == {"no"}


@pytest.mark.parametrize("kind", [".csv", ".npy"])
def test_values_above_one_are_never_guessed_at(kind: str, run: Path, tmp_path: Path) -> None:
    """Raw digits, 0 … 16, were taken for bytes in a .csv file."""
    from sklearn.datasets import load_digits

    raw = load_digits().images[:3]
    if kind == ".npy":
        np.save(tmp_path / "a.npy", raw)
    else:
        np.savetxt(tmp_path / "a.csv", raw.reshape(3, -1), delimiter=",")
    result = call("predict", run, tmp_path / f"a{kind}", code=1)
    assert f"a{kind}` to be in [0, 1], but got values from 0 to 16. Pass pixels" in result.stderr
    assert result.stdout == ""


def test_an_image_is_as_large_as_at_the_server_at_most(run: Path, tmp_path: Path) -> None:
    Image.new("1", (12_000, 12_000)).save(tmp_path / "large.png")
    result = call("predict", run, tmp_path / "large.png", code=1)
    assert "large.png` to be a readable image, but got 12000×12000 pixels, more than 25,000,000." in result.stderr
    assert "Warning" not in result.stderr  # pillow's


def test_other_sizes_and_colours_are_taken(run: Path, tmp_path: Path, pixels: np.ndarray[Any, Any]) -> None:
    Image.fromarray(pixels[0]).resize((40, 60)).convert("RGBA").save(tmp_path / "big.png")
    result = call("predict", run, tmp_path / "big.png")
    assert len(rows_of(result.stdout)) == 1


def _discs(root: Path) -> Path:
    """Photographs of discs in three sizes, some taken upright, in train and val."""
    exif, generator = Image.Exif(), np.random.default_rng(0)
    exif[0x0112] = 6
    for part, rows in (("train", 12), ("val", 6)):
        for label, radius in {"small": 8, "medium": 14, "large": 20}.items():
            (root / "discs" / part / label).mkdir(parents=True)
            for row in range(rows):
                y, x = np.mgrid[:60, :80] - generator.integers(25, 35, 2)[:, None, None]
                image = Image.fromarray(np.where(x**2 + y**2 < radius**2, 230, 20).astype(np.uint8)).convert("RGB")
                image.save(root / "discs" / part / label / f"{row}.png", **({"exif": exif} if row % 2 else {}))
    return root


def test_images_of_a_folder_are_asked_as_they_were_trained(tmp_path: Path) -> None:
    root, run = _discs(tmp_path / "data"), tmp_path / "run"
    job = 'net = "resnet20"\ndata = "discs"\nimage_size = 28\nvalid = 6\nsamples = 1\n[net_options]\nwidth = 0.25\n'
    (tmp_path / "discs.toml").write_text(job + "[method_options]\ncomponents = 2\n[train]\nsteps = 4\nbatch_size = 8\n")
    call("train", tmp_path / "discs.toml", "--data", root, "--out", run)
    rows = rows_of(call("predict", run, root / "discs" / "val", "--risk", 1, "--data", root).stdout)
    stored = RunFolder(run).answers()
    assert [Path(row["file"]).parent.name for row in rows] == sorted(["large", "medium", "small"] * 6)
    found = torch.tensor([float(row["probability"]) for row in rows])
    torch.testing.assert_close(found, stored["probs"].amax(1), rtol=1e-4, atol=1e-5)
    again = json.loads(call("evaluate", run, "--data", root, "--json").stdout)
    assert again["scores"]["nll"] == pytest.approx(json.loads((run / "result.json").read_text())["scores"]["nll"], 1e-5)


def test_damaged_files_of_every_kind_are_named(
    run: Path, tmp_path: Path, pixels: np.ndarray[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def turned(image: Image.Image, *, in_place: bool) -> None:  # as pillow does with some damaged tags
        if image.format == "JPEG":
            raise struct.error("required argument is not an integer")

    monkeypatch.setattr("PIL.ImageOps.exif_transpose", turned)
    good = _png(tmp_path, pixels)[0]
    Image.fromarray(pixels[0]).save(tmp_path / "a.jpg")
    np.save(tmp_path / "a.npy", pixels)
    header = (tmp_path / "a.npy").read_bytes().replace(f"({len(pixels)}, ".encode(), b"(9999999999999, ")
    (tmp_path / "huge.npy").write_bytes(header)
    (tmp_path / "odd.npy").write_bytes((tmp_path / "a.npy").read_bytes().replace(b"}", b"\\"))
    others = [tmp_path / name for name in ("a.jpg", "huge.npy", "odd.npy")]
    result = call("predict", run, good, *others, "--risk", 1, "--quiet", code=1)
    assert len(rows_of(result.stdout)) == 1
    assert [path.name for path in others if f"`{path}`" in result.stderr] == [path.name for path in others]


def test_names_that_are_no_text_are_escaped(run: Path, tmp_path: Path, pixels: np.ndarray[Any, Any]) -> None:
    (path,) = _png(tmp_path, pixels[:1])
    path.rename(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff.png"))
    call("predict", run, tmp_path, "--risk", 1, "-o", tmp_path / "out.csv")
    assert [row["file"] for row in rows_of((tmp_path / "out.csv").read_text())] == [rf"{tmp_path}/a\xff.png"]


def test_numbers_too_large_to_compute_with_are_refused(curve: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n0.5\n1e20\n")
    result = call("predict", curve, tmp_path / "a.csv", code=1)
    assert "numbers up to 1e+15, but got a larger one in row 1" in result.stderr


def test_unreadable_files_are_left_out_and_named(run: Path, tmp_path: Path, pixels: np.ndarray[Any, Any]) -> None:
    good = [str(path) for path in _png(tmp_path, pixels)]
    for name in ("2.png", "4.png"):
        (tmp_path / name).write_bytes(b"no image")
    good = [good[0], good[1], good[3]]
    alone = call("predict", run, *good, "--risk", 1)
    result = call("predict", run, tmp_path, "--risk", 1, "--quiet", code=1)
    assert result.stdout == alone.stdout
    errors = result.stderr.splitlines()
    assert len(errors) == 2
    assert all(f"{tmp_path / name}`" in error for name, error in zip(("2.png", "4.png"), errors, strict=True))
    call("predict", run, tmp_path, "-o", tmp_path / "out.json", "--json", code=1)
    assert [row["file"] for row in json.loads((tmp_path / "out.json").read_text())["rows"]] == good


def test_predict_json_and_files(run: Path, tmp_path: Path, pixels: np.ndarray[Any, Any]) -> None:
    paths = _png(tmp_path, pixels)
    found = json.loads(call("predict", run, *paths, "--json", "--samples", 2, "--seed", 3).stdout)
    assert (found["samples"], found["seed"], found["risk"]["examples"]) == (2, 3, 300)
    assert [list(row) for row in found["rows"]] == [FIELDS] * 5
    result = call("predict", run, *paths, "-o", tmp_path / "out.json", "--json", "--samples", 2, "--seed", 3)
    assert result.stdout == ""
    assert json.loads((tmp_path / "out.json").read_text()) == found
    assert call("predict", run, *paths, "-o", tmp_path / "out.csv").stdout == ""
    assert len(rows_of((tmp_path / "out.csv").read_text())) == 5


def _bad(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


@pytest.mark.parametrize(
    ("make", "code", "message"),
    [
        (lambda folder: folder / "none.png", 2, "none.png"),
        (lambda folder: folder, 2, "a folder with images"),
        (lambda folder: _bad(folder, "a.txt", b"x"), 2, ".npy, .csv"),
        (lambda folder: _bad(folder, "a.png", b"no image"), 1, "a.png`"),
        (lambda folder: _bad(folder, "a.png", b""), 1, "a.png`"),
        (lambda folder: _bad(folder, "a.npy", b"no array"), 1, "an .npy file"),
        (lambda folder: _npy(lambda x: x[:, :7])(folder, np.zeros((2, 8, 8), np.uint8))[0], 1, "(N, 1, 8, 8)"),
        (lambda folder: _npy(lambda x: x - 1.0)(folder, np.zeros((2, 8, 8)))[0], 1, "in [0, 1]"),
        (lambda folder: _npy(lambda x: x * np.nan)(folder, np.zeros((2, 8, 8)))[0], 1, "in [0, 1]"),
        (lambda folder: _npy(lambda x: x)(folder, np.full((2, 8, 8), 16))[0], 1, "in [0, 1], but got values from 16"),
        (lambda folder: _npy(lambda x: x)(folder, np.zeros((2, 8, 8), bool))[0], 1, "an array of numbers"),
        (lambda folder: _npy(lambda x: x)(folder, np.array([{}]))[0], 1, "an .npy file"),
        (lambda folder: _npy(lambda x: x)(folder, np.zeros((0, 8, 8), np.uint8))[0], 1, "one or more examples"),
        (lambda folder: _bad(folder, "a.csv", b"1,2,3\n"), 1, "(N, 64)"),
        (lambda folder: _bad(folder, "a.csv", b"1,2,3\n1,2\n"), 1, "column"),
        (lambda folder: _bad(folder, "a.csv", b"1,2,3\n1,x,3\n"), 1, "'x' in row 2, column '2'"),
        (lambda folder: _bad(folder, "a.csv", b"\xff\xfe\x00"), 1, "no row below the header"),
        (lambda folder: _bad(folder, "a.csv", b""), 1, "to be CSV"),
    ],
)
def test_wrong_inputs(make: Callable[[Path], Path], code: int, message: str, run: Path, tmp_path: Path) -> None:
    result = call("predict", run, make(tmp_path), code=code)
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--risk", "0"], "--risk"),
        (["--risk", "1.5"], "--risk"),
        (["--novelty", "1"], "`--novelty`"),
    ],
)
def test_wrong_predict_options(words: list[str], message: str, run: Path, tmp_path: Path) -> None:
    path = _png(tmp_path, np.zeros((1, 8, 8), np.uint8))[0]
    assert message in call("predict", run, path, *words, code=2).stderr


# -------------------------------------------------------------------------------------------------------------- points


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "curve"
    result = call("train", "toy-regression", *TINY, "--out", folder)
    assert "RMSE" in result.stdout
    assert "corrupted" not in result.stdout
    assert f"ibnn predict {folder} points.csv" in result.stderr
    return folder


def test_numbers_are_predicted_with_intervals(curve: Path, tmp_path: Path) -> None:
    x = np.array([[-3.0], [0.5], [40.0]])
    np.save(tmp_path / "a.npy", x)
    (tmp_path / "a.csv").write_text("x\n-3\n0.5\n40\n")
    expected = jobs.read_run(curve).model.predict(torch.from_numpy(x).float(), samples=5, seed=0)
    low, high = expected.interval(0.9)
    named = {"mean": expected.mean, "std": expected.std, "low": low, "high": high}
    named |= {"aleatoric": expected.aleatoric, "epistemic": expected.epistemic}
    for file in ("a.csv", "a.npy"):
        rows = rows_of(call("predict", curve, tmp_path / file, "--samples", 5).stdout)
        assert list(rows[0]) == ["file", "row", *named]
        for name, values in named.items():
            assert [float(row[name]) for row in rows] == pytest.approx(values[:, 0].tolist(), rel=1e-4)
    found = json.loads(call("predict", curve, tmp_path / "a.csv", "--json").stdout)
    assert (found["risk"], found["novelty"]) == (None, None)  # 30 points to train on are too few to tell
    refused = call("predict", curve, tmp_path / "a.csv", "--novelty", 0.1, code=2)
    assert "`novelty`" in refused.stderr


def test_novel_numbers_are_withheld(tmp_path: Path) -> None:
    more = ["--set", "examples=300", "--set", "valid=110", "--set", "train.steps=2"]
    call("train", "toy-regression", *TINY, *more, "--out", tmp_path / "run", "--quiet")
    (tmp_path / "a.csv").write_text("x\n0.5\n40\n")
    result = call("predict", tmp_path / "run", tmp_path / "a.csv", "--novelty", 0.02)
    rows = rows_of(result.stdout)
    assert list(rows[0])[-3:] == ["p_value", "abstain", "withheld"]
    assert [(row["abstain"], row["withheld"]) for row in rows] == [("no", ""), ("yes", "novel")]
    assert float(rows[1]["p_value"]) == pytest.approx(1 / 111, rel=1e-5)
    assert "Answers 1 of 2 inputs; withheld: 1 novel." in result.stderr
    refused = call("predict", tmp_path / "run", tmp_path / "a.csv", "--novelty", 0.005, code=2)
    assert "`novelty` to be at least 0.0091 with 110 held-out inputs" in refused.stderr
    plain, mixed = (
        rows_of(call("predict", tmp_path / "run", tmp_path / "a.csv", *more).stdout)
        for more in ([], ["--fallback", 0.02])
    )
    assert plain[0]["mean"] == mixed[0]["mean"]
    assert plain[1]["mean"] != mixed[1]["mean"]


def test_runs_of_points_are_evaluated_and_reported(curve: Path, tmp_path: Path) -> None:
    stored = json.loads((curve / "result.json").read_text())
    assert json.loads(call("evaluate", curve, "--json").stdout)["scores"] == pytest.approx(stored["scores"])
    call("report", curve, "-o", tmp_path / "report.html")
    assert "RMSE" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: _png(folder, np.zeros((1, 8, 8), np.uint8))[0], "a .csv or .npy file of points"),
        (lambda folder: _bad(folder, "a.csv", b"1,2\n"), "(N, 1)"),
        (lambda folder: _bad(folder, "a.csv", b"nan\n"), "finite"),
        (lambda folder: _npy(lambda x: x.astype(complex))(folder, np.zeros((2, 1)))[0], "an array of numbers"),
    ],
)
def test_wrong_points(make: Callable[[Path], Path], message: str, curve: Path, tmp_path: Path) -> None:
    assert message in call("predict", curve, make(tmp_path), code=1).stderr


def test_points_of_classes_are_labelled_and_abstained_from(tmp_path: Path) -> None:
    call("train", "two-moons", *TINY, "--out", tmp_path / "run", "--quiet")
    (tmp_path / "a.csv").write_text("0,1\n1,-0.5\n")
    found = json.loads(call("predict", tmp_path / "run", tmp_path / "a.csv", "--json", "--samples", 5).stdout)
    assert [list(row) for row in found["rows"]] == [FIELDS] * 2
    assert found["risk"]["examples"] == 200
    expected = jobs.read_run(tmp_path / "run").model.predict(torch.tensor([[0.0, 1.0], [1.0, -0.5]]), samples=5, seed=0)
    assert [row["total"] for row in found["rows"]] == pytest.approx(expected.total.tolist(), rel=1e-4)


def _answers_of(path: Path, x: np.ndarray[Any, Any]) -> tuple[dict[str, Any], Any]:
    facts = {"ibnn.json": ""}
    program = torch.export.load(path, extra_files=facts)
    with torch.no_grad():
        answers = program.module()(torch.from_numpy(x).float())
    return answers, json.loads(facts["ibnn.json"])


def test_runs_of_points_are_exported(curve: Path, tmp_path: Path) -> None:
    path, x = tmp_path / "m.pt2", np.array([[-3.0], [0.5], [4.0]])
    words = ["--format", "torch", "--samples", 2, "--seed", 1, "--json"]
    told = json.loads(call("export", curve, "-o", path, *words).stdout)
    assert told["difference"] < 1e-4
    found, facts = _answers_of(path, x)
    expected = jobs.read_run(curve).model.predict(torch.from_numpy(x).float(), samples=2, seed=1)
    for name in ("mean", "std", "aleatoric", "epistemic"):
        torch.testing.assert_close(found[name], getattr(expected, name), rtol=1e-4, atol=0)
    assert (facts["columns"], facts["classes"], facts["pixels"]) == (["x1"], [], None)
    assert "`--pixels`" in call("export", curve, "--pixels", code=2).stderr


# ------------------------------------------------------------------------------------------------ own tables and nets

JOB = """net = "mlp"
data = "flowers.csv"
target = "kind"
valid = 20
samples = 3

[net_options]
hidden = 16

[method_options]
components = 2

[train]
steps = 60
lr = 0.02
batch_size = 32
"""


def _flowers(rows: int = 150, numbers: bool = False) -> str:
    generator = np.random.default_rng(3)
    lines = ["width,height,kind"]
    for i in range(rows):
        width, height = generator.normal(loc=(i % 3) * 4, size=2)
        lines.append(f"{width},{100 * height},{width + height if numbers else ('iris', 'lily', 'rose')[i % 3]}")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def flowers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table, a job, and its run."""
    folder = tmp_path_factory.mktemp("flowers")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "flowers.csv").write_text(_flowers())
        (folder / "job.toml").write_text(JOB)
        result = call("train", "job.toml")
    assert "flowers.csv: 'kind' is 3 classes (iris, lily, rose)" in result.stderr
    assert "ibnn predict runs/job flowers.csv" in result.stderr
    return folder


def test_rows_of_a_table_are_predicted_by_the_names_of_their_columns(
    flowers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(flowers)
    (tmp_path / "new.csv").write_text("note,height,width\nfine,390,3.5\n,-50,0.2\n")
    result = call("predict", "runs/job", tmp_path / "new.csv")
    assert f"{tmp_path / 'new.csv'}: not used: 'note'." in result.stderr
    rows = rows_of(result.stdout)
    assert [row["label"] for row in rows] == ["lily", "iris"]
    np.save(tmp_path / "new.npy", np.array([[3.5, 390], [0.2, -50]]))  # by order
    by_order = rows_of(call("predict", "runs/job", tmp_path / "new.npy").stdout)
    assert [row | {"file": ""} for row in by_order] == [row | {"file": ""} for row in rows]
    assert "not used: 'kind'." in call("predict", "runs/job", "flowers.csv").stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("width,hight\n1,2\n", "a column 'height', but got none called 'height'. Did you mean 'hight'?"),
        ("1,2\n3,4\n", "a column 'width'"),
        ("width,height,width\n1,2,3\n", "2 called 'width'"),
        ("width,height\n1,2\n1,tall\n", "'tall' in row 2, column 'height'"),
        ("width,height\n1,\n", "nothing in row 1, column 'height'"),
        ("width,height\n1,1e39\n", "finite"),
        ("width,height\n", "no row below the header"),
    ],
)
def test_wrong_rows_of_a_table(text: str, words: str, flowers: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text)
    result = call("predict", flowers / "runs" / "job", tmp_path / "a.csv", code=1)
    assert words in result.stderr
    assert result.stdout == ""


def test_a_run_on_a_table_is_evaluated_reported_and_exported(
    flowers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(flowers)
    stored = json.loads((flowers / "runs" / "job" / "result.json").read_text())
    found = json.loads(call("evaluate", "runs/job", "--json").stdout)
    assert (found["name"], found["data"]) == ("ibnn mlp flowers.csv seed 0", "flowers.csv")
    assert found["scores"] == pytest.approx(stored["scores"])
    copy = shutil.copytree(flowers / "runs" / "job", tmp_path / "run")
    monkeypatch.chdir(tmp_path)  # where there is no table
    assert "neither" in (error := call("evaluate", copy, code=1).stderr)
    assert "--data" in error
    assert json.loads(call("evaluate", copy, "--data", flowers, "--json").stdout)["scores"] == found["scores"]
    call("report", copy, "-o", "report.html")
    assert "ibnn mlp flowers.csv seed 0" in Path("report.html").read_text()
    call("export", copy, "-o", "m.pt2", "--format", "torch", "--samples", 2)
    answers, facts = _answers_of(Path("m.pt2"), np.array([[3.5, 390]]))
    assert (facts["columns"], facts["target"]) == (["width", "height"], "kind")
    assert facts["classes"][int(answers["probabilities"][0].argmax())] == "lily"
    (tmp_path / "new.csv").write_text("height,width\n390,3.5\n")
    Path("flowers.csv").write_text(_flowers(151))
    assert "flowers.csv, which has changed" in call("evaluate", copy, code=2).stderr
    risk = json.loads(call("predict", copy, "new.csv", "--json", "--risk", 0.9).stdout)["risk"]
    assert risk["examples"] > 0  # whose answers the run has stored


@pytest.mark.parametrize(
    ("table", "settings", "words"),
    [
        (_flowers().replace("lily", "", 1), [], "nothing in row 2, column 'kind'"),
        (_flowers(), ["target=kin"], "Did you mean 'kind'?"),
        (_flowers(), ["target=width"], "'iris' in row 1, column 'kind'"),
        (_flowers(), ["valid=500"], "`valid`"),
        (_flowers(), ["examples=121"], "`examples`"),
        (_flowers(), ["net_options.inputs=5"], "(2,), which flowers.csv has"),
        (_flowers(), ["augment=true"], "`augment`"),
        (_flowers(), ["ignore=width"], "`ignore`"),
        (_flowers(), ["task=regression"], "`task`"),
        (_flowers(), ["net=lenet", "net_options={}"], "options"),
    ],
)
def test_a_table_that_cannot_be_trained_on_leaves_everything_as_it_was(
    table: str, settings: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)
    Path("flowers.csv").write_text(table)
    Path("run").mkdir()
    Path("run/job.toml").write_text("old")
    Path("run/result.json").write_text("{}")
    changes = [word for setting in settings for word in ("--set", setting)]
    result = call("train", "job.toml", *changes, "--out", "run", "--fresh", code=2)
    assert words in result.stderr
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["flowers.csv", "job.toml", "job.toml", "result.json"]
    assert Path("run/job.toml").read_text() == "old"


NET = """
from torch import nn

def make_net(outputs, inputs=2, width=8):
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))
"""


def test_a_network_of_your_own_through_all_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"cli_{abs(hash(str(tmp_path)))}"
    Path(f"{name}.py").write_text(NET)
    found = json.loads(call("plan", "--net", f"{name}:make_net", "--option", "width=4", "--json").stdout)
    assert (found["nodes"], found["weights"]) == (2 + 4, 2 * 4 + 4 + 4 * 10 + 10)
    for net, words in ((f"{name}:make", "Did you mean 'make_net'?"), ("os:system", "has no module 'os'")):
        assert words in call("plan", "--net", net, code=2).stderr
    assert "'widht'" in call("plan", "--net", f"{name}:make_net", "--option", "widht=4", code=2).stderr
    Path("flowers.csv").write_text(_flowers(numbers=True))
    Path("job.toml").write_text(JOB.replace('"mlp"', f'"{name}:make_net"').replace("hidden", "width"))
    changes = ["--set", "train.steps=3", "--set", "net_options.widht=4"]
    assert "unexpected keyword argument 'widht'" in call("train", "job.toml", *changes, code=2).stderr
    assert not Path("runs").exists()
    result = call("train", "job.toml", "--set", "train.steps=3", "--set", "seed=6", "--out", "run")
    assert "'kind' is a number; " in result.stderr
    assert "ibnn predict run flowers.csv --trust-code" in result.stderr
    for words in (("predict", "run", "flowers.csv"), ("evaluate", "run"), ("export", "run"), ("serve", "run")):
        assert f"one whose network is code, {name}:make_net" in call(*words, code=2).stderr
    call("report", "run")
    page = Path("report.html").read_text()
    assert f"ibnn {name}:make_net flowers.csv seed 6" in page
    assert "<pre>seed: 6\n" in page
    assert len(rows_of(call("predict", "run", "flowers.csv", "--trust-code").stdout)) == 150
    assert "RMSE" in call("evaluate", "run", "--trust-code").stdout
    call("export", "run", "--trust-code", "--format", "torch", "-o", "m.pt2")
    for module in [module for module in sys.modules if module == name]:
        del sys.modules[module]
    Path(f"{name}.py").unlink()
    assert f"has no module '{name}'" in call("predict", "run", "flowers.csv", "--trust-code", code=2).stderr


# ---------------------------------------------------------------------------------------------------------- abstaining


def test_smaller_risk_abstains_more_and_none_abstains_all(run: Path, tmp_path: Path) -> None:
    test = data.load("digits").test
    assert isinstance(test, data.Split)
    np.save(tmp_path / "a.npy", test.images.numpy())
    given = []
    for risk in (0.01, 0.1, 0.3, 0.9):
        result = call("predict", run, tmp_path / "a.npy", "--risk", risk, "--novelty", 0, "--json")
        rows, facts = json.loads(result.stdout)["rows"], json.loads(result.stdout)["risk"]
        given.append([row["file"] for row in rows if not row["abstain"]])
        assert all(row["abstain"] == (facts["limit"] is None or row["total"] > facts["limit"]) for row in rows)
        assert ("All abstain" in result.stderr) == (not given[-1])
        assert facts["bound"] <= risk or not facts["coverage"]
    assert given[0] == []
    assert all(len(a) <= len(b) for a, b in pairwise(given))
    assert len(given[-1]) > 300


def test_novel_images_are_withheld_with_the_reason(run: Path, tmp_path: Path, pixels: np.ndarray[Any, Any]) -> None:
    np.save(tmp_path / "a.npy", np.concatenate([pixels, 255 - pixels]))

    def ask(*words: object) -> tuple[list[tuple[str | None, bool]], Any, str]:
        result = call("predict", run, tmp_path / "a.npy", "--json", *words)
        found = json.loads(result.stdout)
        return [(row["withheld"], row["abstain"]) for row in found["rows"]], found["novelty"], result.stderr

    reasons, facts, words = ask("--risk", 1)
    assert reasons == [(None, False)] * 5 + [("novel", True)] * 5
    assert facts == {"level": 0.01, "examples": 300, "novel": 5}
    assert "Answers 5 of 10 inputs; withheld: 5 novel." in words
    reasons, facts, words = ask("--risk", 1, "--novelty", 0)
    assert (set(reasons), facts["novel"]) == ({(None, False)}, 0)
    assert "Answers 10 of 10 inputs; withheld: none." in words
    reasons, _, words = ask("--risk", 1e-9)  # which 300 inputs cannot show
    assert reasons == [(None, False)] * 5 + [("novel", True)] * 5
    assert "needs 2995732273 held-out inputs" in words
    reasons, _, words = ask("--risk", 0.02)  # which no threshold keeps after 12 steps
    assert reasons == [("uncertain", True)] * 5 + [("novel and uncertain", True)] * 5
    assert "Answers 0 of 10 inputs; withheld: 5 novel and uncertain, 5 uncertain." in words
    _, _, words = ask("--risk", 0.9)
    assert " or p-value ≤ 0.01: this answers " in words
    rows = rows_of(call("predict", run, tmp_path / "a.npy", "--risk", 1).stdout)
    assert [row["withheld"] for row in rows] == [""] * 5 + ["novel"] * 5
    x = data.load("digits").normalise(torch.from_numpy(np.concatenate([pixels, 255 - pixels]))[:, None])
    expected = jobs.read_run(run).model.predict(x, samples=3).p_value
    assert [float(row["p_value"]) for row in rows] == pytest.approx(expected.tolist(), rel=1e-5)


def test_validation_answers_are_stored_in_the_run_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _png(tmp_path, np.zeros((1, 8, 8), np.uint8))[0]

    def ask(*words: object) -> Any:
        return json.loads(call("predict", run, path, "--json", "--risk", 0.9, *words).stdout)["risk"]

    valid: Any = make_data(jobs.read_run(run).job).valid
    x, y = valid.__getitems__(list(range(300)))
    answer: Any = jobs.read_run(run).model.predict(x, samples=3)
    stored = RunFolder(run).answers()
    torch.testing.assert_close(stored["valid/total"], answer.total)
    assert torch.equal(stored["valid/wrong"], answer.labels != y)
    torch.testing.assert_close(stored["valid/p_value"], answer.p_value)
    other = ask("--seed", 7)  # other draws, from the data

    def gone(*_: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(parts, "make_data", gone)
    assert ask("--seed", 7) is None
    assert ask()["examples"] == other["examples"] == 300
    assert ask()["limit"] == pytest.approx(other["limit"], rel=0.2)


# ------------------------------------------------------------------------------------------------------- damaged runs


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    content[-9] ^= 1
    path.write_bytes(content)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize("damage", [_flip, _cut])
@pytest.mark.parametrize("name", ["model.safetensors", "job.toml", "result.json", "answers.safetensors"])
def test_damaged_runs_are_refused(name: str, damage: Callable[[Path], None], run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    damage(copy / name)
    np.save(tmp_path / "a.npy", np.zeros((1, 8, 8)))
    commands: list[tuple[object, ...]] = [("predict", copy, tmp_path / "a.npy"), ("export", copy)]
    commands += [("evaluate", copy)] if name != "answers.safetensors" else []  # which has others
    commands += [("report", copy, "-o", tmp_path / "r.html")] if name != "model.safetensors" else []
    for words in commands:
        result = call(*words, code=1)
        assert str(copy / name) in result.stderr
        assert result.stdout == ""
    assert not (tmp_path / "r.html").exists()


def test_damaged_runs_can_be_trained_anew(curve: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(curve, tmp_path / "run")
    _cut(copy / "job.toml")
    assert "ibnn train --fresh" in call("train", "toy-regression", *TINY, "--out", copy, code=1).stderr
    call("train", "toy-regression", *TINY, "--out", copy, "--fresh")
    old, new = (safetensors.torch.load_file(folder / "model.safetensors") for folder in (curve, copy))
    assert old.keys() == new.keys()
    assert all(torch.equal(new[name], value) for name, value in old.items())


# ---------------------------------------------------------------------------------------------------------- exit codes


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("predict nowhere a.npy", 2, "no such nowhere"),
        ("predict file a.npy", 2, "no such file"),
        ("predict RUN a.npy --samples 0", 2, "--samples"),
        ("predict RUN a.npy --seed -1", 2, "--seed"),
        ("predict RUN a.npy --novlty 0.1", 2, "--novelty"),
        ("predict RUN a.npy --novelty nan", 2, "`--novelty`"),
        ("serve RUN --novelty -1", 2, "`--novelty`"),
        ("predict RUN a.npy -o file/a.csv", 2, "`--out`"),
        ("predict RUN a.npy -o a.csv/", 2, "`--out`"),
        ("evaluate nowhere", 2, "no such nowhere"),
        ("report file", 2, "folders of finished runs"),
        ("report RUN -o .", 2, "`--out`"),
        ("report RUN -o file/a.html", 2, "file is a file"),
        ("export nowhere", 2, "no such nowhere"),
        ("export RUN -o file/m.onnx", 2, "`--out`"),
        ("serve nowhere", 2, "no such nowhere"),
        ("serve RUN --port 99999", 2, "--port"),
        ("serve RUN --megabytes inf", 2, "--megabytes"),
        ("demo --out file", 2, "`--out`"),
        ("data get nothing", 2, "`name`"),
        ("data get digits --data file", 2, "is a file"),
        ("plan", 2, "--net"),
        ("plan --net lenet --option width=nan", 2, "`width`"),
        ("plan --net mlp --option layers=1.5", 2, "`layers`"),
        ("plan --net vgg16-small --option dropout=2", 2, "`dropout`"),
    ],
)
def test_wrong_usage_is_2_and_failure_1(
    words: str, code: int, message: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", np.zeros((1, 8, 8)))
    Path("file").write_text("mine")
    Path("bad.json").write_text('{"cells": {}\n')
    Path("list.json").write_text("[]")
    Path("a.csv").mkdir()
    before = sorted(tmp_path.rglob("*"))
    result = call(*words.replace("RUN", str(run)).split(), code=code)
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""
    assert sorted(tmp_path.rglob("*")) == before


# ----------------------------------------------------------------------------------------------- report, paper, demo


def test_report(run: Path, tmp_path: Path) -> None:
    result = call("report", run, "-o", tmp_path / "report.html", "--title", "My page")
    assert result.stdout.strip() == str(tmp_path / "report.html")
    assert "My page" in (tmp_path / "report.html").read_text()
    assert "folders of finished runs" in call("report", tmp_path / "none", code=2).stderr


def test_report_leaves_out_what_is_no_finished_run(curve: Path, tmp_path: Path) -> None:
    begun, lock, page = tmp_path / "begun", tmp_path / "run.lock", tmp_path / "report.html"
    begun.mkdir()
    lock.touch()
    assert "folders of finished runs" in call("report", begun, lock, "-o", page, code=2).stderr
    assert not page.exists()
    shutil.copy(curve / "job.toml", begun)
    result = call("report", curve, begun, lock, "-o", page)
    assert result.stderr.splitlines() == [f"Skipped: {x}, which is no folder of a finished run." for x in (begun, lock)]
    alone = tmp_path / "alone.html"
    call("report", curve, "-o", alone)
    assert page.read_bytes() == alone.read_bytes()


def test_demo_shows_its_table_and_where_its_figures_are(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = json.loads((Path(__file__).parents[2] / "experiments" / "results" / "demo.json").read_text())
    asked: list[object] = []
    monkeypatch.setattr("ibnn.lab.demo.run", lambda *options: asked.append(options) or stored)
    assert json.loads(call("demo", "--out", "there", "--seed", 3, "--json").stdout) == stored
    short, long = call("demo", "--quiet").stdout, call("demo").stdout
    assert asked == [(Path("there"), 3), (Path("demo"), 0), (Path("demo"), 0)]
    assert long.startswith(short)
    assert f"{stored['metrics']['iBNN']['nll'][0]:.3f}" in short
    assert "Look at: demo/reliability.png" in long.removeprefix(short)
    call("demo", "--seed", -1, code=2)
    assert "--out" in call("demo", "--out", __file__, code=2).stderr
    assert len(asked) == 3


# ---------------------------------------------------------------------------------------------------------- processes


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torch.distributed.run", "accelerate.commands.launch"])
def test_two_workers_write_the_answers_of_one(run: Path, tmp_path: Path, launcher: str) -> None:
    images = data.load("digits").test.images[:, 0].numpy()
    np.save(tmp_path / "a.npy", images)  # 360 rows, two batches
    _png(tmp_path, images[:150])
    (tmp_path / "7.png").write_bytes(b"no image")
    (tmp_path / "bad.csv").write_text("1,2\n")
    inputs = [tmp_path / "a.npy", tmp_path / "bad.csv", tmp_path]
    alone = call("predict", run, *inputs, "-o", tmp_path / "one.csv", code=1)
    words = ["--nproc-per-node", "2"] if "torch" in launcher else ["--cpu", "--num_processes", "2"]
    command = [
        sys.executable,
        "-m",
        launcher,
        *words,
        "-m",
        "ibnn",
        "predict",
        run,
        *inputs,
        "-o",
        tmp_path / "two.csv",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_PORT": "0"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1, done.stderr
    assert (tmp_path / "two.csv").read_bytes() == (tmp_path / "one.csv").read_bytes()
    errors = [line for line in alone.stderr.splitlines() if line.startswith("Error")]
    assert len(errors) == 2
    assert sorted(line for line in done.stderr.splitlines() if line.startswith("Error")) == sorted(errors)


@pytest.mark.slow
def test_a_closed_pipe_is_quiet() -> None:
    command = [sys.executable, "-m", "ibnn", "data", "list", "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait() == 1
    assert process.stderr.read() == ""
    process.stderr.close()


# -------------------------------------------------------------------------------------------------------------- export


@pytest.mark.slow
def test_export_answers_as_predict(run: Path, pixels: np.ndarray[Any, Any], tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    result = call("export", run, "-o", tmp_path / "m.onnx", "--pixels", "--samples", 2, "--seed", 3)
    assert result.stdout == f"{tmp_path / 'm.onnx'}\n"
    assert "are draws" in result.stderr
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    probabilities, total, *_ = session.run(None, {"x": pixels[:, None].astype(np.float32) / 255})
    np.save(tmp_path / "a.npy", pixels)
    rows = rows_of(call("predict", run, tmp_path / "a.npy", "--samples", 2, "--seed", 3, "--risk", 1).stdout)
    facts = json.loads(session.get_modelmeta().custom_metadata_map["ibnn"])
    assert [facts["classes"][i] for i in probabilities.argmax(1)] == [row["label"] for row in rows]
    assert total == pytest.approx([float(row["total"]) for row in rows], abs=1e-4)
    assert facts["pixels"] == facts["normalisation"]


@pytest.mark.slow
def test_export_of_normalised_images_and_wrong_exports(run: Path, tmp_path: Path) -> None:
    result = call("export", run, "-o", tmp_path / "m.pt2", "--format", "torch")
    assert result.stdout == f"{tmp_path / 'm.pt2'}\n"
    assert "are draws" in result.stderr
    _, facts = _answers_of(tmp_path / "m.pt2", np.zeros((2, 1, 8, 8)))
    assert (facts["samples"], facts["pixels"]) == (3, None)  # the job's
    assert "job.toml" in call("export", tmp_path, code=2).stderr
    assert "the folder" in call("export", run, "-o", tmp_path, "--format", "torch", code=2).stderr
    assert "tflite" in call("export", run, "--format", "tflite", code=2).stderr
