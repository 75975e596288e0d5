"""Answers to shortened prompts that keep their positions: the target's own, whatever drafts and moves do.

Compared with the bundled target's plain forward over the whole text at these positions, in float32.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from actors.coordinator.request import Endpoint, Request
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from actors.verifier.rows import TargetRow
from actors.wire.messages import Admit
from decoding.drafts.options import NgramOptions
from decoding.prompt_positions import PromptPositions
from decoding.sampling.params import SamplingParams
from engine.model.runner import Runner

MODELS = Path("models")
TOKENS = 10  # of each answer
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {
        name: AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32).eval()
        for name in ("target", "drafter")
    }


@pytest.fixture(scope="module")
def prompts() -> list[tuple[list[int], PromptPositions]]:
    """Return the chunks that are left of held-out prompts: every second one of 6 tokens, and the end."""
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    lines = (MODELS / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:3]
    shortened = []
    for line in lines:
        whole = tokenizer(json.loads(line)["prompt"]).input_ids * 3
        kept = [i for i in range(len(whole)) if i // 6 % 2 == 0 or i >= len(whole) - 4]
        shortened.append(([whole[i] for i in kept], PromptPositions(kept, len(whole))))
    return shortened


@torch.no_grad()
def write(model: PreTrainedModel, prompt: Sequence[int], positions: PromptPositions, count: int) -> list[int]:
    """Return the greedy answer, by a forward over the whole text for each token. The mask keeps it one text."""
    tokens, ids = list(prompt), list(positions.kept)
    for step in range(count):
        mask = torch.ones(1, len(tokens), dtype=torch.int64)
        logits = model(torch.tensor([tokens]), position_ids=torch.tensor([ids]), attention_mask=mask).logits
        tokens.append(int(logits[0, -1].argmax()))
        ids.append(positions.length + step)
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def engine(models: dict[str, PreTrainedModel]) -> Iterator[Engine]:
    replicas: dict[str, tuple[Role, Runner]] = {
        "target": ("target", Runner(models["target"], slots=4, max_length=256, max_query=16)),
        "drafter": ("drafter", Runner(models["drafter"], slots=4, max_length=256, max_query=16)),
    }
    with Engine(replicas, LoopOptions(prefill_chunk=16, adaptive=False)) as engine:
        yield engine
        engine.check()


@pytest.mark.parametrize("drafter", [None, "drafter"])
def test_answers_are_those_at_the_original_positions(
    engine: Engine,
    models: dict[str, PreTrainedModel],
    prompts: list[tuple[list[int], PromptPositions]],
    drafter: str | None,
) -> None:
    """Whole prompts of the same tokens run beside them, and leave their pages behind."""
    ngram = None if drafter is None else NgramOptions(longest=3)
    endpoint = Endpoint("test", "target", drafter, 4, decode=lambda tokens: "", ngram=ngram)
    params = SamplingParams(max_tokens=TOKENS, temperature=0)
    shortened = [Request(endpoint, prompt, params, prompt_positions=kept) for prompt, kept in prompts]
    whole = [Request(endpoint, prompt, params) for prompt, _ in prompts]
    answers = engine.generate([*whole, *shortened])
    texts = [[token for delta in answer for token in delta.token_ids] for answer in answers[len(whole) :]]
    assert texts == [write(models["target"], prompt, kept, TOKENS) for prompt, kept in prompts]
    again = engine.generate([Request(endpoint, prompt, params) for prompt, _ in prompts])
    expected = [[token for delta in answer for token in delta.token_ids] for answer in answers[: len(whole)]]
    assert [[token for delta in answer for token in delta.token_ids] for answer in again] == expected


def test_a_row_that_moves_goes_on_at_the_same_positions(
    models: dict[str, PreTrainedModel], prompts: list[tuple[list[int], PromptPositions]]
) -> None:
    prompt, kept = prompts[0]
    answer = write(models["target"], prompt, kept, 6)
    admit = Admit(1, [*prompt, *answer[:5]], len(prompt), SamplingParams(max_tokens=9), 0, False, prompt_positions=kept)
    row = TargetRow("coordinator", admit, acceptance=0.5)
    row.slot = 0
    runner = Runner(models["target"], slots=1, max_length=256, max_query=256)
    assert int(runner.logits(row.inputs(256))[-1].argmax()) == answer[5]
    other = TargetRow("coordinator", Admit(2, admit.tokens, len(prompt), admit.params, 0, False), acceptance=0.5)
    assert row.cache_salt != other.cache_salt
