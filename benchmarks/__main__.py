"""`make bench`: Hugging Face `generate`, plain and assisted, against Consort, plain and speculative.

One interleaved run on one machine: same checkpoints, dtype, prompts, output length and number of threads.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import click
import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from actors.loading import ModelSpec, load_model, load_tokenizer
from benchmarks import ours, report
from benchmarks.huggingface import HuggingFace
from benchmarks.limits import Limits, agreement
from benchmarks.ours import Ours
from benchmarks.report import Score, Speculation
from benchmarks.workload import Workload
from training.acceptance import tokens_per_step
from training.heldout import read_prompts

FOLDER = click.Path(path_type=Path)
Answers = dict[str, list[list[int]]]  # by contestant, one per prompt run


@click.command()
@click.option("--target", type=FOLDER, help="Default: the bundled target, inflated to about 300 M parameters.")
@click.option("--drafter", type=FOLDER, default=Path("models/drafter"), show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--draft-length", "draft_lengths", multiple=True, default=(4, 6, 8), show_default=True, help="γ of ours.")
@click.option("--threads", default=4, show_default=True, help="Of HF and of plain decoding.")
@click.option("--target-threads", default=3, show_default=True, help="Of a target with a drafter beside it.")
@click.option("--drafter-threads", default=1, show_default=True)
@click.option("--repetitions", default=5, show_default=True)
@click.option("--prompts", "prompts_per_run", default=2, show_default=True, help="Per repetition, new ones each time.")
@click.option("--new-tokens", default=96, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--output", type=FOLDER, default=Path(".bench/bench.json"), show_default=True)
def main(
    target: Path | None,
    drafter: Path,
    dtype: str,
    draft_lengths: tuple[int, ...],
    threads: int,
    target_threads: int,
    drafter_threads: int,
    repetitions: int,
    prompts_per_run: int,
    new_tokens: int,
    temperature: float,
    output: Path,
) -> None:
    """Compare, print, and write JSON."""
    options = dict(click.get_current_context().params)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target = target or _inflated_target()
    torch.set_num_threads(threads)
    hf_target = load_model(ModelSpec(name="target", path=str(target), dtype=dtype))
    hf_drafter = load_model(ModelSpec(name="drafter", path=str(drafter), dtype=dtype))
    tokenizer = load_tokenizer(str(target))
    prompts = [tokenizer(text)["input_ids"] for text in read_prompts(Path("models/heldout.jsonl"))]
    workload = Workload(prompts, new_tokens, temperature)
    peers = [HuggingFace(hf_target, None, None), *(HuggingFace(hf_target, hf_drafter, γ) for γ in (None, 4, 8))]
    with ours.start(
        target,
        drafter,
        dtype=dtype,
        plain_threads=threads,
        target_threads=target_threads,
        drafter_threads=drafter_threads,
        draft_lengths=list(draft_lengths),
    ) as own:
        rates, answers = _compare([*peers, *own], workload, repetitions, prompts_per_run)
    scores = [Score(name, rates[name], _same_text(answers[name], answers[peers[0].name])) for name in rates]
    plain, *speculative = own
    speculations = [_speculation(each, plain, rates, answers, workload, hf_drafter) for each in speculative]
    report.print_report(scores, speculations)
    output.parent.mkdir(parents=True, exist_ok=True)
    found = report.as_json(scores, speculations, {name: str(value) for name, value in options.items()})
    output.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    click.echo(f"written to {output}")


def _inflated_target() -> Path:
    """The bundled target at a realistic cost: same text, about 300 M parameters. Made once per target."""
    source, output = Path("models/target"), Path(".bench/target-inflated")
    made = output / "model.safetensors"
    if not made.exists() or made.stat().st_mtime < (source / "model.safetensors").stat().st_mtime:
        command = [sys.executable, "-m", "training", "inflate", "--source", str(source), "--output", str(output)]
        subprocess.run([*command, "--force"], check=True)
    return output


def _compare(
    contestants: list[HuggingFace | Ours], workload: Workload, repetitions: int, prompts_per_run: int
) -> tuple[dict[str, list[float]], Answers]:
    """Tokens per second of every contestant in every repetition, in turn, after a warm-up; and what they wrote."""
    for contestant in contestants:
        contestant.run(Workload(workload.prompts[-1:], 16, workload.temperature))
        if isinstance(contestant, Ours):
            contestant.forget()
    rates: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    answers: Answers = {contestant.name: [] for contestant in contestants}
    for repetition in range(repetitions):
        part = workload.part(repetition * prompts_per_run, prompts_per_run)
        for contestant in contestants:
            began_s = time.perf_counter()
            texts = contestant.run(part)
            rates[contestant.name].append(sum(map(len, texts)) / (time.perf_counter() - began_s))
            answers[contestant.name] += texts
        click.echo(f"repetition {repetition + 1} of {repetitions}: {_latest(rates)}")
    return rates, answers


def _latest(rates: dict[str, list[float]]) -> str:
    return ", ".join(f"{name} {values[-1]:.1f}" for name, values in rates.items())


def _same_text(answers: list[list[int]], reference: list[list[int]]) -> float:
    """The share of tokens up to the first difference from the reference, over all answers."""
    same = 0
    for answer, expected in zip(answers, reference, strict=True):
        differs = [i for i, (a, b) in enumerate(zip(answer, expected, strict=True)) if a != b]
        same += differs[0] if differs else len(expected)
    return same / sum(map(len, reference))


def _speculation(
    speculative: Ours,
    plain: Ours,
    rates: dict[str, list[float]],
    answers: Answers,
    workload: Workload,
    drafter: PreTrainedModel,
) -> Speculation:
    """What speculation reached, and what it could have reached at best with the same times and texts."""
    texts = answers[speculative.name]
    prompts = workload.part(0, len(texts)).prompts
    per_run = len(texts) // len(rates[speculative.name])
    agreements = [
        agreement(drafter, prompt, text, workload.params(index % per_run))
        for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]
    times, plain_times, drafts = speculative.target_times, plain.target_times, speculative.drafter_times
    ratios = [a / b for a, b in zip(rates[speculative.name], rates[plain.name], strict=True)]
    return Speculation(
        Limits(
            draft_length=speculative.draft_length,
            plain_step_s=plain_times.step_s / plain_times.steps,
            verify_step_s=times.step_s / times.steps,
            draft_step_s=drafts.step_s / drafts.steps,
            tokens_per_step=tokens_per_step(agreements, speculative.draft_length),
        ),
        speed_up=sorted(ratios)[len(ratios) // 2],
        acceptance_rate=speculative.statistics.acceptance_rate,
        acceptance_length=speculative.statistics.acceptance_length,
        waited_share=times.waited_s / (times.waited_s + times.step_s + times.prefill_s),
    )


if __name__ == "__main__":
    main()
