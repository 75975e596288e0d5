"""Tokenizers of GGUF files give the tokens of those that the files were made from."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import GemmaTokenizer, LlamaTokenizer, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import generate_merges

from decoding.errors import ConfigError
from engine.loading.gguf.header import Header
from engine.loading.gguf.tokenizer import end_tokens, make_tokenizer

BUNDLED = Path(__file__).parents[4] / "models" / "drafter" / "tokenizer.json"
TEXTS = ["hello hell he", "  hello", "hé <turn>hello ", "<s>he\n\nllo", ""]
PIECES = ["he", "ll", "llo", "hello", "hell", "▁he", "▁hello", "▁▁", "▁", *"helo", "\n"]
SPECIAL = ["<unk>", "<s>", "</s>", "<turn>"]
TOKENS = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
SCORES = [0.0] * (len(TOKENS) - len(PIECES)) + [-float(number) for number in range(len(PIECES))]
CONTROL, BYTE, NORMAL, USER_DEFINED = 3, 6, 1, 4
KINDS = [CONTROL, CONTROL, CONTROL, USER_DEFINED, *[BYTE] * 256, *[NORMAL] * len(PIECES)]


def write(folder: Path, architecture: str, fields: dict[str, Any]) -> Header:
    writer = gguf.GGUFWriter(folder / "m.gguf", architecture)
    for key, value in fields.items():
        getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Header(folder / "m.gguf")


def read(folder: Path, architecture: str, fields: dict[str, Any]) -> PreTrainedTokenizerBase:
    return make_tokenizer(write(folder, architecture, fields))


SENTENCE_PIECE: dict[str, Any] = {
    "tokenizer_model": "llama",
    "token_list": TOKENS,
    "token_scores": SCORES,
    "token_types": KINDS,
    "unk_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize(
    ("architecture", "more", "kind"),
    [("llama", {}, LlamaTokenizer), ("gemma3", {"add_space_prefix": False}, GemmaTokenizer)],
)
def test_characters_are_merged_by_score(tmp_path: Path, architecture: str, more: dict[str, Any], kind: Any) -> None:
    vocabulary = {token: number for number, token in enumerate(TOKENS)}
    ranks = {token: -float(number) for number, token in enumerate(TOKENS)}  # also of the scores
    expected = kind(
        vocab=vocabulary,
        merges=generate_merges(vocabulary, ranks),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
    )
    expected.add_tokens(["<turn>"])
    tokenizer = read(tmp_path, architecture, SENTENCE_PIECE | more)
    for text in TEXTS:
        tokens = expected.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False) == tokens
        assert tokenizer.encode(text) == [1, *tokens]  # SentencePiece begins texts
        assert tokenizer.decode(tokens) == expected.decode(tokens)
        assert tokenizer.decode(tokens, skip_special_tokens=True) == expected.decode(tokens, skip_special_tokens=True)


def test_texts_begin_and_end_as_the_file_says(tmp_path: Path) -> None:
    tokenizer = read(tmp_path, "llama", SENTENCE_PIECE | {"add_bos_token": False, "add_eos_token": True})
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [*plain, 2]
    assert tokenizer.encode("hello", "he") == [*plain, 2, *tokenizer.encode("he")]


def byte_level(split: str) -> dict[str, Any]:
    bundled = json.loads(BUNDLED.read_text(encoding="utf-8"))["model"]
    return {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": split,
        "token_list": sorted(bundled["vocab"], key=bundled["vocab"].__getitem__),
        "token_merges": [" ".join(merge) for merge in bundled["merges"]],
        "bos_token_id": 0,
    }


@pytest.mark.parametrize(
    ("split", "pieces"),
    [
        ("llama-bpe", ["I", "'ll", "Ġsay", "Ġ", "123", "45", "ĠaB", "!Ċ"]),
        ("qwen2", ["I", "'ll", "Ġsay", "Ġ", *"12345", "ĠaB", "!Ċ"]),
        ("qwen35", ["I", "'ll", "Ġsay", "Ġ", *"12345", "ĠaB", "!Ċ"]),
        ("tekken", ["I", "'ll", "Ġsay", "Ġ", *"12345", "Ġa", "B", "!Ċ"]),
        ("gpt-4o", ["I'll", "Ġsay", "Ġ", "123", "45", "Ġa", "B", "!Ċ"]),
        ("deepseek-v3", ["I", "'ll", "Ġsay", "Ġ", "123", "45", "ĠaB", "!Ċ"]),
        ("gpt-2", ["I", "'ll", "Ġsay", "Ġ12345", "ĠaB", "!", "Ċ"]),
    ],
)
def test_texts_are_split_by_the_named_pattern(tmp_path: Path, split: str, pieces: list[str]) -> None:
    tokenizer: Any = read(tmp_path, "llama", byte_level(split))
    split_text = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("I'll say 12345 aB!\n")
    assert [piece for piece, _ in split_text] == pieces
    assert tokenizer.decode(tokenizer.encode("I'll say 12345 aB!\n")).endswith("I'll say 12345 aB!\n")


@pytest.mark.parametrize(("split", "begins"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_some_kinds_begin_texts_unless_the_file_says_otherwise(tmp_path: Path, split: str, begins: bool) -> None:
    plain = read(tmp_path, "llama", byte_level(split) | {"add_bos_token": False}).encode("a text")
    assert read(tmp_path, "llama", byte_level(split)).encode("a text") == [*[0] * begins, *plain]


@pytest.mark.parametrize(
    ("turn", "kind", "others", "expected"),
    [
        ("<|eot_id|>", CONTROL, [], [2, 3]),
        ("<|im_end|>", USER_DEFINED, [], [2, 3]),
        ("<|im_end|>", NORMAL, [], [2]),  # a piece of text
        ("<|end|>", CONTROL, [], [2, 3]),
        ("<|end|>", CONTROL, ["<|return|>"], [2]),  # GPT-OSS ends parts of a turn with it
        ("<turn>", CONTROL, [], [2]),
    ],
)
def test_turns_end_also_where_the_file_names_the_end_of_a_text_alone(
    tmp_path: Path, turn: str, kind: int, others: list[str], expected: list[int]
) -> None:
    kinds = [CONTROL, CONTROL, CONTROL, kind, *[CONTROL] * len(others)]
    fields = {"token_list": [*SPECIAL[:3], turn, *others], "token_types": kinds, "eos_token_id": 2}
    assert end_tokens(write(tmp_path, "llama", fields)) == expected


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.model is rwkv.*tokenizer\.json"):
        read(tmp_path, "llama", SENTENCE_PIECE | {"tokenizer_model": "rwkv"})
