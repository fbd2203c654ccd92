"""`ibnn.serve` for a model of a Python session, and what it shares with the command."""

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ibnn.app.predictor import Predictor, check_limits
from ibnn.app.serve.app import make_app
from ibnn.app.serve.limits import listen, make_server
from ibnn.app.serve.service import Service
from ibnn.batches import as_source, gather


def serve(
    model: Any,
    valid: Any = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    classes: Sequence[str] = (),
    samples: int = 5,
    seed: int = 0,
    risk: float = 0.05,
    novelty: float | None = None,
    fallback: float | None = None,
    false_alarm: float = 0.01,
    megabytes: float = 10,
) -> None:
    """Serves a model over HTTP until Ctrl-C or SIGTERM: POST /predict and GET /health.

    A request is {"inputs": [...]}: what the network takes, as nested lists, or an object of lists by keyword. In a
    notebook, run it in a thread: `threading.Thread(target=ibnn.serve, args=[model], daemon=True).start()`.

    Args:
        model: A converted network or a baseline; it computes on its own device.
        valid: Labelled inputs that the model was not trained on, (x, y) or a loader: they decide where to abstain.
            Without them, answers for novel inputs alone are withheld, if the model has reference data.
        host: Address to listen on; the default accepts connections from this machine only.
        port: 0 takes any free port.
        classes: Names of the classes; default: their numbers.
        samples: Draws per component.
        seed: Seed of the draws.
        risk: Abstains so that at most this share of the answers given is wrong, with 95 % confidence.
        novelty: Withholds inputs whose p-value is at most this; 0 for never; default: 0.01, or the smallest there is.
        fallback: p-value below which answers are mixed with the base rates; default: never.
        false_alarm: Probability that the shift monitor ever raises an alarm although nothing has shifted.
        megabytes: Largest request that is accepted.
    """
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        how = "threading.Thread(target=ibnn.serve, args=[model], daemon=True).start()"
        raise TypeError(f"ibnn.serve runs its own event loop. Call it in a thread: {how}.")
    check_limits(risk, novelty, false_alarm, megabytes)
    if valid is not None:
        valid = gather(as_source(valid, batch_size=256, name="valid", shuffled=False), 0, "valid")
    draws: Any = {"samples": samples, "seed": seed, "fallback": fallback}
    predictor = Predictor.of_model(model, valid=valid, classes=classes, **draws)
    note = partial(print, file=sys.stderr, flush=True)
    start(predictor, host, port, megabytes, note, risk=risk, novelty=novelty, false_alarm=false_alarm)


def start(
    predictor: Predictor, host: str, port: int, megabytes: float, note: Callable[[str], None], **options: Any
) -> None:
    """Listens, says what will be withheld, and serves until the end; `options` are those of `Service`."""
    with listen(host, port) as at:
        service = Service(predictor, **options)
        for line in predictor.notes(service.evidence, service.novelty):
            note(line)
        if service.monitor is None:
            note("Inputs are not monitored for a shift: the model has no reference data.")
        server = make_server(make_app(service, megabytes=megabytes), drain=service.drain)
        print(f"Serving at http://{f'[{host}]' if ':' in host else host}:{at.getsockname()[1]}/", flush=True)
        if threading.current_thread() is not threading.main_thread():  # signals are not this thread's business
            return server.run(sockets=[at])
        before = signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again at the end
        try:
            server.run(sockets=[at])
        finally:
            signal.signal(signal.SIGTERM, before)
