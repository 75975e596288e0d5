"""`make bench-serve`: loads Consort, with speculation on and off, and the servers of its peers that are at hand.

One interleaved run on one machine; see docs/serving-benchmark.md.
"""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import click

from benchmarks.processes import Server
from benchmarks.report import Curve, Panel, draw, ratios, write
from benchmarks.serving.client import Load, LoadGenerator, LoadResult
from benchmarks.serving.servers import ConsortServer, PeerServer, huggingface_server, llama_server, vllm_server
from deployments.configuration.config import DEFAULT_CONFIG, ServerConfig, load_config
from deployments.configuration.paths import locate
from engine.loading.gguf.files import is_gguf
from evaluation.metrics import table

ON, OFF = "Consort", "Consort, speculate: false"
LLAMA, LLAMA_NGRAM = "llama.cpp", "llama.cpp+ngram"
VLLM, VLLM_NGRAM, VLLM_EAGLE3 = "vLLM", "vLLM+ngram", "vLLM+eagle3"
HF, HF_NGRAM = "HF", "HF+ngram"
PEERS = (LLAMA, LLAMA_NGRAM, VLLM, VLLM_NGRAM, VLLM_EAGLE3, HF, HF_NGRAM)
_ALONE = (HF, HF_NGRAM)  # answer one request after the other, so they are measured with one stream only
_LATENCIES = {"TTFT": "ttft", "TPOT": "tpot", "ITL": "itl"}
FOLDER = click.Path(path_type=Path)
option = partial(click.option, show_default=True)


@click.command()
@click.argument("config_path", metavar="[CONFIG]", type=FOLDER, default=DEFAULT_CONFIG)
@option(
    "--prompts", type=FOLDER, default=Path("models/smollm2-drafter/heldout.jsonl"), help='Lines of {"prompt": text}.'
)
@option("--streams", type=int, multiple=True, default=(1, 2, 4, 8, 16, 32), help="Requests at once; may be repeated.")
@option("--temperature", "temperatures", type=float, multiple=True, default=(0.0,), help="May be repeated.")
@option("--repetitions", default=3)
@option("--requests-per-stream", default=2)
@option("--new-tokens", type=click.IntRange(2), default=128)
@option("--peer", "peers", multiple=True, help="Of those below, or NAME=URL of a server that is up; may be repeated.")
@option("--no-peers", is_flag=True, help="Measure Consort alone.")
@option("--peer-threads", default=len(os.sched_getaffinity(0)), help="Of each peer.")
@option(
    "--llama-server", type=FOLDER, default=Path(".bench/llama/bin/llama-server"), help="Built by `make bench-llama`."
)
@option("--vllm-python", type=FOLDER, default=Path(".bench/vllm/bin/python"), help="Created by `make bench-peers`.")
@option("--output", type=FOLDER, default=Path(".bench/serve.json"), help="JSON file; the figure goes beside it.")
def main(**given: Any) -> None:
    """Serve a CONFIG's first endpoint, by default the default model; measure, print, write JSON, and draw.

    Peers serve the same target: llama.cpp and llama.cpp+ngram a .gguf file; vLLM, vLLM+ngram and, where the endpoint
    has such heads, vLLM+eagle3; with one stream HF and HF+ngram. By default all take part that are installed.
    """
    options = SimpleNamespace(**given)
    config = load_config(options.config_path)
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
    paused: Server | None = None  # while others are measured


def peer_servers(options: SimpleNamespace, config: ServerConfig) -> dict[str, Callable[[], PeerServer]]:
    """Return how to start each peer that is at hand, by name."""
    model_name, endpoint = next(iter(config.endpoints.items()))
    target, log = config.models[endpoint.target], options.output.parent
    path = locate(target.path)
    slots, threads = max(options.streams), options.peer_threads
    peers: dict[str, Callable[[], PeerServer]] = {}
    if options.llama_server.exists() and is_gguf(path):
        llama = partial(llama_server, options.llama_server, path, slots=slots, threads=threads)
        peers[LLAMA] = partial(llama, drafts=False, log=log / "serve-llama.log")
        peers[LLAMA_NGRAM] = partial(llama, drafts=True, log=log / "serve-llama-ngram.log")
    if options.vllm_python.exists():
        python, size = options.vllm_python, {"slots": slots, "threads": threads}
        vllm = partial(vllm_server, python, path, target.dtype, name=model_name, **size)
        length = {"num_speculative_tokens": endpoint.draft_length}
        peers[VLLM] = partial(vllm, drafts=None, log=log / "serve-vllm.log")
        ngram = {"method": "ngram", "prompt_lookup_max": 4, **length}
        peers[VLLM_NGRAM] = partial(vllm, drafts=ngram, log=log / "serve-vllm-ngram.log")
        heads = endpoint.heads
        if heads is not None and heads.kind == "eagle3" and heads.path is not None:
            eagle3 = {"method": "eagle3", "model": locate(heads.path), **length}
            peers[VLLM_EAGLE3] = partial(vllm, drafts=eagle3, log=log / "serve-vllm-eagle3.log")
    if 1 in options.streams:
        huggingface = partial(huggingface_server, path, target.dtype, threads=threads)
        peers[HF] = partial(huggingface, lookup=0, log=log / "serve-hf.log")
        peers[HF_NGRAM] = partial(huggingface, lookup=endpoint.draft_length, log=log / "serve-hf-ngram.log")
    return peers


