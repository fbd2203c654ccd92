"""The service over real HTTP on loopback: answers, refusals, load, shutdown."""

import functools
import http.client
import io
import json
import math
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from ibnn import data
from ibnn.app.predictor import Predictor
from ibnn.files.saving import save_pretrained
from ibnn.lab import jobs, parts
from ibnn.lab.job import Job
from ibnn.lab.runs import RunFolder
from ibnn.novelty import Reference
from ibnn.novelty.reference import p_values

pytest.importorskip("starlette")
requests = pytest.importorskip("requests")
pytest.importorskip("uvicorn")

from ibnn.app.serve import limits  # noqa: E402
from ibnn.app.serve.app import make_app  # noqa: E402
from ibnn.app.serve.limits import Busy, listen, make_server  # noqa: E402
from ibnn.app.serve.service import Batcher, Service  # noqa: E402

TINY = Job(
    net="mlp",
    net_options={"inputs": 64, "hidden": 32},
    data="digits",
    valid=300,
    method_options={"components": 2},
    train={"steps": 60, "batch_size": 64},
    samples=2,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "digits"
    jobs.run(TINY, folder, quiet=True)
    return folder


@pytest.fixture(scope="module")
def pixels() -> torch.Tensor:
    test = data.load("digits").test
    assert isinstance(test, data.Split)
    return test.images.float() / 255  # (N, 1, 8, 8)


class Running:
    """A service in a thread of this process."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.service = Service(Predictor.read(folder), **options)
        app = make_app(self.service, megabytes=0.2)
        at = listen("127.0.0.1", 0)
        self.address = at.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self.server = make_server(app, drain=self.service.drain)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [at]})
        self.thread.start()
        until(lambda: self.server.started)
        self.session = requests.Session()

    def predict(self, code: int = 200, **sent: Any) -> Any:
        reply = self.session.post(f"{self.url}/predict", timeout=30, **sent)
        assert reply.status_code == code, reply.text
        return reply.json()

    def get(self, path: str) -> Any:
        reply = self.session.get(self.url + path, timeout=30)
        reply.raise_for_status()
        return reply

    def stop(self) -> None:
        self.session.close()
        self.server.should_exit = True
        self.thread.join()


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    served = Running(folder, risk=0.3)
    yield served
    served.stop()


def without_reference(folder: Path, copy: Path) -> Path:
    """A copy of a run without reference data, as one on few data is."""
    home = RunFolder(shutil.copytree(folder, copy))
    model = jobs.read_run(copy).model
    assert model.reference is not None
    model.reference = None
    save_pretrained(model, copy)
    home.finish(home.result)
    return copy


def png(pixels: torch.Tensor, size: int = 8) -> bytes:
    file = io.BytesIO()
    image = Image.fromarray((pixels[0] * 255).round().byte().numpy())
    image.resize((size, size), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


# ------------------------------------------------------------------------------------------------------------- answers


def test_answers_are_those_of_predict(running: Running, folder: Path, pixels: torch.Tensor) -> None:
    x = pixels[:20]
    found = running.predict(json={"inputs": x.tolist()})
    model, inputs = jobs.read_run(folder).model, data.load("digits").normalise((x * 255).byte())
    expected = model.predict(inputs, samples=2, seed=0)
    assert found["classes"] == list("0123456789")
    rows = found["rows"]
    torch.testing.assert_close(torch.tensor([r["probabilities"] for r in rows]), expected.probs, rtol=0, atol=1e-6)
    for name in ("total", "aleatoric", "epistemic"):
        values = torch.tensor([row[name] for row in rows])
        torch.testing.assert_close(values, getattr(expected, name), rtol=1e-4, atol=1e-6)
    assert [row["label"] for row in rows] == [str(label) for label in expected.labels.tolist()]
    assert [row["p_value"] for row in rows] == expected.p_value.tolist()
    assert found["risk"] == 0.3
    novel = expected.novel(0.01).tolist()
    assert [row["abstain"] for row in rows] == [
        row["total"] > found["limit"] or each for row, each in zip(rows, novel, strict=True)
    ]


def test_flat_nested_and_images_are_answered_alike(running: Running, pixels: torch.Tensor) -> None:
    x = (pixels[:4] * 255).round() / 255
    bodies = [x.tolist(), x[:, 0].tolist(), x.flatten(1).tolist()]
    found = [running.predict(json={"inputs": body})["rows"] for body in bodies]
    files = [("image", (f"{i}.png", png(image))) for i, image in enumerate(x)]
    found.append(running.predict(files=files)["rows"])
    for rows in found[1:]:
        for row, first in zip(rows, found[0], strict=True):
            assert row["probabilities"] == pytest.approx(first["probabilities"], abs=1e-6)
    big = running.predict(files={"image": ("a.png", png(x[0], 32))})["rows"][0]
    assert len(big["probabilities"]) == 10  # resized


def test_smaller_risks_abstain_more(running: Running, pixels: torch.Tensor) -> None:
    given = []
    for risk in (0.01, 0.1, 0.3, 1):
        service = Service(running.service.predictor, risk=risk, novelty=0)
        rows = service.ask(pixels[:200]).result(30)
        given.append(sum(not row["abstain"] for row in rows))
        service.close()
    assert given[0] == 0
    assert service.rule.limit == math.inf
    assert sorted(given) == given
    assert given[-1] == 200


def test_health(running: Running) -> None:
    health = running.get("/health").json()
    assert health["status"] == "ok"
    assert health["input"] == {"channels": 1, "height": 8, "width": 8}
    assert health["abstention"]["examples"] == 300
    assert health["novelty"]["against"] == "300 held-out inputs"
    assert health["counts"]["inputs"] == health["shift"]["seen"]
    reply = running.get("/health")
    assert reply.json()["counts"]["replies"]["200"] == health["counts"]["replies"].get("200", 0) + 1
    assert reply.headers["x-content-type-options"] == "nosniff"


# ------------------------------------------------------------------------------------------------------------ refusals


def body(value: Any) -> dict[str, Any]:
    plain = isinstance(value, dict | list)
    return {"data": json.dumps(value) if plain else value, "headers": {"Content-Type": "application/json"}}


def bomb() -> bytes:
    """A small file of 49 million pixels."""
    file = io.BytesIO()
    Image.new("1", (7_000, 7_000)).save(file, "PNG")
    return file.getvalue()


def named_in(charset: str) -> dict[str, Any]:
    """No image, whose name is no text in some charsets."""
    head = b'Content-Disposition: form-data; name="image"; filename="x\\ud800+2AA-.png"'
    part = b"--a\r\n" + head + b"\r\n\r\nno image\r\n--a--\r\n"
    return {"data": part, "headers": {"Content-Type": f"multipart/form-data; boundary=a; charset={charset}"}}


FLAT = [0.5] * 64


@pytest.mark.parametrize(
    ("sent", "code", "words"),
    [
        (body(b"{"), 400, "`body` to be JSON"),
        (body(b"\xff"), 400, "`body` to be JSON"),
        (body(b"[" * 100_000), 400, "RecursionError"),
        (body([FLAT]), 422, 'an object with "inputs" alone'),
        (body({"inputs": [FLAT], "seed": 1}), 422, "the keys ['inputs', 'seed']"),
        (body({"inputs": []}), 422, "a list of at most 256 inputs"),
        (body({"inputs": "a"}), 422, 'but got "a"'),
        (body({"inputs": [FLAT] * 257}), 422, "but got 257 of them"),
        (body({"inputs": [FLAT, FLAT[1:]]}), 422, "but got lists of different lengths"),
        (body({"inputs": [[*FLAT[1:], "1"]]}), 422, 'finite numbers in lists, but got "1"'),
        (body({"inputs": [[*FLAT[1:], True]]}), 422, "but got true"),
        (body({"inputs": [[*FLAT[1:], None]]}), 422, "but got null"),
        (body({"inputs": [[*FLAT[1:], math.nan]]}), 422, "finite numbers in lists, but got NaN"),
        (body(b'{"inputs": [[1e999]]}'), 422, "finite numbers"),
        (body(b'{"inputs": [[1' + b"0" * 400 + b"]]}"), 422, "finite numbers"),
        (body(b'{"inputs": [[' + b"1" * 100_000 + b"]]}"), 422, "finite numbers in lists, but got Infinity"),
        (body({"inputs": [[*FLAT[1:], 1.01]]}), 422, "in [0, 1], but got values from 0.5 to 1.01"),
        (body({"inputs": [FLAT[1:]]}), 422, "of shape (N, 1, 8, 8) or (N, 64), but got (1, 63)"),
        ({"data": {"a": 1}}, 415, "but got application/x-www-form-urlencoded"),
        ({}, 415, "but got none"),
        ({"data": b"a", "headers": {"Content-Type": "multipart/form-data"}}, 400, "boundary"),
        ({"files": {"picture": b"a"}}, 422, "but got a field 'picture'"),
        ({"files": {"image": b"no image"}}, 422, "a readable image"),
        ({"files": {"image": b""}}, 422, "a readable image"),
        ({"files": {"image": bomb()}}, 422, "7000×7000 pixels, more than 25,000,000"),
        ({"files": {"image": b"\x80\x04K\x01."}}, 422, "a readable image"),  # a pickle
        (named_in("undefined"), 422, "undefined encoding"),
        (named_in("utf-7"), 422, "a readable image"),
        (named_in("unicode_escape"), 422, "a readable image"),
        (named_in("punycode"), 422, "punycode"),
        ({"data": b"0" * 300_000}, 413, "at most 200,000 bytes, but got 300,000"),
        (body(b"0" * 100_000 for _ in range(3)), 413, "at most 200,000 bytes"),  # in chunks: no length is told
    ],
)
def test_refusals_explain(sent: dict[str, Any], code: int, words: str, running: Running) -> None:
    before = running.service.monitor.seen  # type: ignore[union-attr]
    found = running.predict(code, **sent)
    assert words in found["detail"]
    assert " at 0x" not in found["detail"]  # no address of memory
    assert running.service.monitor.seen == before  # type: ignore[union-attr]


def test_many_small_images_share_the_limit_of_pixels(running: Running) -> None:
    file = io.BytesIO()
    Image.new("1", (3_000, 3_000)).save(file, "PNG")
    files = [("image", (f"{number}.png", file.getvalue())) for number in range(3)]
    assert "more than 7,000,000" in running.predict(422, files=files)["detail"]


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=a"])
def test_a_client_that_disconnects_is_no_failure_of_the_service(
    kind: str, running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    def count(status: int) -> float:
        return running.service.statuses[status]

    left, failed = count(499), count(500)
    with socket.create_connection(running.address) as client:
        head = f"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: {kind}\r\nContent-Length: 9\r\n\r\n"
        client.sendall(head.encode() + b"--a")
    deadline = time.monotonic() + 10
    while count(499) == left and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (count(499), count(500)) == (left + 1, failed)
    assert caplog.text == ""


def test_unknown_paths_and_methods(running: Running) -> None:
    assert requests.get(f"{running.url}/secret", timeout=30).status_code == 404
    assert requests.get(f"{running.url}/predict", timeout=30).status_code == 405


# ---------------------------------------------------------------------------------------------------------------- load


def test_answers_under_load_are_those_of_single_requests(running: Running, pixels: torch.Tensor) -> None:
    inputs = pixels[:48].flatten(1).tolist()
    alone = [running.predict(json={"inputs": [each]})["rows"][0] for each in inputs[:12]]

    def ask(number: int) -> Any:
        for _ in range(100):  # on a busy machine the first batch takes so long that others are told to try again
            reply = requests.post(f"{running.url}/predict", json={"inputs": [inputs[number]]}, timeout=60)
            if reply.status_code != 503:
                break
            time.sleep(0.1)
        assert reply.status_code == 200, reply.text
        return reply.json()["rows"][0]

    held = threading.Event()
    answer = running.service._batcher._answer
    sizes: list[int] = []

    def slow(questions: Any) -> Any:
        held.wait(30)
        sizes.append(len(questions))
        return answer(questions)

    running.service._batcher._answer = slow
    try:
        with ThreadPoolExecutor(16) as pool:
            futures = [pool.submit(ask, number) for number in range(48)]
            deadline = time.monotonic() + 30
            while len(running.service._batcher._queue) < 10 and time.monotonic() < deadline:
                time.sleep(0.01)  # until the first is in work and others wait
            held.set()
            together = [future.result() for future in futures]
    finally:
        running.service._batcher._answer = answer
    assert sum(sizes) == 48
    assert max(sizes) > 4  # they did go together
    for row, expected in zip(together, alone, strict=False):
        assert row["label"] == expected["label"]
        assert row["probabilities"] == pytest.approx(expected["probabilities"], abs=1e-6)


def test_a_batcher_refuses_fails_and_ends_well() -> None:
    held, began = threading.Event(), threading.Event()

    def answer(questions: Any) -> list[int]:
        began.set()
        held.wait(30)
        if 13 in questions:
            raise ValueError("13")
        return [question * 2 for question in questions]

    batcher = Batcher(answer, most=4, waiting=6, rows=lambda question: 1)
    first = batcher.submit(1)
    began.wait(30)
    waiting = [batcher.submit(number) for number in (2, 13, 3, 4, 5)]
    with pytest.raises(Busy):
        batcher.submit(6)
    assert waiting[3].cancel()  # its client has gone
    held.set()
    batcher.close()
    assert first.result(0) == 2
    assert [waiting[i].result(0) for i in (0, 2, 4)] == [4, 6, 10]
    with pytest.raises(ValueError, match="13"):
        waiting[1].result(0)


def test_a_batcher_refuses_what_would_wait_too_long() -> None:
    held = threading.Event()
    slow = Batcher(lambda questions: [held.wait(30) for _ in questions], most=1, waiting=99, rows=lambda question: 1)
    slow._timed = (10.0, 1.0)  # seconds and rows of the last batches
    accepted = [slow.submit(number) for number in range(3)]  # the last waits for 20 s
    with pytest.raises(Busy) as full:
        slow.submit(3)
    assert full.value.headers == {"Retry-After": "30"}
    held.set()
    slow.close()
    assert all(future.result(0) for future in accepted)


def test_overload_is_told(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(question: Any) -> None:
        raise Busy(3.2)

    monkeypatch.setattr(running.service, "ask", full)
    reply = requests.post(f"{running.url}/predict", json={"inputs": [FLAT]}, timeout=30)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "4")


def until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def half_sent(running: Running, length: int = 0, body: bytes = b"") -> socket.socket:
    """A connection that has sent a part of a head or, with a length, of a body."""
    client = socket.create_connection(running.address, timeout=20)
    head = f"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n"
    client.sendall(head.encode() + (b"\r\n" + body if length else b""))
    return client


def test_replies_do_not_wait_for_acknowledgements() -> None:
    with listen("127.0.0.1", 0) as at, socket.create_connection(at.getsockname()):
        accepted = at.accept()[0]
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        accepted.close()


def test_a_head_and_a_body_must_come_in_time(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEAD", 0.3)
    monkeypatch.setattr(limits, "BODY", 0.3)
    with half_sent(running) as client:
        assert client.recv(99) == b""  # closed
    with half_sent(running, 99, b"{") as client:
        assert client.recv(9999).startswith(b"HTTP/1.1 408")
    running.session.close()
    assert running.predict(json={"inputs": [FLAT]})["rows"]


def test_idle_connections_give_way(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    running.session.close()
    until(lambda: not running.server.server_state.connections)
    monkeypatch.setattr(limits, "PER_ADDRESS", 4)
    idle = [half_sent(running, *kind) for kind in ((), (99, b"{"), (), (99, b"{"))]
    until(lambda: len(running.server.server_state.connections) == 4)
    with ExitStack() as stack:
        for client in idle:
            stack.enter_context(client)
        for number in (0, 1):
            session = stack.enter_context(requests.Session())
            assert session.post(f"{running.url}/predict", json={"inputs": [FLAT]}, timeout=30).status_code == 200
            assert idle[number].recv(99) == b""  # the oldest
        idle[2].sendall(b"\r\n")
        assert idle[2].recv(99).startswith(b"HTTP/1.1 4")  # an empty body, but answered


def test_bytes_in_flight_are_bounded(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "IN_FLIGHT", 150_000)
    large = json.dumps({"inputs": [FLAT] * 200}) + 50_000 * " "
    assert len(large) > limits.SMALL
    with half_sent(running, 150_000, b" " * 140_000):
        until(lambda: requests.post(f"{running.url}/predict", timeout=30, **body(large)).status_code == 503)
        reply = requests.post(f"{running.url}/predict", timeout=30, **body(large))
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        assert running.predict(json={"inputs": [FLAT]})["rows"]
    until(lambda: requests.post(f"{running.url}/predict", timeout=30, **body(large)).status_code == 200)


def test_an_ending_service_answers_or_says_when_to_come_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GRACE", 1)
    served, held = Running(folder), threading.Event()
    answer = served.service._batcher._answer
    monkeypatch.setattr(served.service._batcher, "_answer", lambda questions: held.wait(30) and answer(questions))
    post = functools.partial(requests.post, f"{served.url}/predict", json={"inputs": [FLAT]}, timeout=30)
    with ThreadPoolExecutor(4) as pool:
        accepted = [pool.submit(post) for _ in range(3)]
        until(lambda: served.service._batcher._backlog == 3)
        connected = http.client.HTTPConnection(*served.address, timeout=30)
        connected.connect()
        until(lambda: len(served.server.server_state.connections) == 4)
        served.service.drain()
        connected.request("GET", "/health")
        reply = connected.getresponse()
        assert (reply.status, reply.headers["retry-after"], reply.headers["connection"]) == (503, "1", "close")
        served.server.should_exit = True
        replies = [future.result() for future in accepted]
        held.set()
        assert {(each.status_code, each.headers["retry-after"]) for each in replies} == {(503, "1")}
        connected.close()
    served.stop()


# --------------------------------------------------------------------------------------------------------------- shift


def test_the_monitor_rings_for_shifted_images(folder: Path, pixels: torch.Tensor) -> None:
    served = Running(folder, false_alarm=0.02)
    try:
        served.predict(json={"inputs": pixels[:100].tolist()})
        calm = served.get("/health").json()["shift"]
        assert (calm["seen"], calm["alarm"], calm["false_alarm"]) == (100, False, 0.02)
        noise = torch.rand(120, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        served.predict(json={"inputs": noise.tolist()})
        shift = served.get("/health").json()["shift"]
        assert shift["alarm"]
        assert 100 < shift["alarm_at"] <= 220
        assert shift["p_value"] <= 0.02
    finally:
        served.stop()


def test_novel_images_are_withheld_counted_and_ring(folder: Path, pixels: torch.Tensor) -> None:
    served = Running(folder, risk=0.3)
    try:
        rows = served.predict(json={"inputs": (1 - pixels[:40]).tolist()})["rows"]
        assert all(row["abstain"] and row["withheld"].startswith("novel") for row in rows)
        assert {row["p_value"] for row in rows} == {torch.tensor(1 / 301).item()}
        health = served.get("/health").json()
        assert health["novelty"] == {"level": 0.01, "against": "300 held-out inputs"}
        assert health["shift"]["alarm_at"] <= 5
        assert health["shift"]["direction"] == "higher"
        assert (health["counts"]["inputs"], health["counts"]["abstained"], health["counts"]["novel"]) == (40, 40, 40)
    finally:
        served.stop()
    with pytest.raises(ValueError, match="`novelty`"):
        Service(served.service.predictor, novelty=0.003)  # below 1 / 301


def test_a_run_without_reference_data_is_served(folder: Path, pixels: torch.Tensor, tmp_path: Path) -> None:
    copy = without_reference(folder, tmp_path / "run")
    served = Running(copy, risk=0.3)
    try:
        found = served.predict(json={"inputs": (1 - pixels[:40]).tolist()})
        for row in found["rows"]:
            assert row["p_value"] is None
            assert row["withheld"] == ("uncertain" if row["total"] > found["limit"] else None)
            assert row["abstain"] == (row["withheld"] is not None)
        health = served.get("/health").json()
        assert health["novelty"] is None
        assert health["shift"] is None
    finally:
        served.stop()
    with pytest.raises(ValueError, match=r"`novelty` to be 0 for a model that knows no reference data, but got 0\.01"):
        Service(Predictor.read(copy), novelty=0.01)


def test_the_monitor_ranks_novelty_as_the_scores_rank() -> None:
    """New inputs rank among held-out p-values of a group as their scores do among the scores."""
    reference = Reference(scores=torch.arange(150.0)[None])
    held = reference.held_out_p_values()
    torch.testing.assert_close(held, torch.arange(150, 0, -1).double() / 150, rtol=0, atol=1e-6)
    new = torch.arange(150) + 0.5
    p = p_values(reference.scores[0], new).double()
    higher = (reference.scores > new[:, None]).sum(1)
    assert torch.equal((held < p[:, None]).sum(1), higher)
    assert torch.equal((held <= p[:, None]).sum(1), higher)  # no ties


def test_stored_answers_of_other_draws_decide_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(parts, "make_data", gone)
    copy = without_reference(folder, tmp_path / "run")
    for samples, stored in ((3, False), (2, True)):  # the stored answers have 2
        service = Service(Predictor.read(copy, samples))
        assert (service.evidence is not None) == stored
        service.close()


# ------------------------------------------------------------------------------------------------- points and tables

CURVE = Job(
    net="mlp",
    net_options={"hidden": 16},
    data="toy-regression",
    examples=130,
    valid=100,
    method_options={"components": 2},
    train={"steps": 60, "lr": 0.01},
    samples=3,
)


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("runs") / "curve"
    jobs.run(CURVE, folder, quiet=True)
    served = Running(folder)
    yield served
    served.stop()


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A table of your own, of classes, served from another folder."""
    folder = tmp_path_factory.mktemp("table")
    x = torch.randn(300, 2, generator=torch.Generator().manual_seed(0))
    lines = [f"{a},{100 * b},{'up' if a + b > 0 else 'down</script>'}" for a, b in x.tolist()]
    (folder / "t.csv").write_text("\n".join(["a,<b>,way", *lines]) + "\n")
    fields = CURVE.model_dump(exclude_unset=True) | {"data": "t.csv", "target": "way", "examples": None, "valid": 60}
    jobs.run(Job(**fields), folder / "run", data_folder=folder, quiet=True)
    served = Running(folder / "run", risk=0.3)
    yield served
    served.stop()


def test_numbers_are_served_with_intervals(curve: Running) -> None:
    x = torch.tensor([[-3.0], [0.5], [40.0]])
    found = curve.predict(json={"inputs": x.tolist()})
    expected = curve.service.predictor.run.model.predict(x, samples=3, seed=0)
    low, high = expected.interval(0.9)  # type: ignore[attr-defined]
    named = {name: getattr(expected, name) for name in ("mean", "std", "aleatoric", "epistemic")}
    assert list(found) == ["target", "rows"]
    for name, values in (named | {"low": low, "high": high}).items():
        assert [row[name] for row in found["rows"]] == pytest.approx(values[:, 0].tolist(), rel=1e-4)
    assert curve.predict(json={"inputs": [{"x1": 1.0}]})["rows"]
    health = curve.get("/health").json()
    assert (health["abstention"], health["input"], health["classes"]) == (None, {"columns": ["x1"]}, [])
    assert health["shift"] is None
    assert {(row["p_value"], row["abstain"], row["withheld"]) for row in found["rows"]} == {(None, False, None)}
    assert health["novelty"] is None  # 30 points to train on are too few to tell


def test_rows_of_a_table_are_labelled_by_order_or_by_name(table: Running) -> None:
    found = table.predict(json={"inputs": [[2.0, 200.0], [-2.0, -200.0]]})
    assert found["classes"] == ["down</script>", "up"]
    assert [row["label"] for row in found["rows"]] == ["up", "down</script>"]
    named = table.predict(json={"inputs": [{"<b>": 200, "a": 2}, {"a": -2, "<b>": -200}]})
    assert named == found
    expected = table.service.predictor.run.model.predict(torch.tensor([[2.0, 200.0]]), samples=3, seed=0)
    assert found["rows"][0]["probabilities"] == pytest.approx(expected.probs[0].tolist(), abs=1e-6)  # type: ignore[attr-defined]
    assert found["rows"][0]["abstain"] is (found["rows"][0]["total"] > found["limit"])
    assert table.get("/health").json()["abstention"]["examples"] == 60  # stored: the table is elsewhere


@pytest.mark.parametrize(
    ("sent", "code", "words"),
    [
        (body({"inputs": [[1.0]]}), 422, "of shape (N, 2), but got (1, 1)"),
        (body({"inputs": [1.0, 2.0]}), 422, "of shape (N, 2), but got (2,)"),
        (body({"inputs": [[[1.0, 2.0]]]}), 422, "of shape (N, 2), but got (1, 1, 2)"),
        (body({"inputs": [{"a": 1.0}]}), 422, "the columns a, <b>, but got no ['<b>']"),
        (body({"inputs": [{"a": 1.0, "<b>": 2, "c": 3}]}), 422, "but got also ['c']"),
        (body({"inputs": [{"a": 1.0, "<b>": 2}, [1, 2]]}), 422, "but got no ['<b>', 'a']"),
        (body({"inputs": [{"a": 1.0, "<b>": "2"}]}), 422, 'finite numbers in lists, but got "2"'),
        (body({"inputs": [[1.0, 1.1e15]]}), 422, "numbers up to 1e+15"),
        (body({"inputs": [[1.0, math.inf]]}), 422, "finite numbers in lists, but got Infinity"),
        ({"files": {"image": b"a"}}, 415, "application/json, but got multipart/form-data"),
    ],
)
def test_wrong_rows_are_explained(sent: dict[str, Any], code: int, words: str, table: Running) -> None:
    assert words in table.predict(code, **sent)["detail"]


# ------------------------------------------------------------------------------------------------------------- process


@pytest.mark.slow
def test_sigterm_finishes_what_is_in_flight(folder: Path, pixels: torch.Tensor) -> None:
    words = [sys.executable, "-m", "ibnn", "serve", str(folder), "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.fullmatch(r"Serving at (http://127\.0\.0\.1:\d+)/\n", process.stdout.readline())
        assert found is not None
        sent = {"inputs": pixels[:250].tolist()}
        with ThreadPoolExecutor(8) as pool:
            futures = [pool.submit(requests.post, f"{found[1]}/predict", json=sent, timeout=60) for _ in range(8)]
            while not requests.get(f"{found[1]}/health", timeout=30).json()["counts"]["inputs"]:
                pass
            process.send_signal(signal.SIGTERM)
            codes = [future.result().status_code for future in futures if not future.exception()]
        assert process.wait(120) == 0
        err = process.communicate()[1]
        assert "Traceback" not in err
        assert set(codes) == {200}
        with pytest.raises(requests.ConnectionError):
            requests.get(found[1], timeout=5)
    finally:
        process.kill()
        process.communicate()


def test_wrong_commands(folder: Path) -> None:
    from test_cli import call

    taken = listen("127.0.0.1", 0)
    port = taken.getsockname()[1]
    with taken:
        assert "an address of this machine with a free port" in call("serve", folder, "--port", port, code=1).stderr
    for host in ("no.such.host.invalid", "192.0.2.1", "a" * 70, "::zz"):  # 192.0.2.0/24 is no machine's
        assert f"but got {host!r}, 8000 (" in call("serve", folder, "--host", host, code=1).stderr
    assert "--risk" in call("serve", folder, "--risk", 0, code=2).stderr
    assert "--false-alarm" in call("serve", folder, "--false-alarm", 1, code=2).stderr
    assert "--megabytes" in call("serve", folder, "--megabytes", 0, code=2).stderr
    assert "job.toml" in call("serve", folder.parent, code=2).stderr
