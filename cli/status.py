"""Read a server's status over HTTP, and show it: once, as JSON, or repeatedly in place."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
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


def wait_for_replicas(
    client: Client, model: str, replicas: int, report: Callable[[str], None], *, timeout_s: float
) -> None:
    """Wait until a model has so many replicas, and report what they wait for whenever that changes.

    Raises UnavailableError if it has not so many in time, or the server does not say.
    """
    ends_at_s, last = time.monotonic() + timeout_s, None
    while True:
        counts = client.document("/v1/status")["models"]
        count = next((count for count in counts if count["model"] == model), None)
        if count is not None and count["wanted"] == count["running"] == replicas:
            return
        state = "the server does not say how many run" if count is None else _words(count)
        if time.monotonic() > ends_at_s:
            raise UnavailableError(f"{model}: not {replicas} replica(s) after {timeout_s:g} s: {state}")
        if state != last:
            report(f"{model}: {state}")
        last = state
        time.sleep(_POLL_S)


def _words(count: Document) -> str:
    """Return how many replicas a model has, and why not more."""
    reason = f", {count['reason']}" if count["reason"] else ""
    return f"{count['running']} of {count['wanted']} replicas{reason}"


class StatusReader:
    """Reads a server's status repeatedly. Rates are since the last reading, at first since the server's start."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._last: Document | None = None

    def read(self) -> Document:
        """Return what `consort status --json` prints: GET /v1/status, with the URL and each endpoint's rates.

        Raises UnavailableError if no server answers; InvalidRequestError if the key is wrong.
        """
        document = self._client.document("/v1/status")
        last, self._last = self._last, document
        if last is not None and last["uptime_s"] >= document["uptime_s"]:
            last = None  # the server was restarted
        rates = [_rates(endpoint, document["uptime_s"], last) for endpoint in document["endpoints"]]
        endpoints = [{**each, "rates": own} for each, own in zip(document["endpoints"], rates, strict=True)]
        return {"url": self._client.url, **document, "endpoints": endpoints}


def _rates(endpoint: Document, uptime_s: float, last: Document | None) -> Document:
    """Return an endpoint's rates since the last document. None: nothing happened."""
    before: Document = {}
    totals, elapsed_s = endpoint["totals"], uptime_s
    if last is not None:
        before = next((other["totals"] for other in last["endpoints"] if other["name"] == endpoint["name"]), {})
        elapsed_s -= last["uptime_s"]
    grown = {name: count - before.get(name, 0) for name, count in totals.items()}
    return {
        "tokens_per_s": _ratio(grown["tokens"], elapsed_s),
        "acceptance_rate": _ratio(grown["accepted"], grown["drafted"]),
        "acceptance_length": _ratio(grown["tokens"], grown["steps"]),
        "hit_rate": _ratio(grown["hits"], grown["missed"]),
    }


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


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
            try:
                live.update(render(reader.read()), refresh=True)
            except _AWAY as error:
                live.update(Text(str(error), style="red"), refresh=True)
            time.sleep(interval_s)


def show(status: Document, console: Console, *, as_json: bool) -> None:
    """Print the status once."""
    if as_json:
        console.file.write(json.dumps(status) + "\n")
        console.file.flush()
    else:
        console.print(render(status))


def render(status: Document) -> RenderableType:
    """Render the status: as tables, or where a terminal is too narrow for whole names, as lines."""
    models, endpoints = status["models"], status["endpoints"]
    short = [f"{count['model']}: {_words(count)}" for count in models if count["running"] < count["wanted"]]
    restarts = [_restart(count) for count in models if count["last_restart"] is not None]
    waits = [
        f"{each['name']}: a request that comes now waits for {each['predicted_wait_s']:.0f} s"
        for each in endpoints
        if each["predicted_wait_s"] >= 1
    ]
    loaded = [(each["name"], each["weights"]) for each in status["replicas"] if each["weights"] is not None]
    unfit = [f"{name}: {weights['error']}" for name, weights in loaded if weights["error"]]
    notes = [Text(line, style="yellow") for line in (*short, *waits, *restarts, *unfit)]
    ready, requests = status["status"] == "ready", status["requests"]
    headline = Text.assemble(_mark(ready), " ", (status["url"], "bold"), f" {status['status']}")
    headline.append(", incomplete" if ready and short else "")
    headline.append(f" · {requests['running']} running, {requests['waiting']} waiting")
    headline.append(f" · version {status['version']}")
    parts: list[RenderableType] = [headline, Text(), _endpoints(endpoints), *_proposers(endpoints)]
    return Group(*parts, *([Text(), *notes] if notes else []), Text(), _replicas(status["replicas"]))


def _restart(count: Document) -> str:
    restart = count["last_restart"]
    when = datetime.fromtimestamp(restart["at_s"]).astimezone().isoformat(sep=" ", timespec="seconds")
    return f"{count['model']}: a replica was replaced at {when}: {restart['reason']}"


def _proposers(endpoints: Sequence[Document]) -> Iterator[Text]:
    """Say how many drafts of each proposer are accepted, and what share of the time it takes."""
    for endpoint in endpoints:
        parts = [
            f"{each['name']} {_cell(each['acceptance_rate'], '.0%')} accepted, "
            f"{_cell(each['time_share'], '.0%')} of the time"
            for each in endpoint["proposers"]
        ]
        if parts:
            yield Text(f"{endpoint['name']}: {'; '.join(parts)}", style="dim")


def _endpoints(endpoints: Sequence[Document]) -> "_Listing":
    listing = _Listing("model", ("target", "drafter"), ("requests", "tokens/s", "accepted", "per step", "hits"))
    for endpoint in endpoints:
        rates = endpoint["rates"]
        cells = (
            endpoint["target"],
            endpoint["drafter"] or "–",
            str(endpoint["totals"]["requests"]),
            _cell(rates["tokens_per_s"], ".1f"),
            _cell(rates["acceptance_rate"], ".0%"),
            _cell(rates["acceptance_length"], ".2f"),
            _cell(rates["hit_rate"], ".0%"),
        )
        listing.add(endpoint["name"], cells, ready=endpoint["ready"])
    return listing


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _replicas(replicas: Sequence[Document]) -> "_Listing":
    drafts = {None: "–", True: "wanted", False: "not wanted"}
    replaceable = any(replica["weights"] for replica in replicas)
    texts = ("role", *(["weights"] if replaceable else []), "drafts", "load")
    listing = _Listing("replica", texts, ("running", "waiting", "slots"))
    for replica in replicas:
        weights = [_weights(replica["weights"])] if replaceable else []
        counts = [str(replica[key]) for key in ("running", "waiting", "slots")]
        bar = _bar(replica["running"], replica["slots"])
        listing.add(replica["name"], (replica["role"], *weights, drafts[replica["drafting"]], bar, *counts))
    return listing


def _weights(weights: Document | None) -> str:
    return "–" if weights is None else weights["version"] + (", asleep" if weights["asleep"] else "")


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


def _bar(running: int, slots: int) -> Text:
    """Return a bar for the share of slots in use."""
    filled = min(_BAR_WIDTH, -(-running * _BAR_WIDTH // slots)) if slots else 0
    return Text.assemble(("█" * filled, "green"), ("░" * (_BAR_WIDTH - filled), "dim"))
