"""Chats and texts are read line by line, and only what the assistant says is learned of a chat."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from decoding.errors import ConfigError
from training.examples import IGNORED, Example, Row, encode, read_examples

CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And three and three?"},
    {"role": "assistant", "content": "It is six."},
]
FORGETFUL = (  # as templates do that drop the thoughts of earlier turns
    "{% for message in messages %}{% if loop.last and message['role'] == 'assistant' %}<|assistant|>(thinks) "
    "{% else %}{{ '<|' + message['role'] + '|>' }}{% endif %}{{ message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained("models/target")
    return loaded


def write(folder: Path, *lines: Any) -> Path:
    file = folder / "data.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return file


def learned(row: Row, tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode([label for label in row.labels if label != IGNORED]))


def test_chats_and_texts(tmp_path: Path) -> None:
    examples = read_examples(write(tmp_path, {"messages": CHAT}, "", {"text": "Once."}, ""))
    assert examples == [Example(1, messages=CHAT), Example(3, text="Once.")]


def test_all_of_a_text_is_learned(tokenizer: PreTrainedTokenizerBase) -> None:
    (row,) = encode(Example(1, text="Once upon a time"), tokenizer, max_length=64)
    assert row.labels == row.tokens == [*tokenizer("Once upon a time")["input_ids"], tokenizer.eos_token_id]


def test_the_assistants_turns_are_learned(tokenizer: PreTrainedTokenizerBase) -> None:
    (row,) = encode(Example(1, messages=CHAT), tokenizer, max_length=256)
    assert tokenizer.decode(row.tokens) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert learned(row, tokenizer) == "Four.<|end|>It is six.<|end|>"


def test_a_template_that_rewrites_earlier_turns_gives_a_row_for_each(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = FORGETFUL
    first, second = encode(Example(1, messages=CHAT), tokenizer, max_length=256)
    assert learned(first, tokenizer) == "(thinks) Four.<|end|>"
    assert learned(second, tokenizer) == "(thinks) It is six.<|end|>"
    assert "(thinks) Four." not in tokenizer.decode(second.tokens)


def test_what_is_too_long_is_cut(tokenizer: PreTrainedTokenizerBase) -> None:
    (row,) = encode(Example(1, messages=CHAT), tokenizer, max_length=40)
    assert len(row.tokens) == len(row.labels) <= 40
    assert encode(Example(1, messages=CHAT), tokenizer, max_length=5) == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is not JSON"),
        ("[]", "is neither a chat nor a text"),
        ({"prompt": "x"}, "is neither a chat nor a text"),
        ({"text": "x", "messages": []}, "is neither a chat nor a text"),
        ({"text": ""}, "text must be a string that is not empty"),
        ({"text": 3}, "text must be a string"),
        ({"messages": []}, "at least one message"),
        ({"messages": ["hello"]}, r"messages\[0\] must be an object"),
        ({"messages": [{"role": "bot", "content": "x"}]}, r"messages\[0\]\.role must be one of .*, not 'bot'"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]\.content must be a string"),
        ({"messages": CHAT[:2]}, "no turn of the assistant"),
    ],
)
def test_a_bad_line_is_named(line: Any, reason: str, tmp_path: Path) -> None:
    file = write(tmp_path, {"text": "fine"}, line)
    with pytest.raises(ConfigError, match=rf"data\.jsonl, line 2: .*{reason}"):
        read_examples(file)


def test_a_file_without_examples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no examples"):
        read_examples(write(tmp_path, "", ""))
    with pytest.raises(ConfigError, match=r"none\.jsonl: can't be read"):
        read_examples(tmp_path / "none.jsonl")


def test_a_chat_needs_a_template(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="line 7 is a chat, but the model's tokenizer has no chat template"):
        encode(Example(7, messages=CHAT), tokenizer, max_length=64)


def test_a_chat_that_the_template_refuses_is_named(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = "{{ raise_exception('no system messages') }}"
    with pytest.raises(ConfigError, match="line 7: the chat template refuses it: no system messages"):
        encode(Example(7, messages=CHAT), tokenizer, max_length=64)
