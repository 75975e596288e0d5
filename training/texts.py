"""Chats that a target writes, to train on: a question that a user might ask, then the target's answer.

With each token of an answer come the most probable ones there and their probabilities, so that a student needs no
further pass of its teacher. The texts are written once into the work folder, for all that is trained for the target.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decoding.errors import ConfigError
from engine.loading.checkpoint import ModelSpec
from engine.loading.settings import context_length, load_tokenizer, read_header
from training.files import write_whole

T = TypeVar("T")

CHATS_PER_SHARD = 32
HELD_OUT = 20  # every 20th prompt is never trained on
CANDIDATES = 32  # most probable tokens that are kept at each position
Report = Callable[[str], None]
TEXTS = "texts"


@dataclass(frozen=True, slots=True, eq=False)
class Chat:
    """A prompt, with the chat template around it, and the answer with its end token unless it was cut off."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    temperature: float
    candidates: Tensor  # [T, CANDIDATES] int32, the most probable tokens in place of each of the answer's, best first
    logprobs: Tensor  # [T, CANDIDATES] float16, of the candidates, at temperature 1


def shard_files(folder: Path) -> list[Path]:
    """Return the shards of a folder, in order. Raises ConfigError if one is missing."""
    shards = sorted(folder.glob("[0-9]*.jsonl"))
    for number, shard in enumerate(shards):
        if shard.stem != f"{number:05}":
            raise ConfigError(f"{folder}: {number:05}.jsonl is missing; remove the shards after it, or all of them")
    return shards


def read_shard(shard: Path) -> list[Chat]:
    """Return the chats of a shard."""
    lines = [json.loads(line) for line in shard.read_text().splitlines()]
    lengths = [len(line["tokens"]) for line in lines]
    tensors = load_file(shard.with_suffix(".safetensors"))
    columns = zip(lines, tensors["candidates"].split(lengths), tensors["logprobs"].split(lengths), strict=True)
    return [Chat(**line, candidates=candidates, logprobs=logprobs) for line, candidates, logprobs in columns]


def count_tokens(shard: Path) -> int:
    """Return the tokens of all answers in a shard."""
    return sum(len(json.loads(line)["tokens"]) for line in shard.read_text().splitlines())


def write_shard(shard: Path, chats: Sequence[Chat]) -> None:
    """Write a shard; a run that is killed leaves all of it or nothing that counts."""
    tensors = {name: torch.cat([getattr(chat, name) for chat in chats]) for name in ("candidates", "logprobs")}
    write_whole(shard.with_suffix(".safetensors"), save(tensors))
    names = "prompt", "tokens", "temperature"
    lines = (json.dumps({name: getattr(chat, name) for name in names}) + "\n" for chat in chats)
    write_whole(shard, "".join(lines).encode())  # last: a shard counts once it is there


class Texts:
    """The chats of some shards: those to train on, and those held out, whose prompts nothing is trained on."""

    def __init__(self, shards: Sequence[Path]) -> None:
        chats = [chat for shard in shards for chat in read_shard(shard)]
        prompts = [tuple(chat.prompt) for chat in chats]
        held_out = {*list(dict.fromkeys(prompts))[::HELD_OUT]}
        self.shards = shards
        self._is_held_out = [prompt in held_out for prompt in prompts]
        self.training, self.held_out = self.split(chats)

    def split(self, of_chats: Sequence[T]) -> tuple[list[T], list[T]]:
        """Return what belongs to the chats to train on, and to those held out. of_chats: a thing of each chat."""
        pairs = list(zip(of_chats, self._is_held_out, strict=True))
        return [each for each, held_out in pairs if not held_out], [each for each, held_out in pairs if held_out]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """A target, and how to run it."""

    path: str
    device: str = "auto"
    longest: int = 1024  # tokens of a text, with its prompt
    threads: int | None = None  # None: torch's choice

    def spec(self) -> ModelSpec:
        return ModelSpec(name="target", path=self.path, device=self.device, threads=self.threads, unpacked=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """The texts that a target writes for what is trained."""

    tokens: int = 500_000  # of all answers
    answer_tokens: int = 256  # of one answer
    streams: int = 64
    questions: tuple[str, ...] = ()  # none: the target asks itself
    chat: bool = True  # whether questions go into the target's chat template, if it has one
    seed: int = 0


def load_target_tokenizer(target: str) -> PreTrainedTokenizerBase:
    """Load the target's tokenizer. Raises ConfigError, whose text is a line, if there is none."""
    if target.startswith(("/", ".", "~")) and not Path(target).exists():
        raise ConfigError(f"TARGET {target} is not there: give a model's folder, a .gguf file or a Hub id")
    try:
        return load_tokenizer(target)
    except ConfigError as error:
        first_line = str(error).splitlines()[0]
        raise ConfigError(f"TARGET {target} has no tokenizer that can be loaded: {first_line}") from error


def fitted(target: TargetOptions) -> TargetOptions:
    """Return the options with texts no longer than the target's. Raises ConfigError if it has no configuration."""
    try:
        header = read_header(target.path)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).splitlines()[0]
        raise ConfigError(f"TARGET {target.path} has no configuration that can be read: {first_line}") from error
    return replace(target, longest=min(target.longest, context_length(header, None)))


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of the tokens that stand for no text."""
    return sorted(set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder))
