"""`serve`: a finished run as a service over HTTP."""

import math
from pathlib import Path
from typing import Annotated

import typer

from ibnn.app.cli.answer import check_risk, read, worded
from ibnn.app.cli.options import Data, Risk, RunFolder, Samples, Seed, TrustCode
from ibnn.app.cli.screen import Screen, check_out, misuse
from ibnn.errors import complaint

_HOST = "Address to listen on; the default accepts connections from this machine only."
_FALSE_ALARM = "Probability that the shift monitor ever raises an alarm although nothing has shifted."
_STATE = "File that keeps the shift monitor's state between starts."


def serve(
    screen: Screen,
    folder: RunFolder,
    host: Annotated[str, typer.Option(help=_HOST)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8000,
    samples: Samples = None,
    seed: Seed = 0,
    risk: Risk = 0.05,
    false_alarm: Annotated[float, typer.Option(help=_FALSE_ALARM)] = 0.01,
    state: Annotated[Path | None, typer.Option(help=_STATE)] = None,
    megabytes: Annotated[float, typer.Option(help="Largest request that is accepted.")] = 10,
    data: Data = None,
    trust_code: TrustCode = False,
) -> None:
    """Serves a run over HTTP: /predict, /health, /metrics, and a page at / to try it with an image or a row.

    Ctrl-C or SIGTERM ends it after the requests in flight are answered. There is no password: before others can reach
    it, put a proxy in front that asks for one.
    """
    with misuse():
        check_risk(risk)
        if state is not None:
            check_out("--state", state)
        if not 0 < false_alarm < 1:
            raise ValueError(complaint("--false-alarm", "between 0 and 1", false_alarm, "Pass 0.01."))
        if not 0 < megabytes < math.inf:
            raise ValueError(complaint("--megabytes", "positive and finite", megabytes, "Pass 10."))
    from ibnn.app.serve import server
    from ibnn.app.serve.app import make_app
    from ibnn.app.serve.service import Service

    asked = read(folder, samples, seed, trust_code)
    with misuse():
        at = server.listen(host, port)
    with at:
        with misuse():
            service = Service(asked, risk=risk, false_alarm=false_alarm, data=data, state=state)
        facts = service.limit(risk)[1]
        screen.note(worded(facts) if facts else "Never abstains.")
        if service.monitor is None:
            screen.note(f"Inputs are not monitored for a shift: {service.unwatched}.")
        address = f"http://{f'[{host}]' if ':' in host else host}:{at.getsockname()[1]}/"
        ready = f"Serving at {address}"
        server.serve(make_app(service, megabytes=megabytes), at, ready=lambda: print(ready, flush=True))
