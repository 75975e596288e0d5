"""`make bench`: compares Consort, plain and speculative, with Hugging Face `generate`, vLLM and alternation.

One interleaved run on one machine, with the same checkpoints, dtype, prompts, output length and cores.
"""

import itertools
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.comparison.figure import draw
from benchmarks.comparison.lineup import Lineup, Options, start_lineup
from benchmarks.comparison.run import Comparison, run_comparison
from benchmarks.comparison.tables import as_text
from benchmarks.inflated import inflated_target
from benchmarks.peers.ours import measure_times, swept_lengths
from benchmarks.peers.workload import Workload
from benchmarks.report import write
from engine.loading.settings import load_tokenizer
from training.heldout import read_prompts

FOLDER = click.Path(path_type=Path)
option = partial(click.option, show_default=True)


@click.command()
@option("--target", type=FOLDER, help="Default: the bundled target, inflated to about 300 M parameters.")
@option("--drafter", type=FOLDER, default=Path("models/drafter"))
@option("--dtype", default="bfloat16", help="Dtype of the target, for every contestant.")
@option("--drafter-dtype", default="float32", help="Dtype of the drafter, for every contestant.")
@option("--streams", type=int, multiple=True, default=(1, 8), help="Concurrent prompts; may be repeated.")
@option("--temperature", "temperatures", type=float, multiple=True, default=(0.0,), help="May be repeated.")
@option("--draft-length", "draft_lengths", type=int, multiple=True, default=(2, 4, 8), help="γ; may be repeated.")
@option("--adaptive-limit", default=8, help="Maximum of an adaptive γ.")
@option("--threads", default=4, help="Threads of a contestant that runs one model at a time.")
@option("--target-threads", default=3, help="Threads of our target while a drafter runs in another process.")
@option("--drafter-threads", default=1)
@option("--repetitions", default=5)
@option("--prompts", default=2, help="New prompts per repetition, at least as many as streams.")
@option("--new-tokens", default=64)
@option("--vllm-python", type=FOLDER, default=Path(".bench/vllm/bin/python"), help="Created by `make bench-peers`.")
@option("--output", type=FOLDER, default=Path(".bench/bench.json"), help="JSON file; the figure goes beside it.")
def main(repetitions: int, prompts: int, new_tokens: int, output: Path, **given: Any) -> None:
    """Compare, print, write JSON, and draw."""
    temperatures, streams = given.pop("temperatures"), given["streams"]
    options = Options(**given | {"target": given["target"] or inflated_target()})
    tokenizer = load_tokenizer(str(options.target))
    texts = [tokenizer(text)["input_ids"] for text in read_prompts(Path("models/heldout.jsonl"))]
    comparisons = []
    with start_lineup(options, report=click.echo) as lineup:
        for count, temperature in itertools.product(streams, temperatures):
            workload = Workload(texts, new_tokens, temperature, count)
            comparisons.append(_compare(lineup, options, workload, repetitions, max(prompts, count)))
            click.echo(f"\n{as_text(comparisons[-1])}\n")
    settings = asdict(options) | {"repetitions": repetitions, "prompts": prompts, "new_tokens": new_tokens}
    write(
        output,
        "benchmarks",
        settings,
        comparisons=[asdict(comparison) for comparison in comparisons],
        left_out=lineup.left_out,
    )
    draw(comparisons, output.with_suffix(".png"))
    click.echo(f"drawn to {output.with_suffix('.png')}")
    for reason in lineup.left_out:
        click.echo(reason)


def _compare(lineup: Lineup, options: Options, workload: Workload, repetitions: int, prompts: int) -> Comparison:
    click.echo(f"{workload.streams} stream(s), temperature {workload.temperature:g}")
    γs, plain, drafting = swept_lengths(options.draft_lengths, options.adaptive_limit), lineup.plain, lineup.drafting
    return run_comparison(
        lineup.contestants,
        workload,
        models=lineup.models,
        measure=lambda: {drafting.group: measure_times(plain, drafting, streams=workload.streams, draft_lengths=γs)},
        repetitions=repetitions,
        prompts=prompts,
        report=click.echo,
    )


if __name__ == "__main__":
    main()
