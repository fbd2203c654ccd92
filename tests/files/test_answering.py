"""Exported files tell novel inputs, and answer to them, as `predict` does."""

import json

import pytest
import torch
from torch import nn

import ibnn
from ibnn import baselines, nets
from ibnn.files.export import file_answers

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

FIELDS = {"probabilities": "probs"}


class Sequences(nn.Module):
    """torch's Transformer, time first, whose padding is left out, and a GRU."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, norm_first=True)
        self.steps = nn.GRU(8, 8, batch_first=True)

    def forward(self, tokens, attention_mask):
        x = self.layer(self.embed(tokens).transpose(0, 1), src_key_padding_mask=~attention_mask.bool())
        x = self.steps(x.transpose(0, 1))[0]
        weight = attention_mask[..., None].float()
        return self.head((x * weight).sum(1) / weight.sum(1))


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x):
        x = self.body(x).relu()
        return {"a": self.a(x), "b": self.b(x)}


def convnet():
    first = [nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 160, 3), nn.BatchNorm2d(160)]
    return nn.Sequential(*first, nn.ReLU(), nn.Conv2d(160, 4, 3), nn.Flatten(), nn.Linear(16, 3))  # 320 > WIDEST


def tokens(rows, first=0):
    mask = (torch.arange(5) < torch.arange(rows)[:, None] % 4 + 2).long()
    return {"tokens": torch.randint(first, first + 10, (rows, 5)), "attention_mask": mask}


def two(rows):
    return {"a": torch.randint(3, (rows,)), "b": torch.randn(rows, 1)}


def rows_of(data, part):
    return {name: value[part] for name, value in data.items()} if isinstance(data, dict) else data[part]


CASES = {
    "mlp": (lambda: ibnn.convert(nets.mlp(4, 3, hidden=8), components=2, seed=0), (4,), 3),
    "convnet": (lambda: ibnn.convert(convnet(), components=2, seed=0), (2, 6, 6), 3),
    "sequences": (lambda: ibnn.convert(Sequences(), components=2, seed=0), tokens, 3),
    "dense": (lambda: ibnn.convert(nn.Conv2d(2, 3, 3, padding=1), components=2, seed=0), (2, 6, 6), (3, 6, 6)),
    "predicted noise": (
        lambda: ibnn.convert(nets.mlp(4, 2), likelihood=ibnn.Gaussian(noise="predicted"), components=2, seed=0),
        (4,),
        0,
    ),
    "yes or no": (lambda: ibnn.convert(nets.mlp(4, 2), likelihood="bernoulli", components=2, seed=0), (4,), (2,)),
    "heads": (
        lambda: ibnn.convert(
            TwoHeads(), likelihood=ibnn.Heads({"a": ibnn.Categorical(), "b": ibnn.Gaussian()}), components=2, seed=0
        ),
        (4,),
        two,
    ),
    "double": (lambda: ibnn.convert(nets.mlp(4, 3, hidden=8).double(), components=2, seed=0), (4,), 3),
    "plain": (lambda: baselines.Plain(nets.mlp(4, 3, hidden=8)), (4,), 3),
    "ensemble": (lambda: baselines.Ensemble([nets.mlp(4, 3, hidden=8) for _ in range(2)]), (4,), 3),
}


def made(name, **options):
    """A model with a reference, and two known and three novel inputs."""
    torch.manual_seed(0)
    make, shape, target = CASES[name]
    model = make().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
    if callable(shape):
        x, foreign = shape(240), shape(3, 10)
        new = {name: torch.cat([value[:2], foreign[name]]) for name, value in x.items()}
    else:
        x = torch.randn(240, *shape, dtype=next(model.parameters()).dtype)
        new = torch.cat([x[:2], 1.7 * x[2:3], 9 * x[3:5]])
    if callable(target):
        y = target(240)
    elif isinstance(target, tuple) and len(target) == 1:
        y = torch.randint(2, (240, *target)).float()
    elif isinstance(target, tuple):
        y = torch.randint(target[0], (240, *target[1:]))
    else:
        y = torch.randint(target, (240,)) if target else torch.randn(240, 1)
    if isinstance(x, dict):
        rows = [{**{k: v[i] for k, v in x.items()}, "labels": y[i]} for i in range(240)]
        train, valid = (torch.utils.data.DataLoader(part, batch_size=60) for part in (rows[:120], rows[120:]))
        ibnn.fit_novelty(model, train, valid, **options)
    else:
        train, valid = ((rows_of(x, part), rows_of(y, part)) for part in (slice(120), slice(120, 240)))
        ibnn.fit_novelty(model, train, valid, **options)
    return model, new


def expected(model, x, **options):
    p = model.predict(x, samples=2, **options)
    heads = {f"{name}.": head for name, head in p.heads.items()} if hasattr(p, "heads") else {"": p}
    names = ("probabilities", "mean", "std", "total", "aleatoric", "epistemic")
    found = {f"{head}{n}": getattr(q, FIELDS.get(n, n), None) for head, q in heads.items() for n in names}
    return found, p


QUICK = [("onnx", "mlp")]
SLOW = [(f, name) for name in CASES for f in ("onnx", "torch") if (f, name) not in QUICK]


@pytest.mark.parametrize(("format", "name"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_files_tell_novelty_and_fall_back_as_predict_does(format, name, tmp_path):
    model, x = made(name)
    path = tmp_path / "file"
    written = ibnn.export(model, x, path, samples=2, format=format, fallback=0.2)
    assert written.difference < 1e-4
    for part in (slice(0, 5), slice(3, 4)):
        new = rows_of(x, part)
        answers = file_answers(format, path.read_bytes(), new)
        wanted, p = expected(model, new, fallback=0.2)
        assert list(answers)[-1] == "p_value"
        assert answers["p_value"].shape == p.p_value.shape
        torch.testing.assert_close(answers.pop("p_value"), p.p_value, rtol=1e-6, atol=0)
        for output, value in answers.items():
            torch.testing.assert_close(value, wanted[output], rtol=1e-4, atol=1e-5)
    known, novel = (expected(model, rows_of(x, part))[1].p_value for part in (slice(0, 2), slice(3, 5)))
    assert novel.max() < 0.2 < known.max()  # else nothing has fallen back
    off, on = expected(model, x, novelty=False)[0], expected(model, x, fallback=0.2)[0]
    assert any((on[n] - off[n]).abs().max() > 1e-3 for n in on if on[n] is not None)


@pytest.mark.slow
def test_files_without_novelty_are_as_before(tmp_path):
    model, x = made("mlp")
    plain = ibnn.export(model, x, tmp_path / "a", samples=2, format="torch", novelty=False)
    answers, wanted = file_answers("torch", plain.path.read_bytes(), x), expected(model, x, novelty=False)[0]
    assert list(answers) == ["probabilities", "total", "aleatoric", "epistemic"]
    for name, value in answers.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)
    model.reference = None
    again = ibnn.export(model, x, tmp_path / "b", samples=2, format="torch")
    assert again.bytes == pytest.approx(plain.bytes, abs=64)
    assert again.draw_bytes == plain.draw_bytes == 4 * 2 * 2 * model.nodes


def test_the_file_says_what_novelty_is(tmp_path):
    model, x = made("mlp")
    ibnn.export(model, x, tmp_path / "a", samples=2, format="torch", metadata={"classes": ["a", "b", "c"]})
    facts = {"ibnn.json": ""}
    torch.export.load(tmp_path / "a", extra_files=facts)
    found = json.loads(facts["ibnn.json"])
    assert found["outputs"][-1] == "p_value"
    assert found["classes"] == ["a", "b", "c"]
    says = found["p_value"].pop("says")
    assert says.startswith("p-value")
    assert found["p_value"] == {"held_out": 120, "smallest": 1 / 121, "fallback": None}


def test_a_file_that_tells_another_novelty_is_refused(tmp_path, monkeypatch):
    model, x = made("mlp")
    true = ibnn.novelty.Reference.distances
    monkeypatch.setattr(
        "ibnn.novelty.Reference.distances",
        lambda self, fold, x: true(self, fold, x) * (0 if torch.compiler.is_exporting() else 1),
    )
    with pytest.raises(ValueError, match="novelty=False"):
        ibnn.export(model, x, tmp_path / "a", samples=2, format="torch")
    assert not (tmp_path / "a").exists()


def test_options_that_are_not_known_are_refused(tmp_path):
    model, x = made("mlp")
    with pytest.raises(TypeError, match="novel"):
        ibnn.export(model, x, tmp_path / "a", novel=False)
