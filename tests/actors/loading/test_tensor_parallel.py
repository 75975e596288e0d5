"""A tensor-parallel group writes and drafts what one process does, with trees and shared prefixes, without graphs."""

import multiprocessing
import socket
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.coordinator.request import Endpoint, Request
from actors.loading.checkpoint import ModelSpec
from actors.loading.tensor_parallel import Rank, TensorParallelGroup, follow, load_sharded_runner
from actors.loops.options import LoopOptions
from actors.model.runner import Runner
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from decoding.sampling.params import SamplingParams

SIZE: dict[str, Any] = {"slots": 3, "max_length": 96, "max_query": 64}
TARGET, DRAFTER = "models/target", "models/drafter"


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
    return [[token for delta in answer for token in delta.tokens] for answer in answers], drafter_steps


def whole(path: str) -> Runner:
    return Runner(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), **SIZE)


def take_part(role: Role, rank: int, port: int, result: Connection | None) -> None:
    """Run a rank of the group; rank 0 serves requests and sends the answers."""
    spec = ModelSpec(
        name="m", path=TARGET, dtype="float32", device="cpu", threads=1, slots=3, max_length=96, prefill_chunk=64
    )
    group = TensorParallelGroup(Rank(rank, 2, "127.0.0.1", port))
    runner = load_sharded_runner(spec, group)
    runner.use_graphs(capture=lambda run: run)  # a runner on a GPU does this by itself
    assert runner.recorder is None
    if result is None:
        follow(runner, group)
    else:
        pair = (runner, whole(DRAFTER)) if role == "target" else (whole(TARGET), runner)
        result.send((*answers(*pair), next(tuple(keys.shape) for keys, _ in runner.cache.layers.values())))
    group.close()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("role", ["target", "drafter"])
def test_two_processes_write_what_one_writes(role: Role) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    processes = [context.Process(target=take_part, args=(role, rank, port, (sender, None)[rank])) for rank in range(2)]
    for process in processes:
        process.start()
    expected, _ = answers(whole(TARGET), whole(DRAFTER))
    actual, drafter_steps, shape = receiver.recv()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert actual == expected
    assert drafter_steps > 0
    assert shape[1] == 1  # of two key-value heads
