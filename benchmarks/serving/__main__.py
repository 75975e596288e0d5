"""`make bench-serve`: loads Consort, with speculation on and off, and vLLM's server with `vllm bench serve`.

One interleaved run on one machine; see docs/serving-benchmark.md.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.inflated import inflated_target
from benchmarks.report import write
from benchmarks.serving.figure import draw
from benchmarks.serving.findings import OFF, ON, VLLM, LoadComparison, as_text
from benchmarks.serving.load import Load, LoadGenerator, LoadResult
from benchmarks.serving.overhead import Overhead, measure_overhead
from benchmarks.serving.servers import MODEL, VllmServer, make_config, our_server
from deployments.configuration.config import ServerConfig
from training.heldout import read_prompts

PROMPTS = Path("models/heldout.jsonl")
PAIRS = {  # the target, created if needed, and its dtype
    "inflated": (inflated_target, "bfloat16"),
    "bundled": (lambda: Path("models/target"), "float32"),
}
_SEED = {"seed": 0}  # so that Consort's texts are the same with and without speculation

FOLDER = click.Path(path_type=Path)
option = partial(click.option, show_default=True)


@dataclass(frozen=True, slots=True)
class LoadedServer:
    """A server, and additional fields of its requests."""

    url: str
    extra_body: Mapping[str, object] = field(default_factory=dict)
    server: VllmServer | None = None  # paused while others are measured


@click.command()
@option("--pair", type=click.Choice(list(PAIRS)), default="inflated", help="A target of 285 M parameters, or of 5 M.")
@option("--target", type=FOLDER, help="A checkpoint instead of the pair's target.")
@option("--drafter", type=FOLDER, help="By default models/drafter, unless there are heads.")
@option("--heads", type=FOLDER, help="An EAGLE-3 head.")
@option("--dtype", help="Of the target; by default bfloat16 in the inflated pair, float32 in the bundled one.")
@option("--drafter-dtype", default="float32")
@option("--target-threads", default=3)
@option("--drafter-threads", default=1)
@option("--colocated", is_flag=True, help="Run the drafter in the target's process, with the threads of both.")
@option("--ngram", is_flag=True, help="Draft from the text itself, too.")
@option("--prompts", type=FOLDER, default=PROMPTS, help='Lines of {"prompt": text}.')
@option("--draft-length", default=6, help="Maximum number of draft tokens per step.")
@option("--streams", type=int, multiple=True, default=(1, 2, 4, 8, 16, 32), help="Requests at once; may be repeated.")
@option("--temperature", "temperatures", type=float, multiple=True, default=(0.0,), help="May be repeated.")
@option("--repetitions", default=3)
@option("--requests-per-stream", default=2)
@option("--new-tokens", default=48)
@option("--overhead-prompts", default=8, help="Prompts to measure the overhead of HTTP; 0: skip that.")
@option("--vllm-python", type=FOLDER, default=Path(".bench/vllm/bin/python"), help="Created by `make bench-peers`.")
@option("--vllm/--no-vllm", "with_vllm", default=True, help="Whether to measure vLLM's server.")
@option("--vllm-threads", type=int, help="Cores for vLLM's workers; by default all but one.")
@option("--output", type=FOLDER, default=Path(".bench/serve.json"), help="JSON file; the figure goes beside it.")
def main(output: Path, **given: Any) -> None:
    """Measure, print, write JSON, and draw."""
    make_target, dtype = PAIRS[given.pop("pair")]
    options = Options(**given | {"target": given["target"] or make_target(), "dtype": given["dtype"] or dtype})
    if not options.vllm_python.exists():
        raise click.ClickException(
            f"there is no {options.vllm_python}, which brings the load generator: make bench-peers"
        )
    config = options.config()
    comparisons, overheads = _measure(options, config, output.parent)
    click.echo(f"\n{as_text(comparisons, overheads)}\n")
    settings = asdict(options) | {"server": config.model_dump(mode="json")}
    findings = {
        "loads": [asdict(comparison) for comparison in comparisons],
        "http_overhead": [asdict(overhead) for overhead in overheads],
    }
    write(output, "benchmarks.serving", settings, **findings)
    draw(comparisons, output.with_suffix(".png"))
    click.echo(f"drawn to {output.with_suffix('.png')}")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command line."""

    target: Path
    drafter: Path | None
    heads: Path | None
    dtype: str
    drafter_dtype: str
    target_threads: int
    drafter_threads: int
    colocated: bool
    ngram: bool
    prompts: Path
    draft_length: int
    streams: Sequence[int]
    temperatures: Sequence[float]
    repetitions: int
    requests_per_stream: int
    new_tokens: int
    overhead_prompts: int
    vllm_python: Path
    with_vllm: bool
    vllm_threads: int | None

    @property
    def slots(self) -> int:
        return max(self.streams)

    def config(self) -> ServerConfig:
        return make_config(
            self.target,
            self.drafter or (None if self.heads else Path("models/drafter")),
            heads=self.heads,
            dtype=self.dtype,
            drafter_dtype=self.drafter_dtype,
            target_threads=self.target_threads,
            drafter_threads=self.drafter_threads,
            slots=self.slots,
            draft_length=self.draft_length,
            colocated=self.colocated,
            ngram=self.ngram,
        )

    def load(self, temperature: float, streams: int, seed: int) -> Load:
        """Return a load. seed: of the choice of prompts."""
        requests = streams * self.requests_per_stream
        return Load(self.prompts, self.target, requests, streams, self.new_tokens, temperature, seed=seed)


