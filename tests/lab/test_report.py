import base64
import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import safetensors.torch
import torch
from chromium import Browser
from torch import Tensor

from ibnn import metrics
from ibnn.errors import DamagedError
from ibnn.lab.report import write_report
from ibnn.lab.runs import RunFolder

CLASSES = ["cat", "dog", "<script>alert(1)</script>", 'a "quoted" & odd name', "fox"]
FILES = ("job.toml", "result.json", "history.csv", "answers.safetensors")


def answered(draws: Tensor) -> dict[str, Tensor]:
    """What a job stores, from draws of probabilities (K, S, N, C)."""

    def entropy(p: Tensor) -> Tensor:
        return torch.special.entr(p).sum(-1)

    probs, component = draws.mean((0, 1)), draws.mean(1)
    aleatoric, middle = entropy(draws).mean((0, 1)), entropy(component).mean(0)
    parts = {"aleatoric": aleatoric, "between": entropy(probs) - middle, "within": middle - aleatoric}
    return {"probs": probs, **{name: part.clamp_min(0) for name, part in parts.items()}}


def make_run(
    folder: Path, *, name: str = "ibnn-8 seed 0", draws: tuple[int, int] = (4, 5), rows: int = 300, seed: int = 0
) -> Path:
    """A run folder as `ibnn.jobs` writes it: 5 classes, noisy draws, one set out of distribution, images."""
    generator = torch.Generator().manual_seed(7)  # the same test set for all runs
    labels = torch.randint(5, (rows,), generator=generator)
    clean = 2.5 * torch.nn.functional.one_hot(labels, 5) + 1.3 * torch.randn(rows, 5, generator=generator)
    generator.manual_seed(seed)
    (k, s), scale = draws, 2.0 if draws == (1, 1) else 1.4

    def draw(logits: Tensor, spread: float) -> Tensor:
        shift = spread * torch.randn(k, 1, *logits.shape, generator=generator)
        noise = shift + 0.4 * spread * torch.randn(k, s, *logits.shape, generator=generator)
        return (scale * (logits + (noise if k > 1 else 0 * noise))).softmax(-1)

    test = draw(clean, 0.8)
    stored = answered(test)
    tensors = {"labels": labels, **stored}
    order = (stored["aleatoric"] + stored["between"] + stored["within"]).argsort()
    shown = torch.cat([order[:4], order[-4:]])
    ramp = torch.arange(28 * 28).view(1, 28, 28)
    tensors["shown/rows"] = shown
    tensors["shown/images"] = ((ramp * (shown[:, None, None, None] % 7 + 1)) % 256).byte()

    probs = stored["probs"]
    scores = {"error": metrics.error(probs, labels), "nll": metrics.nll(probs.log(), labels)}
    scores |= {"ece": metrics.ece(probs, labels), "brier": metrics.brier(probs, labels), "aurc": 0.1}
    curve = metrics.reliability_curve(probs, labels)
    reliability = {n: getattr(curve, n)[curve.count > 0].tolist() for n in ("confidence", "accuracy", "count")}
    reading = {"scores": scores, "corrupted": {"all": scores}, "outsiders": {"noise": {"total": 0.75}}}
    reading |= {"temperature": 1.0, "reliability": reliability}
    result = {
        **reading,
        "tempered": reading | {"temperature": 1.5},
        "name": name,
        "job": {"net": "mlp", "data": "made", "method": name, "seed": seed},
        "costs": {
            "train_seconds": 12.5,
            "rows": 7000,
            "steering_rows": 900,
            "parameters": 38152,
            "stored": 38153,
            "latents": 9488,
            "forwards": k * s,
        },
        "classes": CLASSES,
        "diagnosis": "All 4 components are apart.\nThe noise is alive: std 0.31 (prior 0.30)." if k > 1 else "",
        "provenance": {
            "python": "3.11",
            "torch": "2.13",
            "ibnn": "0.1",
            "commit": "0123456789ab",
            "nested": {"a": [1]},
        },
    }
    lines = ["epoch,step,loss,nll,kl,beta,lr,latent_lr,valid_nll" + (",prior_std" if k > 1 else "")]
    for epoch in range(1, 21):
        valid = f"{0.6 + 1.2 / epoch + 0.004 * epoch:.4f}" if epoch % 2 == 0 else ""
        values = [epoch, 55 * epoch, 2 / epoch + 0.3, 1.8 / epoch + 0.25, 90, 1, 0.01, 0.05, valid]
        lines.append(",".join(map(str, values + ([0.3 + 0.02 * epoch] if k > 1 else []))))
    folder.mkdir(parents=True)
    (folder / "job.toml").write_text(
        f'net = "mlp"\ndata = "made"\nmethod = "plain"\nseed = {seed}\n\n[fit]\nepochs = 20\n'
    )
    (folder / "history.csv").write_text("\n".join(lines) + "\n")
    safetensors.torch.save_file(tensors, folder / "answers.safetensors")
    RunFolder(folder).finish(result)
    return folder


