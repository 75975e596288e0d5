"""A cached, ragged, reordered forward equals the model's plain forward over the whole text."""

import random

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.model.cuda import Replay
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.models import CONFIGS, VOCAB, tiny_model

TOLERANCE = 5e-6


def make_runner(family: str = "llama-gqa", *, graphs: bool = False) -> Runner:
    """graphs: bucketed shapes and fixed buffers as with CUDA graphs, but calls instead of replays."""
    runner = Runner(tiny_model(family), slots=5, max_length=80, max_query=24)
    if graphs:
        runner.use_graphs(capture=lambda run: run)
    return runner


def run(runner: Runner, *rows: RowInput) -> list[Tensor]:
    """Each row's logits, [Q, V]."""
    return list(runner.logits(rows).split([len(row.tokens) for row in rows]))


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


@torch.no_grad()
def plain(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """[T, V] logits of the whole text, without a cache."""
    logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_any_sequence_of_calls(family: str, graphs: bool) -> None:
    """Random rows in random order extend, roll back and rewrite their slots; every logit is compared."""
    runner = make_runner(family, graphs=graphs)
    rng = random.Random(family)
    texts: list[list[int]] = [[] for _ in range(5)]
    for _ in range(20):
        rows = []
        for slot in rng.sample(range(5), rng.randint(1, 5)):
            start = max(0, len(texts[slot]) - rng.choice([0, 0, 0, 1, 3, 100]))
            new = random_tokens(rng, rng.choice([1, 1, 2, 5, 24]))
            if start + len(new) > runner.max_length:
                start = 0
            texts[slot] = [*texts[slot][:start], *new]
            rows.append(RowInput(slot, start, new))
        logits = run(runner, *rows)
        for row, row_logits in zip(rows, logits, strict=True):
            expected = plain(runner.model, texts[row.slot])
            assert_close(row_logits, expected[row.start :])


@pytest.mark.parametrize("family", CONFIGS)
def test_prefill_in_chunks_beside_other_rows(family: str) -> None:
    runner = make_runner(family)
    rng = random.Random(3)
    long, short = random_tokens(rng, 70), random_tokens(rng, 9)
    run(runner, RowInput(2, 0, short))
    for start in range(0, 70, 16):
        chunk = long[start : start + 16]
        logits = runner.logits([RowInput(4, start, chunk, wanted=1), RowInput(2, 8, short[8:])])
        assert_close(logits[0], plain(runner.model, long)[start + len(chunk) - 1])
        assert_close(logits[1], plain(runner.model, short)[-1])


@pytest.mark.parametrize("wanted", [(1, 1, 1), (0, 3, 12), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("graphs", [False, True])
def test_logits_after_the_last_tokens(wanted: tuple[int, ...], graphs: bool) -> None:
    runner = make_runner()
    if graphs:
        runner.use_graphs(lambda run: run)
    rng = random.Random(4)
    texts = [random_tokens(rng, 12) for _ in range(3)]
    rows = zip(texts, wanted, strict=True)
    logits = runner.logits([RowInput(slot, 0, text, wanted=count) for slot, (text, count) in enumerate(rows)])
    for row_logits, text, count in zip(logits.split(wanted), texts, wanted, strict=True):
        assert_close(row_logits, plain(runner.model, text)[len(text) - count :])


def test_padding_at_the_end_of_a_slot_touches_no_other_slot() -> None:
    """A full slot beside a long query: its padding is not written into the next slot."""
    runner = make_runner()
    rng = random.Random(5)
    full, neighbour = random_tokens(rng, 80), random_tokens(rng, 20)
    for start in range(0, 80, 20):
        run(runner, RowInput(0, start, full[start : start + 20]))
    run(runner, RowInput(1, 0, neighbour))
    logits = run(runner, RowInput(0, 79, full[79:]), RowInput(3, 0, random_tokens(rng, 24)))
    assert_close(logits[0][0], plain(runner.model, full)[-1])
    assert_close(run(runner, RowInput(1, 19, neighbour[19:]))[0][0], plain(runner.model, neighbour)[-1])


def test_a_query_that_is_too_long_is_refused() -> None:
    """It would overwrite the next slot."""
    runner = make_runner()
    with pytest.raises(ValueError, match="a row writes 105 positions"):
        run(runner, RowInput(0, 79, [1]), RowInput(1, 79, [1] * 26))


def test_the_vocabulary_is_the_width_of_the_logits() -> None:
    runner = make_runner()
    assert run(runner, RowInput(0, 0, [1]))[0].shape == (1, runner.vocab_size)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_trees_grown_over_several_calls(family: str, graphs: bool) -> None:
    """Each node's logits are those of its own path; a compacted path continues as text."""
    runner = make_runner(family, graphs=graphs)
    rng = random.Random(family)
    texts = [random_tokens(rng, length) for length in (7, 20)]
    for slot, text in enumerate(texts):
        run(runner, RowInput(slot, 0, text))
    nodes: list[list[tuple[list[int], list[int]]]] = [[], []]  # by slot: a node's columns from the top, and its tokens
    for _ in range(3):
        rows = []
        for slot, text in enumerate(texts):
            start = len(text) + len(nodes[slot])
            tokens = random_tokens(rng, rng.randint(1, 4))
            for j, token in enumerate(tokens):
                columns, path = rng.choice([([], []), *nodes[slot]])
                nodes[slot].append(([*columns, start + j], [*path, token]))
            paths = [columns for columns, _ in nodes[slot][-len(tokens) :]]
            rows.append(RowInput(slot, start, tokens, trunk=len(text), paths=paths))
        logits = run(runner, *rows)
        for slot, row in enumerate(rows):
            for j, (_, path) in enumerate(nodes[slot][-len(row.tokens) :]):
                assert_close(logits[slot][j], plain(runner.model, texts[slot] + path)[-1])
    for slot, text in enumerate(texts):
        columns, path = max(nodes[slot], key=lambda node: len(node[0]))
        runner.compact(slot, len(text), columns)
        new = random_tokens(rng, 3)
        logits = run(runner, RowInput(slot, len(text) + len(path), new))
        assert_close(logits[0], plain(runner.model, text + path + new)[-3:])


def test_unrecordable_calls_run_directly_and_lack_of_memory_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    """A bucket that ran out of memory is recorded later."""
    errors: list[Exception] = [torch.OutOfMemoryError("full"), RuntimeError("not while capturing")]

    def capture(run: Replay) -> Replay:
        raise errors.pop(0)

    runner = make_runner()
    expected = run(runner, RowInput(0, 0, [1, 2]))[0]
    runner.use_graphs(capture=capture)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        run(runner, RowInput(0, 0, [1, 2]))
    assert_close(run(runner, RowInput(0, 0, [1, 2]))[0], expected)
    assert_close(run(runner, RowInput(0, 0, [1, 2]))[0], expected)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
