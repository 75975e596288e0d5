"""The stage of a run that lets the target write what the work folder lacks."""

import hashlib
import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from decoding.errors import ConfigError
from engine.loading.runners import load_runner
from engine.loading.settings import load_end_tokens
from training.chat_writer import QUESTION_TOKENS, ChatTemplate, ChatWriter, Written
from training.features import features_folder, write_features
from training.files import write_whole
from training.texts import (
    CHATS_PER_SHARD,
    TEXTS,
    Report,
    TargetOptions,
    TextOptions,
    Texts,
    count_tokens,
    shard_files,
    write_shard,
)

_SETTINGS = "settings.json"


def write_missing(
    target: TargetOptions,
    wanted: TextOptions,
    work: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    layers: Sequence[int] = (),
    report: Report,
) -> Texts:
    """Let the target write what the work folder lacks, and return the first texts that have as many tokens as wanted.

    layers: after how many layers to keep the hidden states along new texts.

    Raises ConfigError if the folder belongs to another target, an answer does not fit after a prompt, there are no
    texts, or the disk is full.
    """
    folder = work / TEXTS
    template = ChatTemplate(tokenizer, chat=wanted.chat)
    asked = wanted.questions or template.openings
    settings = {
        "target": target.path,
        "answer tokens": wanted.answer_tokens,
        "prompts": hashlib.sha256(repr((asked, wanted.chat)).encode()).hexdigest()[:12],
        "seed": wanted.seed,
    }
    _check_settings(settings, work)
    shards = _first_shards(folder, wanted.tokens)
    if sum(map(count_tokens, shards)) < wanted.tokens:
        _check_lengths(template, wanted, target.longest)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(work / _SETTINGS, json.dumps(settings).encode())
        spec = replace(target.spec(), slots=wanted.streams + 1, max_length=target.longest)
        writer = ChatWriter(
            runner=load_runner(spec, hidden_layers=layers),
            template=template,
            ends=sorted({*load_end_tokens(target.path), tokenizer.eos_token_id} - {None}),
            answer_tokens=wanted.answer_tokens,
            questions=wanted.questions,
            seed=wanted.seed,
        )
        states_to = features_folder(work, layers, target.longest) if layers else None
        written = writer.write(len(shards) * CHATS_PER_SHARD)
        for total in write_texts(written, folder, tokens=wanted.tokens, states_to=states_to, states=len(layers)):
            report(f"texts: {total:,} of {wanted.tokens:,} tokens")
    texts = Texts(_first_shards(folder, wanted.tokens))
    if not texts.training:
        raise ConfigError(f"{folder} has no texts to train on: give more --tokens")
    return texts


def write_texts(
    written: Iterable[Written], folder: Path, *, tokens: int, states_to: Path | None = None, states: int = 0
) -> Generator[int, None, None]:
    """Write chats into shards until their answers have `tokens` tokens. Those that are in no whole shard are lost.

    Yields the tokens of answers so far, after each shard.

    written: chats, in any order; their numbers follow those in the shards.
    states_to: the folder of their hidden states, if these are kept. states: how many of each token.
    """
    for path in (folder, states_to):
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
    shards = shard_files(folder)
    total = sum(map(count_tokens, shards))
    waiting: dict[int, Written] = {}
    for latest in written:
        waiting[latest.number] = latest
        first = len(shards) * CHATS_PER_SHARD
        numbers = range(first, first + CHATS_PER_SHARD)
        if not waiting.keys() >= set(numbers):
            continue
        together = [waiting.pop(number) for number in numbers]
        shards.append(folder / f"{len(shards):05}.jsonl")
        if states_to is not None:
            kept = torch.cat([each.states for each in together if each.states is not None])
            write_features(states_to / f"{shards[-1].stem}.safetensors", kept, states)
        write_shard(shards[-1], [each.chat for each in together])
        total += sum(len(each.chat.tokens) for each in together)
        yield total
        if total >= tokens:
            return


def _first_shards(folder: Path, tokens: int) -> list[Path]:
    """Return the first shards whose answers have so many tokens; all, if they have fewer."""
    total, first = 0, []
    for shard in shard_files(folder):
        if total >= tokens:
            break
        first.append(shard)
        total += count_tokens(shard)
    return first


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
