"""What `consort demo` says of two answers, over answers made up here."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import pytest
from rich.console import Console

from cli.console.generation import Generation
from cli.serving.demo import report, run_demo
from deployments.client import Client

TOKENS = ["Go", " to", " bed", "."]


def generation(*, steps: int, drafted: int, accepted: int, total_s: float, text: str = "Sleep.") -> Generation:
    length = 100 / steps
    speculation = {"steps": steps, "drafted": drafted, "accepted": accepted, "acceptance_length": length}
    return Generation(text=text, tokens=100, speculation=speculation, first_s=0.1, total_s=total_s)


PLAIN = generation(steps=101, drafted=0, accepted=0, total_s=2.1)  # 20 ms a step


def said(ours: Generation) -> str:
    return "\n".join(map(str, report(ours, PLAIN)))


def test_a_gain_comes_with_its_costs() -> None:
    text = said(generation(steps=51, drafted=90, accepted=50, total_s=1.1 + 0.25))
    assert "50 of 90 draft tokens accepted in 51 steps" in text
    assert "1.56 × as fast: a step takes 25.0 ms" in text
    assert "instead of 20.0 ms, and brings 1.96 tokens" in text
    assert "the same seed gives the same text" in text


def test_a_loss_is_told_with_what_would_pay() -> None:
    text = said(generation(steps=91, drafted=90, accepted=10, total_s=2.8))
    assert "0.75 × as fast: here drafts do not pay. A step takes 30.0 ms" in text
    assert "more than 1.50 would pay" in text


def test_without_drafts_there_is_nothing_to_explain() -> None:
    assert "nothing was drafted" in said(generation(steps=101, drafted=0, accepted=0, total_s=2.1))


def test_texts_that_differ_are_reported() -> None:
    assert "the text differs" in said(generation(steps=51, drafted=90, accepted=50, total_s=1.4, text="Wake."))


class FakeClient:
    """Answers with the same tokens, two of them accepted if it may speculate."""

    def document(self, path: str) -> dict[str, Any]:
        return {"data": [{"id": "m", "drafter": None, "ngram": True}]}

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        accepted = 2 if body.get("speculate", True) else 0
        details = [
            {
                "id": 1,
                "text": token,
                **({"source": "accepted", "proposer": "ngram"} if index < accepted else {"source": "plain"}),
            }
            for index, token in enumerate(TOKENS)
        ]
        choice = {"index": 0, "delta": {"content": "".join(TOKENS)}, "finish_reason": "stop", "token_details": details}
        speculation = {"steps": 4 - accepted, "drafted": accepted, "accepted": accepted, "acceptance_length": 2.0}
        yield {"choices": [choice], "speculation": speculation, "seed": 7}
        yield {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}


@pytest.mark.parametrize("terminal", [True, False])
def test_the_answer_is_shown_with_the_sources_of_its_tokens(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.serving.demo._PRACTICE_S", 0.0)
    console = Console(force_terminal=terminal, record=True, width=100)
    run_demo(cast(Client, FakeClient()), console, model="m")
    shown = console.export_text()
    if terminal:  # elsewhere the answer is written as it is
        assert "Go to bed." in shown
    assert "2 tokens from n-grams of the text" in shown
    assert "2 from the target" in shown
    assert "2 of 2 draft tokens accepted" in shown
