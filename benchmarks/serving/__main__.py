"""`make bench-serve`: loads Consort, with speculation on and off, and other servers with `vllm bench serve`.

One interleaved run on one machine; see docs/serving-benchmark.md.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import click

from benchmarks.models import HELD_OUT, inflated
from benchmarks.processes import free_port
from benchmarks.report import Curve, Panel, draw, ratios, write
from benchmarks.serving.servers import MODEL, Load, LoadGenerator, LoadResult, VllmServer, our_server
from deployments.configuration.config import ServerConfig, parse_config
from evaluation.metrics import table

ON, OFF, VLLM = "Consort", "Consort, speculate: false", "vLLM"
_PAIRS: dict[str, tuple[Callable[[], Path], str]] = {  # the target, created if needed, and its dtype
    "inflated": (inflated, "bfloat16"),
    "bundled": (lambda: Path("models/target"), "float32"),
}
_LATENCIES = {"TTFT": "ttft", "TPOT": "tpot", "ITL": "itl"}
FOLDER = click.Path(path_type=Path)
option = partial(click.option, show_default=True)


@click.command()
@option("--pair", type=click.Choice(list(_PAIRS)), default="inflated", help="A target of 285 M parameters, or of 5 M.")
@option("--target", type=FOLDER, help="A checkpoint instead of the pair's target.")
@option("--drafter", type=FOLDER, help="By default models/drafter, unless there are heads.")
@option("--heads", type=FOLDER, help="An EAGLE-3 head.")
@option("--dtype", help="Of the target; by default bfloat16 in the inflated pair, float32 in the bundled one.")
@option("--drafter-dtype", default="float32")
@option("--target-threads", default=3)
@option("--drafter-threads", default=1)
@option("--colocated", is_flag=True, help="Run the drafter in the target's process, with the threads of both.")
@option("--ngram", is_flag=True, help="Draft from the text itself, too.")
@option("--prompts", type=FOLDER, default=HELD_OUT, help='Lines of {"prompt": text}.')
@option("--draft-length", default=6, help="Maximum number of draft tokens per step.")
@option("--streams", type=int, multiple=True, default=(1, 2, 4, 8, 16, 32), help="Requests at once; may be repeated.")
@option("--temperature", "temperatures", type=float, multiple=True, default=(0.0,), help="May be repeated.")
@option("--repetitions", default=3)
@option("--requests-per-stream", default=2)
@option("--new-tokens", default=48)
@option("--vllm-python", type=FOLDER, default=Path(".bench/vllm/bin/python"), help="Created by `make bench-peers`.")
@option("--vllm/--no-vllm", "with_vllm", default=True, help="Whether to measure vLLM's server.")
@option("--vllm-threads", type=int, help="Cores for vLLM's workers; by default all but one.")
@option("--peer", "peers", multiple=True, help="NAME=URL of another server, such as llama.cpp's; may be repeated.")
@option("--output", type=FOLDER, default=Path(".bench/serve.json"), help="JSON file; the figure goes beside it.")
def main(**given: Any) -> None:
    """Measure, print, write JSON, and draw."""
    options = SimpleNamespace(**given)
    make_target, dtype = _PAIRS[options.pair]
    options.target, options.dtype = options.target or make_target(), options.dtype or dtype
    if not options.vllm_python.exists():
        message = f"there is no {options.vllm_python}, which brings the load generator: make bench-peers"
        raise click.ClickException(message)
    config = _config(options)
    comparisons = _measure(options, config)
    click.echo(f"\n{as_text(comparisons)}\n")
    settings = vars(options) | {"server": config.model_dump(mode="json")}
    write(options.output, "benchmarks.serving", settings, loads=[asdict(comparison) for comparison in comparisons])
    draw(
        [_panels(comparisons, temperature) for temperature in options.temperatures], options.output.with_suffix(".png")
    )


@dataclass(frozen=True, slots=True)
class LoadComparison:
    """Repetitions at one temperature and concurrency, by server, in the same order."""

    temperature: float
    concurrency: int
    repetitions: Mapping[str, Sequence[LoadResult]]

    def all(self, name: str, quantity: str) -> list[float]:
        return [getattr(measured, quantity) for measured in self.repetitions[name]]

    def median(self, name: str, quantity: str) -> float:
        return median(self.all(name, quantity))

    def ratios(self, name: str, reference: str) -> list[float]:
        """Return the ratios of tokens per second."""
        return ratios(self.all(name, "tokens_per_s"), self.all(reference, "tokens_per_s"))


@dataclass(frozen=True, slots=True)
class _LoadedServer:
    """A server, and additional fields of its requests."""

    url: str
    extra_body: Mapping[str, object] = field(default_factory=dict)
    paused: VllmServer | None = None  # while others are measured


def _config(options: SimpleNamespace) -> ServerConfig:
    slots, colocated = max(options.streams), options.colocated
    common = {"device": "cpu", "slots": slots}
    threads = options.target_threads + options.drafter_threads * colocated
    target = {"path": str(options.target), "dtype": options.dtype, "threads": threads, **common}
    models: dict[str, object] = {"target": target}
    endpoint: dict[str, object] = {"target": "target", "draft_length": options.draft_length}
    drafter = options.drafter or (None if options.heads else Path("models/drafter"))
    if drafter is not None:
        where = {"colocated_with": "target"} if colocated else {"threads": options.drafter_threads, "slots": slots}
        models["drafter"] = {"path": str(drafter), "dtype": options.drafter_dtype, "device": "cpu", **where}
        endpoint["drafter"] = "drafter"
    if options.heads is not None:
        endpoint["heads"] = {"path": str(options.heads), "kind": "eagle3"}
    if options.ngram:
        endpoint["ngram"] = {}
    document = {"models": models, "endpoints": {MODEL: endpoint}, "http": {"port": free_port()}}
    return parse_config(document, folder=Path.cwd())


def _measure(options: SimpleNamespace, config: ServerConfig) -> list[LoadComparison]:
    """Start all servers, then load one at a time."""
    folder: Path = options.output.parent
    with ExitStack() as stack:
        generator = stack.enter_context(LoadGenerator(options.vllm_python, log=folder / "serve-generator.log"))
        others = {name: _LoadedServer(url) for name, url in (peer.split("=", 1) for peer in options.peers)}
        if options.with_vllm:
            vllm = VllmServer(
                options.vllm_python,
                options.target,
                dtype=options.dtype,
                slots=max(options.streams),
                threads=options.vllm_threads,
                log=folder / "serve-vllm.log",
            )
            click.echo("vLLM's server loads and compiles …")
            others[VLLM] = _LoadedServer(stack.enter_context(vllm).url, paused=vllm)
            vllm.pause()
        click.echo("Consort's server loads …")
        url, seed = (
            stack.enter_context(our_server(config)),
            {"seed": 0},
        )  # so texts are the same with and without drafts
        servers = {ON: _LoadedServer(url, seed), OFF: _LoadedServer(url, seed | {"speculate": False}), **others}
        return _compare(generator, servers, options)


def _compare(
    generator: LoadGenerator, servers: Mapping[str, _LoadedServer], options: SimpleNamespace
) -> list[LoadComparison]:
    """Measure all temperatures and numbers of streams, after a warm-up of each server with the most streams."""

    def run(name: str, temperature: float, streams: int, seed: int) -> LoadResult:
        server, requests = servers[name], streams * options.requests_per_stream
        load = Load(options.prompts, options.target, requests, streams, options.new_tokens, temperature, seed)
        if server.paused:
            server.paused.resume()
        try:
            return generator.run(server.url, MODEL, load, server.extra_body)
        finally:
            if server.paused:
                server.paused.pause()

    for name in servers:
        run(name, options.temperatures[0], max(options.streams), options.repetitions)
    return [
        _repeat(temperature, streams, list(servers), run, options.repetitions)
        for temperature, streams in itertools.product(options.temperatures, options.streams)
    ]


def _repeat(
    temperature: float,
    streams: int,
    names: Sequence[str],
    run: Callable[[str, float, int, int], LoadResult],
    repetitions: int,
) -> LoadComparison:
    """Measure all servers in every repetition, in alternating order, each with a choice of prompts of its own."""
    results: dict[str, list[LoadResult]] = {name: [] for name in names}
    seeds = itertools.count()
    for repetition in range(repetitions):
        for name in names if repetition % 2 == 0 else reversed(names):
            results[name].append(run(name, temperature, streams, next(seeds)))
    comparison = LoadComparison(temperature, streams, results)
    rates = (f"{name} {' '.join(f'{rate:.0f}' for rate in comparison.all(name, 'tokens_per_s'))}" for name in names)
    click.echo(f"temperature {temperature:g}, {streams} stream(s), tokens/s: {', '.join(rates)}")
    return comparison


def as_text(comparisons: Sequence[LoadComparison]) -> str:
    """Format medians; ratios are those within repetitions."""
    parts = []
    for temperature in dict.fromkeys(comparison.temperature for comparison in comparisons):
        chosen = [comparison for comparison in comparisons if comparison.temperature == temperature]
        parts.append(f"temperature {temperature:g}, tokens per second, medians\n{_rate_table(chosen)}")
        parts.append(f"temperature {temperature:g}, milliseconds, medians\n{_latency_table(chosen)}")
    return "\n\n".join(parts)


def _rate_table(comparisons: Sequence[LoadComparison]) -> str:
    others = [name for name in comparisons[0].repetitions if name not in (ON, OFF)]
    head = ["streams", "on", "off", "on / off", "(min – max)", "tokens/event"]
    head += [title for name in others for title in (name, f"on / {name}", f"off / {name}")]
    rows = []
    for each in comparisons:
        gains = each.ratios(ON, OFF)
        row = [str(each.concurrency), *(f"{each.median(name, 'tokens_per_s'):.1f}" for name in (ON, OFF))]
        row += [f"{median(gains):.2f}", f"({min(gains):.2f} – {max(gains):.2f})"]
        row.append(f"{each.median(ON, 'tokens_per_event'):.2f}")
        for other in others:
            row.append(f"{each.median(other, 'tokens_per_s'):.1f}")
            row += [f"{median(each.ratios(name, other)):.2f}" for name in (ON, OFF)]
        rows.append(row)
    return table(head, rows)


def _latency_table(comparisons: Sequence[LoadComparison]) -> str:
    quantities = [f"{name}_p{percent}_ms" for name in _LATENCIES.values() for percent in (50, 99)]
    rows = [
        [f"{each.concurrency}, {name}", *(f"{each.median(name, quantity):.1f}" for quantity in quantities)]
        for each in comparisons
        for name in each.repetitions
    ]
    return table(["streams", *(title for name in _LATENCIES for title in (f"{name} p50", "p99"))], rows)


def _panels(comparisons: Sequence[LoadComparison], temperature: float) -> list[Panel]:
    chosen = [comparison for comparison in comparisons if comparison.temperature == temperature]
    titles = {"tokens_per_s": "tokens/s", "ttft_p50_ms": "time to first token, ms, median"}
    panels = []
    for quantity, title in titles.items():
        curves = []
        for name in chosen[0].repetitions:
            values = [comparison.all(name, quantity) for comparison in chosen]
            ranges = [(min(each), max(each)) for each in values]
            curves.append(Curve(name, [each.concurrency for each in chosen], list(map(median, values)), ranges))
        panels.append(Panel(f"{title}, temperature {temperature:g}", "streams at once", curves, log=True))
    return panels


if __name__ == "__main__":
    main()
