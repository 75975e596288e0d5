"""The host reads from the `meta` device, each read is counted, and the program runs from end to end."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.step_budget.__main__ import main
from benchmarks.step_budget.metered_runner import (
    HYBRID,
    KEYS_AND_VALUES,
    LOGITS,
    STATES,
    WEIGHTS,
    MeteredRunner,
    skipped_kernels,
)
from benchmarks.step_budget.stage import HostClock, fake_results
from benchmarks.step_budget.traffic import ACTIVATIONS, Meter, Traffic
from engine.model.ragged_batch import RowInput


def test_reads_are_zeros_and_waits() -> None:
    numbers = torch.zeros(2, 3, dtype=torch.int64, device="meta")
    with fake_results(), Meter(lambda _: "") as meter:
        assert numbers.tolist() == [[0, 0, 0], [0, 0, 0]]
        assert numbers[0, 1].item() == 0
        assert (numbers == 3).all()
        numbers.copy_(torch.ones(2, 3, dtype=torch.int64))
    traffic = meter.traffic
    assert (traffic.to_host, traffic.waits, traffic.to_device) == (3, 3, 1)
    assert (traffic.to_host_bytes, traffic.to_device_bytes) == (48 + 8 + 1, 48)
    assert traffic.kernels == 2  # the comparison and `all`


def test_reads_fail_without_them() -> None:
    with fake_results():
        pass
    with pytest.raises(NotImplementedError, match="meta"):
        torch.zeros(2, device="meta").tolist()


def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "budget.json"
    small = ["--rows", "4", "--many", "8", "--context", "40", "--vocabulary", "100", "--steps", "4"]
    assert (
        main(["--shape", "tiny", "--drafter", "tiny", "--case", "sampled, drafts", *small, "--output", str(output)])
        == 0
    )
    assert "sampled, drafts" in capsys.readouterr().out
    names = [finding["name"] for finding in json.loads(output.read_text())["findings"]]
    assert names == ["sampled, drafts", "drafter's chain"]


_BUSY_S = 0.02


def _work() -> None:
    end_s = time.thread_time() + _BUSY_S
    while time.thread_time() < end_s:
        pass


def _times(*steps: Callable[[HostClock], object]) -> tuple[float, float]:
    """Run the steps, with work before and after each. Returns the exposed and the whole time, in works."""
    with fake_results():
        with HostClock() as clock:
            _read(clock)  # the first time, torch imports modules
        with HostClock() as clock:
            _work()
            for step in steps:
                step(clock)
                _work()
    return round(clock.exposed_s / _BUSY_S), round(clock.seconds / _BUSY_S)


def _read(_: HostClock) -> object:
    return torch.zeros(3, device="meta").tolist()


def test_all_is_exposed_without_a_forward() -> None:
    assert _times(_read) == (2, 2)


def test_nothing_is_exposed_between_a_forward_and_the_read() -> None:
    assert _times(HostClock.note_forward) == (1, 2)
    assert _times(HostClock.note_forward, _read) == (2, 3)
    assert _times(HostClock.note_forward, lambda _: torch.zeros(3, device="meta") + 1, _read) == (2, 4)
    assert _times(HostClock.note_forward, _read, HostClock.note_forward) == (2, 4)


ROWS, WIDTH, VOCAB = 4, 3, 1000
COLUMNS = ROWS * 32
TOKENS = ROWS * WIDTH
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 64, 4, 2, 16, 128  # of the shape "tiny"
SIZE = 2  # bytes of a bfloat16


@pytest.fixture
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


@pytest.mark.usefixtures("results")
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
    rotated_read, rotated_written = queries + keys + 2 * table, queries + keys
    attention_read, attention_written = joined, queries
    other_read = 2 * x + x + queries + 2 * x + x + 2 * inner + inner + 2 * x  # norms, products, sums, gate
    other_written = 2 * x + joined + x + x + 2 * inner + inner + x + x
    layout = 8 * (3 * ROWS + 1 + 6 * TOKENS) + 4 * COLUMNS // 16  # the batch, and the tables' entries
    assert read[WEIGHTS] == SIZE * weights
    assert read[KEYS_AND_VALUES] == SIZE * column * COLUMNS
    assert written[KEYS_AND_VALUES] == SIZE * column * TOKENS
    assert read[ACTIVATIONS] == SIZE * (rotated_read + attention_read + other_read) + layout
    assert written[ACTIVATIONS] == SIZE * (rotated_written + attention_written + other_written)
    assert read[LOGITS] == written[LOGITS] == 0


@pytest.mark.usefixtures("results")
def test_quantised_weights_are_read_as_they_are_stored() -> None:
    rows = 64
    metered = MeteredRunner(
        "8b", vocab_size=VOCAB, columns=rows * 2048, slots=rows, max_length=64, max_query=16, layers=3, bits=4
    )
    inputs = [RowInput(slot, 0, [1] * 6) for slot in range(rows)]
    tokens, positions, batch, _ = metered.runner._forward.pack(inputs)
    with torch.inference_mode(), metered.metered() as meter:
        metered.runner.forward(tokens, positions, batch)
    hidden, heads, intermediate = 4096, 32 + 2 * 8, 14336
    layer = hidden * (heads * 128 + hidden + 3 * intermediate)
    norms = SIZE * hidden * 7
    stored = 3 * layer * (4 + 16 / 32) // 8 + VOCAB * hidden * (8 + 16 / 32) // 8 + norms  # a scale for each 32
    assert metered.weight_bytes() == stored + 2 * 64 * 4  # and frequencies of the rotation
    read_rows = len(tokens[0]) * hidden * (8 + 16 / 32) // 8  # of the embedding
    assert meter.traffic.read[WEIGHTS] == stored + read_rows + 64 * 4
    floor = stored + metered.columns * metered.column_bytes() + 2 * len(tokens[0]) * VOCAB * 4
    assert meter.traffic.bytes <= 1.25 * floor


@pytest.mark.usefixtures("results")
def test_a_hybrid_moves_little_more_than_weights_pages_and_states() -> None:
    rows, context = 64, 2048
    metered = MeteredRunner(
        HYBRID, vocab_size=VOCAB, columns=rows * context, slots=rows, max_length=64, max_query=16, layers=4
    )
    inputs = [RowInput(slot, 0, [1] * 5, settled=1) for slot in range(rows)]
    tokens, positions, batch, _ = metered.runner._forward.pack(inputs)
    with torch.inference_mode(), metered.metered() as meter:
        metered.runner.forward(tokens, positions, batch)
    pages = rows * context * metered.column_bytes()
    states = rows * metered.state_bytes()
    assert metered.column_bytes() == 2 * 4 * 256 * SIZE
    assert metered.state_bytes() == 3 * 32 * 128 * 128 * 4
    moved = sum(meter.traffic.read[name] + meter.traffic.written[name] for name in (WEIGHTS, KEYS_AND_VALUES, STATES))
    assert moved <= 1.25 * (metered.weight_bytes() + pages + states)
