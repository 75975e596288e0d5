"""A soak test of seconds on tiny models: all slots in use, clients that disconnect, no leaks."""

import os

import torch

from actors.coordinator.request import Endpoint, Request
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from decoding.blending.params import BlendParams, EnsembleOptions
from decoding.drafts.options import NgramOptions
from decoding.sampling.params import SamplingParams
from engine.layers.faster_layers import use_faster_layers
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.chaos.load import Case
from tests.chaos.soak import Round, ServedModels, Soak, growth, with_beams, with_shared_prefixes
from tests.support.models import VOCAB, tiny_model

MODELS: dict[str, tuple[Role, str]] = {
    "target": ("target", "llama-gqa"),
    "member": ("target", "qwen3"),
    "drafter": ("drafter", "mistral-window"),
}


def spell(tokens: list[int]) -> str:
    """Decode so that the text of a prefix is a prefix of the text."""
    return "".join(f"{token} " for token in tokens)


def cases() -> list[Case[Request]]:
    pair = Endpoint("pair", "target", "drafter", 4, decode=spell)
    blend = EnsembleOptions(blend=BlendParams())
    endpoints = {
        "plain": Endpoint("plain", "target", None, 0, decode=spell),
        "drafted": pair,
        "n-grams": Endpoint("n-grams", "target", None, 4, decode=spell, ngram=NgramOptions()),
        "ensemble": Endpoint("blend", "target", "drafter", 4, decode=spell, members=["member"], ensemble=blend),
    }
    cases: list[Case[Request]] = []
    for kind, endpoint in endpoints.items():
        case = Case(kind, 0, Request(endpoint, [1, 2, 3], SamplingParams(max_tokens=24)))
        cases += with_shared_prefixes(case, count=8, most=70, vocab_size=VOCAB, seed=len(cases))
    return [*cases, *(with_beams(case, 2 + index % 2) for index, case in enumerate(cases[:6]))]


def packed_runner(family: str) -> Runner:
    model = tiny_model(family)
    use_faster_layers(model)
    runner = Runner(model, slots=4, max_length=128, max_query=64)
    runner.logits([RowInput(slot=0, start=0, tokens=[0])])
    return runner


def served(engine: Engine, runners: dict[str, Runner]) -> ServedModels:
    with torch.inference_mode():  # touch all pages, because later first uses would look like growth
        for runner in runners.values():
            for store in (store for stores in runner.cache.layers.values() for store in stores):
                store.fill_(0)

    def in_use() -> dict[str, int]:
        caches = {name: runner.cache for name, runner in runners.items()}
        return {name: cache.slots - cache.free or cache.allocator.used for name, cache in caches.items()}

    return ServedModels(engine.stream, runners["target"].cache.slots, in_use, {"engine": os.getpid()})


def test_a_process_that_grows_late_is_named() -> None:
    def some(drafter_mib: int) -> Round:
        return Round(1, 0, [], 1.0, {}, {"target": 2**30, "drafter": drafter_mib * 2**20}, 1000)

    levelled, _ = growth([some(mib) for mib in (100, 200, 250, 260, 255, 261)])
    assert levelled == {"target": 0, "drafter": 1}
    growing, _ = growth([some(mib) for mib in (100, 120, 140, 160, 180, 200)])
    assert growing == {"target": 0, "drafter": 40}


def test_nothing_is_left_behind_and_every_answer_is_right() -> None:
    runners = {name: packed_runner(family) for name, (_, family) in MODELS.items()}
    replicas = {name: (role, runners[name]) for name, (role, _) in MODELS.items()}
    with Engine(replicas, LoopOptions(prefill_chunk=32)) as engine:
        soak = Soak(served(engine, runners), cases(), seed=1)
        rounds = [soak.run_round(1.0) for _ in range(4)]
    assert [result.wrong for result in rounds] == [[]] * 4
    assert [result.leaked for result in rounds] == [{}] * 4
    assert all(result.occupancy > 0.5 and result.disconnected > 0 for result in rounds)
    more_mib, more_objects = growth(rounds)
    assert more_mib["engine"] < 48  # the allocator's reserves vary on a busy machine; a leak grows more
    assert more_objects < 0.05
