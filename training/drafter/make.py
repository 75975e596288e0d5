"""A drafter for a target, from nothing but the target: texts, a smaller model, distillation, a report.

Each stage leaves whole files in the work folder and is skipped where they are, so a run that was killed at any moment
goes on. Must not know the command line.
"""

import hashlib
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.errors import ConfigError
from training.distillation.lessons import Lessons
from training.distillation.loop import DistillationOptions, distil
from training.distillation.rates import held_out_rates
from training.distillation.report import StudentReport
from training.distillation.text_stage import (
    Report,
    TargetOptions,
    TextOptions,
    fitted,
    load_target_tokenizer,
    special_tokens,
    write_missing,
)
from training.drafter.start import StartOptions, copy_vocabulary, load_start, write_start
from training.drafter.step_times import measure_steps
from training.drafter.student import DrafterStudent
from training.files import whole_folder
from training.lora import add_lora, merge_lora


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOptions:
    """How to make a drafter."""

    output: Path
    work: Path
    start: StartOptions
    texts: TextOptions
    distillation: DistillationOptions
    lora_rank: int | None = None  # None: all weights are trained
    tokens_per_step: int = 4096
    longest: int = 1024  # tokens of a text, with its prompt
    threads: int | None = None  # None: torch's choice
    seed: int = 0


def train_drafter(options: DrafterOptions, *, report: Report) -> None:
    """Make a drafter for `options.start.target` in the folder `options.output`.

    Raises:
        ConfigError: the target or its tokenizer can't be loaded, the output is not an empty folder, the work folder
            belongs to another target, there are no texts, or the disk is full.
    """
    if options.output.exists() and (not options.output.is_dir() or any(options.output.iterdir())):
        raise ConfigError(f"--output {options.output} is there already: give another, or remove it")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    tokenizer = load_target_tokenizer(options.start.target)
    target = fitted(
        TargetOptions(
            path=options.start.target, device=options.start.device, longest=options.longest, threads=options.threads
        )
    )
    training, held_out = write_missing(target, options.texts, options.work, tokenizer, report=report)
    run = options.work / "runs" / _run_name(options, len(training))
    start = run / "start"
    if not start.exists():
        write_start(options.start, training, special_tokens(tokenizer), start)
    model, vocabulary, beginning = load_start(start)
    report(f"start: {beginning}")
    measure = partial(held_out_rates, tokens=options.tokens_per_step, longest=options.longest)
    before = measure(DrafterStudent(model, vocabulary), held_out)
    trained = model if options.lora_rank is None else add_lora(model, options.lora_rank, seed=options.seed)
    lessons = Lessons(training, vocabulary, tokens=options.tokens_per_step, longest=options.longest, seed=options.seed)
    distil(DrafterStudent(trained, vocabulary), lessons, options.distillation, run / "checkpoints", report=report)
    drafter = trained if options.lora_rank is None else merge_lora(trained)
    with whole_folder(options.output) as unfinished:
        save_drafter(drafter, start, tokenizer, unfinished)
        report("measuring the drafter")
        StudentReport(
            made="Drafter",
            command="consort train drafter",
            target=options.start.target,
            start=beginning,
            parameters=drafter.num_parameters(),
            settings=_settings(options),
            texts=len(training),
            tokens=sum(len(chat.tokens) for chat in training),
            held_out_texts=len(held_out),
            before=before,
            after=measure(DrafterStudent(drafter, vocabulary), held_out),
            steps=measure_steps(options.start.target, unfinished, device=options.start.device, threads=options.threads),
        ).write(unfinished)
    report(f"{options.output}: {drafter.num_parameters():,} parameters; see report.md there")


def save_drafter(model: PreTrainedModel, start: Path, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a drafter's bfloat16 weights, the vocabulary that it started with and the tokenizer into a folder."""
    deepcopy(model).bfloat16().save_pretrained(folder)
    copy_vocabulary(start, folder)
    tokenizer.save_pretrained(folder)


def _run_name(options: DrafterOptions, chats: int) -> str:
    """Return a name that differs where the weights of the start or of a step would."""
    fixed = replace(options, distillation=replace(options.distillation, epochs=0, minutes=None))
    return hashlib.sha256(repr((_settings(fixed), chats)).encode()).hexdigest()[:12]


def _settings(options: DrafterOptions) -> dict[str, object]:
    """Return the settings that the weights depend on, by name."""
    distillation = asdict(options.distillation)
    for name in ("save_every_s", "report_every_s", "device"):
        del distillation[name]
    names = ("lora_rank", "tokens_per_step", "longest", "seed")
    return asdict(options.start) | distillation | {name: getattr(options, name) for name in names}
