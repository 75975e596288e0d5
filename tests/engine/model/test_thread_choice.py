"""Fewer threads where other processes want the cores, all of them again once they are free."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from engine.kernels.native import library
from engine.model.forward import ModelForward
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from engine.model.thread_choice import CoreTimes, ThreadChoice, read_core_times
from tests.support.models import tiny_model


@dataclass
class Machine:
    """Cores on a clock of their own. A call with several threads takes four times as long if one shares its core."""

    cores: int
    busy: int = 0  # processes that never wait
    now_s: float = 0.0
    waited_s: float = 0.0
    idle_s: float = 0.0
    uses: list[int] = field(default_factory=list)  # the number of threads of each call

    def clock(self) -> float:
        return self.now_s

    def read(self) -> CoreTimes:
        return CoreTimes(self.waited_s, self.idle_s)

    def run(self, choice: ThreadChoice, calls: int) -> None:
        for _ in range(calls):
            threads = choice.threads
            shares = threads + self.busy > self.cores
            seconds = 0.024 / threads * (1 if not shares else 4 if threads > 1 else (1 + self.busy) / self.cores)
            self.now_s += seconds
            self.waited_s += seconds * min(threads, self.busy) if shares else 0
            self.idle_s += seconds * max(self.cores - threads - self.busy, 0)
            self.uses.append(threads)
            choice.note(1, seconds)


def choose(machine: Machine, most: int) -> ThreadChoice:
    return ThreadChoice(most, read=machine.read, clock=machine.clock)


def test_a_quiet_machine_is_left_as_it_is() -> None:
    machine = Machine(cores=2)
    machine.run(choose(machine, 2), 2000)
    assert set(machine.uses) == {2}


@pytest.mark.parametrize(("cores", "busy", "expected"), [(2, 1, 1), (2, 2, 1), (16, 1, 15), (16, 5, 11)])
def test_a_core_that_another_process_wants_is_left_to_it(cores: int, busy: int, expected: int) -> None:
    machine = Machine(cores)
    choice = choose(machine, cores)
    machine.run(choice, 500)
    machine.busy = busy
    machine.run(choice, 5000)
    assert machine.uses[-500:].count(expected) > 400  # trials take the rest
    machine.busy = 0
    machine.run(choice, 5000)
    assert machine.uses[-500:] == [cores] * 500


def test_trials_that_change_nothing_become_rare() -> None:
    """All threads wait for other processes, but fewer are no faster."""
    machine = Machine(cores=2)
    choice = choose(machine, 2)
    for _ in range(20_000):
        machine.now_s += 0.01
        machine.waited_s += 0.01
        machine.uses.append(choice.threads)
        choice.note(1, 0.01)
    assert 0 < machine.uses.count(1) < 300


def test_calls_of_other_sizes_are_not_compared() -> None:
    machine = Machine(cores=2, busy=2)
    choice = choose(machine, 2)
    sizes = iter(range(10**6))
    for _ in range(1000):
        machine.now_s += 0.01
        machine.waited_s += 0.02
        choice.note(next(sizes), 0.01)
    assert choice._chosen == 2


def test_without_the_systems_counts_nothing_changes() -> None:
    choice = ThreadChoice(2, read=lambda: None)
    for _ in range(100):
        choice.note(1, 1.0)
        assert choice.threads == 2


def test_the_system_counts_what_threads_wait() -> None:
    times = read_core_times()
    assert times is None or (times.waited_s >= 0 and times.idle_s > 0)


@pytest.mark.parametrize("same", [True, False])
def test_a_model_chooses_only_if_its_bits_do_not_depend_on_threads(
    monkeypatch: pytest.MonkeyPatch, *, same: bool
) -> None:
    threads = torch.get_num_threads()

    def compare(*_: object) -> Generator[None, None, bool]:
        yield
        return same

    monkeypatch.setattr(Runner, "_is_same_on_one_thread", compare)
    torch.set_num_threads(2)
    try:
        runner = Runner(tiny_model("llama-gqa"), slots=2, max_length=64, max_query=16)
        runner.logits([RowInput(0, 0, [1])])
        runner.use_trace()
        assert (runner._threads is not None) == same
    finally:
        torch.set_num_threads(threads)


def test_a_narrow_model_is_traced_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, used = torch.get_num_threads(), list[int]()

    def trace(*_: object) -> Iterator[None]:
        used.append(torch.get_num_threads())
        yield

    monkeypatch.setattr(ModelForward, "trace", trace)
    torch.set_num_threads(2)
    try:
        runner = Runner(tiny_model("llama-gqa"), slots=2, max_length=64, max_query=16)
        runner.use_trace()
        runner.model.config.hidden_size = 4096
        runner.use_trace()
        assert (used, torch.get_num_threads()) == ([1, 2], 2)
    finally:
        torch.set_num_threads(threads)


def test_logits_are_the_same_with_any_number_of_threads() -> None:
    threads = torch.get_num_threads()
    results = []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            runner = Runner(tiny_model("llama-gqa"), slots=2, max_length=64, max_query=16)
            runner.logits([RowInput(0, 0, [1])])
            runner.use_trace()
            results.append(runner.logits([RowInput(0, 0, [*range(5, 17)]), RowInput(1, 0, [3])]).clone())
            assert torch.get_num_threads() == number
    finally:
        torch.set_num_threads(threads)
    if library() is None:
        pytest.skip("no C++ compiler")
    assert all(torch.equal(result, results[0]) for result in results)
