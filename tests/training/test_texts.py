"""Chats that a model writes: the same at every run, whole shards, resumed where a run ended."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from decoding.errors import ConfigError
from engine.loading.checkpoint import ModelSpec
from engine.loading.runners import load_runner
from engine.loading.settings import load_tokenizer
from training.chat_writer import ChatTemplate, ChatWriter
from training.features import StoredFeatures, write_features
from training.text_stage import write_texts
from training.texts import CANDIDATES, CHATS_PER_SHARD, Texts, shard_files

TARGET = "models/target"
LAYERS = (1, 3)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(TARGET)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = "{% for m in messages %}user: {{ m.content }}\nanswer: {% endfor %}"
    return tokenizer


def make_writer(tokenizer: PreTrainedTokenizerBase, *questions: str, streams: int = 8) -> ChatWriter:
    assert isinstance(tokenizer.eos_token_id, int)
    spec = ModelSpec(
        name="target", path=TARGET, dtype="float32", device="cpu", max_length=512, threads=1, slots=streams + 1
    )
    return ChatWriter(
        runner=load_runner(spec, hidden_layers=LAYERS),
        template=ChatTemplate(tokenizer),
        ends=[tokenizer.eos_token_id],
        answer_tokens=12,
        questions=questions,
    )


def test_a_prompt_is_what_the_chat_template_writes(tokenizer: PreTrainedTokenizerBase) -> None:
    template = ChatTemplate(tokenizer)
    message = [{"role": "user", "content": "Why?"}]
    whole = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    assert template.prompt("Why?") == whole
    assert whole[: len(template.before_question())] == template.before_question()


def test_an_interrupted_run_goes_on_and_writes_the_same(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    questions = "Why?", "What is a tuple?", "Who are you?"
    tokens = 2 * CHATS_PER_SHARD * 12
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    *_, written = write_texts(make_writer(tokenizer, *questions).write(0), whole, tokens=tokens)
    assert written >= tokens
    interrupted = write_texts(make_writer(tokenizer, *questions, streams=3).write(0), parts, tokens=tokens)
    next(interrupted)
    interrupted.close()
    assert len(shard_files(parts)) == 1
    others = make_writer(tokenizer, *questions, streams=5).write(CHATS_PER_SHARD)
    assert [*write_texts(others, parts, tokens=tokens)][-1] == written
    assert [shard.read_bytes() for shard in shard_files(parts)] == [shard.read_bytes() for shard in shard_files(whole)]
    texts = Texts(shard_files(whole))
    assert {tuple(chat.prompt) for chat in texts.held_out} == {tuple(ChatTemplate(tokenizer).prompt("Why?"))}
    assert len({tuple(chat.prompt) for chat in texts.training}) == 2


def test_the_model_asks_and_what_comes_with_its_answers_is_its_own(tokenizer: PreTrainedTokenizerBase) -> None:
    writer = make_writer(tokenizer, streams=4)
    template = ChatTemplate(tokenizer)
    before, after = template.before_question(), template.after_question()
    model: Any = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    written = list(islice(writer.write(0), 12))
    assert len({tuple(chat.prompt) for _, chat, _ in written}) == 12
    assert {chat.temperature for _, chat, _ in written} == {0.0, 0.7, 1.0}
    for _, chat, states in written:
        prompt, text = len(chat.prompt), [*chat.prompt, *chat.tokens]
        assert text[: len(before)] == before
        assert text[prompt - len(after) : prompt] == after
        assert len(chat.tokens) == 12 or chat.tokens[-1] == tokenizer.eos_token_id
        with torch.no_grad():
            output = model(torch.tensor([text]), output_hidden_states=True)
        assert states is not None
        expected = torch.cat([output.hidden_states[layers][0, :-1] for layers in LAYERS], dim=-1)
        torch.testing.assert_close(states, expected, atol=1e-3, rtol=1e-3)
        logprobs = output.logits[0, prompt - 1 : -1].log_softmax(-1)
        best = logprobs.topk(CANDIDATES)
        torch.testing.assert_close(chat.logprobs.float(), best.values, atol=1e-2, rtol=1e-2)
        drawn = logprobs.gather(-1, torch.tensor(chat.tokens)[:, None])
        assert (drawn > -12).all()
        if chat.temperature == 0:
            assert chat.tokens == chat.candidates[:, 0].tolist() == best.indices[:, 0].tolist()


def test_stored_states_are_close_to_what_they_were(tmp_path: Path) -> None:
    states = torch.randn(7, 12, generator=torch.Generator().manual_seed(0))
    states[2, 3], states[4] = 3000.0, 0.0
    write_features(tmp_path / "states.safetensors", states, 2)
    kept = StoredFeatures(tmp_path / "states.safetensors", 1, 6).read()
    assert kept.shape == (5, 12)
    torch.testing.assert_close(kept.float(), states[1:6], atol=1e-2, rtol=0.07)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "00001.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"00000\.jsonl is missing"):
        shard_files(tmp_path)
