"""Jobs: data in, run folder out, and back."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from PIL import Image

from ibnn import metrics
from ibnn.data import toy_regression, two_moons
from ibnn.lab import jobs
from ibnn.lab.evaluation import Evaluation
from ibnn.lab.job import Job, merged
from ibnn.lab.jobs import read_run, run
from ibnn.lab.methods import METHODS
from ibnn.lab.parts import make_data, make_method
from ibnn.lab.runs import RunFolder
from ibnn.prediction import GaussianPrediction
from ibnn.training.data import HeldOut
from ibnn.training.trainable import Trainable

DIGITS = Job(
    net="mlp",
    net_options={"inputs": 64, "hidden": 16, "layers": 1},
    data="digits",
    examples=400,
    valid=200,
    samples=2,
    train={"epochs": 2, "batch_size": 64},
)
OPTIONS = {"ibnn": {"components": 2}, "dropout": {"rate": 0.1}, "ensemble": {"members": 2}, "swag": {"rank": 2}}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_and_is_read_back(method: str, tmp_path: Path) -> None:
    swa = {"swa": 0.4} if method.startswith("swa") else {}
    job = DIGITS.but(method=method, method_options=OPTIONS.get(method, {}), train=swa)
    result = run(job, tmp_path, quiet=True)
    again = read_run(tmp_path)
    assert again.job == job
    assert again.result == result
    whole = make_data(job).whole
    answers = safetensors.torch.load_file(tmp_path / "answers.safetensors")
    prediction = again.model.predict(whole.normalise(whole.test.images), samples=2)  # type: ignore[union-attr]
    torch.testing.assert_close(prediction.probs, answers["probs"])  # type: ignore[attr-defined]
    assert result["scores"]["nll"] == pytest.approx(metrics.nll(answers["probs"].double().log(), answers["labels"]))
    assert result["costs"]["rows"] == 2 * 200 * (2 if method == "ensemble" else 1)
    forwards = {"sgd": 1, "swa": 1, "ensemble": 2, "ibnn": 4}.get(method, 2)
    assert result["costs"]["forwards"] == forwards
    assert result["costs"]["parameters"] == sum(p.numel() for p in again.model.parameters())
    assert result["costs"]["train_seconds"] > 0
    weights = 64 * 16 + 16 + 16 * 10 + 10
    stored = {"ensemble": 2, "swag": 2 + 2, "vi": 2, "ibnn": 1}.get(method, 1) * weights  # of swag: two and the rank
    stored += result["costs"]["latents"] if method == "ibnn" else 0
    assert result["costs"]["stored"] == stored + (3 if method == "ensemble" else 1)  # the temperatures
    assert (result["costs"]["steering_rows"] > 0) == (method == "ibnn")
    assert not list((tmp_path / "checkpoints").glob("*"))


def test_a_finished_run_is_not_run_again_and_its_folder_is_its_own(tmp_path: Path) -> None:
    job = DIGITS.but(method="sgd")
    first = run(job, tmp_path, quiet=True)
    assert run(job, tmp_path, quiet=True) == first
    with pytest.raises(ValueError, match="one of another job"):
        run(job.but(seed=1), tmp_path, quiet=True)


def test_temperature_scaling_is_measured_beside(tmp_path: Path) -> None:
    result = run(DIGITS.but(method="sgd", train={"epochs": 20, "lr": 0.01}), tmp_path, quiet=True)
    assert result["temperature"] == 1.0
    assert result["tempered"]["temperature"] != 1.0
    assert result["tempered"]["scores"]["error"] == result["scores"]["error"]
    assert read_run(tmp_path).model.likelihood.temperature == 1.0
    assert "tempered" not in run(DIGITS.but(method="sgd", valid=0), tmp_path / "other", quiet=True)


def test_the_split_is_the_same_for_all_seeds() -> None:
    first, second = make_data(DIGITS), make_data(DIGITS.but(seed=5))
    assert torch.equal(first.train.data.images, second.train.data.images)  # type: ignore[union-attr]
    assert len(first.train) == 200
    assert first.valid is not None
    assert len(first.valid) == 200
    rows = {tuple(image.flatten().tolist()) for image in first.train.data.images}  # type: ignore[union-attr]
    held_out = {tuple(image.flatten().tolist()) for image in first.valid.data.images}  # type: ignore[union-attr]
    assert not rows & held_out


def test_seeds_decide_the_start() -> None:
    same, other = make_method(DIGITS, 10), make_method(DIGITS.but(seed=1), 10)
    assert torch.equal(same.net[1][0].weight, make_method(DIGITS, 10).net[1][0].weight)
    assert not torch.equal(same.net[1][0].weight, other.net[1][0].weight)
    members = make_method(DIGITS.but(method="ensemble", method_options={"members": 2}), 10).net
    assert not torch.equal(members[0][1][0].weight, members[1][1][0].weight)
    assert torch.equal(members[0][1][0].weight, same.net[1][0].weight)


def test_trained_weights_come_first(tmp_path: Path) -> None:
    job = DIGITS.but(first={"epochs": 3}, method_options={"components": 2}, train={"epochs": 1, "lr": 1e-9})
    before = job.before()
    assert before is not None
    other = job.but(samples=7).before()
    assert other is not None
    assert other.key == before.key  # one run, whatever draws follow
    result = run(job, tmp_path / "run", quiet=True)
    plain = read_run(tmp_path / before.key)
    assert plain.job.method == "sgd"
    torch.testing.assert_close(read_run(tmp_path / "run").model.net[1][0].weight, plain.model.net[1][0].weight)
    assert result["costs"]["rows"] == (3 + 1) * 200
    assert result["costs"]["train_seconds"] > plain.result["costs"]["train_seconds"]
    weights = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(plain.model.net.state_dict(), weights)
    job = DIGITS.but(method="sgd", weights=str(weights), train={"epochs": 1, "lr": 1e-9})
    run(job, tmp_path / "given", quiet=True)
    torch.testing.assert_close(read_run(tmp_path / "given").model.net[1][0].weight, plain.model.net[1][0].weight)


def test_a_job_says_where_latents_are(tmp_path: Path) -> None:
    job = DIGITS.but(method_options={"components": 2, "where": "both", "bias_latents": "layer"}, train={"epochs": 1})
    result = run(job, tmp_path, quiet=True)
    assert result["costs"]["latents"] == 2 * 2 * (64 + 16 + 1 + 16 + 10 + 1)
    again = read_run(tmp_path)
    assert (again.model.where, again.model.bias_latents) == ("both", "layer")  # type: ignore[attr-defined]
    assert again.job == job == Job.from_toml(job.to_toml())


def test_costs_count_what_was_done(tmp_path: Path) -> None:
    job = DIGITS.but(method="sgd", train={"epochs": 30, "patience": 1, "lr": 0.3})
    run(job, tmp_path / "patience", quiet=True)
    epochs = len((tmp_path / "patience" / "history.csv").read_text().splitlines()) - 1
    assert epochs < 30
    assert read_run(tmp_path / "patience").result["costs"]["rows"] == epochs * 200
    job = DIGITS.but(method_options={"components": 2}, train={"samples": 2})
    costs = run(job, tmp_path / "steered", quiet=True)["costs"]
    assert costs["rows"] == 2 * 2 * 200  # samples, epochs
    assert not list((tmp_path / "steered").glob("**/checkpoints/*"))
    costs = run(job.but(valid=0), tmp_path / "split", quiet=True)["costs"]
    assert costs["rows"] == 2 * 2 * 400  # fewer than 500: none are held out
    assert costs["steering_rows"] == 0


def test_rows_of_looks_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    real = HeldOut.draws

    def count(self: HeldOut, samples: int, rows: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, targets = real(self, samples, rows, **options)
        seen.append(self.model.components * samples * len(targets))
        return outputs, targets

    monkeypatch.setattr(HeldOut, "draws", count)
    job = DIGITS.but(method_options={"components": 3})
    assert run(job, tmp_path, quiet=True)["costs"]["steering_rows"] == sum(seen) >= 6 * 3 * 100


def test_toml_and_back() -> None:
    job = DIGITS.but(first={"epochs": 2, "schedule": {"kind": "cosine"}})
    assert Job.from_toml(job.to_toml()) == job
    assert Job.from_toml(job.to_toml()).key == job.key != DIGITS.key


def test_a_pruned_run_is_thin_and_read_back(tmp_path: Path) -> None:
    dense = DIGITS.but(method_options={"components": 2})
    job = dense.but(prune={"keep": 0.5, "epochs": 3})
    assert job.before() == dense
    assert dense.key == DIGITS.but(method_options={"components": 2}, prune=None).key != job.key
    assert (job.full_recipe().epochs, job.full_recipe().batch_size, dense.full_recipe().epochs) == (3, 64, 2)
    result = run(job, tmp_path / "thin", quiet=True)
    thin, wide = read_run(tmp_path / "thin"), read_run(tmp_path / dense.key)
    before, after = result["pruned"]["sizes"]
    assert before == {"weights": 64 * 16 + 16 + 16 * 10 + 10, "products": 64 * 16 + 16 * 10, "nodes": 80}
    assert after == {"weights": 8 * 75 + 10, "products": 8 * 74, "nodes": 72}  # eight of sixteen units
    assert thin.model.net[1][2].in_features == 8
    assert wide.model.net[1][2].in_features == 16
    held_out = make_data(job).valid
    assert held_out is not None
    x, y = held_out.__getitems__(list(range(len(held_out))))
    for model, scores in zip((wide.model, thin.model), result["pruned"]["held_out"], strict=True):
        assert scores["nll"] == pytest.approx(metrics.nll(model.predict(x, samples=2).log_probs.double(), y), rel=1e-5)
    assert result["costs"]["rows"] == (2 + 3) * 200
    assert result == run(job, tmp_path / "thin", quiet=True)
    with pytest.raises(ValueError, match="one of this job"):
        run(dense, tmp_path / "thin", quiet=True)


def test_what_cannot_be_pruned_begins_no_run(tmp_path: Path) -> None:
    job = DIGITS.but(prune={"keep": 0.01}, train={"epochs": 1})
    with pytest.raises(ValueError, match=r"`keep` to be enough .* 1\.2 \(is the network's output\)"):
        run(job, tmp_path / "thin", quiet=True)
    assert not RunFolder(tmp_path / "thin").begun


def test_merging_changes_neither() -> None:
    base, changes = {"a": {"b": 1}}, {"a": {"c": 2}}
    assert merged(base, changes) == {"a": {"b": 1, "c": 2}}
    assert (base, changes) == ({"a": {"b": 1}}, {"a": {"c": 2}})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"net": "lenett"}, "Did you mean 'lenet'"),
        ({"method": "ibn"}, "Did you mean 'ibnn'"),
        ({"train": {"lr": -1.0}}, "`train.lr` .* Change train.lr"),
        ({"first": {"lr": -1.0}}, "`first.lr`"),
        ({"train": {"steps": 1}}, "`train` to be consistent"),
        ({"method": "ensemble", "first": {"epochs": 1}}, "`first` to be absent"),
        ({"method": "ensemble", "weights": "a.safetensors"}, "`weights` to be absent"),
        ({"train": {"epocs": 1}}, "Did you mean 'epochs'"),
        ({"vald": 3}, "Did you mean 'valid'"),
        ({"samples": 0}, "`samples`"),
        ({"train": {"seed": 5}}, r"`train.seed` to be absent.* but got 5\. .*--set seed=5"),
        ({"first": {"seed": 5}}, "`first.seed` to be absent"),
        ({"method_options": {"seed": 5}}, "`method_options.seed` to be absent"),
        ({"net": "mynets:make_net()"}, "package.module:function, but got 'mynets:make_net\\(\\)'"),
        ({"data": "t.csv"}, "`target` to be the column of t.csv to predict"),
        ({"target": "y"}, "`target` to be absent unless data is a .csv file"),
        ({"task": "classes"}, "`task` to be absent"),
        ({"ignore": ["y"]}, "`ignore` to be absent"),
        ({"test_share": 0.5}, "`test_share` to be absent"),
        ({"data": "t.csv", "target": "y", "task": "class"}, "`task` to be 'classes' or 'numbers'"),
        ({"data": "t.csv", "target": "y", "test_share": 1.0}, "`test_share`"),
        ({"prune": {"keep": 1.0}}, "`prune.keep`"),
        ({"prune": {"epochs": 1}}, "`prune.keep` .* but got None"),
        ({"prune": {"keep": 0.5, "epocs": 1}}, "`prune.epocs` .* Did you mean 'epochs'"),
        ({"prune": {"keep": 0.5, "seed": 1}}, "`prune.seed` to be absent"),
        ({"prune": {"keep": 0.5}, "method": "sgd"}, "`prune`"),
    ],
)
def test_wrong_fields_are_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DIGITS.but(**changes)


def test_wrong_options_of_a_method_are_named() -> None:
    with pytest.raises(ValueError, match="method_options"):
        make_method(DIGITS.but(method="sgd", method_options={"rate": 1}), 10)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"net": "lenet", "net_options": {}},
            r"`net` .* \(1, 8, 8\), which digits has, but got 'lenet', which stops",
        ),
        ({"net_options": {"inputs": 63}}, r"'mlp', which stops: RuntimeError: mat1.* net_options.inputs = 64"),
        ({"net_options": {"hidden": -1}}, "`hidden`"),
        ({"net": "lenet", "net_options": {}, "data": "two-moons"}, r"\(2,\), which two-moons has"),
        ({"data": "photos"}, r"photos/train/CLASS/\*\.jpg .* IBNN_DATA"),
        ({"method": "sgd", "weights": "none.safetensors"}, r"`weights`.* no file none\.safetensors.*save_file"),
        ({"method": "swag", "method_options": {"rank": 1}}, "`rank`"),
        ({"fallback": 1e-6}, "`fallback`"),
    ],
)
def test_what_cannot_run_leaves_no_file(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    fields = DIGITS.model_dump(exclude_unset=True) | changes
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        run(Job(**fields), tmp_path / "run", data_folder=tmp_path, quiet=True)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_weights_of_another_network_are_named(tmp_path: Path) -> None:
    safetensors.torch.save_file({"fc.weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="`weights` to be those of 'mlp'"):
        run(DIGITS.but(weights=str(tmp_path / "other.safetensors")), tmp_path / "run", quiet=True)
    assert not list((tmp_path / "run").glob("*"))


def test_an_mlp_takes_images_of_a_folder(tmp_path: Path) -> None:
    for place in ("train/a", "train/b", "val/a"):
        (tmp_path / "photos" / place).mkdir(parents=True)
        Image.new("RGB", (9, 12)).save(tmp_path / "photos" / place / "0.png")
    job = Job(net="mlp", net_options={"inputs": 48}, data="photos", image_size=4)
    assert make_data(job, tmp_path).train[0][0].shape == (3, 4, 4)


def test_the_first_training_is_locked_and_has_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = DIGITS.but(first={"epochs": 1}, train={"epochs": 1})
    asked = []

    def look(model: Trainable, *_: Any, data_folder: Path, **__: Any) -> Evaluation:
        with RunFolder(tmp_path / "first").lock(wait=False) as free:
            pass
        asked.append((type(model).__name__, data_folder, free))
        return real(model, *_, data_folder=data_folder, **__)

    real = jobs.evaluate
    monkeypatch.setattr(jobs, "evaluate", look)
    (tmp_path / "data").mkdir()
    run(job, tmp_path / "run", data_folder=tmp_path / "data", first_folder=tmp_path / "first", quiet=True)
    assert asked == [("Plain", tmp_path / "data", False), ("IBNN", tmp_path / "data", True)]
    assert read_run(tmp_path / "first").job == job.before()


# --------------------------------------------------------------------------------------------------------------- points

CURVE = Job(net="mlp", net_options={"hidden": 8, "layers": 1}, data="toy-regression", samples=3, train={"steps": 5})


@pytest.mark.parametrize("method", METHODS)
def test_every_method_regresses_and_is_read_back(method: str, tmp_path: Path) -> None:
    swa = {"swa": 0.4} if method.startswith("swa") else {}
    result = run(CURVE.but(method=method, method_options=OPTIONS.get(method, {}), train=swa), tmp_path, quiet=True)
    x, y = toy_regression(1000, seed=1000)
    answers = safetensors.torch.load_file(tmp_path / "answers.safetensors")
    found = read_run(tmp_path).model.predict(x, samples=3)
    assert isinstance(found, GaussianPrediction)
    torch.testing.assert_close(found.mean, answers["mean"])
    assert result["classes"] == []
    assert result["scores"]["rmse"] == pytest.approx(float((answers["mean"] - y).square().mean().sqrt()), rel=1e-5)
    draws = torch.distributions.Normal(found.draw_means.double(), found.draw_stds.double())
    assert result["scores"]["nll"] == pytest.approx(-float(draws.log_prob(y).exp().mean(0).log().mean()), rel=1e-3)
    inside = draws.cdf(y).mean(0)  # of the mixture
    assert result["scores"]["coverage"] == pytest.approx(float(((inside > 0.05) & (inside < 0.95)).float().mean()))
    assert result["costs"]["rows"] == 5 * 30 * (2 if method == "ensemble" else 1)
    assert result["costs"]["steering_rows"] == 0


def test_a_network_of_points_takes_and_gives_their_units() -> None:
    model = make_method(CURVE.but(method="sgd"), 0)
    x, _ = toy_regression(5, seed=3)
    answer = model.predict(x)
    torch.testing.assert_close(answer.mean, model.net[1](x / 4) * 24)
    torch.testing.assert_close(answer.std, torch.full((5, 1), 3.0))
    moons = make_method(Job(net="mlp", data="two-moons", method="sgd"), 2)
    assert moons.net[1][1][0].in_features == 2
    assert torch.equal(moons.net(torch.tensor([[1.5, 0.75]])), moons.net[1](torch.ones(1, 2)))


def test_points_are_split_for_all_seeds_alike() -> None:
    job = Job(net="mlp", data="two-moons", examples=100, valid=30)
    first, second = make_data(job), make_data(job.but(seed=4))
    assert first.valid is not None
    x, y = two_moons(100, noise=0.2, seed=0)
    assert torch.equal(first.train.__getitems__(list(range(70)))[0], x[:70])
    assert torch.equal(second.valid.__getitems__(list(range(30)))[1], y[70:])  # type: ignore[union-attr]
    tested = first.whole.test.x.tolist()  # type: ignore[union-attr]
    assert not set(map(tuple, tested)) & set(map(tuple, x.tolist()))
    for wrong, words in (({"valid": 100}, "`valid`"), ({"augment": True}, "`augment`")):
        with pytest.raises(ValueError, match=words):
            make_data(job.but(**wrong))


def test_moons_are_told_apart_and_tempered(tmp_path: Path) -> None:
    train = {"epochs": 30, "batch_size": 32, "lr": 0.01}
    job = Job(net="mlp", net_options={"hidden": 16}, data="two-moons", valid=200, method="sgd", train=train)
    result = run(job, tmp_path, quiet=True)
    assert result["scores"]["error"] < 0.06
    x, y = two_moons(1000, noise=0.2, seed=1000)
    model = read_run(tmp_path).model
    logits, p = model.net(x).detach(), model.predict(x)
    assert result["scores"]["nll"] == pytest.approx(metrics.nll(p.log_probs, y), rel=1e-5)
    torch.testing.assert_close(p.log_probs, logits.log_softmax(1))
    assert model.likelihood.temperature == 1.0
    model.likelihood.set_temperature(result["tempered"]["temperature"])
    tempered = model.predict(x).log_probs
    torch.testing.assert_close(tempered, (logits / result["tempered"]["temperature"]).log_softmax(1))
    assert result["tempered"]["scores"]["nll"] == pytest.approx(metrics.nll(tempered, y), rel=1e-5)
    assert "corrupted" not in result


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"job\.toml"):
        read_run(tmp_path)


# ------------------------------------------------------------------------------------------------------- own tables


def write_table(path: Path, target: str, rows: int = 60) -> None:
    """Columns of very different units; the target is a class or a number."""
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 1.0, 1e4]) + 5
    lines = ["small,middle,large,y"]
    for row in x.tolist():
        value = ("low" if row[1] < 5 else "high") if target == "classes" else 100 + 7 * row[1]
        lines.append(",".join(map(repr, row)) + f",{value}")
    path.write_text("\n".join(lines) + "\n")


TABLE = Job(
    net="mlp",
    net_options={"hidden": 8, "layers": 1},
    data="t.csv",
    target="y",
    valid=12,
    samples=2,
    train={"steps": 4, "batch_size": 16},
)


@pytest.mark.parametrize("task", ["classes", "numbers"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_on_a_table_and_needs_it_no_more(
    method: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "t.csv", task)
    swa = {"swa": 0.4} if method.startswith("swa") else {}
    job = TABLE.but(method=method, method_options=OPTIONS.get(method, {}), train=swa)
    result = run(job, tmp_path / "run", quiet=True)
    assert result["classes"] == (["high", "low"] if task == "classes" else [])
    assert result["name"] == f"{method} mlp t.csv seed 0"
    test = make_data(job).whole.test
    (tmp_path / "t.csv").unlink()
    again = read_run(tmp_path / "run")
    found, answers = again.model.predict(test.x, samples=2), safetensors.torch.load_file("run/answers.safetensors")  # type: ignore[union-attr]
    if isinstance(found, GaussianPrediction):
        torch.testing.assert_close(found.mean, answers["mean"])
        assert 50 < float(found.mean.mean()) < 220  # in the target's own units, untrained as it is
    else:
        torch.testing.assert_close(found.probs, answers["probs"])  # type: ignore[attr-defined]
    assert again.units is not None
    assert again.units.columns == ("small", "middle", "large")
    with pytest.raises(FileNotFoundError, match=r"`data` to be a table, but got neither .*t\.csv nor data/t\.csv"):
        make_data(job, units=again.units)


def test_a_network_of_a_table_sees_standardised_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "t.csv", "numbers")
    splits = make_data(TABLE)
    model = make_method(TABLE.but(method="sgd"), 0, units=splits.units)
    x, y = splits.train.__getitems__(list(range(len(splits.train))))
    seen = model.net[0](x)
    torch.testing.assert_close(seen.mean(0), torch.zeros(3), atol=1e-3, rtol=0)
    torch.testing.assert_close(seen.std(0, correction=0), torch.ones(3), atol=1e-3, rtol=0)
    found = model.predict(x)
    torch.testing.assert_close(found.mean, model.net[1](seen) * y.std(correction=0) + y.mean())
    assert found.std[:, 0].tolist() == pytest.approx([0.5 * float(y.std(correction=0))] * len(x), rel=1e-5)
    other = make_data(TABLE.but(seed=7))
    assert torch.equal(other.train.x, splits.train.x)  # type: ignore[union-attr]
    assert other.units == splits.units
    with pytest.raises(ValueError, match="`augment`"):
        make_data(TABLE.but(augment=True))


def test_a_table_is_found_here_or_in_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "there").mkdir()
    write_table(tmp_path / "there" / "t.csv", "classes")
    assert make_data(TABLE, tmp_path / "there").whole.classes == ("high", "low")
    write_table(tmp_path / "here" / "t.csv", "numbers")
    assert make_data(TABLE, tmp_path / "there").whole.classes == ()


def test_a_table_that_has_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "t.csv", "classes")
    monkeypatch.setattr(jobs, "fit", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(TABLE, tmp_path / "run", quiet=True)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "t.csv", "classes", rows=61)
    with pytest.raises(ValueError, match=r"begun before the table changed.*--fresh"):
        run(TABLE, tmp_path / "run", quiet=True)
    write_table(tmp_path / "t.csv", "classes")
    run(TABLE, tmp_path / "run", quiet=True)
    write_table(tmp_path / "t.csv", "classes", rows=61)
    with pytest.raises(ValueError, match=r"t\.csv, which has changed"):
        make_data(TABLE, units=read_run(tmp_path / "run").units)
    (tmp_path / "run" / "table.json").write_text("{}")
    with pytest.raises(ValueError, match=r"table\.json"):
        read_run(tmp_path / "run")


def test_keys_differ_where_jobs_do() -> None:
    assert Job(net="lenet", data="mnist").key == Job(net="lenet", data="mnist", samples=5, train={}).key
    keys = {job.key for job in (TABLE, TABLE.but(target="z"), TABLE.but(task="classes"), TABLE.but(ignore=["a"]))}
    assert len(keys | {TABLE.but(test_share=0.3).key}) == 5
    job = TABLE.but(task="classes", ignore=["a", "é"], test_share=0.3)
    assert Job.from_toml(job.to_toml()) == job


# ----------------------------------------------------------------------------------------------------- own networks

NET = """
from torch import nn

