"""BATCHING: one thread answers; the questions that arrive meanwhile are answered together next."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

Question = TypeVar("Question")
Answer = TypeVar("Answer")


class OverloadedError(Exception):
    """The queue is full."""


class Batcher(Generic[Question, Answer]):
    """Gathers questions from many threads into batches; nobody waits for a batch to fill.

    >>> batcher = Batcher(lambda questions: [2 * q for q in questions], most=8, waiting=100, rows=lambda q: 1)
    >>> [future.result() for future in [batcher.submit(3), batcher.submit(4)]]
    [6, 8]
    >>> batcher.close()
    """

    def __init__(
        self,
        answer: Callable[[Sequence[Question]], Sequence[Answer]],
        *,
        most: int,
        waiting: int,
        rows: Callable[[Question], int],
    ) -> None:
        """Starts the thread; a batch of `most` rows takes no more questions, and at most `waiting` of these wait."""
        self._answer, self._most, self._rows = answer, most, rows
        self._queue: queue.Queue[tuple[Question, Future[Answer]] | None] = queue.Queue(waiting)
        self._thread = threading.Thread(target=self._work, name="ibnn-answers", daemon=True)
        self._thread.start()

    def submit(self, question: Question) -> Future[Answer]:
        """Returns the future answer; raises `OverloadedError` if too many questions wait."""
        future: Future[Answer] = Future()
        try:
            self._queue.put_nowait((question, future))
        except queue.Full:
            raise OverloadedError from None
        return future

    def close(self) -> None:
        """Answers the waiting questions and ends the thread."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        ending = False
        while not ending:
            batch: list[tuple[Question, Future[Answer]]] = []
            while not batch or (sum(self._rows(q) for q, _ in batch) < self._most and not self._queue.empty()):
                following = self._queue.get()  # this thread is the only reader
                if following is None:
                    ending = True
                    break
                batch.append(following)
            self._settle([each for each in batch if each[1].set_running_or_notify_cancel()])

    def _settle(self, batch: list[tuple[Question, Future[Answer]]]) -> None:
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
