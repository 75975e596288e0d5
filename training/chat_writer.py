"""Lets a target write chats, many rows in each of its steps: a question that a user might ask, then the answer.

A row goes on from question to answer in place, so that no token is read twice or turned into text on the way. What
training needs comes with each token from the forward that wrote it: the most probable tokens, and hidden states.
Questions after Xu et al. 2024, "Magpie", arXiv 2406.08464.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decoding.errors import ConfigError
from decoding.sampling.batch import SamplingBatch
from decoding.sampling.history import History, Position
from decoding.sampling.params import SamplingParams
from decoding.sampling.sampler import sample
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from training.texts import CANDIDATES, Chat

QUESTION_TOKENS = 128
_TEMPERATURES = (0.0, 0.7, 0.7, 1.0)  # of answers
_QUESTION_TEMPERATURE, _QUESTION_TOP_P = 0.8, 0.95  # small models write nonsense at 1
_OPENED = 0.6  # of the questions begin with an opening
_MARK = "\u241f"  # stands for a question while a chat template is taken apart
# First words of what users ask. A small model left to itself asks for little else than essays and explanations.
_OPENINGS = (
    # questions
    "What is", "What are the", "Why do", "Why is", "How does", "How do I", "How can I", "When did", "Who was", "Who is",
    "Where", "Is it true that", "Can you explain", "Explain", "Describe", "Define", "Compare", "What is the difference",
    "Tell me about", "Give me some advice on", "I have a problem with my", "I'm planning", "I want to learn",
    "Should I", "What happens when", "Solve the following problem:", "Calculate", "If a", "A train",
    # code
    "Write a Python function that", "Write a Python program to", "Write a function in JavaScript that",
    "Write a SQL query", "Write a bash script that", "Write a C++ program", "Write HTML and CSS for", "Implement a",
    "Fix the bug in this code:\n\n```python\n", "What does this code do?\n\n```python\ndef", "Write unit tests for",
    "How do I use", "Refactor this function:\n\n```python\ndef", "Write a regular expression that", "Write a class",
    # data
    "Return a JSON object with", "Give me a JSON list of", "Write JSON that describes",
    "Extract the names and dates from this text as JSON:\n\n", "Convert this table to JSON:\n\n|", "Write a YAML file",
    "Make a Markdown table of", "Classify the sentiment of this review as positive or negative:\n\n",
    # lists
    "List", "Give me a list of", "Name five", "What are ten", "List the steps to", "Give three reasons why",
    "Provide a step-by-step guide to", "Make a checklist for", "Brainstorm ideas for", "Create a weekly plan for",
    # texts
    "Rewrite the following sentence:\n\n", "Rewrite this text to make it more formal:\n\n",
    "Make this text shorter and clearer:\n\n", "Correct the grammar in this text:\n\n",
    "Summarize the following text in two sentences:\n\n", "Translate the following sentence into", "Paraphrase:",
    "Write an email to", "Write a letter", "Write a short story about", "Write a poem about", "Write a product",
    "Write a tweet", "Write a blog post about", "Write a paragraph about", "Write a dialogue between",
    "Answer the question using this text:\n\n", "Continue the following story:\n\n", "Suggest a title for",
    "Hi", "Hello",
)  # fmt: skip


class ChatTemplate:
    """The tokens around a question, taken from a tokenizer's chat template; a plain text without one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat: bool = True) -> None:
        """chat: whether to use the tokenizer's template."""
        self._tokenizer = tokenizer
        begin: str | None = tokenizer.bos_token
        before, after = begin or "", ""
        self.openings: Sequence[str] = ()
        if chat and tokenizer.chat_template is not None:
            message = [{"role": "user", "content": _MARK}]
            text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            before, _, after = str(text).partition(_MARK)
            self.openings = _OPENINGS
        self._before, self._after = before, after

    def before_question(self, opening: str = "") -> list[int]:
        """Return the tokens after which a user's question follows. opening: its first words."""
        return self._encode(self._before + opening)

    def after_question(self) -> list[int]:
        """Return the tokens between a question and its answer."""
        return self._encode(self._after)

    def prompt(self, question: str) -> list[int]:
        """Return the tokens after which the answer follows."""
        return self._encode(self._before + question + self._after)

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens


class Written(NamedTuple):
    """A finished chat."""

    number: int
    chat: Chat
    states: Tensor | None  # [T - 1, k · H] after each token but the last, if the runner keeps any


