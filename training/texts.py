"""Chats that a model writes by itself, to train on: a question that a user might ask, then the model's answer.

Questions after Xu et al. 2024, "Magpie", arXiv 2406.08464. Knows nothing of what is trained.
"""

import json
import random
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from actors.coordinator.request import Endpoint, Request
from actors.replica.in_process import Engine
from decoding.errors import ConfigError
from decoding.sampling.params import SamplingParams
from training.files import write_whole

CHATS_PER_SHARD = 32
HELD_OUT = 20  # every 20th chat is never trained on
_MARK = "\u241f"  # stands for a question while a chat template is taken apart
_QUESTION_TOKENS = 128
_TEMPERATURES = (0.0, 0.7, 0.7, 1.0)  # of answers
_QUESTION_TEMPERATURE, _QUESTION_TOP_P = 0.8, 0.95  # small models write nonsense at 1


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt, with the chat template around it, and the answer with its end token unless it was cut off."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    temperature: float


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
        answer = self._continue(prompt, rng, self._answer_tokens, temperature)
        return Chat(prompt, answer, temperature)

    def _question(self, number: int, rng: random.Random) -> str:
        if self._questions:
            return self._questions[number % len(self._questions)]
        tokens = self._continue(
            self._template.before_question(), rng, _QUESTION_TOKENS, _QUESTION_TEMPERATURE, _QUESTION_TOP_P
        )
        return self._template.decode(tokens).strip()

    def _continue(
        self, prompt: Sequence[int], rng: random.Random, length: int, temperature: float, top_p: float = 1.0
    ) -> list[int]:
        seed = rng.getrandbits(62)
        params = SamplingParams(
            max_tokens=length, temperature=temperature, top_p=top_p, seed=seed, eos_token_ids=self._ends
        )
        deltas = self._engine.stream(Request(self._endpoint, prompt, params))
        return [token for delta in deltas for token in delta.tokens]


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
                lines = "".join(json.dumps(asdict(chat)) + "\n" for chat in chats)
                write_whole(folder / f"{len(shards):05}.jsonl", lines.encode())
                shards = shard_files(folder)
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
    return [Chat(**json.loads(line)) for line in shard.read_text().splitlines()]


def read_texts(folder: Path) -> tuple[list[Chat], list[Chat]]:
    """Return the chats to train on and those held out."""
    chats = [chat for shard in shard_files(folder) for chat in read_shard(shard)]
    held_out = [chat for number, chat in enumerate(chats) if number % HELD_OUT == 0]
    return [chat for number, chat in enumerate(chats) if number % HELD_OUT], held_out
