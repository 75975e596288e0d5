"""A drafter for a target, from nothing but the target: texts, a smaller model, distillation, a report.

Each stage leaves whole files in the work folder and is skipped where they are, so a run that was killed at any moment
goes on. Must not know the command line.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from actors.loading.checkpoint import ModelSpec, load_tokenizer
from actors.replica.in_process import Engine
from actors.replica.replica import load_runner
from decoding.errors import ConfigError
from training.distillation import DistillationOptions, distil
from training.files import whole_folder, write_whole
from training.lessons import Lessons
from training.lora import add_lora, merge_lora
from training.start import StartOptions, load_start, write_start
from training.texts import Chat, ChatTemplate, ChatWriter, read_texts, shard_files, write_texts
from training.vocabulary import DraftVocabulary

Report = Callable[[str], None]
_SETTINGS = "settings.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """The texts that a target writes for its drafter."""

    tokens: int = 500_000  # of all answers
    answer_tokens: int = 256  # of one answer
    streams: int = 32
    questions: tuple[str, ...] = ()  # none: the target asks itself
    seed: int = 0


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
            belongs to another target, the target writes no texts, or the disk is full.
    """
    if options.output.exists() and (not options.output.is_dir() or any(options.output.iterdir())):
        raise ConfigError(f"--output {options.output} is there already: give another, or remove it")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    target = options.start.target
    tokenizer = load_tokenizer(target)
    training, held_out = _texts(options, tokenizer, report)
    run = options.work / "runs" / _run_name(options, len(training))
    start = run / "start"
    if not start.exists():
        said = write_start(options.start, training, special_tokens(tokenizer), start)
        report(f"start: {said}")
    model, vocabulary = load_start(start)
    lessons = Lessons(training, vocabulary, tokens=options.tokens_per_step, longest=options.longest, seed=options.seed)
    student = model if options.lora_rank is None else add_lora(model, options.lora_rank, seed=options.seed)
    checkpoints = run / "checkpoints"
    student = distil(student, vocabulary, lessons, options.distillation, checkpoints, report=report)
    drafter = student if options.lora_rank is None else merge_lora(student)
    with whole_folder(options.output) as unfinished:
        save_drafter(drafter, vocabulary, tokenizer, unfinished)
    report(f"{options.output}: {drafter.num_parameters():,} parameters")


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of the tokens that stand for no text."""
    return sorted(set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder))


def save_drafter(
    model: PreTrainedModel, vocabulary: DraftVocabulary, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Write a drafter's bfloat16 weights, its vocabulary and its target's tokenizer into a folder."""
    model.to(torch.bfloat16).save_pretrained(folder)
    vocabulary.save(folder)
    tokenizer.save_pretrained(folder)


def _texts(
    options: DrafterOptions, tokenizer: PreTrainedTokenizerBase, report: Report
) -> tuple[list[Chat], list[Chat]]:
    """Let the target write what is missing, and return the chats to train on and those held out."""
    wanted, folder = options.texts, options.work / "texts"
    _check_settings(options)
    written = sum(len(chat.tokens) for part in read_texts(folder) for chat in part) if shard_files(folder) else 0
    if written < wanted.tokens:
        spec = ModelSpec(
            name="target",
            path=options.start.target,
            device=options.start.device,
            slots=wanted.streams,
            max_length=options.longest,
            threads=options.threads,
        )
        ends = _ends(tokenizer)
        with Engine({"target": ("target", load_runner(spec))}) as engine:
            writer = ChatWriter(
                engine,
                "target",
                ChatTemplate(tokenizer),
                ends,
                answer_tokens=wanted.answer_tokens,
                questions=wanted.questions,
                seed=wanted.seed,
            )
            for written in write_texts(writer, folder, tokens=wanted.tokens, streams=wanted.streams):
                report(f"texts: {written:,} of {wanted.tokens:,} tokens")
    training, held_out = read_texts(folder)
    if not training:
        raise ConfigError(f"{folder} has no texts to train on: give more --tokens")
    return training, held_out


def _ends(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else []


def _check_settings(options: DrafterOptions) -> None:
    """Note whose texts the work folder has, or check that they are of this target."""
    settings = {
        "target": options.start.target,
        "answer_tokens": options.texts.answer_tokens,
        "seed": options.texts.seed,
    }
    file = options.work / _SETTINGS
    if not file.exists():
        options.work.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(settings).encode())
    for name, value in json.loads(file.read_text()).items():
        if value != settings[name]:
            raise ConfigError(
                f"{options.work} has texts with {name} {value!r}, not {settings[name]!r}: give another --work folder"
            )


def _run_name(options: DrafterOptions, chats: int) -> str:
    """Return a name that differs where the weights of the start or of a step would."""
    fixed = replace(options.distillation, epochs=0, minutes=None, save_every_s=0.0, report_every_s=0.0)
    settings = (asdict(options.start), asdict(fixed), options.lora_rank, options.tokens_per_step, options.longest)
    return hashlib.sha256(repr((settings, options.seed, chats)).encode()).hexdigest()[:12]
