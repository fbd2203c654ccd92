"""Answers questions about a run in batches, abstains, monitors the inputs, and counts."""

import hashlib
import json
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ibnn._version import __version__
from ibnn.app import finite
from ibnn.app.inputs import MOST
from ibnn.app.predictor import HeldOut, Predictor
from ibnn.errors import complaint
from ibnn.files import sealed
from ibnn.inputs import Inputs, batch_length
from ibnn.monitoring.abstention import Threshold
from ibnn.monitoring.shift import ShiftMonitor, fewest_scores
from ibnn.prediction import CategoricalPrediction, Prediction

WAITING = 256 * MOST  # rows that wait, unless they take more memory than this:
BYTES = 64_000_000
PATIENCE = 20  # seconds that a request may have to wait for its answer; one that would wait longer is refused

Row = dict[str, Any]
Q = TypeVar("Q")  # a question
A = TypeVar("A")  # an answer


class Question(NamedTuple):
    """Inputs of the predictor's kind, whether the answers of single draws are wanted, and the rule."""

    inputs: Inputs
    draws: bool
    rule: Threshold = Threshold(math.inf, 1.0, 0, 1.0)  # which answers to withhold


class Service:
    """Answers questions, one batch at a time; counts and monitors them."""

    def __init__(
        self,
        predictor: Predictor,
        *,
        risk: float = 0.05,
        novelty: float | None = None,
        false_alarm: float = 0.01,
        data: Path | None = None,
        state: Path | None = None,
    ) -> None:
        """Reads or computes the held-out answers, and starts the answering thread; options as of `ibnn serve`."""
        self.predictor, self.risk, self._state = predictor, risk, state
        self.novelty = predictor.novelty_level(novelty)  # p-value up to which inputs are withheld as novel
        self.held_out: HeldOut | None = predictor.held_out(data)  # decides where to abstain
        self.rule = lru_cache(maxsize=64)(lambda risk, level: predictor.rule(risk, level, lambda: self.held_out))
        self.rule(risk, self.novelty)
        self.watched = self._score()
        self.unwatched = ""  # why there is no monitor
        self.monitor = self._monitor(false_alarm)
        self.counts = Counts()
        waiting = max(MOST, min(WAITING, BYTES // (4 * predictor.kind.size)))  # float32
        self._batcher = Batcher(self._answer, most=MOST, waiting=waiting, rows=lambda q: batch_length(q.inputs))
        self.ask = self._batcher.submit  # returns the future rows, one for each input
        self.draining = False  # whether the service is about to end

    def _score(self) -> str:
        """Returns the name of the score that the monitor ranks."""
        held, predictor = self.held_out, self.predictor
        if predictor.ranked is not None:
            return "novelty"
        if held is None:
            return "total"
        least = 1e-6 if predictor.labels else 1e-6 * float(held.total.max())  # variances have units
        agrees = predictor.model.components == 1 and not float(held.epistemic.abs().max()) > least
        return "total" if agrees else "epistemic"

    def _monitor(self, false_alarm: float) -> ShiftMonitor | None:
        predictor, held, reference = self.predictor, self.held_out, self.predictor.reference
        scores, fewest = torch.empty(0), fewest_scores(false_alarm)
        if reference is not None:
            scores = -reference.held_out_p_values().log()
        elif held is not None and self.watched != "novelty":
            scores = getattr(held, self.watched)
        self.against = f"{len(scores):,} {'held-out inputs' if reference is not None or held is None else held.source}"
        stored = held is not None and held.stored and predictor.run is not None and predictor.run.job.samples
        if reference is None and stored and (predictor.samples, predictor.seed) != (stored, 0):
            self.unwatched = "the stored test answers come from other draws"
        elif not len(scores):
            self.unwatched = "the model has no held-out inputs to compare with"
        elif not predictor.labels and self.watched == "total":
            self.unwatched = "a single network is equally uncertain about every number"
        elif len(scores) < fewest:
            self.unwatched = f"this false-alarm rate needs {fewest} held-out answers, and there are {len(scores)}"
        if self.unwatched:
            return None
        fresh = ShiftMonitor(scores.cpu(), false_alarm=false_alarm, seed=predictor.seed)
        self._start = hashlib.sha256(json.dumps(fresh.state()).encode()).hexdigest()
        return fresh if self._state is None or not self._state.exists() else self._restored(self._state)

    def _restored(self, path: Path) -> ShiftMonitor:
        kept = sealed.read_json(path, remedy="Delete it to start over, or pass another file.")
        with suppress(ValueError, TypeError, KeyError):
            if kept["begin"] == self._start:
                return ShiftMonitor.restored(kept["monitor"])
        expected, got = "a file written by a service of this run", f"{path}, of another run or false-alarm rate"
        raise ValueError(complaint("state", expected, got, "Pass another file, or delete this one to start over."))

    def _answer(self, questions: Sequence[Question]) -> list[list[Row]]:
        found = self.predictor.answer(_joined([question.inputs for question in questions]))
        if self.monitor is not None:
            p = found.p_value if self.watched == "novelty" else None
            self.monitor.update(getattr(found, self.watched).flatten() if p is None else -p.log())
        self.counts.batch.observe(len(found))
        self.counts.inputs.inc(len(found))
        answers, first = [], 0
        for question in questions:
            own = found.rows(torch.arange(first, first + batch_length(question.inputs)))
            answers.append(self._rows(question, own))
            first += len(own)
        return answers

    def _rows(self, question: Question, found: Prediction) -> list[Row]:
        """Returns the answers to one question as plain data."""
        none = {"p_value": None, "abstain": False, "withheld": None}
        more: dict[str, list[Any]] = {}
        if isinstance(found, CategoricalPrediction):
            more["probabilities"] = found.probs.tolist()
        if question.draws:
            more["draws"] = self.predictor.draws(question.inputs).tolist()
        rows = self.predictor.described(found, question.rule)
        return [none | row | {name: each[i] for name, each in more.items()} for i, row in enumerate(rows)]

    @property
    def wait(self) -> float:
        """Seconds after which to try again if a new question cannot be answered in time; 0 if it can."""
        wait = self._batcher.wait
        return max(wait, 1.0) if self.draining or wait > PATIENCE else 0.0

    def drain(self) -> None:
        """Refuses new questions from now on; those that wait are answered."""
        self.draining = True

    def close(self) -> None:
        """Answers the waiting questions, then writes the monitor's state."""
        self._batcher.close()
        if self._state is not None and self.monitor is not None:
            sealed.write_json(self._state, {"begin": self._start, "monitor": self.monitor.state()})

    def health(self) -> dict[str, Any]:
        """Returns what is served, where it abstains, and whether inputs have shifted."""
        predictor, shift = self.predictor, None
        if (monitor := self.monitor) is not None:
            shift = {
                "score": self.watched,
                "against": self.against,
                "false_alarm": monitor.false_alarm,
                "seen": monitor.seen,
                "alarm": monitor.alarm is not None,
                "alarm_at": monitor.alarm,
                "direction": monitor.direction if monitor.alarm is not None else None,
                "p_value": min(1.0, monitor.p_value),
            }
        return {
            "status": "ok",
            "version": __version__,
            "run": predictor.name,
            "classes": list(predictor.classes),
            "input": predictor.kind.facts,
            "components": predictor.model.components,
            "samples": predictor.samples,
            "seed": predictor.seed,
            "abstention": finite(self.rule(self.risk, self.novelty)[1]),
            "novelty": self._novelty(),
            "shift": shift,
        }

    def _novelty(self) -> dict[str, Any] | None:
        """Returns up to which p-value inputs are withheld as novel, what they are ranked among, and how many were."""
        if (ranked := self.predictor.ranked) is None:
            return None
        novel = self.counts.registry.get_sample_value("ibnn_novel_total") or 0
        return {"level": self.novelty, "against": f"{ranked:,} held-out inputs", "novel": int(novel)}

    def metrics(self) -> bytes:
        """Returns the counters in Prometheus' text format."""
        if self.monitor is not None:
            self.counts.shift_seen.set(self.monitor.seen)
            self.counts.shift_wealth.set(self.monitor.log_wealth)
            self.counts.shift_alarm.set(self.monitor.alarm is not None)
        return generate_latest(self.counts.registry)


def _joined(parts: list[Inputs]) -> Inputs:
    """Returns the inputs of several questions as one batch; raises if their shapes differ."""
    if isinstance(parts[0], dict):
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return torch.cat(parts)


class Counts:
    """The service's counters, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        seconds, rows = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10), (1, 2, 4, 8, 16, 32, 64, 128, 256)
        self.requests = Counter("ibnn_requests", "Requests answered.", ["path", "status"], registry=own)
        self.seconds = Histogram("ibnn_request_seconds", "Time to answer.", ["path"], buckets=seconds, registry=own)
        self.inputs = Counter("ibnn_inputs", "Inputs predicted.", registry=own)
        self.abstained = Counter("ibnn_abstained", "Inputs whose answer was withheld.", registry=own)
        self.novel = Counter("ibnn_novel", "Inputs whose answer was withheld as novel.", registry=own)
        self.batch = Histogram("ibnn_batch_rows", "Inputs answered together.", buckets=rows, registry=own)
        self.shift_seen = Gauge("ibnn_shift_inputs", "Inputs the shift monitor has seen.", registry=own)
        self.shift_wealth = Gauge("ibnn_shift_log_wealth", "Log wealth of the bet on a shift.", registry=own)
        self.shift_alarm = Gauge("ibnn_shift_alarm", "1 once the shift monitor has rung.", registry=own)


class Busy(Exception):  # noqa: N818  no error of anybody
    """Too much work is waiting; says for how many seconds it will."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"{seconds:.3g} s of work wait")
        self.seconds = seconds


class Batcher(Generic[Q, A]):
    """Gathers questions from many threads into batches; nobody waits for a batch to fill."""

    def __init__(
        self, answer: Callable[[Sequence[Q]], Sequence[A]], *, most: int, waiting: int, rows: Callable[[Q], int]
    ) -> None:
        """Starts the thread; a batch of `most` rows takes no more questions, and at most `waiting` rows wait."""
        self._answer, self._most, self._waiting, self._rows = answer, most, waiting, rows
        self._queue: queue.Queue[tuple[Q, Future[A]] | None] = queue.Queue()
        self._lock, self._backlog = threading.Lock(), 0  # rows that wait or are being answered
        self._timed = (0.0, 0.0)  # seconds and rows of recent batches
        self._thread = threading.Thread(target=self._work, name="ibnn-answers", daemon=True)
        self._thread.start()

    @property
    def wait(self) -> float:
        """Seconds until a question that comes now is answered, judged by recent batches."""
        seconds, rows = self._timed
        return self._backlog * seconds / rows if rows else 0.0

    def submit(self, question: Q) -> Future[A]:
        """Returns the future answer; raises `Busy` if too many rows wait. An idle batcher takes any question."""
        rows = self._rows(question)
        with self._lock:
            if self._backlog and (self._backlog + rows > self._waiting or self.wait > PATIENCE):
                raise Busy(self.wait)
            self._backlog += rows
        future: Future[A] = Future()
        self._queue.put((question, future))
        return future

    def close(self) -> None:
        """Answers the waiting questions and ends the thread."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        ending = False
        while not ending:
            batch: list[tuple[Q, Future[A]]] = []
            rows = 0
            while not batch or (rows < self._most and not self._queue.empty()):
                following = self._queue.get()  # this thread is the only reader
                if following is None:
                    ending = True
                    break
                batch.append(following)
                rows += self._rows(following[0])
            begin = time.perf_counter()
            wanted = [each for each in batch if each[1].set_running_or_notify_cancel()]
            self._settle(wanted)
            with self._lock:
                self._backlog -= rows
                if wanted:
                    seconds, count = self._timed
                    answered = sum(self._rows(question) for question, _ in wanted)
                    self._timed = (0.8 * seconds + time.perf_counter() - begin, 0.8 * count + answered)

    def _settle(self, batch: list[tuple[Q, Future[A]]]) -> None:
        try:
            answers = self._answer([question for question, _ in batch]) if batch else []
        except BaseException as error:
            if len(batch) == 1:
                batch[0][1].set_exception(error)
                return
            for each in batch:  # so that one failure does not fail the others
                self._settle([each])
            return
        for (_, future), answer in zip(batch, answers, strict=True):
            future.set_result(answer)
