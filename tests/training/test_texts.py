"""Chats that a model writes: the same at every run, whole shards, resumed where a run ended."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from actors.replica.in_process import Engine
from decoding.errors import ConfigError
from engine.loading.checkpoint import ModelSpec
from engine.loading.runners import load_runner
from engine.loading.settings import load_tokenizer
from training.texts import CANDIDATES, CHATS_PER_SHARD, ChatTemplate, ChatWriter, read_texts, shard_files, write_texts

TARGET = "models/target"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(TARGET)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    spec = ModelSpec(name="target", path=TARGET, dtype="float32", device="cpu", max_length=512, threads=1)
    with Engine({"target": ("target", load_runner(spec))}) as engine:
        yield engine


def make_writer(engine: Engine, tokenizer: PreTrainedTokenizerBase, *questions: str) -> ChatWriter:
    assert isinstance(tokenizer.eos_token_id, int)
    ends = [tokenizer.eos_token_id]
    template = ChatTemplate(tokenizer)
    return ChatWriter(engine=engine, template=template, ends=ends, answer_tokens=12, questions=questions)


def test_a_prompt_is_what_the_chat_template_writes(tokenizer: PreTrainedTokenizerBase) -> None:
    template = ChatTemplate(tokenizer)
    message = [{"role": "user", "content": "Why?"}]
    whole = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    assert template.prompt("Why?") == whole
    assert whole[: len(template.before_question())] == template.before_question()


def test_an_interrupted_run_goes_on_and_writes_the_same(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    writer = make_writer(engine, tokenizer, "Why?", "What is a tuple?", "Who are you?")
    tokens = 2 * CHATS_PER_SHARD * 12
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    *_, written = write_texts(writer, whole, tokens=tokens, streams=8)
    assert written >= tokens
    interrupted = write_texts(writer, parts, tokens=tokens, streams=3)
    next(interrupted)
    interrupted.close()
    assert len(shard_files(parts)) == 1
    assert [*write_texts(writer, parts, tokens=tokens, streams=5)][-1] == written
    assert [shard.read_bytes() for shard in shard_files(parts)] == [shard.read_bytes() for shard in shard_files(whole)]
    training, held_out = read_texts(whole)
    for chat in training:
        assert chat.candidates.shape == chat.logprobs.shape == (len(chat.tokens), CANDIDATES)
        assert (chat.logprobs.exp().sum(-1) < 1.01).all()
        if chat.temperature == 0:
            assert chat.candidates[:, 0].tolist() == chat.tokens
    assert len(held_out) == -(-(len(training) + len(held_out)) // 20)


def test_the_model_asks_questions_itself(engine: Engine, tokenizer: PreTrainedTokenizerBase) -> None:
    chats = [make_writer(engine, tokenizer).write(number) for number in range(3)]
    template = ChatTemplate(tokenizer)
    before = template.before_question()
    assert all(list(chat.prompt[: len(before)]) == before for chat in chats)
    assert len({tuple(chat.prompt) for chat in chats}) == len(chats)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "00001.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"00000\.jsonl is missing"):
        shard_files(tmp_path)