def _measure(options: Options, config: ServerConfig, folder: Path) -> tuple[list[LoadComparison], list[Overhead]]:
    """Start all servers, then load one at a time."""
    with ExitStack() as stack:
        generator = LoadGenerator(options.vllm_python, log=folder / "serve-generator.log")
        stack.enter_context(generator)
        contestants: dict[str, LoadedServer] = {}
        if options.with_vllm:
            vllm = VllmServer(
                options.vllm_python,
                options.target,
                dtype=options.dtype,
                slots=options.slots,
                threads=options.vllm_threads,
                log=folder / "serve-vllm.log",
            )
            click.echo("vLLM's server loads and compiles …")
            contestants[VLLM] = LoadedServer(stack.enter_context(vllm).url, server=vllm)
            stack.callback(vllm.resume)
            vllm.pause()
        click.echo("Consort's server loads …")
        url = stack.enter_context(our_server(config))
        contestants = {
            ON: LoadedServer(url, _SEED),
            OFF: LoadedServer(url, _SEED | {"speculate": False}),
            **contestants,
        }
        comparisons = _compare(generator, contestants, options)
        return comparisons, list(_overheads(options, config))


def _compare(
    generator: LoadGenerator, contestants: Mapping[str, LoadedServer], options: Options
) -> list[LoadComparison]:
    """Measure all temperatures and numbers of streams, after a warm-up of each server with the most streams."""

    def run(name: str, load: Load) -> LoadResult:
        contestant = contestants[name]
        if contestant.server is None:
            return generator.run(contestant.url, MODEL, load, contestant.extra_body)
        contestant.server.resume()
        try:
            return generator.run(contestant.url, MODEL, load, contestant.extra_body)
        finally:
            contestant.server.pause()

    for name in contestants:
        run(name, options.load(options.temperatures[0], options.slots, options.repetitions))
    return [
        _repeat(partial(options.load, temperature, streams), list(contestants), run, options.repetitions)
        for temperature, streams in itertools.product(options.temperatures, options.streams)
    ]


def _repeat(
    load: Callable[[int], Load], names: Sequence[str], run: Callable[[str, Load], LoadResult], repetitions: int
) -> LoadComparison:
    """Measure all servers in every repetition, in alternating order.

    Each run has its own prompts, because two of the names share a server, which caches prefixes.
    """
    results: dict[str, list[LoadResult]] = {name: [] for name in names}
    seeds = itertools.count()
    for repetition in range(repetitions):
        for name in names if repetition % 2 == 0 else reversed(names):
            results[name].append(run(name, load(next(seeds))))
    last = load(0)
    rates = ", ".join(
        f"{name} {' '.join(f'{measured.tokens_per_s:.0f}' for measured in results[name])}" for name in names
    )
    click.echo(f"temperature {last.temperature:g}, {last.concurrency} stream(s), tokens/s: {rates}")
    return LoadComparison(last.temperature, last.concurrency, results)


def _overheads(options: Options, config: ServerConfig) -> list[Overhead]:
    if options.overhead_prompts == 0:
        return []
    prompts = read_prompts(PROMPTS)[: options.overhead_prompts + 1]
    measure = partial(measure_overhead, config, prompts, new_tokens=options.new_tokens)
    return [measure(temperature=options.temperatures[0], speculate=speculate) for speculate in (True, False)]


if __name__ == "__main__":
    main()
