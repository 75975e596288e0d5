"""One contestant computes at a time, in turn, on the same prompts."""

import pytest

from benchmarks.peers import contestant as module
from benchmarks.peers.contestant import Activity, Contestant, Kind, Workload, interleave


class Recorder:
    """A host that records whether it is running."""

    def __init__(self) -> None:
        self.running = False

    def pause(self) -> None:
        self.running = False

    def resume(self) -> None:
        self.running = True


class Echo(Contestant):
    """Answers with the prompt's first token, and checks that no other host is running."""

    def __init__(self, name: str, kind: Kind, host: Recorder, others: list[Recorder], turns: list[str]) -> None:
        super().__init__(name, "test", kind, [host])
        self._host, self._others, self._turns = host, others, turns

    def takes_part(self, workload: Workload) -> bool:
        return self.kind != "hf-assisted" or workload.streams == 1

    def run(self, workload: Workload) -> list[list[int]]:
        assert [host for host in self._others if host.running] == [self._host]
        self._turns.append(self.group)
        return [prompt[:1] * workload.new_tokens for prompt in workload.prompts]

    def activity(self) -> Activity:
        assert self._host.running
        return Activity()


@pytest.fixture(autouse=True)
def no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SETTLING_S", 0.0)


def line_up(turns: list[str]) -> list[Echo]:
    hosts = [Recorder() for _ in range(3)]
    kinds: list[Kind] = ["hf", "hf-assisted", "plain"]
    return [Echo(f"c{i}", kind, host, hosts, turns) for i, (kind, host) in enumerate(zip(kinds, hosts, strict=True))]


def test_each_repetition_has_new_prompts_and_begins_with_another_contestant() -> None:
    turns: list[str] = []
    workload = Workload([[10], [11], [12], [13]], new_tokens=2)
    records = interleave(line_up(turns), workload, repetitions=3, prompts=2, report=lambda line: None)
    assert turns == [*("c0", "c1", "c2"), *("c0", "c1", "c2"), *("c1", "c2", "c0"), *("c2", "c0", "c1")]
    for record in records:
        assert [text.prompt for text in record.texts] == [[10], [11], [12], [13], [10], [11]]
        assert [text.answer for text in record.texts] == [[n, n] for n in (10, 11, 12, 13, 10, 11)]
        assert [text.params.seed for text in record.texts] == [0, 1, 0, 1, 0, 1]
        assert len(record.tokens_per_s) == 3
        assert not record.contestant.hosts[0].running  # type: ignore[attr-defined]


def test_no_repetition_but_the_first_is_begun_when_time_is_up() -> None:
    lines: list[str] = []
    workload = Workload([[10], [11]], new_tokens=1)
    records = interleave(line_up([]), workload, repetitions=3, prompts=1, report=lines.append, until_s=0.0)
    assert [len(record.tokens_per_s) for record in records] == [1, 1, 1]
    assert lines[-1] == "no time for more than 1 of 3 repetitions"


def test_contestants_that_cannot_run_the_workload_are_left_out() -> None:
    workload = Workload([[10], [11]], new_tokens=1, streams=2)
    records = interleave(line_up([]), workload, repetitions=1, prompts=2, report=lambda line: None)
    assert [record.contestant.kind for record in records] == ["hf", "plain"]


def test_a_workload_is_answered_in_batches_of_as_many_as_there_are_streams() -> None:
    workload = Workload([[1], [2], [3]], new_tokens=4, temperature=0.5, streams=2)
    batches = list(workload.batches())
    assert [prompts for prompts, _ in batches] == [[[1], [2]], [[3]]]
    assert [[prompt_params.seed for prompt_params in params] for _, params in batches] == [[0, 1], [2]]
