"""Replays give what calls give, and what the host sees is the same as without a GPU."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from actors.drafter.chain import ChainStart, DraftChain
from actors.drafter.tree import DraftChoice
from actors.model.cuda_streams import use_own_stream
from actors.model.faster_layers import use_faster_layers
from actors.model.forward_input import RowInput
from actors.model.packed_linear import GroupedLinear
from actors.model.runner import Runner
from decoding.sampling.params import SamplingParams
from tests.support.models import CONFIGS, VOCAB, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

PARAMS = [
    SamplingParams(max_tokens=40, temperature=0),
    SamplingParams(max_tokens=40, temperature=0.8, seed=3, top_k=9),
    SamplingParams(max_tokens=40, temperature=1.3, seed=4, top_p=0.9, min_p=0.02),
]


def runners(family: str) -> tuple[Runner, Runner]:
    """One with the same buckets and calls in place of replays, and one with replays."""
    models = [torch.nn.Module.cuda(tiny_model(family)) for _ in range(2)]
    called, replayed = (Runner(model, slots=5, max_length=80, max_query=40) for model in models)
    called.use_graphs(capture=lambda run: run)
    return called, replayed


@pytest.mark.parametrize("family", CONFIGS)
def test_replays_give_the_same_logits(family: str) -> None:
    """Recorded when a bucket is first met, replayed after that, beside calls that are too long for any bucket."""
    both = runners(family)
    rng = random.Random(family)
    lengths = [0] * 5
    for _ in range(30):
        counts = [rng.choice([1, 2, 5]) for _ in range(5)]
        rows = [RowInput(i, lengths[i], [rng.randrange(VOCAB) for _ in range(counts[i])]) for i in range(5)]
        if not all(row.end < 80 for row in rows):
            lengths = [0] * 5
            continue
        lengths = [row.end for row in rows]
        called, replayed = (runner.logits(rows) for runner in both)
        torch.testing.assert_close(replayed, called, atol=1e-4, rtol=1e-4)


def drafted(runner: Runner) -> list[list[DraftChoice]]:
    """Two chains of the same rows, whose texts are read first."""
    texts = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
    runner.logits([RowInput(slot, 0, text[:-1]) for slot, text in enumerate(texts)])
    chain = DraftChain(runner)
    starts = [
        ChainStart(RowInput(slot, len(text) - 1, text[-1:]), params, len(text))
        for slot, (text, params) in enumerate(zip(texts, PARAMS, strict=True))
    ]
    first = chain.run(starts, 5)
    assert chain.run(starts, 5) == first
    return first


@pytest.mark.parametrize("family", ["llama-gqa", "gpt2", "gemma3"])
def test_chains_draft_what_they_draft_on_a_cpu(family: str) -> None:
    called, replayed = runners(family)
    on_cpu = drafted(Runner(tiny_model(family), slots=5, max_length=80, max_query=40))
    for found in (drafted(called), drafted(replayed)):
        assert [[one.tokens[0] for one in row] for row in found] == [[one.tokens[0] for one in row] for row in on_cpu]
        gaps = torch.tensor([[one.gap for one in row] for row in found])
        torch.testing.assert_close(gaps, torch.tensor([[one.gap for one in row] for row in on_cpu]), atol=1e-3, rtol=0)


def test_two_threads_record_and_replay_beside_each_other() -> None:
    """As a target and a drafter on one GPU do."""

    def work(runner: Runner) -> list[list[DraftChoice]]:
        use_own_stream(runner.device)
        chain = DraftChain(runner)
        chain.warm_up()
        return drafted(runner)

    one, other = runners("llama-gqa")[1], runners("llama-gqa")[1]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, (one, other)))
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["llama-gqa", "qwen3", "gemma3"])
def test_a_packed_model_gives_the_same_logits(family: str) -> None:
    rows = [RowInput(0, 0, [3, 1, 4, 1, 5]), RowInput(2, 0, [9, 2])]
    expected = runners(family)[0].logits(rows)
    model = torch.nn.Module.cuda(tiny_model(family))
    before = {type(module) for module in model.modules()}
    use_faster_layers(model)
    assert GroupedLinear in {type(module) for module in model.modules()} - before
    found = Runner(model, slots=3, max_length=16, max_query=8).logits(rows)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
