"""Requests of every kind to a fleet, and their transcripts."""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from actors.coordinator.request import Delta, Endpoint, Request
from benchmarks.models import HELD_OUT
from decoding.blending.params import BlendParams, EnsembleOptions
from decoding.drafts.options import NgramOptions
from decoding.sampling.params import SamplingParams, Structure
from engine.loading.settings import load_tokenizer
from evaluation.prompts import read_prompts
from tests.chaos.load import Case, Transcript

_INTEGERS = '{"type": "array", "items": {"type": "integer"}}'
# Parameters of requests by kind; prompts and seeds differ within a kind.
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "cold": {"temperature": 0.6, "top_p": 0.9, "top_k": 50},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_p": 0.02},
    "log-probabilities": {"temperature": 0.8, "logprobs": 3, "prompt_logprobs": 2},
    "stop string": {"temperature": 0.7, "stop": ("\n\n", "return")},
    "JSON": {"temperature": 0.8, "structure": Structure(kind="json", definition=_INTEGERS)},
    "plain": {"temperature": 1.0},
    "n-grams": {"temperature": 0.3},
    "ensemble": {"temperature": 0.7},
}


def make_cases(target: Path, count: int, new_tokens: int, *, seed: int) -> list[Case[Request]]:
    """Make requests of all kinds in turn, with random prompts and seeds."""
    tokenizer: Any = load_tokenizer(str(target))
    rng = random.Random(seed)
    endpoints = _endpoints(lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True))
    cases = []
    for index, text in enumerate(rng.sample(read_prompts(HELD_OUT), count)):
        kind = list(KINDS)[index % len(KINDS)]
        length = new_tokens if kind == "ensemble" else rng.choice([new_tokens, 2 * new_tokens, 4 * new_tokens])
        params = SamplingParams(
            max_tokens=length, eos_token_ids=(tokenizer.eos_token_id,), seed=rng.getrandbits(62), **KINDS[kind]
        )
        prompt = tokenizer(text)["input_ids"]
        request = Request(endpoints.get(kind, endpoints["pair"]), prompt, params, kind != "plain")
        cases.append(Case(kind, index, request))
    return cases


def _endpoints(decode: Callable[[list[int]], str]) -> dict[str, Endpoint]:
    pair = Endpoint("pair", "target", "drafter", 4, decode)
    blend = BlendParams(kind="mixture", weights=(0.6, 0.4))
    return {
        "pair": pair,
        "n-grams": replace(pair, ngram=NgramOptions()),
        "ensemble": replace(pair, members=["member"], ensemble=EnsembleOptions(blend=blend)),
    }


def fresh(request: Request) -> Request:
    """Return the same request under a new id."""
    return replace(request, request_id=random.getrandbits(63))


def collect(deltas: Iterable[Delta], answer: Transcript) -> None:
    """Write a transcript of an answer's deltas."""
    for delta in deltas:
        answer.note_arrival()
        answer.texts[0] += delta.text
        answer.tokens += delta.token_ids
        answer.logprobs += delta.logprobs
        answer.prompt_logprobs += delta.prompt_logprobs or ()
        answer.finish = delta.finish
