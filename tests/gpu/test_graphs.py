"""Replays give what calls give, and the same drafts as a CPU."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from actors.drafter.chain import ChainStart, DraftChain
from decoding.drafts.choices import DraftChoice
from decoding.sampling.params import SamplingParams
from engine.layers.faster_layers import use_faster_layers
from engine.layers.packing import GroupedLinear
from engine.model.cuda import use_own_stream
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.models import CONFIGS, VOCAB, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

PARAMS = [
    SamplingParams(max_tokens=40, temperature=0),
    SamplingParams(max_tokens=40, temperature=0.8, seed=3, top_k=9),
    SamplingParams(max_tokens=40, temperature=1.3, seed=4, top_p=0.9, min_p=0.02),
]


MIXTURES = "mixtral", "qwen3-moe", "gpt-oss"  # some types of their experts' products can't be recorded


def were_recorded(runner: Runner) -> bool:
    return runner.recorder is not None and runner.recorder.error is None


def runners(family: str) -> tuple[Runner, Runner]:
    """Return a runner that makes calls in the same buckets, and one with replays."""
    models = [torch.nn.Module.cuda(tiny_model(family)) for _ in range(2)]
    called, replayed = (Runner(model, slots=5, max_length=80, max_query=40) for model in models)
    called.use_graphs(capture=lambda run: run)
    return called, replayed


@pytest.mark.parametrize("family", CONFIGS)
def test_replays_give_the_same_logits(family: str) -> None:
    """Graphs are recorded on a bucket's first use and replayed after that."""
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
    if family not in MIXTURES:
        assert were_recorded(both[1])


def drafted(runner: Runner) -> list[list[DraftChoice]]:
    """Return the choices of a chain after some texts; a second run gives the same."""
    texts = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
    runner.logits([RowInput(slot, 0, text[:-1]) for slot, text in enumerate(texts)])
    chain = DraftChain(runner)
    starts = [
        ChainStart(RowInput(slot, len(text) - 1, text[-1:]), params, len(text))
        for slot, (text, params) in enumerate(zip(texts, PARAMS, strict=True))
    ]
    first = chain.run(starts, 3)
    assert chain.run(starts, 3) == first
    return first


def first_tokens(rows: list[list[DraftChoice]]) -> list[list[int]]:
    return [[choice.tokens[0] for choice in row] for row in rows]


def gaps(rows: list[list[DraftChoice]]) -> torch.Tensor:
    return torch.tensor([[choice.gap for choice in row] for row in rows])


@pytest.mark.parametrize("family", ["llama-gqa", "gpt2", "gemma3"])
def test_chains_draft_what_they_draft_on_a_cpu(family: str) -> None:
    called, replayed = runners(family)
    on_cpu = drafted(Runner(tiny_model(family), slots=5, max_length=80, max_query=40))
    for on_gpu in (drafted(called), drafted(replayed)):
        assert were_recorded(replayed)
        assert first_tokens(on_gpu) == first_tokens(on_cpu)
        torch.testing.assert_close(gaps(on_gpu), gaps(on_cpu), atol=1e-3, rtol=0)


def test_two_threads_record_and_replay_beside_each_other() -> None:
    """A target and a drafter on one GPU do so."""

    def work(runner: Runner) -> list[list[DraftChoice]]:
        use_own_stream(runner.device)
        chain = DraftChain(runner)
        chain.warm_up()
        return drafted(runner)

    replayed = [runners("llama-gqa")[1] for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(work, replayed)
    assert first == second
    assert all(map(were_recorded, replayed))


@pytest.mark.parametrize("family", ["llama-gqa", "qwen3", "gemma3"])
def test_a_packed_model_gives_the_same_logits(family: str) -> None:
    rows = [RowInput(0, 0, [3, 1, 4, 1, 5]), RowInput(2, 0, [9, 2])]
    expected = runners(family)[0].logits(rows)
    model = torch.nn.Module.cuda(tiny_model(family))
    before = {type(module) for module in model.modules()}
    use_faster_layers(model)
    assert GroupedLinear in {type(module) for module in model.modules()} - before
    logits = Runner(model, slots=3, max_length=16, max_query=8).logits(rows)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_replays_of_a_packed_model_in_bfloat16_have_the_bits_of_calls() -> None:
    """Products, norms and attention sum in one order; hidden states are kept, and the runner replays them, too."""
    runners = []
    for capture in (lambda run: run, None):
        model = torch.nn.Module.cuda(tiny_model("llama-gqa").bfloat16())
        use_faster_layers(model)
        runner = Runner(model, slots=5, max_length=80, max_query=40)
        runner.keep_hidden_states((1, 2))
        runner.use_graphs(capture)
        runner.logits([RowInput(0, 0, [0])])
        runner.cache.clear_all()
        runner.warm_up()
        runners.append(runner)
    assert were_recorded(runners[1])
    for start, count in ((0, 5), (5, 1), (6, 3), (9, 5)):
        rows = [RowInput(slot, start, [(7 * slot + index) % VOCAB for index in range(count)]) for slot in range(5)]
        called, replayed = (runner.logits(rows).clone() for runner in runners)
        assert torch.equal(called, replayed)
        for states, others in zip(*(runner.hidden or () for runner in runners), strict=True):
            assert torch.equal(states, others)
