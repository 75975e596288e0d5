"""Recorded calls do again what they did, with what their inputs hold by then."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.kernels import native
from engine.kernels.call_recorder import CallRecorder
from engine.layers.rotary import use_native_angles

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C++ compiler")


def test_a_replay_computes_with_new_inputs() -> None:
    """Operators with a native form, views, one without, and counters."""
    table, chosen = torch.randn(7, 4).bfloat16(), torch.tensor([2, 5, 2])
    kept, counter = torch.zeros(9, 4), torch.tensor([3, 8, 0])

    def run() -> Tensor:
        counter.add_(1 - (counter - counter - 0))
        rows = torch.nn.functional.embedding(chosen, table).float()
        joined = torch.stack([rows.view(-1, 2, 2).transpose(1, 2).reshape(-1, 4), rows * 2]).sum(0)
        kept.index_copy_(0, chosen, joined + joined)
        return kept.index_select(0, chosen - 1)

    expected_counter = counter + 2
    replay = CallRecorder().record(run)
    table.copy_(torch.randn(7, 4))
    chosen.copy_(torch.tensor([1, 6, 3]))
    replayed = replay().clone()
    assert counter.tolist() == expected_counter.tolist()
    rows = table[chosen].float()
    values = 2 * (rows.view(-1, 2, 2).transpose(1, 2).reshape(-1, 4) + rows * 2)
    assert torch.equal(kept[chosen], values)
    assert torch.equal(replayed, kept[chosen - 1])


def test_a_replay_uses_as_many_threads_as_there_are_now() -> None:
    seen: list[int] = []
    x = torch.ones(2, 8)

    def run() -> Tensor:
        seen.append(torch.get_num_threads())
        return x + x

    before = torch.get_num_threads()
    replay = CallRecorder().record(run)
    try:
        torch.set_num_threads(before + 1)
        assert torch.equal(replay(), x + x)
        replay()
    finally:
        torch.set_num_threads(before)
    replay()
    assert seen == [before, before + 1]


def test_a_call_that_looks_at_values_is_made_as_it_is() -> None:
    x = torch.zeros(2)
    recorder = CallRecorder()
    replay = recorder.record(lambda: x + 1 if x.sum().item() else x)
    assert recorder.error is not None
    x.fill_(1)
    assert replay().tolist() == [2, 2]


def test_a_call_whose_shapes_depend_on_values_is_made_as_it_is() -> None:
    x = torch.zeros(3)
    recorder = CallRecorder()
    replay = recorder.record(lambda: x.nonzero())
    x[1] = 1
    assert recorder.error is not None
    assert replay().tolist() == [[1]]


def test_a_recording_that_fails_later_leaves_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2)
    recorder = CallRecorder()
    replay = recorder.record(lambda: x + x)
    before = torch.get_num_threads()
    monkeypatch.setattr(recorder, "_record", None)
    try:
        torch.set_num_threads(before + 1)
        assert replay().tolist() == [2, 2]
    finally:
        torch.set_num_threads(before)
    assert recorder.error is not None
    assert replay().tolist() == [2, 2]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 512},
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_angles_are_those_of_transformers(
    monkeypatch: pytest.MonkeyPatch, rope: dict[str, object], dtype: torch.dtype
) -> None:
    module = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=2, rope_parameters=rope))
    positions, x = torch.tensor([[0, 7, 130, 2047]]), torch.zeros(1, dtype=dtype)
    expected = module(x, positions)
    use_native_angles(module)
    assert all(map(torch.equal, module(x, positions), expected))  # outside recordings they are transformers' own
    monkeypatch.setattr(torch.Tensor, "cos", None)
    recorded = CallRecorder().record(lambda: torch.cat(module(x, positions)))()
    torch.testing.assert_close(recorded, torch.cat(expected), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_angles_of_another_type_than_the_input_stay_transformers_own() -> None:
    """As in ERNIE 4.5, whose angles are float32 in any model."""
    module = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=2))
    forward = module.forward
    module.forward = lambda x, position_ids: tuple(angles.float() for angles in forward(x.float(), position_ids))
    positions, x = torch.tensor([[0, 7]]), torch.zeros(1, dtype=torch.bfloat16)
    use_native_angles(module)
    recorded = CallRecorder().record(lambda: torch.cat(module(x, positions)))()
    assert recorded.dtype == torch.float32


def test_neither_recordings_nor_traces_load_the_compiler_of_torch() -> None:
    program = """
import sys
import torch
from engine.kernels.call_recorder import CallRecorder
from engine.kernels.operator_trace import Example, trace
CallRecorder().record(lambda: torch.ones(2) * 2)
trace(lambda x: x * 2, *(Example([n], [torch.ones(n)]) for n in (3, 5)))
print({"torch._dynamo", "sympy"} & set(sys.modules))
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "set()"
