import base64
import functools
import itertools
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
from ibnn.lab.report import PARTS, Run, intervals, read_runs, write_report
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
    unseen = torch.randn(rows // 2, 5, generator=generator)
    generator.manual_seed(seed)
    (k, s), scale = draws, 2.0 if draws == (1, 1) else 1.4

    def draw(logits: Tensor, spread: float) -> Tensor:
        shift = spread * torch.randn(k, 1, *logits.shape, generator=generator)
        noise = shift + 0.4 * spread * torch.randn(k, s, *logits.shape, generator=generator)
        return (scale * (logits + (noise if k > 1 else 0 * noise))).softmax(-1)

    test = draw(clean, 0.8)
    stored = answered(test)
    tensors = {"labels": labels, **stored}
    tensors |= {f"ood/noise/{key}": value for key, value in answered(draw(unseen, 1.6)).items()}
    order = (stored["aleatoric"] + stored["between"] + stored["within"]).argsort()
    shown = torch.cat([order[:4], order[-4:]])
    ramp = torch.arange(28 * 28).view(1, 28, 28)
    tensors["shown/rows"] = shown
    tensors["shown/images"] = ((ramp * (shown[:, None, None, None] % 7 + 1)) % 256).byte()
    tensors["shown/draws"] = test.flatten(0, 1)[:, shown].movedim(0, 1).contiguous()

    probs = stored["probs"]
    scores = {"error": 100 * metrics.error(probs, labels), "nll": metrics.nll(probs.log(), labels)}
    scores |= {"ece": metrics.ece(probs, labels), "brier": metrics.brier(probs, labels), "aurc": 0.1}
    result = {
        "name": name,
        "job": {"net": "mlp", "data": "made", "method": name, "seed": seed},
        "scores": scores,
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
        "temperature": 1.0,
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


def know(folder: Path) -> Path:
    """Adds what a run stores whose method can tell novel inputs: p-values, and two examples of each set."""
    images = torch.arange(28 * 28).view(1, 1, 28, 28).byte().repeat(2, 1, 1, 1)
    stored = {}
    for prefix, name, rows in (("", "test", 300), ("ood__noise__", "noise", 150)):
        p = (torch.arange(rows) + 1) / rows if name == "test" else torch.full((rows,), 1 / 200)
        score = -p.log() + (0 if name == "test" else torch.arange(rows) % 7)
        stored |= {f"{prefix}p_value": p, f"{prefix}score": score}
        stored |= {
            f"novel__{name}__rows": score.argsort(descending=True, stable=True)[:2],
            f"novel__{name}__images": images.clone(),
        }
    change_tensors(folder, **stored)
    return folder


def make_regression(folder: Path) -> Path:
    make_run(folder, name="boston")
    safetensors.torch.save_file({"mean": torch.zeros(3, 1)}, folder / "answers.safetensors")
    change(folder, scores={"nll": 2.468, "rmse": 3.125, "coverage": 0.91}, classes=[])
    return folder


def change(folder: Path, **entries: Any) -> None:
    """Changes a result, and seals the run as it is now."""
    content = json.loads((folder / "result.json").read_text()) | entries
    RunFolder(folder).finish({name: value for name, value in content.items() if name != "seal"})


def change_tensors(folder: Path, **tensors: Tensor | None) -> None:
    path = folder / "answers.safetensors"
    named = {key.replace("__", "/"): value for key, value in tensors.items()}
    merged = safetensors.torch.load_file(path) | named
    safetensors.torch.save_file({key: value for key, value in merged.items() if value is not None}, path)
    change(folder)


def strip(folder: Path) -> None:
    """Leaves only what a run must have."""
    names = safetensors.torch.load_file(folder / "answers.safetensors")
    (folder / "history.csv").write_text("epoch,nll\n")
    change_tensors(
        folder, **{name.replace("/", "__"): None for name in names if name not in ("labels", "probs", *PARTS)}
    )


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


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where intervals are not looked at."""
    monkeypatch.setattr(metrics, "bootstrap", functools.partial(metrics.bootstrap, resamples=20))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], str]:
    root = tmp_path_factory.mktemp("report")
    runs = [make_run(root / "a"), make_run(root / "b", name="plain <script>x</script>", draws=(1, 1), seed=1)]
    before = dict(matplotlib.rcParams)
    write_report(runs, root / "out" / "report.html", title="Two <runs>")
    assert dict(matplotlib.rcParams) == before
    assert [path.name for path in (root / "out").iterdir()] == ["report.html"]
    return runs, (root / "out" / "report.html").read_text()


def intervals_of(probs: Tensor, labels: Tensor) -> dict[str, metrics.Interval]:
    return intervals(Run(0, "", "", {}, {}, {"probs": probs, "labels": labels}))


def test_numbers_are_those_of_the_metrics(made: tuple[list[Path], str]) -> None:
    runs, html = made
    summary, _, detection, risk, split = Page(html).tables
    for run, row, found, areas in zip(runs, summary[1:], detection[1:], risk[1:], strict=True):
        stored = safetensors.torch.load_file(run / "answers.safetensors")
        probs, labels = stored["probs"], stored["labels"]
        measured = intervals_of(probs, labels)  # compared with metrics.bootstrap below
        for column, name, digits in (
            ("error %", "error", 1),
            ("NLL", "nll", 3),
            ("ECE", "ece", 3),
            ("Brier", "brier", 3),
        ):
            shown = re.findall(r"\d+\.\d+", row[summary[0].index(column)])
            assert shown == [f"{value:.{digits}f}" for value in measured[name]], column
        total, other = (sum(stored[p + part] for part in PARTS) for p in ("", "ood/noise/"))
        doubts = {"max-prob": (-probs.amax(1), -stored["ood/noise/probs"].amax(1)), "total": (total, other)}
        if run.name == "a":
            epistemic = [stored[p + "between"] + stored[p + "within"] for p in ("", "ood/noise/")]
            doubts["epistemic"] = (epistemic[0], epistemic[1])
        else:
            assert found[-4:-2] == ["–", "–"]
        assert found[-2:] == ["–", "–"]  # no novelty
        for score, (inside, outside) in doubts.items():
            assert found[detection[0].index(f"AUROC {score}")] == f"{metrics.auroc(inside, outside):.3f}"
            assert found[detection[0].index(f"FPR95 {score}")] == f"{metrics.fpr_at_95_tpr(inside, outside):.3f}"
        curve = metrics.risk_coverage(1 - probs.amax(1), probs.argmax(1) == labels)
        assert areas[1] == f"{curve.area:.4f}"
        assert areas[2] == f"{100 * curve.risk[149].item():.1f}"
        assert areas[-1] == f"{100 * metrics.error(probs, labels):.1f}"
        wrong = probs.argmax(1) != labels
        line = next(line for line in split if line[0] == row[0] and line[1] == "wrong answers")
        assert line[2] == f"{stored['aleatoric'][wrong].mean().item():.3f}"
        assert line[-2] == f"{total[wrong].mean().item():.3f}"


def test_quick_intervals_are_the_slow_ones() -> None:
    probs, labels = torch.randn(200, 4).mul(3).softmax(1), torch.randint(4, (200,))
    quick = intervals_of(probs, labels)
    slow = {
        "nll": metrics.bootstrap(metrics.nll, probs.log(), labels),
        "ece": metrics.bootstrap(metrics.ece, probs, labels),
        "brier": metrics.bootstrap(metrics.brier, probs, labels),
        "error": metrics.bootstrap(lambda p, y: 100 * metrics.error(p, y), probs, labels),
    }
    for name, interval in slow.items():
        assert quick[name] == pytest.approx(interval, rel=1e-6), name


@pytest.mark.usefixtures("few_resamples")
def test_best_values_are_marked_only_on_the_same_data(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "a"),
        make_run(tmp_path / "b", name="b", draws=(1, 1)),
        make_run(tmp_path / "c", name="c"),
    ]
    change(runs[2], job={"data": "other"})
    for run in runs:
        strip(run)
    write_report(runs, tmp_path / "r.html")
    rows = Page((tmp_path / "r.html").read_text()).tables[0][1:]
    for column in range(1, 5):
        values = [float(re.findall(r"[\d.]+", row[column])[0]) for row in rows[:2]]
        assert ["★" in row[column] for row in rows[:2]] == [value == min(values) for value in values]
        assert "★" not in rows[2][column]


def test_page_is_well_formed_accessible_and_alone(made: tuple[list[Path], str]) -> None:
    html = made[1]
    page = Page(html)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [attributes["href"] or "" for attributes in page.all("a")]
    assert len(links) == 11
    assert all(link[0] == "#" and link[1:] in ids for link in links)
    for _, attributes in page.tags:
        if "aria-labelledby" in attributes:
            assert attributes["aria-labelledby"] in ids
    images = page.all("img")
    assert len(images) == 2 * (1 + 1 + 1 + 1) + 1 + 1  # of 2 runs; risk; one has epistemic histograms
    assert all(len(image["alt"] or "") > 15 and (image["src"] or "").startswith("data:image/") for image in images)
    assert all(image["alt"] and re.search(r"\d", image["alt"]) for image in images)
    assert "http://" not in html
    assert "https://" not in html
    assert "@import" not in html
    assert not re.search(r"url\(|<script|<iframe|<object|\son\w+=", html)
    assert page.all("html") == [{"lang": "en"}]
    assert [tag for tag, _ in page.tags if tag == "h1"] == ["h1"]
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert all(
        region["tabindex"] == "0" and region["role"] == "region" for region in page.all("div") if "role" in region
    )
    for image in images:
        kind, _, content = (image["src"] or "").partition(";base64,")
        figure = base64.b64decode(content)
        assert figure.startswith(b"\x89PNG" if kind == "data:image/png" else b"<?xml")
    assert len(html) < 1_000_000


@pytest.mark.usefixtures("few_resamples")
def test_hostile_strings_are_only_text(tmp_path: Path) -> None:
    odd = '<script>alert(1)</script>" onload="x" $\\frac{ & \x00 日本 _'
    run = make_run(tmp_path / "a", name=odd + "\ud800")
    (run / "job.toml").write_text(f"data = {json.dumps(odd)}\n")
    tensors = safetensors.torch.load_file(run / "answers.safetensors")
    tensors |= {
        key.replace("noise", f"_{odd}/x"): value.clone() for key, value in tensors.items() if key.startswith("ood/")
    }
    safetensors.torch.save_file(tensors, run / "answers.safetensors")
    change(run, diagnosis=f"</pre>{odd}", provenance={odd: odd}, classes=[odd + str(i) for i in range(5)])
    write_report([run], tmp_path / "r.html", title=odd)
    html = (tmp_path / "r.html").read_text()
    page = Page(html)
    assert not page.all("script")
    assert not any("onload" in attributes for _, attributes in page.tags)
    assert page.words.count("<script>alert(1)</script>") > 10
    assert "\x00" not in html


@pytest.mark.usefixtures("few_resamples")
def test_a_name_cannot_leave_an_attribute_or_an_element(tmp_path: Path) -> None:
    """In `alt`, in a caption, in a legend and in a table; the values read back are the names themselves."""
    classes = ["a</script><b>", "b' x='", 'c" onerror="y', "d&amp;", "e-->"]
    run = make_run(tmp_path / "a", name='n"><img src=x>', rows=60)
    change(run, classes=classes)
    write_report([run], tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text())
    assert not page.all("b", "script")
    assert {key for image in page.all("img") for key in image} == {"src", "width", "height", "alt"}
    told = [image["alt"] or "" for image in page.all("img")]
    (examples,) = (alt for alt in told if alt.startswith("Most to least certain"))
    assert any(f"true {name}" in examples for name in classes)
    assert any('Reliability diagram of n"><img src=x>: ' in alt for alt in told)
    assert any(row[0] == 'n"><img src=x>' for row in page.tables[0])


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


@pytest.mark.usefixtures("few_resamples")
def test_absent_parts_are_said_in_a_sentence(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", name="bare")
    strip(run)
    change_tensors(run, probs=torch.eye(5)[:1].repeat(300, 1))
    change(run, diagnosis="")
    write_report([run], tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text())
    for sentence in (
        "No run stored answers for inputs out of distribution.",
        "bare stored no examples.",
        "bare has no history of training.",
        "bare has no diagnosis.",
        "true classes have a stored probability of 0",
    ):
        assert sentence in page.words
    assert len(page.all("img")) == 4  # reliability, two histograms, risk


@pytest.mark.usefixtures("few_resamples")
def test_regression_runs_have_scores_and_curves(tmp_path: Path) -> None:
    runs = [make_regression(tmp_path / "r"), make_run(tmp_path / "a")]
    strip(runs[1])
    write_report(runs[:1], tmp_path / "one.html")
    page = Page((tmp_path / "one.html").read_text())
    assert page.tables[0][1][1:4] == ["2.468", "3.125", "0.91"]
    assert len(page.all("img")) == 1
    write_report(runs, tmp_path / "two.html")
    both = Page((tmp_path / "two.html").read_text())
    assert [table[0][1] for table in both.tables] == ["error %", "NLL", "seconds of training", "AURC", "rows"]
    assert both.tables[2][1][1:] == ["12.5", "7,000", "900", "38,152", "9,488", "38,153", "20", "1"]


def test_a_page_of_regression_alone_has_no_empty_sections(tmp_path: Path) -> None:
    write_report([make_regression(tmp_path / "r")], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "No run stored" not in page
    assert re.findall(r'<li><a href="#(\w+)">', page) == ["summary", "training", "diagnosis", "provenance", "glossary"]


@pytest.mark.usefixtures("few_resamples")
def test_novelty_has_a_section_where_it_was_stored(tmp_path: Path) -> None:
    runs = [know(make_run(tmp_path / "a")), make_run(tmp_path / "b", name="b")]
    write_report(runs, tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text())
    table = next(table for table in page.tables if "median p" in table[0])
    assert table[0][2:4] == ["% with p ≤ 0.01", "% with p ≤ 0.05"]
    assert [row[1:] for row in table[1:]] == [
        ["test set", "1.0", "5.0", "0.500", "300"],
        ["noise", "100.0", "100.0", "0.005", "150"],
    ]
    stored = safetensors.torch.load_file(runs[0] / "answers.safetensors")
    auroc = metrics.auroc(stored["score"], stored["ood/noise/score"])
    detection = next(table for table in page.tables if "AUROC novelty" in table[0])
    assert detection[1][detection[0].index("AUROC novelty")] == f"{auroc:.3f}"
    assert "row 6: p = 0.005" in page.words  # the first of those with the lowest tail
    assert "b stored no p-values of novelty." in page.words
    without = len(Page(made_page(runs[1:], tmp_path)).all("img"))
    assert len(Page(made_page(runs[:1], tmp_path)).all("img")) == without + 1 + 2  # p-values, most novel images


def made_page(runs: list[Path], folder: Path) -> str:
    write_report(runs, folder / "page.html")
    return (folder / "page.html").read_text()


def test_regression_shows_novel_rows_without_pictures(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", name="boston")
    p = torch.tensor([0.5, 0.002, 1.0])
    stored = {"mean": torch.zeros(3, 1), "p_value": p, "score": -p.log(), "novel/test/rows": torch.tensor([1, 0])}
    safetensors.torch.save_file(stored, run / "answers.safetensors")
    change(run, scores={"nll": 2.468, "rmse": 3.125, "coverage": 0.91}, classes=[])
    page = made_page([run], tmp_path)
    assert re.findall(r'<li><a href="#(\w+)">', page)[:2] == ["summary", "novelty"]
    assert "row 1: p = 0.002" in page
    assert len(Page(page).all("img")) == 2  # p-values, training


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "a"), make_run(tmp_path / "b"), make_run(tmp_path / "x" / "b")])
    assert [run.name for run in runs] == ["ibnn-8 seed 0 (a)", "ibnn-8 seed 0 (b) (#2)", "ibnn-8 seed 0 (b) (#3)"]


# -------------------------------------------------------------------------------------------------------- in a browser


@pytest.mark.slow
@pytest.mark.parametrize("size", [(320, 640), (360, 740), (1280, 900)])
def test_in_a_browser(browser: Browser, size: tuple[int, int], tmp_path: Path) -> None:
    runs = [
        know(make_run(tmp_path / "a")),
        make_run(tmp_path / "b", name="plain-" + "long" * 20, draws=(1, 1)),
        make_regression(tmp_path / "c"),
    ]
    write_report(runs, tmp_path / "report.html")
    browser.resize(*size)
    browser.open((tmp_path / "report.html").as_uri())
    time.sleep(0.3)
    assert browser.run("return innerWidth") == size[0]
    assert browser.run("return document.documentElement.scrollWidth") <= size[0]
    tops = (
        "return [...document.querySelectorAll('#reliability img')].map(i => Math.round(i.getBoundingClientRect().top))"
    )
    assert size[0] < 1000 or len(set(browser.run(tops))) == 1  # beside each other, however long the names above
    assert browser.run("return [...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert browser.log("browser") == []
    sent = [json.loads(entry["message"])["message"] for entry in browser.log("performance")]
    urls = [m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"]
    assert {url.partition(":")[0] for url in urls} <= {"file", "data"}
    assert sum(url.startswith("file:") for url in urls) == 1
    reached = [browser.tab() for _ in range(13)]
    assert reached[0] == "#main"
    assert reached[1:12] == browser.run(
        "return [...document.querySelectorAll('nav a')].map(a => a.getAttribute('href'))"
    )
    assert reached[12] == "scroll"
