"""Answers questions about a run in batches, abstains, monitors the inputs, and counts."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ibnn._version import __version__
from ibnn.app import finite
from ibnn.app.inputs import MOST
from ibnn.app.predictor import Predictor
from ibnn.app.serve.limits import Busy
from ibnn.inputs import batch_length
from ibnn.monitoring.shift import ShiftMonitor
from ibnn.prediction import CategoricalPrediction

WAITING = 256 * MOST  # rows that wait, unless they take more memory than this:
BYTES = 64_000_000
PATIENCE = 20  # seconds that a request may have to wait for its answer; one that would wait longer is refused

Row = dict[str, Any]


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
    ) -> None:
        """Reads or computes the held-out answers, and starts the answering thread; options as of `ibnn serve`."""
        self.predictor, self.risk = predictor, risk
        self.novelty = predictor.novelty_level(novelty)  # p-value up to which inputs are withheld as novel
        self.rule, self.evidence = predictor.rule(risk, self.novelty, predictor.held_out(data))  # where to abstain
        self.monitor: ShiftMonitor | None = None  # of the inputs' novelty
        if predictor.reference is not None:
            scores = -predictor.reference.held_out_p_values().log().cpu()
            self.monitor = ShiftMonitor(scores, false_alarm=false_alarm, seed=predictor.seed)
        self.statuses: Counter[int] = Counter()  # of replies
        self.counts: Counter[str] = Counter(inputs=0, abstained=0, novel=0)
        waiting = max(MOST, min(WAITING, BYTES // (4 * predictor.kind.size)))  # float32
        self._batcher = Batcher(self._answer, most=MOST, waiting=waiting, rows=batch_length)
        self.ask = self._batcher.submit  # returns the future rows, one for each input
        self.close = self._batcher.close
        self.draining = False  # whether the service is about to end

    def _answer(self, parts: Any) -> list[list[Row]]:
        """Returns the answers to several questions, as plain data; raises for tensors of different shapes."""
        if isinstance(parts[0], dict):
            found = self.predictor.answer({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
        else:
            found = self.predictor.answer(torch.cat(parts))
        if self.monitor is not None and found.p_value is not None:
            self.monitor.update(-found.p_value.log())
        none = {"p_value": None, "abstain": False, "withheld": None}
        rows = [none | row for row in self.predictor.described(found, self.rule)]
        if isinstance(found, CategoricalPrediction):
            for row, probabilities in zip(rows, found.probs.tolist(), strict=True):
                row["probabilities"] = probabilities
        for row in rows:
            self.counts.update(inputs=1, abstained=row["abstain"], novel="novel" in (row["withheld"] or ""))
        left = iter(rows)
        return [list(islice(left, batch_length(part))) for part in parts]

    @property
    def wait(self) -> float:
        """Seconds after which to try again if a new question cannot be answered in time; 0 if it can."""
        wait = self._batcher.wait
        return max(wait, 1.0) if self.draining or wait > PATIENCE else 0.0

    def drain(self) -> None:
        """Refuses new questions from now on; those that wait are answered."""
        self.draining = True

    def health(self) -> dict[str, Any]:
        """Returns what is served, where it abstains, and whether inputs have shifted."""
        predictor, ranked, monitor, shift = self.predictor, self.predictor.ranked, self.monitor, None
        if monitor is not None:
            shift = {
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
            "abstention": finite(self.evidence),
            "novelty": None if ranked is None else {"level": self.novelty, "against": f"{ranked:,} held-out inputs"},
            "shift": shift,
            "counts": {**self.counts, "replies": {str(status): count for status, count in self.statuses.items()}},
        }


class Batcher:
    """Gathers questions from many threads into batches; nobody waits for a batch to fill."""

    def __init__(self, answer: Callable[..., Any], *, most: int, waiting: int, rows: Callable[[Any], int]) -> None:
        """A batch of `most` rows takes no more questions, and at most `waiting` rows wait."""
        self._answer, self._most, self._waiting, self._rows = answer, most, waiting, rows
        self._queue: deque[tuple[Any, Future[Any]]] = deque()
        self._lock, self._backlog = threading.Lock(), 0  # rows that wait or are being answered
        self._timed = (0.0, 0.0)  # seconds and rows of recent batches
        self._thread = ThreadPoolExecutor(1, "ibnn-answers")
        self.close = self._thread.shutdown  # answers the waiting questions

    @property
    def wait(self) -> float:
        """Seconds until a question that comes now is answered, judged by recent batches."""
        seconds, rows = self._timed
        return self._backlog * seconds / rows if rows else 0.0

    def submit(self, question: Any) -> Future[Any]:
        """Returns the future answer; raises `Busy` if too many rows wait. An idle batcher takes any question."""
        rows = self._rows(question)
        with self._lock:
            if self._backlog and (self._backlog + rows > self._waiting or self.wait > PATIENCE):
                raise Busy(self.wait)
            self._backlog += rows
        future: Future[Any] = Future()
        self._queue.append((question, future))
        self._thread.submit(self._work)
        return future

    def _work(self) -> None:
        """Answers the questions that wait, up to a batch; there may be none, if the last batch took them all."""
        batch, rows = list[tuple[Any, Future[Any]]](), 0
        while self._queue and rows < self._most:
            batch.append(self._queue.popleft())
            rows += self._rows(batch[-1][0])
        begin = time.perf_counter()
        wanted = [each for each in batch if each[1].set_running_or_notify_cancel()]
        self._settle(wanted)
        with self._lock:
            self._backlog -= rows
            if wanted:
                seconds, count = self._timed
                answered = sum(self._rows(question) for question, _ in wanted)
                self._timed = (0.8 * seconds + time.perf_counter() - begin, 0.8 * count + answered)

    def _settle(self, batch: list[tuple[Any, Future[Any]]]) -> None:
        try:
            answers = self._answer([question for question, _ in batch]) if batch else []
        except BaseException as error:
            if len(batch) == 1:
                batch[0][1].set_exception(error)
            else:
                for each in batch:  # so that one failure does not fail the others
                    self._settle([each])
        else:
            for (_, future), answer in zip(batch, answers, strict=True):
                future.set_result(answer)
