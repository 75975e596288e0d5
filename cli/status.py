"""Read a server's status over HTTP, and show it: once, as JSON, or repeatedly in place."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import click
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from decoding.errors import DeadlineError, OverloadedError, UnavailableError
from deployments.client import Client

Document = Mapping[str, Any]
_POLL_S = 0.5
_BAR_WIDTH = 5  # characters: a row of a replica with a short name has 80
_UNLIMITED = 10_000  # characters
_AWAY = (DeadlineError, OverloadedError, UnavailableError)
_RATE_HEADINGS = ("requests", "tokens/s", "accepted", "per step", "hits")


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of an endpoint, since the server's start or the last reading. None: nothing happened."""

    tokens_per_s: float | None
    acceptance_rate: float | None
    acceptance_length: float | None
    hit_rate: float | None


@dataclass(frozen=True, slots=True)
class EndpointStatus:
    """An endpoint's models and rates."""

    name: str
    target: str
    drafter: str | None
    ready: bool
    requests: int  # since the server's start
    rates: Rates


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A copy of a model."""

    name: str
    model: str
    role: str
    running: int  # requests that hold a slot
    waiting: int  # requests that wait for one
    slots: int
    drafting: bool | None  # target: whether it wants drafts now


@dataclass(frozen=True, slots=True)
class ReplicaCount:
    """How many replicas a model should have and has. reason: why fewer run than are wanted."""

    model: str
    wanted: int
    running: int
    reason: str | None

    @property
    def words(self) -> str:
        """The counts and the reason in words."""
        return f"{self.running} of {self.wanted} replicas" + (f", {self.reason}" if self.reason else "")


@dataclass(frozen=True, slots=True)
class Status:
    """The status of a server."""

    url: str
    ready: bool
    models: Mapping[str, bool]  # whether a replica is up
    endpoints: Sequence[EndpointStatus]
    replicas: Sequence[ReplicaStatus]
    counts: Sequence[ReplicaCount]
    running: int
    waiting: int
    version: str


def wait_for_replicas(
    client: Client, model: str, replicas: int, report: Callable[[str], None], *, timeout_s: float
) -> None:
    """Wait until a model has so many replicas, and report what they wait for whenever that changes.

    Raises:
        UnavailableError: it has not so many in time, or the server does not say.
    """
    ends_at_s, last = time.monotonic() + timeout_s, None
    while True:
        counts = StatusReader(client).read().counts
        count = next((count for count in counts if count.model == model), None)
        if count is not None and count.wanted == count.running == replicas:
            return
        state = "the server does not say how many run" if count is None else count.words
        if time.monotonic() > ends_at_s:
            raise UnavailableError(f"{model}: not {replicas} replica(s) after {timeout_s:g} s: {state}")
        if state != last:
            report(f"{model}: {state}")
        last = state
        time.sleep(_POLL_S)


class StatusReader:
    """Reads a server's status repeatedly. Rates are since the last reading, at first since the server's start."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._last: Document | None = None

    def read(self) -> Status:
        """Read the status; raises UnavailableError if no server answers, InvalidRequestError if the key is wrong."""
        document = self._client.document("/v1/status")
        if self._last is not None and self._last["uptime_s"] >= document["uptime_s"]:
            self._last = None  # the server was restarted
        last, self._last = self._last, document
        return _status(self._client.url, document, last)


def _status(url: str, document: Document, last: Document | None) -> Status:
    replicas = [_replica(replica) for replica in document["replicas"]]
    return Status(
        url=url,
        ready=document["status"] == "ready",
        models=_models(document["endpoints"], {replica.model for replica in replicas}),
        endpoints=[_endpoint(endpoint, document["uptime_s"], last) for endpoint in document["endpoints"]],
        replicas=replicas,
        counts=[ReplicaCount(**count) for count in document.get("models", [])],
        running=document["requests"]["running"],
        waiting=document["requests"]["waiting"],
        version=document["version"],
    )


def _models(endpoints: Sequence[Document], up: set[str]) -> dict[str, bool]:
    named: Iterator[str | None] = (endpoint[role] for endpoint in endpoints for role in ("target", "drafter"))
    return {name: name in up for name in sorted({name for name in named if name is not None})}


def _endpoint(endpoint: Document, uptime_s: float, last: Document | None) -> EndpointStatus:
    before: Document = {}
    elapsed_s = uptime_s
    if last is not None:
        before = next((other["totals"] for other in last["endpoints"] if other["name"] == endpoint["name"]), {})
        elapsed_s -= last["uptime_s"]
    return EndpointStatus(
        endpoint["name"],
        endpoint["target"],
        endpoint["drafter"],
        endpoint["ready"],
        endpoint["totals"]["requests"],
        _rates(endpoint["totals"], before, elapsed_s),
    )


def _rates(totals: Document, before: Document, elapsed_s: float) -> Rates:
    grown = {name: count - before.get(name, 0) for name, count in totals.items()}
    return Rates(
        tokens_per_s=_ratio(grown["tokens"], elapsed_s),
        acceptance_rate=_ratio(grown["accepted"], grown["drafted"]),
        acceptance_length=_ratio(grown["tokens"], grown["steps"]),
        hit_rate=_ratio(grown["hits"], grown["missed"]),
    )


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def _replica(replica: Document) -> ReplicaStatus:
    return ReplicaStatus(**{field.name: replica[field.name] for field in fields(ReplicaStatus)})


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
    return Group(*parts, Text(), _replicas(status.replicas))


def _current(reader: StatusReader) -> RenderableType:
    try:
        return render(reader.read())
    except _AWAY as error:
        return Text(str(error), style="red")


def _headline(status: Status, *, is_complete: bool) -> Text:
    line = Text.assemble(_mark(status.ready), " ", (status.url, "bold"))
    line.append((" ready" if is_complete else " ready, incomplete") if status.ready else " loading")
    return line.append(f" · {status.running} running, {status.waiting} waiting · version {status.version}")


def _endpoints(status: Status) -> "_Listing":
    listing = _Listing("model", ("target", "drafter"), _RATE_HEADINGS)
    for endpoint in status.endpoints:
        cells = (endpoint.target, endpoint.drafter or "–", *_rate_cells(endpoint))
        listing.add(endpoint.name, cells, ready=endpoint.ready)
    return listing


def _rate_cells(endpoint: EndpointStatus) -> tuple[str, ...]:
    rates = endpoint.rates
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
