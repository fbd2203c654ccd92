"""Models that are no runs, through the commands and the service: saved folders, live models and exported files."""

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_cli import call, rows_of
from torch import Tensor, nn

import ibnn
from ibnn.app.predictor import Predictor
from ibnn.files.saving import save_pretrained

requests = pytest.importorskip("requests")
CODE = """
from torch import nn

def make():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

def small(outputs):
    return nn.Linear(4, outputs)
"""


def made(net: nn.Module | None = None, **options: Any) -> ibnn.IBNN:
    torch.manual_seed(0)
    net = net or nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return ibnn.convert(net, components=2, prior_std=0.3, seed=0, **options).eval()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")  # one for all tests: Python imports the code once


@pytest.fixture
def saved(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A saved model with its code beside it, in the current folder."""
    monkeypatch.chdir(place)
    Path("mine_for_serve.py").write_text(CODE)
    save_pretrained(made(), "saved")
    np.save("a.npy", torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).numpy())
    return Path("saved")


NET = ["--net", "mine_for_serve:make"]


def probabilities(rows: list[dict[str, Any]]) -> list[float]:
    return [float(row["probability"]) for row in rows]


def test_a_saved_model_through_all_commands(saved: Path) -> None:
    x = torch.from_numpy(np.load("a.npy"))
    expected = made().predict(x).probs  # type: ignore[attr-defined]
    found = rows_of(call("predict", saved, "a.npy", *NET).stdout)
    assert probabilities(found) == pytest.approx(expected.amax(1).tolist(), rel=1e-4)
    assert [row["label"] for row in found] == [str(label) for label in expected.argmax(1).tolist()]
    np.savez("test.npz", x=x.numpy(), y=expected.argmax(1).numpy())
    scores = json.loads(call("evaluate", saved, *NET, "--test", "test.npz", "--json").stdout)["scores"]
    assert scores["error"] == 0
    assert scores["nll"] == pytest.approx(-expected.amax(1).log().mean().item(), rel=1e-4)
    call("export", saved, *NET, "--example", "a.npy", "-o", "model.onnx")
    again = rows_of(call("predict", "model.onnx", "a.npy").stdout)
    assert probabilities(again) == pytest.approx(expected.amax(1).tolist(), rel=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("predict saved a.npy", "--net"),
        ("predict saved a.npy --net mine_for_serve:small", "`--net`"),
        ("predict saved none.npy --net mine_for_serve:make", "none.npy"),
        ("evaluate saved --net mine_for_serve:make", "--test"),
        ("evaluate saved --net mine_for_serve:make --test a.npy", "--test"),
        ("export saved --net mine_for_serve:make", "`--example`"),
        ("predict no.onnx a.npy", "`MODEL`"),
    ],
)
def test_what_a_saved_model_needs(words: str, message: str, saved: Path) -> None:
    Path("no.onnx").write_bytes(b"nothing")
    assert message in call(*words.split(), code=2).stderr


def test_a_known_architecture_needs_no_code(tmp_path: Path) -> None:
    model = made(ibnn.nets.make("mlp", classes=3, inputs=4, hidden=8))
    options = {"classes": 3, "inputs": 4, "hidden": 8}
    save_pretrained(model, tmp_path / "m", architecture={"name": "mlp", "options": options})
    np.save(tmp_path / "a.npy", np.zeros((2, 4), np.float32))
    assert len(rows_of(call("predict", tmp_path / "m", tmp_path / "a.npy").stdout)) == 2
    words = ["--example", tmp_path / "a.npy", "-o", tmp_path / "m.pt2", "--format", "torch"]
    call("export", tmp_path / "m", *words)


# ---------------------------------------------------------------------------------------------------------- the service


class Served:
    """`ibnn.serve` in a thread, until the test ends with the process's other threads."""

    def __init__(self, model: Any, valid: Any = None, **options: Any) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        run = threading.Thread(target=ibnn.serve, args=(model, valid), kwargs={"port": port, **options}, daemon=True)
        run.start()
        for _ in range(600):
            try:
                requests.get(f"{self.url}/health", timeout=5)
            except requests.ConnectionError:
                assert run.is_alive()
                time.sleep(0.05)
            else:
                return
        raise AssertionError("the service does not start")

    def ask(self, inputs: Any, code: int = 200) -> Any:
        reply = requests.post(f"{self.url}/predict", json={"inputs": inputs}, timeout=30)
        assert reply.status_code == code, reply.text
        return reply.json()


@pytest.mark.filterwarnings("ignore")
def test_a_live_model_is_served() -> None:
    pytest.importorskip("starlette")
    model, x = made(), torch.randn(90, 4, generator=torch.Generator().manual_seed(1))
    expected: Any = model.predict(x[:3])
    valid = (x, model.predict(x).labels)  # type: ignore[attr-defined]
    served = Served(model, valid, classes=["a", "b", "c"])
    found = served.ask(x[:3].tolist())
    assert (found["classes"], found["risk"]) == (["a", "b", "c"], 0.05)
    answers = torch.tensor([row["probabilities"] for row in found["rows"]])
    torch.testing.assert_close(answers, expected.probs, rtol=0, atol=1e-6)
    assert "Linear" in served.ask([[1.0]], 422)["detail"]
    facts = requests.get(f"{served.url}/health", timeout=5).json()["abstention"]
    assert (facts["examples"], facts["needed"], facts["errors"]) == (90, 59, 0)


class Words(nn.Module):
    """Embeds tokens, and masks some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 6), nn.Linear(6, 2)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.head((self.embedding(tokens) * mask[..., None]).mean(1))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")
def test_inputs_by_name_and_other_answers_are_served() -> None:
    pytest.importorskip("starlette")
    model = made(Words(), likelihood=ibnn.Bernoulli())
    tokens, mask = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    served = Served(model)
    found = served.ask({"tokens": tokens.tolist(), "mask": mask.tolist()})["rows"]
    expected: Any = model.predict({"tokens": tokens, "mask": mask})
    answers = torch.tensor([row["probabilities"] for row in found])
    torch.testing.assert_close(answers, expected.probs, rtol=0, atol=1e-6)
    assert "label" not in found[0]
    served.ask({"tokens": [[1, 2]], "mask": [[1, 1], [1, 1]]}, 422)


def test_only_models_are_served() -> None:
    pytest.importorskip("starlette")
    with pytest.raises(TypeError, match="`model`"):
        ibnn.serve(nn.Linear(4, 3))
    with pytest.raises(ValueError, match="risk"):
        ibnn.serve(made(), risk=2)


@pytest.mark.parametrize(
    "head", ["classes", *(pytest.param(h, marks=pytest.mark.slow) for h in ("numbers", "several"))]
)
def test_an_exported_file_answers_as_the_model(head: str, tmp_path: Path) -> None:
    likelihoods: dict[str, Any] = {
        "classes": ibnn.Categorical(),
        "numbers": ibnn.Gaussian(),
        "several": ibnn.Heads({"a": ibnn.Categorical(), "b": ibnn.Gaussian()}),
    }
    if head == "several":
        net: nn.Module = TwoHeads()
    else:
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3 if head == "classes" else 1))
    model, x = made(net, likelihood=likelihoods[head]), torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
    ibnn.fit_novelty(model, x, x + 1)
    ibnn.export(model, x, tmp_path / "m.onnx", samples=3, metadata={"classes": ["u", "v", "w"]})
    file, own = Predictor.read(tmp_path / "m.onnx"), Predictor.of_model(model, classes=["u", "v", "w"], samples=3)
    assert (file.samples, file.ranked) == (3, own.ranked)
    rule = own.rule(1, own.novelty_level(None), None)[0]
    for row, expected in zip(*(p.described(p.answer(x[:9]), rule) for p in (file, own)), strict=True):
        assert list(row) == list(expected)
        for name in set(row) - {"low", "high"}:  # the file knows one Gaussian, not the mixture
            value = expected[name]
            numeric = isinstance(value, float | list)
            assert row[name] == (pytest.approx(value, rel=1e-3, abs=1e-5) if numeric else value)


class TwoHeads(nn.Module):
    """Has a classifier and a regression on one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x).relu()
        return {"a": self.a(hidden), "b": self.b(hidden)}


def test_options_that_a_file_has_decided_are_refused(tmp_path: Path) -> None:
    model = made()
    ibnn.export(model, torch.zeros(1, 4), tmp_path / "m.onnx")
    for option in ({"samples": 3}, {"seed": 1}, {"fallback": 0.1}):
        with pytest.raises(ValueError, match="absent for"):
            Predictor.read(tmp_path / "m.onnx", **option)  # type: ignore[arg-type]


def test_few_validation_rows_withhold_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(120, 2))
    lines = [f"{a},{b},{'yes' if a > 0 else 'no'}" for a, b in x]
    Path("t.csv").write_text("\n".join(["a,b,y", *lines]))
    job = 'net = "mlp"\ndata = "t.csv"\ntarget = "y"\nvalid = 40\n[net_options]\nhidden = 8\n[train]\nsteps = 20\n'
    Path("t.toml").write_text(job)
    call("train", "t.toml", "--out", "run")
    result = call("predict", "run", "t.csv", "--json")
    found = json.loads(result.stdout)
    assert not any(row["abstain"] for row in found["rows"])
    assert (found["risk"]["needed"], found["risk"]["known"]) == (59, 40)
    assert "59 held-out" in result.stderr
