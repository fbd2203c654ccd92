"""`serve`: a finished run as a service over HTTP."""

import math
from pathlib import Path
from typing import Annotated

import typer

from ibnn.app.cli.answer import RunFolder, Samples, Seed, TrustCode, check_risk, read, worded
from ibnn.app.cli.screen import Screen, check_out, misuse
from ibnn.app.cli.train import Data
from ibnn.errors import complaint


def serve(
    screen: Screen,
    folder: RunFolder,
    host: Annotated[str, typer.Option(help="Address; the default is reached from this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8000,
    samples: Samples = None,
    seed: Seed = 0,
    risk: Annotated[
        float, typer.Option(help="Abstains so that at most this share of the given answers is wrong; 1 never does.")
    ] = 0.05,
    false_alarm: Annotated[
        float, typer.Option(help="Probability that the shift monitor ever rings although nothing has shifted.")
    ] = 0.01,
    state: Annotated[
        Path | None, typer.Option(help="A file that keeps the shift monitor's state from one start to the next.")
    ] = None,
    megabytes: Annotated[float, typer.Option(help="Largest request that is read.")] = 10,
    data: Data = None,
    trust_code: TrustCode = False,
) -> None:
    """Serves a run over HTTP: /predict, /health, /metrics, and a page at / where one drops an image or fills in a row.

    Ctrl-C or SIGTERM ends it when what is in flight is answered. There is no password: put a proxy that asks for one in
    front of it before others may reach it.
    """
    with misuse():
        check_risk(risk)
        if state is not None:
            check_out("--state", state)
        if not 0 < false_alarm < 1:
            raise ValueError(complaint("--false-alarm", "between 0 and 1", false_alarm, "Pass 0.01."))
        if not 0 < megabytes < math.inf:
            raise ValueError(complaint("--megabytes", "positive and finite", megabytes, "Pass 10."))
    from ibnn.app.serve.app import make_app
    from ibnn.app.serve.server import listen
    from ibnn.app.serve.server import serve as run
    from ibnn.app.serve.service import Service

    asked = read(folder, samples, seed, trust_code)
    with misuse():
        at = listen(host, port)
    with at:
        with misuse():
            service = Service(asked, risk=risk, false_alarm=false_alarm, data=data, state=state)
        facts = service.limit(risk)[1]
        screen.note(worded(facts) if facts else "Never abstains.")
        if service.monitor is None:
            screen.note(f"Inputs are not watched for a shift: {service.unwatched}.")
        address = f"http://{f'[{host}]' if ':' in host else host}:{at.getsockname()[1]}/"
        run(make_app(service, megabytes=megabytes), at, ready=lambda: print(f"Serving at {address}", flush=True))
