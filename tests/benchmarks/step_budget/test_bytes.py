"""Counted bytes agree with those counted by hand."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from benchmarks.step_budget.host import fake_results
from benchmarks.step_budget.metered_runner import KEYS_AND_VALUES, LOGITS, WEIGHTS, MeteredRunner, skipped_kernels
from benchmarks.step_budget.traffic import ACTIVATIONS, Traffic
from engine.model.ragged_batch import RowInput

ROWS, WIDTH, VOCAB = 4, 3, 1000
COLUMNS = ROWS * 32
TOKENS = ROWS * WIDTH
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 64, 4, 2, 16, 128  # of the shape "tiny"
SIZE = 2  # bytes of a bfloat16


@pytest.fixture(autouse=True)
def results() -> Iterator[None]:
    with fake_results(), skipped_kernels():
        yield


def forward(layers: int) -> Traffic:
    metered = MeteredRunner(
        "tiny", vocab_size=VOCAB, columns=COLUMNS, slots=ROWS, max_length=64, max_query=16, layers=layers
    )
    runner = metered.runner
    tokens, positions, batch, _ = runner._forward.pack([RowInput(slot, 20, [1, 2, 3]) for slot in range(ROWS)])
    with torch.inference_mode(), metered.metered() as meter:
        runner.forward(tokens, positions, batch)
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
    column = 2 * KV_HEADS * HEAD_DIM  # its key and its value
    table = TOKENS * HEAD_DIM  # cosines or sines
    # Rotation of queries and keys: times cosine, negated half, joined halves, times sine, sum.
    rotated_read = (1 + 0.5 + 1 + 1 + 2) * (queries + keys) + 4 * table
    rotated_written = (1 + 0.5 + 1 + 1 + 1) * (queries + keys)
    attention_read, attention_written = joined, queries
    other_read = 2 * x + x + queries + 2 * x + x + 3 * inner + inner + 2 * x  # norms, products, sums, gate
    other_written = 2 * x + joined + x + x + 2 * inner + 2 * inner + x + x
    layout = 8 * (3 * ROWS + 1 + 6 * TOKENS) + 4 * COLUMNS // 16  # the batch, and the tables' entries
    assert read[WEIGHTS] == SIZE * weights
    assert read[KEYS_AND_VALUES] == SIZE * column * COLUMNS
    assert written[KEYS_AND_VALUES] == SIZE * column * TOKENS
    assert read[ACTIVATIONS] == SIZE * (rotated_read + attention_read + other_read) + layout
    assert written[ACTIVATIONS] == SIZE * (rotated_written + attention_written + other_written)
    assert read[LOGITS] == written[LOGITS] == 0
