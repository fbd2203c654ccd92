import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from fit_job import Stop, make_data, make_net, same

import ibnn
from ibnn import fit
from ibnn.training import session

X, Y = make_data(600)
TRAIN, VALID = (X[:450], Y[:450]), (X[450:], Y[450:])
OPTIONS: dict[str, Any] = {"steps": 15, "batch_size": 90, "checkpoint_every": 2, "quiet": True}


def make_model() -> ibnn.IBNN:
    return ibnn.convert(make_net("full"), components=4, seed=0)


def as_written_before(folder: Path) -> None:
    """Rewrites checkpoints as they were before `prior_std` and `gradient_scale` were part of a model's state."""
    while saved := session.latest_checkpoint(folder / "checkpoints"):
        max((folder / "checkpoints").iterdir()).unlink()
        progress = saved.data["progress"] | {"prior_std": saved.tensors["model/prior_std"].view(torch.float64).item()}
        tensors = {
            name: value for name, value in saved.tensors.items() if not name.endswith(("/prior_std", "/gradient_scale"))
        }
        assert len(tensors) < len(saved.tensors)
        session.save_checkpoint(folder / "old", progress["step"], tensors, saved.data | {"progress": progress}, keep=9)
    shutil.rmtree(folder / "checkpoints")
    (folder / "old").rename(folder / "checkpoints")


@pytest.mark.usefixtures("short_profile")
@pytest.mark.parametrize(
    "extra", [{}, {"patience": 50}, {"beta": 1.0}, {"ema": 0.9}, {"recipe": "pretrained"}], ids=str
)
def test_a_run_interrupted_before_the_state_had_its_numbers_ends_with_the_same_bits(
    tmp_path: Path, extra: dict[str, Any]
) -> None:
    whole, parts = make_model(), make_model()
    expected = fit(whole, TRAIN, VALID, **OPTIONS, **extra)

    def stop(row: dict[str, Any], model: ibnn.IBNN) -> None:
        if row["step"] >= 10:
            raise Stop

    with pytest.raises(Stop):
        fit(make_model(), TRAIN, VALID, run_dir=tmp_path, callbacks=[stop], **OPTIONS, **extra)
    as_written_before(tmp_path)
    history = fit(parts, TRAIN, VALID, run_dir=tmp_path, resume="must", **OPTIONS, **extra)
    assert history.rows == expected.rows
    assert history.looks == expected.looks
    assert same(whole, parts)


def test_a_checkpoint_holds_what_it_always_did(tmp_path: Path) -> None:
    """The names that older and newer code agree on."""
    fit(make_model(), TRAIN, VALID, run_dir=tmp_path, patience=50, **OPTIONS)
    path = max((tmp_path / "checkpoints").iterdir())
    with safetensors.safe_open(path, "pt") as file:
        data = json.loads(file.metadata()["data"])
        kinds = {name.partition("/")[0] for name in file.keys()}  # noqa: SIM118
    assert kinds == {"model", "best", "optimiser0", "optimiser1"}
    assert set(data) == {"progress", "recipe", "optimisers", "averaged", "facts"}
    assert set(data["progress"]) == {
        "step", "sums", "seen", "rows", "finished", "seconds", "best", "waited",
        "looks", "looked", "temperature", "weaker", "relative", "unit_std", "rising",
    }  # fmt: skip
    form = {"draws": "channel", "where": "input", "bias_latents": "none"}
    assert data["facts"] == {"components": 4, "nodes": 22, **form, "examples": 450, "n_data": 450}
    assert data["progress"]["step"] == 15


def test_a_baseline_s_older_checkpoint_gets_no_prior() -> None:
    """Its progress has the prior's standard deviation, its state never had."""
    data = {"progress": {"prior_std": 0.1, "best": {"prior_std": 0.2}}}
    saved = session.Checkpoint({"model/net.weight": torch.ones(1), "best/net.weight": torch.zeros(1)}, data)
    assert list(saved.state("model", {"net.weight"})) == ["net.weight"]
    assert saved.state("model", {"net.weight", "prior_std"})["prior_std"] == torch.tensor(0.1, dtype=torch.float64)
    assert saved.state("best", {"prior_std"})["prior_std"].item() == 0.2
    assert saved.state("average", {"prior_std"}) == {}