def make_regression(folder: Path) -> Path:
    make_run(folder, name="boston")
    safetensors.torch.save_file({"mean": torch.zeros(3, 1)}, folder / "answers.safetensors")
    content = json.loads((folder / "result.json").read_text())
    for name in ("tempered", "corrupted", "reliability", "seal"):
        del content[name]
    scores = {"nll": 2.468, "rmse": 3.125, "coverage": 0.91}
    RunFolder(folder).finish(content | {"scores": scores, "outsiders": {}, "classes": []})
    return folder


def change(folder: Path, **entries: Any) -> None:
    """Changes a result, and seals the run as it is now."""
    content = json.loads((folder / "result.json").read_text()) | entries
    RunFolder(folder).finish({name: value for name, value in content.items() if name != "seal"})


class Page(HTMLParser):
    """Reads a page and complains of what is not well formed."""

    VOID = ("meta", "link", "img", "br")

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.words = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs)
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "span" and "td" in self.open:
            self.handle_data(" ")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words += data
            if {"td", "th"} & set(self.open):
                self.tables[-1][-1][-1] += data

    def all(self, *names: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag in names]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], str]:
    root = tmp_path_factory.mktemp("report")
    runs = [make_run(root / "a"), make_run(root / "b", name="plain <script>x</script>", draws=(1, 1), seed=1)]
    before = dict(matplotlib.rcParams)
    write_report(runs, root / "out" / "report.html", title="Two <runs>")
    assert dict(matplotlib.rcParams) == before
    assert [path.name for path in (root / "out").iterdir()] == ["report.html"]
    return runs, (root / "out" / "report.html").read_text()


def test_numbers_are_those_of_the_result(made: tuple[list[Path], str]) -> None:
    runs, html = made
    tables = Page(html).tables
    assert len(tables) == 6
    for run, (scores, outsiders, costs) in zip(runs, (tables[:3], tables[3:]), strict=True):
        result = json.loads((run / "result.json").read_text())
        assert scores[0] == [result["name"], "error %", "NLL", "ECE", "Brier", "AURC"]
        labels = ["test", "test, + temperature scaling (T = 1.5)"]
        assert [row[0] for row in scores[1:]] == [*labels, *(label.replace("test", "corrupted", 1) for label in labels)]
        assert scores[1][1] == f"{100 * result['scores']['error']:.2f}"
        assert scores[1][2] == f"{result['scores']['nll']:.4f}"
        assert outsiders == [
            ["AUROC of outsiders by", "total entropy"],
            ["noise", "0.7500"],
            ["noise, + temperature scaling (T = 1.5)", "0.7500"],
        ]
        assert costs[1][:4] == ["12.5", "7,000", "900", "38,152"]


def test_page_is_well_formed_accessible_and_alone(made: tuple[list[Path], str]) -> None:
    html = made[1]
    page = Page(html)
    images = page.all("img")
    assert len(images) == 2 * (1 + 1 + 8)  # reliability, training, examples
    assert all(len(image["alt"] or "") > 15 and (image["src"] or "").startswith("data:image/") for image in images)
    assert "http://" not in html
    assert "https://" not in html
    assert "@import" not in html
    assert not re.search(r"url\(|<script|<iframe|<object|\son\w+=", html)
    assert page.all("html") == [{"lang": "en"}]
    assert [tag for tag, _ in page.tags if tag == "h1"] == ["h1"]
    assert [tag for tag, _ in page.tags if tag == "h2"] == ["h2", "h2"]
    assert all(
        region["tabindex"] == "0" and region["role"] == "region" for region in page.all("div") if "role" in region
    )
    for image in images:
        kind, _, content = (image["src"] or "").partition(";base64,")
        figure = base64.b64decode(content)
        assert figure.startswith(b"\x89PNG" if kind == "data:image/png" else b"<?xml")
    assert len(html) < 1_000_000


def test_hostile_strings_are_only_text(tmp_path: Path) -> None:
    odd = '<script>alert(1)</script>" onload="x" $\\frac{ & \x00 日本 _'
    run = make_run(tmp_path / "a", name=odd + "\ud800")
    (run / "job.toml").write_text(f"data = {json.dumps(odd)}\n")
    change(
        run,
        outsiders={odd: {"total": 0.5}},
        diagnosis=f"</pre>{odd}",
        provenance={odd: odd},
        classes=[odd + str(i) for i in range(5)],
    )
    write_report([run], tmp_path / "r.html", title=odd)
    html = (tmp_path / "r.html").read_text()
    page = Page(html)
    assert not page.all("script")
    assert not any("onload" in attributes for _, attributes in page.tags)
    assert page.words.count("<script>alert(1)</script>") > 10
    assert "\x00" not in html


