"""`consort finetune`: what is learned of chats and texts, and runs that were interrupted."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from decoding.errors import ConfigError
from engine.loading.checkpoint import ModelSpec, load_model
from engine.loading.settings import load_tokenizer
from tests.support.models import tiny_model
from tests.support.trimmed import save_trimmed
from training import finetune as module
from training.finetune import IGNORED, Example, FinetuneOptions, Row, encode, finetune, read_examples

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


pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
MODEL = "models/drafter"
TEXT = "The quick brown fox jumps over the lazy dog and runs away."
EXAMPLES = [Example(line, text=TEXT) for line in range(1, 5)]


def options(folder: Path, **changes: object) -> FinetuneOptions:
    usual = FinetuneOptions(
        model=MODEL, output=folder / "out", work=folder / "work", rank=8, epochs=12, learning_rate=1e-2, batch_size=2,
        max_length=64, save_steps=4, threads=1, device="cpu",
    )  # fmt: skip
    return replace(usual, **changes)  # type: ignore[arg-type]


def spec(path: Path | str, **more: str) -> ModelSpec:
    return ModelSpec(name="m", path=str(path), dtype="float32", device="cpu", threads=1, **more)  # type: ignore[arg-type]


@torch.no_grad()
def loss(model: PreTrainedModel) -> float:
    ids = torch.tensor([load_tokenizer(MODEL)(TEXT)["input_ids"]])
    return float(model(input_ids=ids, labels=ids).loss)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuned")
    finetune(options(folder), EXAMPLES, lambda line: None)
    return folder / "out"


def test_a_text_is_learned_and_the_model_is_loaded(tuned: Path) -> None:
    assert loss(load_model(spec(tuned))) < 0.3 * loss(load_model(spec(MODEL)))
    assert load_tokenizer(str(tuned)).get_vocab() == load_tokenizer(MODEL).get_vocab()
    assert not (tuned.parent / "work").exists()
    assert load_file(tuned / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16


def test_an_interrupted_run_ends_like_any_other(tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after its second checkpoint and while it writes the third."""
    lines: list[str] = []

    class Killed(BaseException):
        pass

    def kill(line: str) -> None:
        lines.append(line)
        if line.startswith("step 10 "):
            raise Killed

    with pytest.raises(Killed):
        finetune(options(tmp_path), EXAMPLES, kill)
    assert not (tmp_path / "out").exists()
    half = tmp_path / "work" / "checkpoint-12"
    shutil.copytree(tmp_path / "work" / "checkpoint-8", half)
    (half / "trainer_state.json").write_text("{", encoding="utf-8")
    finetune(options(tmp_path), EXAMPLES, lines.append)
    assert "going on after step 8" in lines
    expected, actual = (load_file(folder / "model.safetensors") for folder in (tuned, tmp_path / "out"))
    assert all(torch.equal(weights, expected[name]) for name, weights in actual.items())


def test_the_adapter_alone_is_served_with_the_model(tuned: Path, tmp_path: Path) -> None:
    finetune(options(tmp_path, keep_adapter=True), EXAMPLES, lambda line: None)
    assert not (tmp_path / "out" / "model.safetensors").exists()
    adapted = load_model(spec(MODEL, adapter=str(tmp_path / "out")))
    assert loss(adapted) == pytest.approx(loss(load_model(spec(tuned))), abs=0.02)  # the other is in bfloat16


def test_checkpoints_of_other_settings_are_refused(tmp_path: Path) -> None:
    module._check_run(options(tmp_path, rank=2), [])
    module._check_run(options(tmp_path), [])  # the first has left no checkpoint
    (tmp_path / "work" / "checkpoint-4").mkdir()
    module._check_run(options(tmp_path, threads=2), [])
    with pytest.raises(ConfigError, match="checkpoints of other settings or data"):
        module._check_run(options(tmp_path, rank=4), [])
    (tmp_path / "work" / "finetune.json").unlink()
    with pytest.raises(ConfigError, match="checkpoints of other settings or data"):
        module._check_run(options(tmp_path), [])


def test_only_checkpoints_are_removed(tmp_path: Path) -> None:
    """The result, or anything else, may be in the same folder."""
    (tmp_path / "chats.jsonl").touch()
    finetune(options(tmp_path, work=tmp_path, epochs=1), EXAMPLES, lambda line: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chats.jsonl", "out"]


def test_an_output_that_exists_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        finetune(options(tmp_path), EXAMPLES, lambda line: None)


def test_a_drafter_with_a_trimmed_vocabulary_is_refused(tmp_path: Path) -> None:
    load_tokenizer(MODEL).save_pretrained(tmp_path / "model")
    save_trimmed(tiny_model("llama-gqa", vocab_size=2048), list(range(100)), tmp_path / "model")
    with pytest.raises(ConfigError, match="trimmed vocabulary"):
        finetune(options(tmp_path, model=str(tmp_path / "model")), EXAMPLES, lambda line: None)


def test_rows_without_anything_to_learn_are_refused(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "Yes."}]
    with pytest.raises(ConfigError, match="nothing is learned within 4 tokens"):
        finetune(options(tmp_path, max_length=4), [Example(1, messages=chat)], lambda line: None)
