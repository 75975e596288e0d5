"""Chats that a target writes, to train on: a question that a user might ask, then the target's answer.

With each token of an answer come the most probable ones there and their probabilities, so that a student needs no
further pass of its teacher. The texts are written once into the work folder, for all that is trained for the target.
Questions after Xu et al. 2024, "Magpie", arXiv 2406.08464.
"""

import hashlib
import json
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from actors.coordinator.request import Delta, Endpoint, Request
from actors.replica.in_process import Engine
from decoding.errors import ConfigError
from decoding.sampling.params import SamplingParams
from engine.loading.checkpoint import ModelSpec
from engine.loading.runners import load_runner
from engine.loading.settings import context_length, load_end_tokens, load_tokenizer, read_header
from training.files import write_whole

T = TypeVar("T")

CHATS_PER_SHARD = 32
HELD_OUT = 20  # every 20th chat is never trained on
CANDIDATES = 32  # most probable tokens that are kept at each position
_MARK = "\u241f"  # stands for a question while a chat template is taken apart
QUESTION_TOKENS = 128
_TEMPERATURES = (0.0, 0.7, 0.7, 1.0)  # of answers
_QUESTION_TEMPERATURE, _QUESTION_TOP_P = 0.8, 0.95  # small models write nonsense at 1
Report = Callable[[str], None]
TEXTS = "texts"
_SETTINGS = "settings.json"


@dataclass(frozen=True, slots=True, eq=False)
class Chat:
    """A prompt, with the chat template around it, and the answer with its end token unless it was cut off."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    temperature: float
    candidates: Tensor  # [T, CANDIDATES] int32, the most probable tokens in place of each of the answer's, best first
    logprobs: Tensor  # [T, CANDIDATES] float16, of the candidates, at temperature 1


class ChatTemplate:
    """The tokens around a question, taken from a tokenizer's chat template; a plain text without one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat: bool = True) -> None:
        """chat: whether to use the tokenizer's template."""
        self._tokenizer = tokenizer
        begin: str | None = tokenizer.bos_token
        self.before, self.after = begin or "", ""
        if chat and tokenizer.chat_template is not None:
            message = [{"role": "user", "content": _MARK}]
            text: Any = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            self.before, _, self.after = str(text).partition(_MARK)

    def before_question(self) -> list[int]:
        """Return the tokens after which a user's question follows."""
        return self._encode(self.before)

    def prompt(self, question: str) -> list[int]:
        """Return the tokens after which the answer follows."""
        return self._encode(self.before + question + self.after)

    def decode(self, tokens: list[int]) -> str:
        """Return the text, without special tokens."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ChatWriter:
    """Writes chats with an engine's replica "target", many at once. The chat of a number is always the same."""

    engine: Engine
    template: ChatTemplate
    ends: Sequence[int]  # tokens that end a message
    answer_tokens: int  # the most of an answer
    questions: Sequence[str] = ()  # to answer in turn; none: the model writes them
    seed: int = 0

    def write(self, number: int) -> Chat:
        """Write one chat."""
        rng = random.Random(f"{self.seed}/{number}")
        temperature = rng.choice(_TEMPERATURES)
        prompt = self.template.prompt(self._question(number, rng))
        deltas = self._continue(prompt, rng, self.answer_tokens, temperature, logprobs=CANDIDATES)
        top = [token.top for delta in deltas for token in delta.logprobs]
        candidates = torch.tensor([[token for token, _ in best] for best in top], dtype=torch.int32)
        logprobs = torch.tensor([[logprob for _, logprob in best] for best in top], dtype=torch.float16)
        return Chat(prompt, _tokens(deltas), temperature, candidates, logprobs)

    def _question(self, number: int, rng: random.Random) -> str:
        if self.questions:
            return self.questions[number % len(self.questions)]
        before = self.template.before_question()
        question = self._continue(before, rng, QUESTION_TOKENS, _QUESTION_TEMPERATURE, top_p=_QUESTION_TOP_P)
        return self.template.decode(_tokens(question)).strip()

    def _continue(
        self, prompt: Sequence[int], rng: random.Random, length: int, temperature: float, **options: Any
    ) -> list[Delta]:
        options |= {"seed": rng.getrandbits(62), "eos_token_ids": tuple(self.ends)}
        params = SamplingParams(max_tokens=length, temperature=temperature, **options)
        endpoint = Endpoint("texts", "target", None, 0, self.template.decode)
        return [*self.engine.stream(Request(endpoint, prompt, params))]


