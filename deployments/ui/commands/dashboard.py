"""Show a server's status: once, as JSON, or repeatedly in place."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from decoding.errors import DeadlineError, OverloadedError, UnavailableError
from deployments.ui.commands.status import EndpointStatus, ReplicaStatus, Status, StatusReader

_BAR_WIDTH = 10  # characters
_AWAY = (DeadlineError, OverloadedError, UnavailableError)
_RATE_HEADINGS = ("requests", "tokens/s", "accepted", "per step", "hits")


def watch(reader: StatusReader, console: Console, *, interval_s: float, as_json: bool) -> None:
    """Show the status until Ctrl-C, also while the server does not answer."""
    if as_json or not console.is_terminal:
        while True:
            try:
                show(reader.read(), console, as_json=as_json)
            except _AWAY as error:
                click.echo(str(error), err=True)
            time.sleep(interval_s)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(_current(reader), refresh=True)
            time.sleep(interval_s)


def show(status: Status, console: Console, *, as_json: bool) -> None:
    """Print the status once."""
    if as_json:
        console.file.write(json.dumps(asdict(status)) + "\n")
        console.file.flush()
    else:
        console.print(render(status))


def render(status: Status) -> RenderableType:
    """Render the status for terminals with at least 80 columns."""
    parts: list[RenderableType] = [_headline(status), Text(), _endpoints(status)]
    if status.replicas is None:
        down = [name for name, up in status.models.items() if not up]
        parts += [Text(), Text(f"not up: {', '.join(down)}", style="yellow")] if down else []
    else:
        parts += [Text(), _replicas(status.replicas)]
    return Group(*parts)


def _current(reader: StatusReader) -> RenderableType:
    try:
        return render(reader.read())
    except _AWAY as error:
        return Text(str(error), style="red")


def _headline(status: Status) -> Text:
    line = Text.assemble(_mark(status.ready), " ", (status.url, "bold"))
    line.append(" ready" if status.ready else " loading")
    if status.running is not None:
        line.append(f" · {status.running} running, {status.waiting} waiting")
    if status.version is not None:
        line.append(f" · version {status.version}")
    return line


def _endpoints(status: Status) -> Table:
    has_rates = any(endpoint.rates is not None for endpoint in status.endpoints)
    table = _table("", "model", "target", "drafter")
    for heading in _RATE_HEADINGS if has_rates else ():
        table.add_column(heading, justify="right", no_wrap=True)
    for endpoint in status.endpoints:
        names = (endpoint.name, endpoint.target, endpoint.drafter or "–")
        table.add_row(_mark(endpoint.ready), *map(Text, names), *_rate_cells(endpoint))
    return table


def _rate_cells(endpoint: EndpointStatus) -> tuple[str, ...]:
    rates = endpoint.rates
    if rates is None:
        return ()
    return (
        str(endpoint.requests),
        _cell(rates.tokens_per_s, ".1f"),
        _cell(rates.acceptance_rate, ".0%"),
        _cell(rates.acceptance_length, ".2f"),
        _cell(rates.hit_rate, ".0%"),
    )


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _replicas(replicas: Sequence[ReplicaStatus]) -> Table:
    table = _table("", "replica", "role", "load")
    for heading in ("running", "waiting", "slots"):
        table.add_column(heading, justify="right")
    table.add_column("drafts")
    for replica in replicas:
        drafts = "–" if replica.drafting is None else "wanted" if replica.drafting else "not wanted"
        counts = (str(replica.running), str(replica.waiting), str(replica.slots))
        table.add_row(_mark(ready=True), Text(replica.name), replica.role, _bar(replica), *counts, drafts)
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _mark(ready: bool) -> Text:
    """Return a mark that differs in shape, too, for terminals without colours."""
    return Text("●", style="green") if ready else Text("○", style="yellow")


def _bar(replica: ReplicaStatus) -> Text:
    """Return a bar for the share of slots in use."""
    filled = min(_BAR_WIDTH, -(-replica.running * _BAR_WIDTH // replica.slots)) if replica.slots else 0
    return Text.assemble(("█" * filled, "green"), ("░" * (_BAR_WIDTH - filled), "dim"))
