"""PARD models of the published layout draft what their own forward over the text and mask tokens gives."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from actors.coordinator.request import Endpoint, Request
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from decoding.drafts.choices import RANKS
from decoding.errors import ConfigError
from decoding.sampling.params import SamplingParams
from engine.heads.loader import load_heads
from engine.heads.pard import PardProposer
from engine.heads.proposer import DraftStart, Reading
from engine.heads.spec import HeadsSpec
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.in_process.test_parameters import PROMPTS, SETTINGS, params, text, tokens
from tests.support.models import VOCAB, tiny_model

MASK, GREEDY = VOCAB - 2, SamplingParams(max_tokens=9, temperature=0)
TEXTS = [[5, 9, 14, 3, 27, 8, 6, 6, 1, 2], [7, 1, 2], [11, 4, 9, 30, 12]]


def stored(folder: Path, name: str, **settings: Any) -> PreTrainedModel:
    model = tiny_model(name)
    for key, value in settings.items():
        setattr(model.config, key, value)
    model.save_pretrained(folder)
    return model


def load(folder: Path, **options: Any) -> tuple[PardProposer, Runner]:
    target = tiny_model("llama-gqa")
    runner = Runner(target, slots=16, max_length=128, max_query=64)
    spec = HeadsSpec(name="endpoints.e.heads", path=str(folder), kind="pard", min_acceptance=0, **options)
    loaded = load_heads(spec, target)
    loaded.prepare(runner)
    proposer = loaded.proposer(runner)
    assert isinstance(proposer, PardProposer)
    return proposer, runner


def read(proposer: PardProposer, runner: Runner, extents: list[tuple[int, int, int]]) -> None:
    """Let the target run tokens first … end - 1 of some texts, and the model read them. extents: text, first, end."""
    runner.logits([RowInput(index, first, TEXTS[index][first:end]) for index, first, end in extents])
    assert runner.hidden is not None
    readings = [
        Reading(index, first, TEXTS[index][first + 1 : end + 1], [], None, TEXTS[index][first])
        for index, first, end in extents
    ]
    proposer.read(readings, runner.hidden)


@pytest.mark.parametrize("name", ["qwen3", "llama", "mistral-window"])
@torch.inference_mode()
def test_logits_are_those_of_the_models_own_forward(tmp_path: Path, name: str) -> None:
    model: Any = stored(tmp_path, name, pard_token=MASK)
    proposer, runner = load(tmp_path)
    assert proposer._run_few is not None
    read(proposer, runner, [(0, 0, 4), (1, 0, 2)])
    read(proposer, runner, [(0, 4, 9), (2, 0, 4)])
    starts = [DraftStart(index, len(TEXTS[index]), GREEDY) for index in range(3)]
    for length in (6, 2):
        logits = proposer.logits(starts, length)
        for index, given in enumerate(TEXTS):
            own = model(torch.tensor([[*given, *[MASK] * (length - 1)]])).logits[0, -length:]
            torch.testing.assert_close(logits[index], own, rtol=1e-4, atol=1e-4)
            choices = proposer.propose(starts, length, RANKS)[index]
            assert [choice.tokens[0] for choice in choices] == own.argmax(-1).tolist()


def test_texts_are_the_same_with_it(tmp_path: Path) -> None:
    """The target's own weights draft, so the first token of each draft is often right."""
    stored(tmp_path, "llama-gqa", pard_token=MASK)
    proposer, runner = load(tmp_path)
    answers = []
    for heads, kind in ((proposer, "pard"), (None, None)):
        where: Any = Endpoint("e", "target", None, 4, text, heads=kind)  # type: ignore[arg-type]
        pairs = zip(PROMPTS, SETTINGS * 2, strict=False)
        requests = [
            Request(where, prompt, params(setting, i), request_id=i) for i, (prompt, setting) in enumerate(pairs)
        ]
        with Engine(
            {"target": ("target", runner)}, own_options={"target": LoopOptions(adaptive=False, heads=heads)}
        ) as engine:
            answers.append(engine.generate(requests))
    assert tokens(answers[0]) == tokens(answers[1])
    assert sum(answer[-1].statistics.accepted_by.get("pard", 0) for answer in answers[0]) > 20


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({}, {}, "is no PARD model: pard_token in config.json is None"),
        ({"pard_token": VOCAB}, {}, f"pard_token in config.json is {VOCAB}"),
        ({"pard_token": MASK}, {"layers": (1,)}, "reads tokens and drafts a block; remove the key"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, settings: Any, options: Any, message: str) -> None:
    stored(tmp_path, "llama", **settings)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, **options)
