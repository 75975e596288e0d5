"""When a learner starts, works and pauses, and what becomes of what it sends."""

from pathlib import Path

import pytest

from actors.loops.adaptation import (
    Adaptation,
    AdaptationOptions,
    Checked,
    Failed,
    FromLearner,
    Pause,
    Texts,
    ToLearner,
    Work,
)
from actors.wire.messages import AdaptationState
from decoding.errors import ConfigError
from decoding.sampling.params import SamplingParams

OPTIONS = AdaptationOptions(module="none", texts=4, update_after=2)
PARAMS = SamplingParams(max_tokens=8)


class FakeLearner:
    def __init__(self) -> None:
        self.sent: list[ToLearner] = []
        self.answers: list[FromLearner] = []
        self.dead = self.closed = False

    def send(self, message: ToLearner) -> None:
        if self.dead:
            raise BrokenPipeError("nobody reads")
        self.sent.append(message)

    def receive(self) -> list[FromLearner]:
        answers, self.answers = self.answers, []
        return answers

    def close(self) -> None:
        self.closed = True


class Stage:
    def __init__(self) -> None:
        self.learner = FakeLearner()
        self.started = 0
        self.published: list[str] = []
        self.error: Exception | None = None
        self.adaptation = Adaptation(OPTIONS, self.start, self.publish)

    def start(self) -> FakeLearner:
        self.started += 1
        return self.learner

    def publish(self, folder: str) -> None:
        if self.error is not None:
            raise self.error
        self.published.append(folder)

    def note(self, count: int) -> None:
        for index in range(count):
            self.adaptation.note([1, 2, index], 2, PARAMS)

    def begin(self) -> None:
        """Let the learner start and work."""
        self.note(2)
        self.adaptation.turn(idle=True)
        self.learner.sent.clear()


def test_nothing_starts_before_there_are_texts_and_time() -> None:
    stage = Stage()
    stage.note(1)
    stage.adaptation.turn(idle=True)
    stage.note(1)
    stage.adaptation.turn(idle=False)
    assert stage.started == 0
    stage.adaptation.turn(idle=True)
    assert stage.started == 1
    texts, work = stage.learner.sent
    assert isinstance(texts, Texts)
    assert [text.tokens for text in texts.texts] == [[1, 2, 0], [1, 2, 0]]
    assert work == Work()


def test_without_memory_for_a_process_drafting_goes_on() -> None:
    def start() -> FakeLearner:
        raise OSError("cannot allocate memory")

    stage = Stage()
    stage.adaptation = Adaptation(OPTIONS, start, stage.publish)
    stage.note(2)
    for _ in range(3):
        stage.adaptation.turn(idle=True)
    assert stage.adaptation.state == AdaptationState()


def test_it_works_while_idle_only() -> None:
    stage = Stage()
    stage.begin()
    for idle in (True, False, False, True):
        stage.adaptation.turn(idle=idle)
    assert stage.learner.sent == [Pause(), Work()]


def test_texts_wait_until_the_drafter_is_idle_and_the_oldest_are_dropped() -> None:
    stage = Stage()
    stage.begin()
    stage.adaptation.turn(idle=False)
    stage.note(6)
    stage.adaptation.turn(idle=False)
    stage.adaptation.turn(idle=True)
    _, texts, _ = stage.learner.sent
    assert isinstance(texts, Texts)
    assert [text.tokens[-1] for text in texts.texts] == [2, 3, 4, 5]


def test_a_prompt_without_an_answer_teaches_nothing() -> None:
    stage = Stage()
    for _ in range(3):
        stage.adaptation.note([1, 2], 2, PARAMS)
    stage.adaptation.turn(idle=True)
    assert stage.started == 0


def test_weights_are_published_while_idle_and_their_folder_goes(tmp_path: Path) -> None:
    stage, folder = Stage(), tmp_path / "0"
    folder.mkdir()
    stage.begin()
    stage.learner.answers = [Checked(8, 0.5, 0.625, str(folder)), Checked(9, 0.5, 0.75)]
    stage.adaptation.turn(idle=False)
    assert stage.published == []
    stage.adaptation.turn(idle=True)
    assert stage.published == [str(folder)]
    assert not folder.exists()
    assert stage.adaptation.state == AdaptationState(1, 9, 0.5, 0.75)


@pytest.mark.parametrize("cause", ["died", "failed", "unloadable"])
def test_when_something_fails_adaptation_ends_and_drafting_goes_on(
    cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage()
    stage.begin()
    stage.learner.dead = cause == "died"
    if cause == "failed":
        stage.learner.answers = [Failed("the learner has no memory left")]
    if cause == "unloadable":
        stage.error = ConfigError("there is no such folder")
        stage.learner.answers = [Checked(8, 0.5, 0.625, "gone")]
    stage.note(4)
    stage.adaptation.turn(idle=True)
    stage.note(4)
    stage.adaptation.turn(idle=True)
    assert stage.learner.closed
    assert stage.started == 1
    assert stage.adaptation.state.updates == 0
    assert len(caplog.records) == 1
    assert "adapts no further" in caplog.text
