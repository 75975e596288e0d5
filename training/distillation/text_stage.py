"""The stage before any training: the target writes texts into the work folder, once for all that is trained for it.

Must not know what is trained.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from actors.replica.in_process import Engine
from actors.replica.replica import load_runner
from decoding.errors import ConfigError
from engine.loading.checkpoint import ModelSpec
from engine.loading.settings import context_length, load_end_tokens, load_tokenizer, read_header
from training.files import write_whole
from training.texts import QUESTION_TOKENS, Chat, ChatTemplate, ChatWriter, read_texts, shard_files, write_texts

Report = Callable[[str], None]
TEXTS = "texts"
_SETTINGS = "settings.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """A target, and how to run it."""

    path: str
    device: str = "auto"
    longest: int = 1024  # tokens of a text, with its prompt
    threads: int | None = None  # None: torch's choice


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """The texts that a target writes for what is trained."""

    tokens: int = 500_000  # of all answers
    answer_tokens: int = 256  # of one answer
    streams: int = 32
    questions: tuple[str, ...] = ()  # none: the target asks itself
    chat: bool = True  # whether questions go into the target's chat template, if it has one
    seed: int = 0


def load_target_tokenizer(target: str) -> PreTrainedTokenizerBase:
    """Load the target's tokenizer.

    Raises:
        ConfigError: the target is not there, or has none. The text is a line.
    """
    if target.startswith(("/", ".", "~")) and not Path(target).exists():
        raise ConfigError(f"TARGET {target} is not there: give a model's folder, a .gguf file or a Hub id")
    try:
        return load_tokenizer(target)
    except ConfigError as error:
        first_line = str(error).splitlines()[0]
        raise ConfigError(f"TARGET {target} has no tokenizer that can be loaded: {first_line}") from error


def fitted(target: TargetOptions) -> TargetOptions:
    """Return the options with texts that are no longer than the target's.

    Raises:
        ConfigError: it has no configuration that can be read.
    """
    try:
        header = read_header(target.path)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).splitlines()[0]
        raise ConfigError(f"TARGET {target.path} has no configuration that can be read: {first_line}") from error
    return replace(target, longest=min(target.longest, context_length(header, None)))


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of the tokens that stand for no text."""
    return sorted(set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder))


def write_missing(
    target: TargetOptions, wanted: TextOptions, work: Path, tokenizer: PreTrainedTokenizerBase, *, report: Report
) -> tuple[list[Chat], list[Chat]]:
    """Let the target write what the work folder lacks, and return the chats to train on and those held out.

    Raises:
        ConfigError: the folder belongs to another target, an answer does not fit after a prompt, there are no texts, or
            the disk is full.
    """
    folder = work / TEXTS
    template = ChatTemplate(tokenizer if wanted.chat else _without_template(tokenizer))
    settings = _settings(target.path, wanted)
    _check_settings(settings, work)
    written = sum(len(chat.tokens) for part in read_texts(folder) for chat in part) if shard_files(folder) else 0
    if written < wanted.tokens:
        _check_lengths(template, wanted, target.longest)
        work.mkdir(parents=True, exist_ok=True)
        write_whole(work / _SETTINGS, json.dumps(settings).encode())
        spec = ModelSpec(
            name="target",
            path=target.path,
            device=target.device,
            slots=wanted.streams,
            max_length=target.longest,
            threads=target.threads,
        )
        with Engine({"target": ("target", load_runner(spec))}) as engine:
            writer = ChatWriter(
                engine,
                "target",
                template,
                _ends(target.path, tokenizer),
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


def _check_lengths(template: ChatTemplate, wanted: TextOptions, longest: int) -> None:
    """Raise ConfigError if an answer does not fit after a question. longest: tokens of a text, with its prompt."""
    if wanted.questions:
        lengths = {f"prompt {i}": len(template.prompt(question)) for i, question in enumerate(wanted.questions, 1)}
    else:
        lengths = {"a question in its template": len(template.prompt("")) + QUESTION_TOKENS}
    too_long = [prompt for prompt, tokens in lengths.items() if tokens + wanted.answer_tokens > longest]
    if too_long:
        raise ConfigError(
            f"--answer-tokens {wanted.answer_tokens}: {too_long[0]} has {lengths[too_long[0]]} tokens, and with its "
            f"answer it may have {longest}; prompts that are too long: {len(too_long)}"
        )


def _without_template(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    plain = deepcopy(tokenizer)
    plain.chat_template = None
    return plain


def _ends(target: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end a message."""
    return sorted({*load_end_tokens(target), tokenizer.eos_token_id} - {None})


def _settings(target: str, texts: TextOptions) -> dict[str, object]:
    """Return what a work folder's texts are made from."""
    return {
        "target": target,
        "answer tokens": texts.answer_tokens,
        "prompts": hashlib.sha256(repr((texts.questions, texts.chat)).encode()).hexdigest()[:12],
        "seed": texts.seed,
    }


def _check_settings(settings: Mapping[str, object], work: Path) -> None:
    """Raise ConfigError if the work folder has texts of other settings, or what was made from such texts."""
    file = work / _SETTINGS
    has_nothing = not shard_files(work / TEXTS) and {path.name for path in work.glob("*")} <= {_SETTINGS, TEXTS}
    if has_nothing or not file.exists():
        return
    for name, value in json.loads(file.read_text()).items():
        if value != settings.get(name):
            change = f"{name} {value!r}, not {settings.get(name)!r}"
            raise ConfigError(f"{work} has texts with {change}: give another --work folder")
