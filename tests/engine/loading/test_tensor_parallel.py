"""A tensor-parallel group writes and drafts what one process does, with trees and shared prefixes, without graphs."""

import multiprocessing
import socket
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPTJConfig, Phi3Config, PretrainedConfig

from actors.coordinator.request import Endpoint, Request
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from decoding.errors import ConfigError
from decoding.sampling.params import SamplingParams
from engine.loading.checkpoint import ModelSpec, load_model
from engine.loading.runners import load_runner
from engine.loading.tensor_parallel import Rank, TensorParallelGroup, follow, load_sharded_runner
from engine.model.runner import Runner
from tests.support.models import let_llama_count_positions, tiny_model

SIZE: dict[str, Any] = {"slots": 3, "max_length": 96, "max_query": 64}
DRAFTER = "models/drafter"
PLAIN = ModelSpec(
    name="m", path="models/target", dtype="float32", device="cpu", threads=1, slots=3, max_length=96, prefill_chunk=64
)
QUANTIZED = replace(PLAIN, quantization="int4")


def requests() -> list[Request]:
    endpoint = Endpoint("e", "target", "drafter", 4, decode=str)
    stem = list(range(100, 140))
    return [
        Request(endpoint, [*stem[: 10 * i], 7 * i + 5], SamplingParams(max_tokens=20, temperature=i % 2, seed=i))
        for i in range(5)
    ]


def answers(target: Runner, drafter: Runner) -> tuple[list[list[int]], int]:
    """Return the tokens of all answers, and how many steps the drafter took."""
    with Engine({"target": ("target", target), "drafter": ("drafter", drafter)}, LoopOptions(adaptive=False)) as engine:
        answers = engine.generate(requests())
        drafter_steps = engine.loops["drafter"].times.steps
    return [[token for delta in answer for token in delta.token_ids] for answer in answers], drafter_steps


def whole(path: str) -> Runner:
    return Runner(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), **SIZE)


def take_part(rank: int, ports: dict[Role, int], result: Connection | None) -> None:
    """Run a rank of one group per role, in turn; rank 0 serves requests and sends the answers."""
    for role, port in ports.items():
        run_rank(role, rank, port, result)


def run_rank(role: Role, rank: int, port: int, result: Connection | None) -> None:
    group = TensorParallelGroup(Rank(rank, 2, "127.0.0.1", port))
    runner = load_sharded_runner(replace(QUANTIZED if role == "target" else PLAIN, tensor_parallel=2), group)
    runner.use_graphs(capture=lambda run: run)  # a runner on a GPU does this by itself
    assert runner.recorder is None
    if result is None:
        follow(runner, group)
    else:
        pair = (runner, whole(DRAFTER)) if role == "target" else (load_runner(QUANTIZED), runner)
        result.send((*answers(*pair), next(tuple(keys.shape) for keys, _ in runner.cache.layers.values())))
    group.close()


@pytest.mark.timeout(240)
def test_two_processes_write_what_one_writes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        ports: dict[Role, int] = {"target": first.getsockname()[1], "drafter": second.getsockname()[1]}
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    processes = [context.Process(target=take_part, args=(rank, ports, (sender, None)[rank])) for rank in range(2)]
    for process in processes:
        process.start()
    expected, _ = answers(load_runner(QUANTIZED), whole(DRAFTER))
    for _ in ports:
        actual, drafter_steps, shape = receiver.recv()
        assert actual == expected
        assert drafter_steps > 0
        assert shape[1] == 1  # of two key-value heads
    for process in processes:
        process.join()
        assert process.exitcode == 0


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 10_000.0}
SHAPE: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 256}


def spec(folder: Path, **options: Any) -> ModelSpec:
    return ModelSpec(**{"name": "m", "path": str(folder), "device": "cpu", "max_length": 64, **options})


def group_of(size: int) -> mock.Mock:
    """A group whose other processes are not there."""
    return mock.Mock(rank=Rank(0, size, "127.0.0.1", 0), least=lambda value: value)


@pytest.mark.parametrize(
    "config",
    [
        Phi3Config(**SHAPE, original_max_position_embeddings=60, rope_parameters=LONG),
        GPTJConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4),
        tiny_model("llama", max_position_embeddings=63).config,
    ],
    ids=["positions that depend on length", "attention of its own", "too few positions"],
)
def test_what_one_device_refuses_is_refused_before_it_is_loaded(config: PretrainedConfig, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as alone:
        load_model(spec(tmp_path))
    with pytest.raises(ConfigError) as split:
        load_sharded_runner(spec(tmp_path), group_of(2))
    assert str(split.value) == str(alone.value)


def test_each_device_needs_room_for_its_part_of_the_weights(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    part = sum(parameter.nbytes for parameter in model.parameters()) // 2
    group, load = group_of(2), "engine.loading.tensor_parallel.read_weights"
    with pytest.raises(ConfigError, match=r"models\.m: the weights need .*: dtype: bfloat16 would need"):
        load_sharded_runner(spec(tmp_path, memory_bytes=part - 1, tensor_parallel=2), group)
    with mock.patch(load, side_effect=InterruptedError), pytest.raises(InterruptedError):
        load_sharded_runner(spec(tmp_path, memory_bytes=part, tensor_parallel=2), group)


def test_heads_that_devices_cannot_share_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    tiny_model("llama").config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"models\.m\.tensor_parallel: .* has 4 key-value heads, .* set it to 2"):
        load_sharded_runner(spec(tmp_path), group_of(3))


def test_pickled_weights_are_loaded_only_on_request(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"models\.m\.path: can't load"):
        load_sharded_runner(spec(tmp_path), group_of(1))
    load_sharded_runner(spec(tmp_path, safetensors_only=False), group_of(1))


def test_code_in_a_checkpoint_is_run_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    model = tiny_model("llama")
    model.config.auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    model.save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"model_type": "llama"', '"model_type": "own"'))
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load_sharded_runner(spec(folder), group_of(1))
    runner = load_sharded_runner(spec(folder, trust_remote_code=True), group_of(1))
    assert type(runner.model).__name__ == "OwnForCausalLM"


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"models\.m\.path: .* lacks 1 weights: model\.norm\.weight"):
        load_sharded_runner(spec(tmp_path), group_of(1))


def test_a_model_that_counts_positions_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration does not show it."""
    tiny_model("llama").save_pretrained(tmp_path)
    let_llama_count_positions(monkeypatch)
    with pytest.raises(ConfigError, match=r"models\.m\.path: .* can't be served: LlamaForCausalLM gives other logits"):
        load_sharded_runner(spec(tmp_path), group_of(1))
