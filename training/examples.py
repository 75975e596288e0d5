"""Chats and texts to learn from, one JSON object per line."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from decoding.errors import ConfigError

IGNORED = -100  # the label of a token that is not learned, as transformers has it
_ROLES = ("system", "developer", "user", "assistant", "tool")
_EXPECTED = 'give {"messages": [{"role": …, "content": …}, …]} or {"text": …}'


@dataclass(frozen=True, slots=True)
class Example:
    """A chat, or a text if there are no messages."""

    line: int  # in its file, from 1
    messages: Sequence[Mapping[str, str]] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens, and which of them are learned."""

    tokens: list[int]  # [T]
    labels: list[int]  # [T]: the same, or IGNORED


def read_examples(file: Path) -> list[Example]:
    """Return the examples of a JSONL file. Empty lines are skipped.

    Raises:
        ConfigError: the file can't be read or has no example, or a line is wrong; the message has its number.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: can't be read: {error}") from error
    examples = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                examples.append(_parse(number, line))
            except ValueError as error:
                raise ConfigError(f"{file}, line {number}: {error}") from error
    if not examples:
        raise ConfigError(f"{file}: has no examples; {_EXPECTED} on each line")
    return examples


def encode(example: Example, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> list[Row]:
    """Return rows of at most `max_length` tokens. Of chats, only what the assistant says is learned.

    A chat is one row if its template writes a turn in the same way when others follow. If not, each turn of the
    assistant is a row of its own, with all before it. What is too long is cut at the end.

    Raises:
        ConfigError: the tokenizer has no chat template, or it refuses the chat.
    """
    if not example.messages:
        tokens: list[int] = tokenizer(example.text, verbose=False)["input_ids"]
        if tokenizer.eos_token_id is not None and tokens[-1:] != [tokenizer.eos_token_id]:
            tokens.append(tokenizer.eos_token_id)
        return [Row(tokens[:max_length], tokens[:max_length])]
    try:
        spans = [_span(example, index, tokenizer) for index in _answers(example)]
    except (ValueError, TemplateError) as error:
        raise ConfigError(f"line {example.line}: the chat template refuses it: {error}") from error
    whole = spans[-1][0]
    if all(whole.startswith(text) for text, _ in spans):
        spans_of_rows = [(whole, [(start, len(text)) for text, start in spans])]
    else:
        spans_of_rows = [(text, [(start, len(text))]) for text, start in spans]
    rows = [_row(text, learned, tokenizer, max_length) for text, learned in spans_of_rows]
    return [row for row in rows if any(label != IGNORED for label in row.labels)]


def _parse(number: int, line: str) -> Example:
    """Return a line's example; raises ValueError with the reason why it is none."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(value, dict) or ("messages" in value) == ("text" in value):
        raise ValueError(f"is neither a chat nor a text; {_EXPECTED}")
    if "text" in value:
        if not isinstance(value["text"], str) or not value["text"]:
            raise ValueError("text must be a string that is not empty")
        return Example(number, text=value["text"])
    messages = value["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one message")
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message)
    if all(message["role"] != "assistant" for message in messages):
        raise ValueError("messages has no turn of the assistant, so there is nothing to learn")
    return Example(number, messages=messages)


def _check_message(name: str, message: object) -> None:
    if not isinstance(message, dict):
        raise ValueError(f"{name} must be an object with role and content")
    if message.get("role") not in _ROLES:
        raise ValueError(f"{name}.role must be one of {', '.join(_ROLES)}, not {message.get('role')!r}")
    if not isinstance(message.get("content"), str):
        raise ValueError(f"{name}.content must be a string")


def _answers(example: Example) -> list[int]:
    return [index for index, message in enumerate(example.messages) if message["role"] == "assistant"]


def _span(example: Example, index: int, tokenizer: PreTrainedTokenizerBase) -> tuple[str, int]:
    """Return a chat up to a turn of the assistant, as its template writes it, and where that turn starts."""
    if not tokenizer.chat_template:
        raise ConfigError(f"line {example.line} is a chat, but the model's tokenizer has no chat template; give texts")
    before = _written(tokenizer, example.messages[:index], opens=True)
    text = _written(tokenizer, example.messages[: index + 1], opens=False)
    if not text.startswith(before):
        before = before[: _common(before, text)]
    return text, len(before)


def _written(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], *, opens: bool) -> str:
    return str(
        tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=opens
        )
    )


def _common(left: str, right: str) -> int:
    """Return the length of the common beginning."""
    pairs = zip(left, right, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _row(text: str, learned: Sequence[tuple[int, int]], tokenizer: PreTrainedTokenizerBase, max_length: int) -> Row:
    """Return the tokens of a text. learned: where the characters to learn start and end."""
    if not tokenizer.is_fast:
        raise ConfigError("chats need a fast tokenizer (tokenizer.json), which tells where each token is; give texts")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    tokens: list[int] = encoded["input_ids"][:max_length]
    labels = [
        token if any(start <= first < end for start, end in learned) else IGNORED
        for token, (first, _) in zip(tokens, encoded["offset_mapping"], strict=False)
    ]
    return Row(tokens, labels)
