"""Counted bytes agree with those counted by hand."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from actors.model.forward_input import RowInput
from benchmarks.step_budget.fake_results import fake_results
from benchmarks.step_budget.metered_runner import KEYS_AND_VALUES, LOGITS, WEIGHTS, MeteredRunner
from benchmarks.step_budget.traffic import ACTIVATIONS, Traffic

ROWS, WIDTH, COLUMNS, VOCAB = 4, 3, 64, 1000
TOKENS = ROWS * WIDTH
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 64, 4, 2, 16, 128  # of the shape "tiny"
SIZE = 2  # bytes of a bfloat16


@pytest.fixture(autouse=True)
def results() -> Iterator[None]:
    with fake_results():
        yield


def forward(layers: int) -> Traffic:
    metered = MeteredRunner("tiny", vocab_size=VOCAB, slots=ROWS, max_length=COLUMNS, max_query=16, layers=layers)
    runner = metered.runner
    inputs = runner._inputs([RowInput(slot, 20, [1, 2, 3]) for slot in range(ROWS)], COLUMNS)
    with torch.inference_mode(), metered.metered() as meter:
        runner.forward(*inputs)
    return meter.traffic


def test_a_layer_moves_what_a_hand_count_says() -> None:
    first, both = forward(1), forward(2)
    read, written = (Counter(getattr(both, name)) for name in ("read", "written"))
    read.subtract(first.read)
    written.subtract(first.written)
    queries, keys = TOKENS * HEADS * HEAD_DIM, TOKENS * KV_HEADS * HEAD_DIM
    x, inner = TOKENS * HIDDEN, TOKENS * INTERMEDIATE
    joined = queries + 2 * keys
    weights = HIDDEN * (joined // TOKENS + HEADS * HEAD_DIM + 3 * INTERMEDIATE + 2)
    cached = 2 * ROWS * COLUMNS * KV_HEADS * HEAD_DIM  # keys and values of all columns
    mask = ROWS * HEADS // KV_HEADS * WIDTH * COLUMNS
    table = TOKENS * HEAD_DIM  # cosines or sines
    # Rotation of queries and keys: times cosine, negated half, joined halves, times sine, sum.
    rotated_read = (1 + 0.5 + 1 + 1 + 2) * (queries + keys) + 4 * table
    rotated_written = (1 + 0.5 + 1 + 1 + 1) * (queries + keys)
    attention_read = 2 * keys + queries + mask // 2 + queries + mask + queries
    attention_written = queries + mask + queries + queries
    other_read = 2 * x + x + queries + 2 * x + x + 3 * inner + inner + 2 * x  # norms, products, sums, gate
    other_written = 2 * x + joined + x + x + 2 * inner + 2 * inner + x + x
    indices = 8 * (2 * 2 * TOKENS + 2 * ROWS)  # for the writes and for the copies of keys and values
    assert read[WEIGHTS] == SIZE * weights
    assert read[KEYS_AND_VALUES] == SIZE * 2 * cached
    assert written[KEYS_AND_VALUES] == SIZE * (cached + 2 * keys)
    assert read[ACTIVATIONS] == SIZE * (rotated_read + attention_read + other_read) + indices
    assert written[ACTIVATIONS] == SIZE * (rotated_written + attention_written + other_written)
    assert read[LOGITS] == written[LOGITS] == 0