@dataclass(slots=True, eq=False)
class _Row:
    """A chat that is being written."""

    number: int
    slot: int
    history: History  # of the question, then of the answer
    answer: SamplingParams
    is_answer: bool
    ran: int  # so many of its tokens are in the slot
    states: list[Tensor]
    is_over: bool = False
    candidates: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.history.tokens

    def input(self) -> RowInput:
        return RowInput(self.slot, self.ran, self.tokens[self.ran :], wanted=1)

    def begin_answer(self, between: Sequence[int]) -> None:
        tokens = [*self.tokens, *between]
        self.history, self.is_answer = History(self.answer, tokens, len(tokens)), True

    def written(self) -> Written:
        prompt = self.history.prompt_length
        chat = Chat(
            self.tokens[:prompt],
            self.tokens[prompt:],
            self.answer.temperature,
            torch.stack(self.candidates),
            torch.stack(self.logprobs),
        )
        return Written(self.number, chat, torch.cat(self.states) if self.states else None)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ChatWriter:
    """Writes chats with a runner. The chat of a number is the same whatever else is written."""

    runner: Runner  # its last slot keeps what all chats begin with, the others a chat each
    template: ChatTemplate
    ends: Sequence[int]  # tokens that end a message
    answer_tokens: int  # the most of an answer
    questions: Sequence[str] = ()  # to answer in turn; none: the model writes them
    seed: int = 0

    def write(self, first: int) -> Iterator[Written]:
        """Yield the chats of the numbers from `first` on as each is finished, without end.

        Raises ConfigError if the model's logits are no numbers.
        """
        cache = self.runner.cache
        numbers = count(first)
        with torch.inference_mode():
            shared = self._read_beginning()
            rows = [self._begin(next(numbers), slot, shared) for slot in range(cache.slots - 1)]
            while True:
                self._step(rows)
                for index, row in enumerate(rows):
                    if row.is_over:
                        yield row.written()
                        cache.clear(row.slot)
                        rows[index] = self._begin(next(numbers), row.slot, shared)

    def _read_beginning(self) -> tuple[list[int], list[Tensor]]:
        """Let the last slot read what is before all questions. Returns its tokens and their states."""
        self.runner.cache.clear_all()
        tokens = self.template.before_question()
        if tokens:
            self.runner.logits([RowInput(self.runner.cache.slots - 1, 0, tokens, wanted=1)])
        hidden = self.runner.hidden
        return tokens, [] if hidden is None or not tokens else [hidden.layers.clone()]

    def _begin(self, number: int, slot: int, shared: tuple[list[int], list[Tensor]]) -> _Row:
        rng = random.Random(f"{self.seed}/{number}")
        ends = tuple(self.ends)
        temperature = rng.choice(_TEMPERATURES)
        answer = SamplingParams(
            max_tokens=self.answer_tokens, temperature=temperature, seed=rng.getrandbits(62), eos_token_ids=ends
        )
        if self.questions:
            tokens, params = self.template.prompt(self.questions[number % len(self.questions)]), answer
        else:
            openings = self.template.openings
            opening = rng.choice(openings) if openings and rng.random() < _OPENED else ""
            tokens = self.template.before_question(opening)
            params = SamplingParams(
                max_tokens=QUESTION_TOKENS,
                temperature=_QUESTION_TEMPERATURE,
                top_p=_QUESTION_TOP_P,
                seed=rng.getrandbits(62),
                eos_token_ids=ends,
            )
        known, states = shared
        held = _common_length(known, tokens[:-1])
        cache = self.runner.cache
        if held:
            cache.fork(cache.slots - 1, slot, held)
        history = History(params, tokens, len(tokens))
        return _Row(number, slot, history, answer, params is answer, held, [each[:held] for each in states if held])

    def _step(self, rows: Sequence[_Row]) -> None:
        """Run all rows and add a token to each."""
        inputs = [row.input() for row in rows]
        logits = self.runner.logits(inputs)
        batch = SamplingBatch.build([Position(row.history) for row in rows], self.runner.vocab_size, logits.device)
        drawn = sample(logits, batch).tolist()
        if min(drawn) < 0:
            raise ConfigError(f"the target's logits are no numbers in chat {rows[drawn.index(min(drawn))].number}")
        answering = [index for index, row in enumerate(rows) if row.is_answer]
        best = logits[answering]
        values, candidates = (each.cpu() for each in best.topk(CANDIDATES))
        logprobs = values - best.logsumexp(-1, keepdim=True).cpu()
        for index, each, logprob in zip(answering, candidates.int(), logprobs.half(), strict=True):
            rows[index].candidates.append(each)
            rows[index].logprobs.append(logprob)
        hidden = self.runner.hidden
        if hidden is not None:
            lengths = [len(each.tokens) for each in inputs]
            for row, part in zip(rows, hidden.layers.cpu().split(lengths), strict=True):
                row.states.append(part.clone())
        for row, token in zip(rows, drawn, strict=True):
            row.ran = len(row.tokens)
            self._take(row, token)

    def _take(self, row: _Row, token: int) -> None:
        is_end = token in self.ends
        if row.is_answer or not is_end:
            row.tokens.append(token)
        length = len(row.tokens) - row.history.prompt_length
        if is_end or length == row.history.params.max_tokens:
            if row.is_answer:
                row.is_over = True
            else:
                row.begin_answer(self.template.after_question())


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens with which both begin."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
