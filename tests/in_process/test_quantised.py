"""Quantised targets and drafters: the text is that of `generate` on the same model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from transformers import PreTrainedModel

from actors.coordinator.request import Delta, Endpoint, Request
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from cli import shell
from decoding.errors import ConfigError
from decoding.sampling.params import SamplingParams
from deployments.configuration.paths import ROOT
from engine.kernels.quantized_weight import Quantization
from engine.loading.checkpoint import ModelSpec, load_model
from engine.loading.memory_budget import weights_on_devices
from engine.loading.quantization import weight_bytes
from engine.loading.runners import load_runner
from engine.loading.settings import load_tokenizer
from engine.model.runner import Runner
from tests.support.models import tiny_model
from tests.support.reference import generate

KINDS: tuple[Quantization, ...] = ("nf4", "int4", "int8")
NEW_TOKENS = 16
CLOSE = 1e-3  # between logits whose standard deviation is 3.7: rounding decides then


def spec(path: Path | str, **options: Any) -> ModelSpec:
    """Return the spec of a float32 model, so that only quantisation rounds."""
    return ModelSpec(
        **{"name": "m", "path": str(path), "dtype": "float32", "device": "cpu", "max_length": 128, **options}
    )


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(str(ROOT / "models/target"))
    lines = (ROOT / "models/heldout.jsonl").read_text(encoding="utf-8").splitlines()[:6]
    return [tokenizer.encode(json.loads(line)["prompt"])[:30] for line in lines]


def serve(target: ModelSpec, drafter: ModelSpec | None, prompts: list[list[int]]) -> list[list[Delta]]:
    endpoint = Endpoint("e", "target", "drafter" if drafter else None, 4, lambda tokens: "")
    replicas: dict[str, tuple[Role, Runner]] = {"target": ("target", load_runner(target))}
    if drafter is not None:
        replicas["drafter"] = ("drafter", load_runner(drafter))
    with Engine(replicas) as engine:
        return engine.generate([Request(endpoint, prompt, params()) for prompt in prompts])


def params() -> SamplingParams:
    return SamplingParams(max_tokens=NEW_TOKENS, temperature=0)


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@torch.no_grad()
def gap(model: PreTrainedModel, text: list[int]) -> float:
    """Return the difference between the two best logits after the text."""
    best, second = model(torch.tensor([text])).logits[0, -1].topk(2).values.tolist()
    return best - second


@torch.no_grad()
def best_tokens(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> Tensor:
    """Return the model's best token in place of each token of an answer, [N]."""
    logits: Tensor = model(torch.tensor([[*prompt, *answer[:-1]]])).logits
    return logits[0, len(prompt) - 1 :].argmax(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_target_writes_what_generate_writes(kind: Quantization, prompts: list[list[int]]) -> None:
    """A text may differ from the reference only where two logits are close."""
    target = spec(ROOT / "models/target", quantization=kind)
    answers = serve(target, spec(ROOT / "models/drafter"), prompts)
    alone = load_model(target)
    expected = generate(alone, prompts, [params()] * len(prompts))
    differing = 0
    for prompt, answer, reference in zip(prompts, map(tokens, answers), expected, strict=True):
        if answer != reference:
            position = next(i for i, pair in enumerate(zip(answer, reference, strict=True)) if pair[0] != pair[1])
            assert gap(alone, [*prompt, *reference[:position]]) < CLOSE
            differing += 1
    assert differing <= 1


def test_rounded_activations_depend_on_neither_drafts_nor_company(prompts: list[list[int]]) -> None:
    target = spec(ROOT / "models/target", quantization="int4", activations="int8")
    together = serve(target, spec(ROOT / "models/drafter", quantization="int8", activations="int8"), prompts)
    alone = [serve(target, None, [prompt])[0] for prompt in prompts[:2]]
    assert list(map(tokens, together[:2])) == list(map(tokens, alone))


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_copy_drafts_for_its_target(kind: Quantization, prompts: list[list[int]]) -> None:
    """How many drafts are verified depends on timing; whether they are right does not."""
    target, copy = spec(ROOT / "models/target"), spec(ROOT / "models/target", quantization=kind)
    alone = load_model(target)
    answers = serve(target, copy, prompts)
    expected = generate(alone, prompts, [params()] * len(prompts))
    assert list(map(tokens, answers)) == expected
    drafter = load_model(copy)
    drafted = [best_tokens(drafter, prompt, answer) for prompt, answer in zip(prompts, expected, strict=True)]
    assert (torch.cat(drafted) == torch.tensor(expected).flatten()).float().mean() > 0.8


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_what_was_foretold(kind: Quantization) -> None:
    folder = ROOT / "models/target"
    full, small = load_model(spec(folder)), load_model(spec(folder, quantization=kind))
    used = sum(weights_on_devices(small).values())
    assert used < 0.45 * sum(weights_on_devices(full).values())
    predicted = weight_bytes(full, torch.float32, kind)
    assert used == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize("kind", ["int4", "nf4"])
def test_a_folder_of_quantised_weights_is_served_as_it_is(
    kind: Quantization, tmp_path: Path, prompts: list[list[int]]
) -> None:
    folder = tmp_path / "copy"
    arguments = ["quantize", str(ROOT / "models/target"), "--to", kind, "--output", str(folder)]
    result = CliRunner().invoke(shell.main, arguments)
    assert f"consort serve {folder}" in result.output
    assert load_tokenizer(str(folder)).get_vocab() == load_tokenizer(str(ROOT / "models/target")).get_vocab()
    expected = serve(spec(ROOT / "models/target", quantization=kind), None, prompts)
    assert list(map(tokens, serve(spec(folder), None, prompts))) == list(map(tokens, expected))
    assert f"--output {folder}: is there already" in str(CliRunner().invoke(shell.main, arguments).output)


def test_layers_without_whole_groups_stay_as_they_are(tmp_path: Path) -> None:
    """Inputs are 64, 96 or 40."""
    tiny_model("llama", hidden_size=64, head_dim=10, intermediate_size=96).save_pretrained(tmp_path)
    layer = load_model(spec(tmp_path, quantization="nf4")).get_submodule("model.layers.0")
    groups = {name: module.quantized.group for name, module in layer.named_modules() if hasattr(module, "quantized")}
    assert (groups["self_attn.q_proj"], groups["mlp.down_proj"]) == (64, 32)
    assert type(layer.get_submodule("self_attn.o_proj")) is nn.Linear


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_such_layers_is_refused(kind: Quantization, tmp_path: Path) -> None:
    tiny_model("llama", hidden_size=40, head_dim=10, intermediate_size=40).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=rf"models\.m\.quantization: {kind} needs linear layers whose inputs are a mul"
    ):
        load_model(spec(tmp_path, quantization=kind))


def test_what_is_quantised_already_is_not_quantised_again(tmp_path: Path) -> None:
    load_model(spec(ROOT / "models/target", quantization="nf4")).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"models\.m\.quantization: the checkpoint is quantised already"):
        load_model(spec(tmp_path, quantization="int8"))
    layer: Any = load_model(spec(tmp_path)).get_submodule("model.layers.0.mlp.up_proj")
    assert layer.quantized.table is not None