def make_net(outputs, inputs, hidden=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of the current folder, next to a table."""
    monkeypatch.chdir(tmp_path)
    name = f"jobs_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(NET)
    write_table(tmp_path / "t.csv", "classes")
    yield name
    sys.modules.pop(name, None)


def test_a_network_of_your_own_runs_and_is_read_back_if_trusted(code: str, tmp_path: Path) -> None:
    job = TABLE.but(net=f"{code}:make_net", net_options={"hidden": 5, "layers": 1})
    with pytest.raises(ValueError, match=r"`net`.*'layers'"):
        run(job, tmp_path / "run", quiet=True)
    assert not list((tmp_path / "run").glob("*"))
    job = Job(**(TABLE.model_dump(exclude_unset=True) | {"net": f"{code}:make_net", "net_options": {"hidden": 5}}))
    result = run(job, tmp_path / "run", quiet=True)
    assert result["name"] == f"ibnn {code}:make_net t.csv seed 0"
    with pytest.raises(ValueError, match=f"code, {code}:make_net. .*--trust-code"):
        read_run(tmp_path / "run")
    again = read_run(tmp_path / "run", trust_code=True)
    assert again.model.net[1][1].in_features == 3  # of the table, though the job says nothing of them
    answers = safetensors.torch.load_file(tmp_path / "run" / "answers.safetensors")
    found = again.model.predict(make_data(job).whole.test.x, samples=2)  # type: ignore[union-attr]
    torch.testing.assert_close(found.probs, answers["probs"])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("hidden=8", "hidden=9"), "layer '1.3' of 8 nodes, but got one of 9"),
        (("def make_net", "def make_other"), "'make_net', which it does not have"),
        (("from torch", "import nowhere_at_all\nfrom torch"), "No module named 'nowhere_at_all'"),
        (None, "has no module"),
    ],
)
def test_code_that_has_changed_since_is_refused(
    change: tuple[str, str] | None, words: str, code: str, tmp_path: Path
) -> None:
    fields = TABLE.model_dump(exclude_unset=True) | {"net": f"{code}:make_net", "net_options": {}}
    run(Job(**fields), tmp_path / "run", quiet=True)
    sys.modules.pop(code)
    if change is None:
        (tmp_path / f"{code}.py").unlink()
    else:
        (tmp_path / f"{code}.py").write_text(NET.replace(*change) + "\n# longer")
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        read_run(tmp_path / "run", trust_code=True)


@pytest.mark.parametrize("trust", [False, True])
def test_a_run_of_somebody_else_executes_nothing(trust: bool, code: str, tmp_path: Path) -> None:
    result = run(TABLE, tmp_path / "run", quiet=True)
    told, home = (tmp_path / "run" / "job.toml").read_text(), RunFolder(tmp_path / "run")
    (tmp_path / "run" / "evil.py").write_text("open('was_here', 'w')")
    for net in ("os:system", "evil:make", "builtins:exec", "subprocess:run"):
        home.write("job.toml", told.replace('"mlp"', f'"{net}"').encode())
        home.finish({name: value for name, value in result.items() if name != "sha256"})  # its checksums are right
        with pytest.raises((ValueError, FileNotFoundError), match="`net`" if trust else "`folder`.*code"):
            read_run(tmp_path / "run", trust_code=trust)
    assert not (tmp_path / "was_here").exists()


def test_a_network_of_your_own_sees_images(code: str, tmp_path: Path) -> None:
    job = DIGITS.but(net=f"{code}:make_net", method="sgd", train={"epochs": 1})
    fields = job.model_dump(exclude_unset=True) | {"net_options": {"inputs": 64}}
    run(Job(**fields), tmp_path / "run", quiet=True)
    assert read_run(tmp_path / "run", trust_code=True).model.net[1].in_features == 64
    for options, words in (({"inputs": 63}, r"\(1, 8, 8\), which digits has.* RuntimeError: mat1"), ({}, "'inputs'")):
        with pytest.raises(ValueError, match=words):
            run(Job(**(fields | {"net_options": options})), tmp_path / "other", quiet=True)
    (tmp_path / f"{code}.py").write_text(NET.replace("hidden, outputs", "hidden, 7"))
    sys.modules.pop(code)
    with pytest.raises(ValueError, match=r"an output of shape \(1, 10\).* \(1, 7\)"):
        run(Job(**fields), tmp_path / "other", quiet=True)
    assert not list((tmp_path / "other").glob("*"))


def test_images_of_a_folder_have_the_size_that_the_job_says(code: str, tmp_path: Path) -> None:
    for place in ("train/a", "train/b", "val/a"):
        (tmp_path / "photos" / place).mkdir(parents=True)
        Image.new("RGB", (9, 12)).save(tmp_path / "photos" / place / "0.png")
    job = Job(net=f"{code}:make_net", data="photos")
    assert make_data(job, tmp_path).train[0][0].shape == (3, 224, 224)
    assert make_data(job.but(image_size=6), tmp_path).train[0][0].shape == (3, 6, 6)
