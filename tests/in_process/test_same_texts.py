"""In bfloat16 a text has the same tokens with drafts and without, alone, in company and with too little memory."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from actors.coordinator.request import Endpoint, Request
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from decoding.beams.options import BeamOptions
from decoding.sampling.params import SamplingParams
from engine.loading.checkpoint import ModelSpec
from engine.loading.runners import load_runner
from engine.model.runner import Runner

PLAIN = Endpoint("plain", "target", None, 0, decode=str)
DRAFTED = Endpoint("drafted", "target", "drafter", 4, decode=str)
LENGTH, COMPANY = 32, 8  # tokens of an answer, requests at once
ROLES: dict[str, Role] = {"target": "target", "drafter": "drafter"}
SETTINGS: list[dict[str, Any]] = [
    *({"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 0.7}),
    *({"temperature": 0.0}, {"temperature": 1.0, "typical_p": 0.9}, {"temperature": 1.0, "min_p": 0.05, "top_k": 40}),
    {"temperature": 0.7, "repetition_penalty": 1.2},
]


def load(name: str, **options: Any) -> Runner:
    spec = ModelSpec(
        name=name, path=f"models/{name}", dtype="bfloat16", device="cpu", threads=1, max_length=192, prefill_chunk=64
    )
    return load_runner(replace(spec, slots=COMPANY, **options))


@pytest.fixture(scope="module")
def runners() -> dict[str, Runner]:
    return {name: load(name) for name in ROLES}


@contextmanager
def running(runners: dict[str, Runner]) -> Iterator[Engine]:
    with Engine({name: (ROLES[name], runners[name]) for name in ROLES}, LoopOptions(adaptive=False)) as engine:
        yield engine


def requests(endpoint: Endpoint) -> list[Request]:
    """Return requests of each setting, the last of which begin alike."""
    tokenizer = AutoTokenizer.from_pretrained("models/target")
    lines = Path("models/heldout.jsonl").read_text(encoding="utf-8").splitlines()
    prompts: list[list[int]] = [tokenizer(json.loads(line)["prompt"]).input_ids for line in lines[: COMPANY + 1]]
    prompts += [[*prompts[-1][:32], *prompt[:20]] for prompt in prompts[: COMPANY - 1]]
    return [
        Request(endpoint, prompt, SamplingParams(max_tokens=LENGTH, seed=seed, **SETTINGS[seed % len(SETTINGS)]))
        for seed, prompt in enumerate(prompts)
    ]


def texts(engine: Engine, asked: Sequence[Request]) -> list[list[int]]:
    return [[token for delta in answer for token in delta.token_ids] for answer in engine.generate(asked)]


@pytest.fixture(scope="module")
def alone(runners: dict[str, Runner]) -> list[list[int]]:
    with running(runners) as engine:
        return [texts(engine, [request])[0] for request in requests(PLAIN)]


@pytest.mark.parametrize(("endpoint", "company"), [(DRAFTED, 1), (PLAIN, COMPANY), (DRAFTED, COMPANY)])
def test_drafts_and_company_change_no_text(
    endpoint: Endpoint, company: int, runners: dict[str, Runner], alone: list[list[int]]
) -> None:
    asked = requests(endpoint)
    with running(runners) as engine:
        groups = [asked[start : start + company] for start in range(0, len(asked), company)]
        assert [text for group in groups for text in texts(engine, group)] == alone


def test_preempted_rows_write_the_same_text(runners: dict[str, Runner]) -> None:
    """All eight fit at first, but have five pages each in the end, of eighteen."""
    asked = [replace_prompt(request, request.prompt[:12]) for request in requests(DRAFTED)[:COMPANY]]
    with running(runners) as engine:
        alone = [texts(engine, [request])[0] for request in asked]
    with running({name: load(name, kv_tokens=288) for name in ROLES}) as engine:
        assert texts(engine, asked) == alone
        assert engine.loops["target"].times.preemptions > 0


def replace_prompt(request: Request, prompt: Sequence[int]) -> Request:
    return Request(request.endpoint, prompt, replace(request.params, max_tokens=56))


def test_beams_in_company_are_those_of_a_search_alone(runners: dict[str, Runner]) -> None:
    search = SamplingParams(max_tokens=LENGTH, temperature=0)
    asked = [Request(PLAIN, request.prompt, search, beams=BeamOptions(num_beams=3)) for request in requests(PLAIN)[:2]]
    with running(runners) as engine:
        alone = [_beams(engine, [request])[0] for request in asked]
        assert _beams(engine, [asked[0], *requests(DRAFTED)[2:4], asked[1]])[:: len(asked) + 1] == alone


def _beams(engine: Engine, asked: Sequence[Request]) -> list[list[list[int]]]:
    return [
        [[token for delta in answer for token in delta.token_ids], *(other.token_ids for other in answer[-1].others)]
        for answer in engine.generate(asked)
    ]
