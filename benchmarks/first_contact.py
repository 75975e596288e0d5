"""From the command to the first token, and what an idle server costs: `python -m benchmarks.first_contact`.

Seconds on the clock mean something on a quiet machine only; processor seconds also elsewhere. Knows the server by its
command line and its HTTP interface alone.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
import psutil  # type: ignore[import-untyped]

from decoding.errors import InvalidRequestError, UnavailableError
from deployments.client import Client
from deployments.configuration.config import DEFAULT_CONFIG, load_config

_POLL_S = 0.1
_SETTLE_S = 10.0  # after the first answer, before the server counts as idle
_STOP_S = 60.0


def first_token(client: Client, model: str, server: subprocess.Popen[bytes]) -> float:
    """Ask until the first token comes; return the time, on `time.monotonic`'s clock.

    Raises:
        UnavailableError: the server has ended.
    """
    body = {"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 16}
    while server.poll() is None:
        try:
            for chunk in client.stream("/v1/chat/completions", body):
                if any(choice["delta"].get("content") for choice in chunk["choices"]):
                    return time.monotonic()
        except (InvalidRequestError, UnavailableError):  # Serve itself answers 404 at first
            time.sleep(_POLL_S)
    raise UnavailableError(f"the server ended with {server.returncode} before its first token")


def processor_seconds(pid: int) -> dict[str, float]:
    """Return the seconds, user and system, of a process and all below it, by pid and name."""
    root = psutil.Process(pid)
    seconds = {}
    for process in (root, *root.children(recursive=True)):
        try:
            times, words = process.cpu_times(), process.cmdline()
        except psutil.Error:  # it has ended
            continue
        name = " ".join(Path(word).name for word in words[:3])[:40]
        seconds[f"{process.pid} {name}"] = times.user + times.system
    return seconds


@contextmanager
def serving(config: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run `consort serve` until the block ends."""
    command = [sys.executable, "-m", "cli", "serve", str(config), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True, env=dict(os.environ))
    try:
        yield server
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(_STOP_S)


def shares(before: dict[str, float], after: dict[str, float], seconds: float) -> dict[str, float]:
    """Return the percentage of a core that each process took, the most first."""
    percent = {name: 100 * (total - before.get(name, 0.0)) / seconds for name, total in after.items()}
    return dict(sorted(percent.items(), key=lambda item: -item[1]))


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in values.items()}


@click.command()
@click.option("--config", "config_path", type=click.Path(path_type=Path), default=DEFAULT_CONFIG)
@click.option("--port", default=18423, show_default=True)
@click.option("--starts", default=1, show_default=True, help="How often to start; the first may convert the model.")
@click.option("--idle-s", default=60.0, show_default=True, help="How long to watch the idle server after each start.")
def main(config_path: Path, port: int, starts: int, idle_s: float) -> None:
    """Print each start's seconds to the first token, and the idle server's share of a core, as JSON."""
    model = next(iter(load_config(config_path).endpoints))
    documents: Sequence[dict[str, object]] = [
        _measure(config_path, model, port=port, idle_s=idle_s) for _ in range(starts)
    ]
    click.echo(json.dumps(documents, indent=2))


def _measure(config: Path, model: str, *, port: int, idle_s: float) -> dict[str, object]:
    began_s = time.monotonic()
    with serving(config, port) as server:
        first_s = first_token(Client(f"http://127.0.0.1:{port}"), model, server) - began_s
        started = processor_seconds(server.pid)
        time.sleep(_SETTLE_S)
        before, watched_s = processor_seconds(server.pid), time.monotonic()
        time.sleep(idle_s)
        idle = shares(before, processor_seconds(server.pid), time.monotonic() - watched_s)
    return {
        "first_token_s": round(first_s, 2),
        "processor_s": round(sum(started.values()), 2),
        "processor_s_by_process": _rounded(dict(sorted(started.items(), key=lambda item: -item[1]))),
        "idle_percent_of_a_core": round(sum(idle.values()), 2),
        "idle_by_process": _rounded(idle),
        "load": round(os.getloadavg()[0], 2),
    }


if __name__ == "__main__":
    main()
