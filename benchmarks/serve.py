"""How does `ibnn serve` do with many, slow and late clients? On loopback, with a small network of digits.

    python benchmarks/serve.py [--against SRC] [--repeats 3] [--json FILE]

With `--against`, the folder `src` of another version, both versions are measured in turns. Times are milliseconds from
a request to its reply, all by the same client in this process:

* keep-alive: one client, one request after the other on one connection.
* clients: 200 clients, each with a connection of its own, 5 requests one after the other.
* slow: 500 connections send a letter of their head each second; meanwhile 4 clients open a connection for every
  request. The ratio is to the same clients without the slow ones; `answered` counts replies within 5 s.
* bodies: 100 connections send 9.8 MB of a body and never finish; megabytes by which the server's peak memory grows.
* sigterm: 120 requests of 256 inputs each are sent at once, then SIGTERM; how many got which status (0: none).
"""

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import report

from ibnn.lab import jobs
from ibnn.lab.job import Job

JOB = Job(
    net="mlp",
    net_options={"inputs": 64, "hidden": 64},
    data="digits",
    valid=300,
    method_options={"components": 4},
    train={"steps": 60, "batch_size": 64},
    samples=5,
)


def request(inputs: int = 1, path: str = "/predict") -> bytes:
    body = json.dumps({"inputs": [[0.5] * 64] * inputs}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes) -> int:
    """Sends a request; returns the status of its reply, which is read to its end."""
    writer.write(sent)
    status, *headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    lengths = [int(line.split(":")[1]) for line in headers if line.startswith("content-length")]
    await (reader.readexactly(lengths[0]) if lengths else reader.read())
    return int(status.split()[1])


async def client(port: int, requests: int, times: list[float], *, anew: bool = False, sent: bytes = b"") -> None:
    """Asks one request after the other, with a new connection for each if `anew`; notes the seconds of each."""
    sent, writer = sent or request(), None
    for _ in range(requests):
        began = time.perf_counter()
        with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(5 if anew else 60):
                if anew or writer is None:
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                if await ask(reader, writer, sent) == 200:
                    times.append(time.perf_counter() - began)
                if anew:
                    writer.close()
    if writer is not None:
        writer.close()


def summary(times: list[float], asked: int) -> dict[str, float]:
    if not times:
        return {"answered": 0, "asked": asked}
    ordered = sorted(times)
    p50, p99 = statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))]
    shown = {"p50": round(1e3 * p50, 1), "p99": round(1e3 * p99, 1), "p99 / p50": round(p99 / p50, 2)}
    return shown | {"answered": len(times), "asked": asked}


async def keep_alive(port: int) -> dict[str, float]:
    times: list[float] = []
    await client(port, 100, times)
    return summary(times, 100)


async def clients(port: int) -> dict[str, float]:
    times: list[float] = []
    await asyncio.gather(*(client(port, 5, times) for _ in range(200)))
    return summary(times, 1000)


async def few(port: int) -> list[float]:
    times: list[float] = []
    await asyncio.gather(*(client(port, 25, times, anew=True) for _ in range(4)))
    return times


async def slow(port: int) -> dict[str, float]:
    before = await few(port)

    async def trickle() -> None:
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            for letter in b"POST /predict HTTP/1.1\r\nHost: a\r\nX: " + 60 * b"a":
                writer.write(bytes([letter]))
                await asyncio.sleep(1)

    tasks = [asyncio.create_task(trickle()) for _ in range(500)]
    await asyncio.sleep(3)
    found = summary(times := await few(port), 100)
    for task in tasks:
        task.cancel()
    ratio = round(statistics.median(times) / statistics.median(before), 2) if times else None
    return found | {"p50, ratio": ratio}


async def bodies(port: int, process: int) -> dict[str, float]:
    def peak() -> float:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM"))

    before, writers = peak(), []
    head = b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 9900000\r\n\r\n"

    async def send() -> None:
        with suppress(OSError, TimeoutError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)
            async with asyncio.timeout(15):
                writer.write(head)
                for _ in range(98):
                    writer.write(b" " * 100_000)
                    await writer.drain()

    await asyncio.gather(*(send() for _ in range(100)))
    await asyncio.sleep(1)
    for writer in writers:
        writer.close()
    return {"megabytes": round(peak() - before)}


async def sigterm(port: int, process: int) -> dict[str, int]:
    async def one() -> int:
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            return await ask(reader, writer, sent)
        return 0

    sent = request(256)
    tasks = [asyncio.create_task(one()) for _ in range(120)]
    await asyncio.sleep(5)
    os.kill(process, signal.SIGTERM)
    return {str(status): count for status, count in sorted(Counter(await asyncio.gather(*tasks)).items())}


@contextmanager
def serving(source: Path, run: Path, *options: str):
    """Serves the run by the version in a folder; yields its port and process."""
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ibnn", "serve", str(run), "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        yield int(process.stdout.readline().rsplit(":", 1)[1].strip("/\n")), process.pid
    finally:
        process.kill()
        process.communicate()


def measure(source: Path, run: Path, samples: int) -> dict[str, dict[str, float]]:
    with serving(source, run) as (port, process):
        asyncio.run(client(port, 3, []))
        found = {"keep-alive": asyncio.run(keep_alive(port)), "clients": asyncio.run(clients(port))}
        found |= {"slow": asyncio.run(slow(port))}
    with serving(source, run) as (port, process):
        found |= {"bodies": asyncio.run(bodies(port, process))}
    with serving(source, run, "--samples", str(samples)) as (port, process):
        asyncio.run(client(port, 1, [], sent=request(256)))
        return found | {"sigterm": asyncio.run(sigterm(port, process))}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--against", type=Path, help="folder `src` of another version")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--samples", type=int, default=100, help="draws per component of the case sigterm")
    options = parser.parse_args()
    sources = {"this": Path(__file__).parents[1] / "src"}
    sources |= {"other": options.against.resolve()} if options.against else {}
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        jobs.run(JOB, run, quiet=True)
        result = {name: [] for name in sources}
        for _ in range(options.repeats):
            for name, source in sources.items():
                result[name].append(measure(source, run, options.samples))
                print(name, json.dumps(result[name][-1]), file=sys.stderr, flush=True)
    facts = {"load": round(os.getloadavg()[0], 2), "cores": os.cpu_count()}
    report.tell({"recipe": JOB.model_dump(exclude_unset=True)} | result | facts, options.json, "uvicorn", "starlette")


if __name__ == "__main__":
    main()