def _tokens(deltas: Sequence[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def write_texts(writer: ChatWriter, folder: Path, *, tokens: int, streams: int) -> Generator[int, None, None]:
    """Write chats into shards of a folder until their answers have `tokens` tokens, `streams` chats at once.

    A run that was interrupted goes on after its last shard. Yields the tokens of answers so far, after each shard.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = shard_files(folder)
    written = sum(len(chat.tokens) for shard in shards for chat in read_shard(shard))
    numbers = count(len(shards) * CHATS_PER_SHARD)
    with ThreadPoolExecutor(streams) as pool:
        ahead: list[Future[Chat]] = []
        try:
            while written < tokens:
                wanted = CHATS_PER_SHARD + streams - len(ahead)
                ahead += [pool.submit(writer.write, next(numbers)) for _ in range(wanted)]
                chats = [future.result() for future in ahead[:CHATS_PER_SHARD]]
                del ahead[:CHATS_PER_SHARD]
                shards.append(folder / f"{len(shards):05}.jsonl")
                _write_shard(shards[-1], chats)
                written += sum(len(chat.tokens) for chat in chats)
                yield written
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


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


def _write_shard(shard: Path, chats: Sequence[Chat]) -> None:
    tensors = {name: torch.cat([getattr(chat, name) for chat in chats]) for name in ("candidates", "logprobs")}
    write_whole(shard.with_suffix(".safetensors"), save(tensors))
    names = "prompt", "tokens", "temperature"
    lines = (json.dumps({name: getattr(chat, name) for name in names}) + "\n" for chat in chats)
    write_whole(shard, "".join(lines).encode())  # last: a shard counts once it is there


def read_texts(folder: Path) -> tuple[list[Chat], list[Chat]]:
    """Return the chats to train on and those held out."""
    return split([chat for shard in shard_files(folder) for chat in read_shard(shard)])


def split(of_chats: Sequence[T]) -> tuple[list[T], list[T]]:
    """Return what belongs to the chats to train on, and to those held out. of_chats: all chats, or a thing of each."""
    held_out = [each for number, each in enumerate(of_chats) if number % HELD_OUT == 0]
    return [each for number, each in enumerate(of_chats) if number % HELD_OUT], held_out


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
    streams: int = 32
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


def write_missing(
    target: TargetOptions, wanted: TextOptions, work: Path, tokenizer: PreTrainedTokenizerBase, *, report: Report
) -> tuple[list[Chat], list[Chat]]:
    """Let the target write what the work folder lacks, and return the chats to train on and those held out.

    Raises:
        ConfigError: the folder belongs to another target, an answer does not fit after a prompt, there are no texts, or
            the disk is full.
    """
    folder = work / TEXTS
    template = ChatTemplate(tokenizer, chat=wanted.chat)
    settings = {
        "target": target.path,
        "answer tokens": wanted.answer_tokens,
        "prompts": hashlib.sha256(repr((wanted.questions, wanted.chat)).encode()).hexdigest()[:12],
        "seed": wanted.seed,
    }
    _check_settings(settings, work)
    written = sum(len(chat.tokens) for part in read_texts(folder) for chat in part) if shard_files(folder) else 0
    if written < wanted.tokens:
        _check_lengths(template, wanted, target.longest)
        work.mkdir(parents=True, exist_ok=True)
        write_whole(work / _SETTINGS, json.dumps(settings).encode())
        spec = replace(target.spec(), slots=wanted.streams, max_length=target.longest)
        with Engine({"target": ("target", load_runner(spec))}) as engine:
            writer = ChatWriter(
                engine=engine,
                template=template,
                ends=sorted({*load_end_tokens(target.path), tokenizer.eos_token_id} - {None}),
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
