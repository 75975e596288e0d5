"""A drafter for a target, from nothing but the target: texts, a smaller model, distillation, a report.

Each stage leaves whole files in the work folder and is skipped where they are, so a run that was killed at any moment
goes on. Must not know the command line.
"""

import hashlib
import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from actors.loading.checkpoint import ModelSpec, load_tokenizer
from actors.loading.gguf import settings_folder
from actors.replica.in_process import Engine
from actors.replica.replica import load_runner
from decoding.errors import ConfigError
from training.drafter.distillation import DistillationOptions, distil
from training.drafter.lessons import Lessons
from training.drafter.rates import held_out_rates
from training.drafter.report import DrafterReport, measure_steps
from training.drafter.start import StartOptions, copy_vocabulary, load_start, write_start
from training.files import whole_folder, write_whole
from training.lora import add_lora, merge_lora
from training.texts import Chat, ChatTemplate, ChatWriter, read_texts, shard_files, write_texts

Report = Callable[[str], None]
_SETTINGS = "settings.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """The texts that a target writes for its drafter."""

    tokens: int = 500_000  # of all answers
    answer_tokens: int = 256  # of one answer
    streams: int = 32
    questions: tuple[str, ...] = ()  # none: the target asks itself
    chat: bool = True  # whether questions go into the target's chat template, if it has one
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
            belongs to another target, there are no texts, or the disk is full.
    """
    if options.output.exists() and (not options.output.is_dir() or any(options.output.iterdir())):
        raise ConfigError(f"--output {options.output} is there already: give another, or remove it")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    tokenizer = _load_tokenizer(options.start.target)
    training, held_out = _texts(options, tokenizer, report)
    run = options.work / "runs" / _run_name(options, len(training))
    start = run / "start"
    if not start.exists():
        write_start(options.start, training, special_tokens(tokenizer), start)
    model, vocabulary, beginning = load_start(start)
    report(f"start: {beginning}")
    measure = partial(held_out_rates, tokens=options.tokens_per_step, longest=options.longest)
    before = measure(model, vocabulary, held_out)
    student = model if options.lora_rank is None else add_lora(model, options.lora_rank, seed=options.seed)
    lessons = Lessons(training, vocabulary, tokens=options.tokens_per_step, longest=options.longest, seed=options.seed)
    student = distil(student, vocabulary, lessons, options.distillation, run / "checkpoints", report=report)
    drafter = student if options.lora_rank is None else merge_lora(student)
    with whole_folder(options.output) as unfinished:
        save_drafter(drafter, start, tokenizer, unfinished)
        report("measuring the drafter")
        DrafterReport(
            target=options.start.target,
            start=beginning,
            parameters=drafter.num_parameters(),
            settings=_settings(options),
            texts=len(training),
            tokens=sum(len(chat.tokens) for chat in training),
            held_out_texts=len(held_out),
            before=before,
            after=measure(drafter, vocabulary, held_out),
            steps=measure_steps(options.start.target, unfinished, device=options.start.device, threads=options.threads),
        ).write(unfinished)
    report(f"{options.output}: {drafter.num_parameters():,} parameters; see report.md there")


def _load_tokenizer(target: str) -> PreTrainedTokenizerBase:
    """Load the target's tokenizer, or say in a line what is missing."""
    if target.startswith(("/", ".", "~")) and not Path(target).exists():
        raise ConfigError(f"TARGET {target} is not there: give a model's folder, a .gguf file or a Hub id")
    try:
        return load_tokenizer(target)
    except ConfigError as error:
        first_line = str(error).splitlines()[0]
        raise ConfigError(f"TARGET {target} has no tokenizer that can be loaded: {first_line}") from error


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of the tokens that stand for no text."""
    return sorted(set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder))


def save_drafter(model: PreTrainedModel, start: Path, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a drafter's bfloat16 weights, the vocabulary that it started with and the tokenizer into a folder."""
    deepcopy(model).bfloat16().save_pretrained(folder)
    copy_vocabulary(start, folder)
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
        with Engine({"target": ("target", load_runner(spec))}) as engine:
            writer = ChatWriter(
                engine,
                "target",
                ChatTemplate(tokenizer if wanted.chat else _without_template(tokenizer)),
                _ends(options.start.target, tokenizer),
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


def _without_template(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    plain = deepcopy(tokenizer)
    plain.chat_template = None
    return plain


def _ends(target: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end a message."""
    try:
        named = GenerationConfig.from_pretrained(settings_folder(target)).eos_token_id
    except OSError:  # many checkpoints have none
        named = None
    tokens = {*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id}
    return sorted(token for token in tokens if isinstance(token, int))


def _check_settings(options: DrafterOptions) -> None:
    """Note whose texts the work folder has, or check that they are of this target."""
    texts = options.texts
    settings = {
        "target": options.start.target,
        "answer tokens": texts.answer_tokens,
        "prompts": hashlib.sha256(repr((texts.questions, texts.chat)).encode()).hexdigest()[:12],
        "seed": texts.seed,
    }
    file = options.work / _SETTINGS
    if not file.exists():
        options.work.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(settings).encode())
    for name, value in json.loads(file.read_text()).items():
        if value != settings.get(name):
            change = f"{name} {value!r}, not {settings.get(name)!r}"
            raise ConfigError(f"{options.work} has texts with {change}: give another --work folder")


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
