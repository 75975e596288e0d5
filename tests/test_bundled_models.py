"""Properties of the bundled models that other code and tests rely on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from benchmarks.tiny.model import load

MODELS = Path("models")
NAMES = ("target", "drafter", "member")
MAX_BYTES = 80_000_000
TEXTS = (
    "def f(x):\n    return x\n",
    "  two  spaces\ttabs\r\nand \x00 control \x7f characters",
    "naïve — 漢字, עברית, 👩‍👩‍👧, \U0010ffff",
    "".join(map(chr, range(0x20, 0x250))),
)


@pytest.fixture(params=NAMES)
def folder(request: pytest.FixtureRequest) -> Path:
    return MODELS / str(request.param)


def test_all_weights_fit() -> None:
    assert sum(path.stat().st_size for path in MODELS.rglob("*.safetensors")) <= MAX_BYTES


def test_shapes_are_multiples_of_64(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(model, LlamaForCausalLM)
    assert model.dtype == torch.bfloat16
    assert model.config.head_dim == 64
    assert model.config.max_position_embeddings >= 1024
    assert all(size % 64 == 0 for parameter in model.parameters() for size in parameter.shape)


@torch.no_grad()
def test_the_whole_context_works(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = model(torch.arange(1024)[None] % 2048).logits
    assert logits.shape == (1, 1024, 2048)
    assert logits.isfinite().all()


def test_every_text_comes_back(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 2048
    for text in TEXTS:
        tokens = tokenizer(text).input_ids
        assert tokens[0] == tokenizer.bos_token_id
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_the_folders_share_one_tokenizer() -> None:
    first, *others = ((MODELS / name / "tokenizer.json").read_bytes() for name in NAMES)
    assert all(other == first for other in others)


def test_special_tokens_agree(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert len(set(expected)) == 3
    for config in (model.config, model.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == expected


def test_the_chat_template_renders(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "What does dedent do?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|begin|><|system|>Be short.<|end|><|user|>What does dedent do?<|end|><|assistant|>"
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    assert [tokens[0], tokens.count(tokenizer.eos_token_id)] == [tokenizer.bos_token_id, 2]


@torch.no_grad()
def test_the_target_ends_its_answers() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    model: Any = load(MODELS / "target")
    messages = [{"role": "user", "content": "What does close in the module socket do?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    answer = model.generate(tokens, max_new_tokens=400, do_sample=False)
    assert tokenizer.eos_token_id in answer[0, tokens.shape[1] :]


def test_held_out_prompts_are_short_and_many() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    lines = (MODELS / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    assert len(prompts) >= 320
    assert all(24 <= len(tokenizer(prompt).input_ids) <= 120 for prompt in prompts)
