"""The texts of each format that weights are stored in or rounded to: 20 prompts, 64 tokens each."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from actors.coordinator.request import Endpoint, Request
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from decoding.drafts.options import NgramOptions
from decoding.sampling.params import SamplingParams
from engine.kernels.native import library
from engine.kernels.quantized_weight import Quantization
from engine.layers.quantized_linear import QuantizedModule
from engine.loading.checkpoint import ModelSpec, load_model
from engine.loading.runners import load_runner
from engine.model.runner import Runner
from tests.support.gguf_files import interleave, write_gguf
from tests.support.quantized_files import BITSANDBYTES, KINDS, save_by_bitsandbytes, save_rounded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ORIGINAL = "models/target"
PROMPTS, LENGTH, COMPANY = 20, 64, 16
CLOSE = 1e-3  # between the two best logits: rounding decides then
PLAIN = Endpoint("plain", "target", None, 0, decode=str)
LOOKED_UP = Endpoint("ngram", "target", None, 4, decode=str, ngram=NgramOptions())
LAYOUTS = {kind.name: kind for kind in KINDS}
BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # that the gguf package writes
ROUNDED: Mapping[str, Quantization] = {"int4": "int4", "int8": "int8", "nf4": "nf4"}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(ORIGINAL)
    lines = Path("models/heldout.jsonl").read_text(encoding="utf-8").splitlines()[:PROMPTS]
    return [tokenizer(json.loads(line)["prompt"]).input_ids[:48] for line in lines]


def save(name: str, folder: Path) -> tuple[ModelSpec, PreTrainedModel]:
    """Return the spec of the model in a format, and the model with the same weights as plain numbers."""
    spec = ModelSpec(name="m", path=str(folder), dtype="float32", device="cpu", threads=1, max_length=192)
    loader: Any = AutoModelForCausalLM
    original = loader.from_pretrained(ORIGINAL, dtype=torch.float32).eval()
    if name in BITSANDBYTES:
        return spec, save_by_bitsandbytes(ORIGINAL, name, folder)
    if name in LAYOUTS:
        return spec, save_rounded(original, LAYOUTS[name], folder)
    if name in BLOCKS:
        (folder / "tokenizer.json").write_bytes((Path(ORIGINAL) / "tokenizer.json").read_bytes())
        matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "token_embd")
        kinds = dict.fromkeys((f"{matrix}.weight" for matrix in matrices), gguf.GGMLQuantizationType[name])
        write_gguf(folder / "m.gguf", original, "llama", interleave, {}, quantized=kinds)
        spec = replace(spec, path=str(folder / "m.gguf"))
        return spec, load_model(replace(spec, unpacked=True))  # by the gguf package
    spec = replace(spec, path=ORIGINAL, quantization=ROUNDED[name])
    with torch.no_grad():
        for path, layer in load_model(spec).named_modules():
            if isinstance(layer, QuantizedModule):
                original.get_parameter(f"{path}.weight").copy_(layer.quantized.dequantized())
    return spec, original


@torch.no_grad()
def write(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    plain: Any = model
    options: dict[str, Any] = {"max_new_tokens": LENGTH, "eos_token_id": None, "pad_token_id": 0}
    text: Tensor = plain.generate(torch.tensor([prompt]), do_sample=False, **options)
    return text[0, len(prompt) :].tolist()


@torch.no_grad()
def gap(model: PreTrainedModel, text: list[int]) -> float:
    """Return the difference between the two best logits after a text."""
    best, second = model(torch.tensor([text])).logits[0, -1].topk(2).values.tolist()
    return best - second


def load(spec: ModelSpec, **options: Any) -> Runner:
    return load_runner(replace(spec, slots=COMPANY, prefill_chunk=64, **options))


def answers(runner: Runner, groups: Sequence[Sequence[Request]]) -> list[list[int]]:
    """Return the texts of requests, of which those of a group run together."""
    with Engine({"target": ("target", runner)}, LoopOptions(adaptive=False)) as engine:
        results = [answer for group in groups for answer in engine.generate(group)]
    return [[token for delta in answer for token in delta.token_ids] for answer in results]


def requests(endpoint: Endpoint, prompts: Sequence[list[int]], temperature: float) -> list[Request]:
    params = SamplingParams(temperature=temperature, max_tokens=LENGTH)
    return [Request(endpoint, prompt, replace(params, seed=seed)) for seed, prompt in enumerate(prompts)]


@pytest.mark.parametrize("name", [*LAYOUTS, *BLOCKS, *BITSANDBYTES, *ROUNDED])
def test_texts_are_those_of_the_plain_weights(
    name: str, tmp_path: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 they are `generate`'s. In bfloat16 drafts, company and what a row has lost change no token."""
    library()  # before its cache is another
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spec, plain = save(name, tmp_path)
    texts = answers(load(spec), [requests(PLAIN, prompts, 0.0)])
    ties = 0
    for prompt, text in zip(prompts, texts, strict=True):
        expected = write(plain, prompt)
        if text != expected:
            same = next(i for i, (left, right) in enumerate(zip(text, expected, strict=True)) if left != right)
            assert gap(plain, [*prompt, *expected[:same]]) < CLOSE
            ties += 1
    assert ties <= 1
    narrow, small = (load(spec, dtype="bfloat16", **options) for options in ({}, {"kv_tokens": 320}))
    for temperature in (0.0, 0.7):
        asked = requests(PLAIN, prompts[:COMPANY], temperature)
        alone = answers(narrow, [[request] for request in asked])
        assert answers(narrow, [asked]) == alone
        assert answers(narrow, [requests(LOOKED_UP, prompts[:COMPANY], temperature)]) == alone
        assert answers(small, [asked]) == alone  # rows lose their place, and are computed again