def chosen_peers(options: SimpleNamespace, config: ServerConfig) -> dict[str, str | Callable[[], PeerServer]]:
    """Return the URL of each peer that is up, and how to start the others."""
    here = {} if options.no_peers else peer_servers(options, config)
    if not options.peers:
        if not options.no_peers and (absent := [name for name in PEERS if name not in here]):
            click.echo(
                f"{', '.join(absent)} can't serve this target here, and are left out; make bench-llama, bench-peers"
            )
        return dict(here)
    chosen = dict(peer.split("=", 1) if "=" in peer else (peer, here.get(peer)) for peer in options.peers)
    if missing := [name for name, start in chosen.items() if start is None]:
        has = ", ".join(here) or "none"
        message = (
            f"{', '.join(missing)} can't serve this target here, of its peers: {has}; make bench-llama, bench-peers"
        )
        raise click.ClickException(message)
    return chosen


def _measure(options: SimpleNamespace, config: ServerConfig) -> list[LoadComparison]:
    """Start all servers, then load one at a time."""
    peers = chosen_peers(options, config)
    with ExitStack() as stack:
        others: dict[str, _LoadedServer] = {}
        for name, start in peers.items():
            if isinstance(start, str):
                others[name] = _LoadedServer(start)
                continue
            click.echo(f"{name} loads …")
            server = stack.enter_context(start())
            others[name] = _LoadedServer(server.url, paused=server)
            server.pause()
        click.echo("Consort loads …")
        url = stack.enter_context(ConsortServer(config, folder=options.output.parent)).url
        seed = {"seed": 0}  # so texts are the same with and without drafts
        servers = {ON: _LoadedServer(url, seed), OFF: _LoadedServer(url, seed | {"speculate": False}), **others}
        return _compare(LoadGenerator(options.prompts), servers, next(iter(config.endpoints)), options)


def _compare(
    generator: LoadGenerator, servers: Mapping[str, _LoadedServer], model: str, options: SimpleNamespace
) -> list[LoadComparison]:
    """Measure all temperatures and numbers of streams, after a warm-up of each server with the most streams."""

    def run(name: str, temperature: float, streams: int, seed: int) -> LoadResult:
        server = servers[name]
        load = Load(streams * options.requests_per_stream, streams, options.new_tokens, temperature, seed)
        if server.paused:
            server.paused.resume()
        try:
            return generator.run(server.url, model, load, server.extra_body)
        finally:
            if server.paused:
                server.paused.pause()

    def names(streams: int) -> list[str]:
        return [name for name in servers if streams == 1 or name not in _ALONE]

    for name in servers:
        run(name, options.temperatures[0], 1 if name in _ALONE else max(options.streams), options.repetitions)
    return [
        _repeat(temperature, streams, names(streams), run, options.repetitions)
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
    others = [name for name in _names(comparisons) if name not in (ON, OFF)]
    head = ["streams", "on", "off", "on / off", "(min – max)", "tokens/event"]
    head += [title for name in others for title in (name, f"on / {name}", f"off / {name}")]
    rows = []
    for each in comparisons:
        gains = each.ratios(ON, OFF)
        row = [str(each.concurrency), *(f"{each.median(name, 'tokens_per_s'):.1f}" for name in (ON, OFF))]
        row += [f"{median(gains):.2f}", f"({min(gains):.2f} – {max(gains):.2f})"]
        row.append(f"{each.median(ON, 'tokens_per_event'):.2f}")
        for other in others:
            if other not in each.repetitions:
                row += ["–"] * 3
                continue
            row.append(f"{each.median(other, 'tokens_per_s'):.1f}")
            row += [f"{median(each.ratios(name, other)):.2f}" for name in (ON, OFF)]
        rows.append(row)
    return table(head, rows)


def _names(comparisons: Sequence[LoadComparison]) -> list[str]:
    return list(dict.fromkeys(name for each in comparisons for name in each.repetitions))


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
        for name in _names(chosen):
            measured = [comparison for comparison in chosen if name in comparison.repetitions]
            values = [comparison.all(name, quantity) for comparison in measured]
            ranges = [(min(each), max(each)) for each in values]
            curves.append(Curve(name, [each.concurrency for each in measured], list(map(median, values)), ranges))
        panels.append(Panel(f"{title}, temperature {temperature:g}", "streams at once", curves, log=True))
    return panels


if __name__ == "__main__":
    main()
