"""A target drafts for itself as its own forward and peft's say: the text without the adapter, the noise with it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.drafts.choices import RANKS
from decoding.errors import ConfigError
from decoding.sampling.params import SamplingParams
from engine.heads.proposer import DraftStart, Reading
from engine.heads.self_drafting import SelfProposer, noise_tokens
from engine.heads.spec import HeadsSpec
from engine.loading.checkpoint import ModelSpec
from engine.loading.runners import load_with_heads
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.families.configurations import make_config, make_model
from tests.support.adapters import save_adapter
from tests.support.models import VOCAB, tiny_model

GREEDY = SamplingParams(max_tokens=9, temperature=0)
TEXTS = [[5, 9, 14, 3, 27, 8, 6, 6, 1, 2], [7, 1, 2], [11, 4, 9, 30, 12]]


def load(folder: Path, path: str = "draft", **options: Any) -> tuple[SelfProposer, Runner]:
    spec = ModelSpec(name="target", path=str(folder / "target"), device="cpu", threads=1, slots=8, max_length=64)
    own = {"min_acceptance": 0.0} | options
    heads = HeadsSpec(name="endpoints.e.heads", path=str(folder / path), kind="self", **own)
    runner, _, proposer = load_with_heads(spec, heads)
    assert isinstance(proposer, SelfProposer)
    return proposer, runner


def set_mask(folder: Path, token: int) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"mask_token_id": token}))


def stored(folder: Path, name: str, **config: Any) -> Any:
    """Write a target and an adapter; return peft's model of both."""
    tiny_model(name).save_pretrained(folder / "target")
    return save_adapter(folder / "draft", tiny_model(name), 1, **config)


def expected(model: Any, text: list[int], noise: list[int]) -> Tensor:
    """Return peft's logits after the text, without its adapter, and after the noise that follows, with it."""
    with model.disable_adapter():
        before = model(input_ids=torch.tensor([text]), use_cache=True)
    after = model(input_ids=torch.tensor([noise]), past_key_values=before.past_key_values, use_cache=True)
    logits: Tensor = torch.cat([before.logits[0, -1:], after.logits[0]])
    return logits


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "mistral-window", "gemma2", "gpt2", "mixtral", "deepseek"])
@pytest.mark.parametrize("mask", [None, VOCAB - 2], ids=["noise", "mask"])
@torch.inference_mode()
def test_logits_are_those_of_peft(tmp_path: Path, name: str, mask: int | None) -> None:
    layers = {"target_modules": ["q_proj", "o_proj"]} if name in ("mixtral", "deepseek") else {}
    model = stored(tmp_path, name, **layers)
    if mask is not None:
        set_mask(tmp_path / "draft", mask)
    proposer, runner = load(tmp_path)
    runner.logits([RowInput(slot, 0, text[:-1]) for slot, text in enumerate(TEXTS)])
    assert runner.hidden is not None
    proposer.read([Reading(slot, 0, text[1:], [], None, text[0]) for slot, text in enumerate(TEXTS)], runner.hidden)
    starts = [DraftStart(slot, len(text), GREEDY) for slot, text in enumerate(TEXTS)]
    stand_ins = noise_tokens(mask, VOCAB)
    for length in (6, 2):
        logits = proposer.logits(starts, length).clone()
        choices = proposer.propose(starts, length, RANKS)
        for slot, text in enumerate(TEXTS):
            own = expected(model, text, stand_ins[len(text) : len(text) + length - 1])
            torch.testing.assert_close(logits[slot], own, rtol=1e-4, atol=2e-4)
            assert [choice.tokens[0] for choice in choices[slot]] == own.argmax(-1).tolist()


@torch.inference_mode()
def test_a_text_with_an_adapter_has_it_on_its_last_token(tmp_path: Path) -> None:
    """Neither that nor a draft changes what the target says of texts afterwards."""
    stored(tmp_path, "llama-gqa")
    save_adapter(tmp_path / "other", tiny_model("llama-gqa"), 2)
    spec = ModelSpec(
        name="target",
        path=str(tmp_path / "target"),
        device="cpu",
        threads=1,
        slots=8,
        max_length=64,
        adapters={"other": str(tmp_path / "other")},
    )
    heads = HeadsSpec(name="heads", path=str(tmp_path / "draft"), kind="self", min_acceptance=0.0)
    runner, _, proposer = load_with_heads(spec, heads)
    assert runner.lora is not None
    assert runner.hidden is not None
    assert len(runner.lora.versions) == 1  # the other's slot, and none that a request could take
    text = TEXTS[0]
    for adapter in (0, 1):
        plain = runner.logits([RowInput(2, 0, text, adapter=adapter)])[-1].clone()
        runner.logits([RowInput(0, 0, text[:-1], adapter=adapter)])
        proposer.read([Reading(0, 0, text[1:], [], None, text[0])], runner.hidden)
        logits = proposer.logits([DraftStart(0, len(text), GREEDY, adapter)], 4)  # type: ignore[attr-defined]
        torch.testing.assert_close(logits[0, 0], plain, rtol=1e-4, atol=1e-4)
        again = runner.logits([RowInput(0, len(text) - 1, text[-1:], adapter=adapter)])[0]
        assert torch.equal(again, runner.logits([RowInput(2, len(text) - 1, text[-1:], adapter=adapter)])[0])


def test_repositories_with_a_folder_for_the_adapter_are_read(tmp_path: Path) -> None:
    stored(tmp_path, "llama")
    (tmp_path / "repository").mkdir()
    (tmp_path / "draft").rename(tmp_path / "repository" / "adapter")
    assert load(tmp_path, "repository")[0].kind == "self"


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    stored(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"endpoints\.e\.heads: \d+% of the second draft tokens"):
        load(tmp_path, min_acceptance=1.0)
    with pytest.raises(ConfigError, match="drafts for itself reads its pages; remove the key"):
        load(tmp_path, layers=(1,))
    with pytest.raises(ConfigError, match=r"endpoints\.e\.heads\.path: .*has no adapter_config\.json"):
        load(tmp_path, "target")
    set_mask(tmp_path / "draft", VOCAB)
    with pytest.raises(ConfigError, match=f"mask_token_id is {VOCAB}, not one of its {VOCAB} tokens"):
        load(tmp_path)


def test_layers_that_carry_a_state_are_refused(tmp_path: Path) -> None:
    config = make_config("lfm2")
    make_model(config).save_pretrained(tmp_path / "target")
    save_adapter(tmp_path / "draft", make_model(config), 1, target_modules=["q_proj"])
    with pytest.raises(ConfigError, match="has layers that carry a state, which can't draft for themselves"):
        load(tmp_path)