def test_a_name_cannot_leave_an_attribute_or_an_element(tmp_path: Path) -> None:
    """In `alt`, in a caption, in a legend and in a table; the values read back are the names themselves."""
    classes = ["a</script><b>", "b' x='", 'c" onerror="y', "d&amp;", "e-->"]
    run = make_run(tmp_path / "a", name='n"><img src=x>', rows=60)
    change(run, classes=classes)
    write_report([run], tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text())
    assert not page.all("b", "script")
    assert {key for image in page.all("img") for key in image} == {"src", "alt"}
    told = [image["alt"] or "" for image in page.all("img")]
    assert any(f"true {name}" in alt for alt in told for name in classes)
    assert any('n"><img src=x>' in alt for alt in told)
    assert page.tables[0][0][0] == 'n"><img src=x>'


def test_bytes_are_the_same_again(made: tuple[list[Path], str], tmp_path: Path) -> None:
    write_report(made[0], tmp_path / "r.html", title="Two <runs>")
    assert (tmp_path / "r.html").read_text() == made[1]


@pytest.mark.parametrize("name", FILES)
def test_missing_files_are_named_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b")]
    (runs[1] / name).unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(f"but got {runs[1]} without {name}. ")):
        write_report(runs, tmp_path / "out" / "r.html")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", FILES)
def test_changed_files_are_refused_before_writing(name: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    with (run / name).open("ab") as file:
        file.write(b" ")
    with pytest.raises(DamagedError, match=name):
        write_report([run], tmp_path / "out" / "r.html")
    assert not (tmp_path / "out").exists()


def test_arguments_are_checked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    with pytest.raises(ValueError, match="one or more run folders"):
        write_report([], tmp_path / "r.html")
    with pytest.raises(ValueError, match="a list of one or more run folders"):
        write_report(run, tmp_path / "r.html")  # type: ignore[arg-type]
    with pytest.raises(IsADirectoryError, match="Expected `out` to be a file's name"):
        write_report([run], tmp_path)


def test_absent_parts_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", name="bare")
    (run / "history.csv").write_text("epoch,nll\n")
    stored = safetensors.torch.load_file(run / "answers.safetensors")
    kept = {name: value for name, value in stored.items() if not name.startswith("shown/")}
    safetensors.torch.save_file(kept, run / "answers.safetensors")
    change(run, diagnosis="")
    write_report([run], tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text())
    assert len(page.all("img")) == 1  # reliability
    assert "Diagnosis" not in page.words
    assert "certain test images" not in page.words


def test_regression_runs_have_scores_and_curves(tmp_path: Path) -> None:
    write_report([make_regression(tmp_path / "r")], tmp_path / "one.html")
    page = Page((tmp_path / "one.html").read_text())
    assert page.tables[0] == [["boston", "NLL", "RMSE", "in 90 % interval"], ["test", "2.4680", "3.1250", "0.9100"]]
    assert len(page.all("img")) == 1


def test_novel_shares_are_shown_where_they_were_stored(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    change(run, novelty={"test": {"0.01": 0.02, "0.05": 0.06}, "noise": {"0.01": 1.0, "0.05": 1.0}})
    write_report([run], tmp_path / "page.html")
    tables = Page((tmp_path / "page.html").read_text()).tables
    assert [
        ["called novel at", "p ≤ 0.01", "p ≤ 0.05"],
        ["test", "2.0 %", "6.0 %"],
        ["noise", "100.0 %", "100.0 %"],
    ] in tables


# -------------------------------------------------------------------------------------------------------- in a browser


@pytest.mark.slow
@pytest.mark.parametrize("size", [(320, 640), (360, 740), (1280, 900)])
def test_in_a_browser(browser: Browser, size: tuple[int, int], tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "a"),
        make_run(tmp_path / "b", name="plain-" + "long" * 20, draws=(1, 1)),
        make_regression(tmp_path / "c"),
    ]
    write_report(runs, tmp_path / "report.html")
    browser.resize(*size)
    browser.open((tmp_path / "report.html").as_uri())
    time.sleep(0.3)
    assert browser.run("return innerWidth") == size[0]
    assert browser.run("return document.documentElement.scrollWidth") <= size[0]
    assert browser.run("return [...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert browser.log("browser") == []
    sent = [json.loads(entry["message"])["message"] for entry in browser.log("performance")]
    urls = [m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"]
    assert {url.partition(":")[0] for url in urls} <= {"file", "data"}
    assert sum(url.startswith("file:") for url in urls) == 1
