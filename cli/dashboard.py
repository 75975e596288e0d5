"""Show a server's status: once, as JSON, or repeatedly in place."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict

import click
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from cli.status import EndpointStatus, ReplicaStatus, Status, StatusReader
from decoding.errors import DeadlineError, OverloadedError, UnavailableError

_BAR_WIDTH = 5  # characters: a row of a replica with a short name has 80
_UNLIMITED = 10_000  # characters
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
    """Render the status: as tables, or where a terminal is too narrow for whole names, as lines."""
    short = [count for count in status.counts if count.running < count.wanted]
    parts: list[RenderableType] = [_headline(status, is_complete=not short), Text(), _endpoints(status)]
    if short:
        parts += [Text(), *(Text(f"{count.model}: {count.words}", style="yellow") for count in short)]
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


def _headline(status: Status, *, is_complete: bool) -> Text:
    line = Text.assemble(_mark(status.ready), " ", (status.url, "bold"))
    line.append((" ready" if is_complete else " ready, incomplete") if status.ready else " loading")
    if status.running is not None:
        line.append(f" · {status.running} running, {status.waiting} waiting")
    if status.version is not None:
        line.append(f" · version {status.version}")
    return line


def _endpoints(status: Status) -> "_Listing":
    has_rates = any(endpoint.rates is not None for endpoint in status.endpoints)
    listing = _Listing("model", ("target", "drafter"), _RATE_HEADINGS if has_rates else ())
    for endpoint in status.endpoints:
        cells = (endpoint.target, endpoint.drafter or "–", *_rate_cells(endpoint))
        listing.add(endpoint.name, cells, ready=endpoint.ready)
    return listing


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


def _replicas(replicas: Sequence[ReplicaStatus]) -> "_Listing":
    listing = _Listing("replica", ("role", "drafts", "load"), ("running", "waiting", "slots"))
    for replica in replicas:
        drafts = "–" if replica.drafting is None else "wanted" if replica.drafting else "not wanted"
        counts = (str(replica.running), str(replica.waiting), str(replica.slots))
        listing.add(replica.name, (replica.role, drafts, _bar(replica), *counts))
    return listing


class _Listing:
    """A table or, where its rows are wider than the terminal, two lines for each row. Names are never broken."""

    def __init__(self, name: str, texts: Sequence[str], numbers: Sequence[str]) -> None:
        self._headings = (name, *texts, *numbers)
        self._table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for heading in ("", name, *texts):
            self._table.add_column(heading, no_wrap=True)
        for heading in numbers:
            self._table.add_column(heading, justify="right", no_wrap=True)
        self._lines: list[Text] = []

    def add(self, name: str, cells: Sequence[str | Text], *, ready: bool = True) -> None:
        self._table.add_row(_mark(ready), Text(name), *(Text.assemble(cell) for cell in cells))
        self._lines.append(Text.assemble(_mark(ready), " ", name))
        parts = (
            Text.assemble((heading, "dim"), " ", cell) for heading, cell in zip(self._headings[1:], cells, strict=True)
        )
        self._lines.append(Text("  ") + Text(" · ").join(parts))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = Measurement.get(console, options.update(width=_UNLIMITED), self._table).maximum
        yield from [self._table] if width <= options.max_width else self._lines


def _mark(ready: bool) -> Text:
    """Return a mark that differs in shape, too, for terminals without colours."""
    return Text("●", style="green") if ready else Text("○", style="yellow")


def _bar(replica: ReplicaStatus) -> Text:
    """Return a bar for the share of slots in use."""
    filled = min(_BAR_WIDTH, -(-replica.running * _BAR_WIDTH // replica.slots)) if replica.slots else 0
    return Text.assemble(("█" * filled, "green"), ("░" * (_BAR_WIDTH - filled), "dim"))
