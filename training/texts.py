"""Chats that a model writes by itself, to train on: a question that a user might ask, then the model's answer.

With each token of an answer comes what the model thought of the most probable ones there, so that a student needs no
further pass of its teacher. Questions after Xu et al. 2024, "Magpie", arXiv 2406.08464. Knows nothing of what is
trained.
"""

import json
import random
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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
from training.files import write_whole

T = TypeVar("T")

CHATS_PER_SHARD = 32
HELD_OUT = 20  # every 20th chat is never trained on
CANDIDATES = 32  # most probable tokens that are kept at each position
_MARK = "\u241f"  # stands for a question while a chat template is taken apart
QUESTION_TOKENS = 128
_TEMPERATURES = (0.0, 0.7, 0.7, 1.0)  # of answers
_QUESTION_TEMPERATURE, _QUESTION_TOP_P = 0.8, 0.95  # small models write nonsense at 1


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

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        begin: str | None = tokenizer.bos_token
        self.before, self.after = begin or "", ""
        if tokenizer.chat_template is not None:
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


class ChatWriter:
    """Writes chats with an engine, many at once. The chat of a number is always the same."""

    def __init__(
        self,
        engine: Engine,
        target: str,
        template: ChatTemplate,
        ends: Sequence[int],
        *,
        answer_tokens: int,
        questions: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        """
        target: the name of the engine's replica.
        ends: tokens that end a message.
        answer_tokens: the most of an answer.
        questions: to answer in turn; none: the model writes them.
        """
        self._engine = engine
        self._endpoint = Endpoint("texts", target, None, 0, template.decode)
        self._template = template
        self._ends = tuple(ends)
        self._answer_tokens = answer_tokens
        self._questions = questions
        self._seed = seed

    def write(self, number: int) -> Chat:
        """Write one chat."""
        rng = random.Random(f"{self._seed}/{number}")
        temperature = rng.choice(_TEMPERATURES)
        prompt = self._template.prompt(self._question(number, rng))
        deltas = self._continue(prompt, rng, self._answer_tokens, temperature, logprobs=CANDIDATES)
        top = [token.top for delta in deltas for token in delta.logprobs]
        candidates = torch.tensor([[token for token, _ in best] for best in top], dtype=torch.int32)
        logprobs = torch.tensor([[logprob for _, logprob in best] for best in top], dtype=torch.float16)
        return Chat(prompt, _tokens(deltas), temperature, candidates, logprobs)

    def _question(self, number: int, rng: random.Random) -> str:
        if self._questions:
            return self._questions[number % len(self._questions)]
        before = self._template.before_question()
        question = self._continue(before, rng, QUESTION_TOKENS, _QUESTION_TEMPERATURE, top_p=_QUESTION_TOP_P)
        return self._template.decode(_tokens(question)).strip()

    def _continue(
        self, prompt: Sequence[int], rng: random.Random, length: int, temperature: float, **options: Any
    ) -> list[Delta]:
        seed = rng.getrandbits(62)
        params = SamplingParams(
            max_tokens=length, temperature=temperature, seed=seed, eos_token_ids=self._ends, **options
        )
        return [*self._engine.stream(Request(self._endpoint, prompt, params))]


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
    """Return the shards of a folder, in order.

    Raises:
        ConfigError: one is missing.
    """
    shards = sorted(folder.glob("[0-9]*.jsonl"))
    for number, shard in enumerate(shards):
        if shard.stem != f"{number:05}":
            raise ConfigError(f"{folder}: {number:05}.jsonl is missing; remove the shards after it, or all of them")
    return shards


def read_shard(shard: Path) -> list[Chat]:
    """Read the chats of a shard."""
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
