"""`consort report` against the fake server in this process."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from deployments.client import Client, Reply
from evaluation import server_report as report_page
from evaluation.metrics import ngram_entropy
from evaluation.server_report import Reporter, acceptance_by_position, count_accepted, write_page


class InProcess(Client):
    """A client of a server in this process."""

    def __init__(self, server: TestClient) -> None:
        super().__init__("http://server")
        self._server = server

    def _request(self, path: str, body: Mapping[str, object] | None = None) -> Reply:
        answer = self._server.get(path) if body is None else self._server.post(path, json=body)
        return Reply(answer.status_code, answer.json())


def test_a_report_has_texts_speeds_and_pictures(fake: TestClient, tmp_path: Path) -> None:
    reporter = Reporter(InProcess(fake), max_tokens=12, temperature=0)
    report = reporter.run(None, ["import os", "def f("], lengths=(1, 2))
    assert [way.way.name for way in report.ways] == ["plain", "speculative"]
    assert list(report.seconds) == [0, 1, 2]
    plain, speculative = (way.metrics for way in report.ways)
    assert plain == speculative  # the same seed, so the same texts
    assert plain.tokens == 12
    assert plain.log_likelihood is not None
    files = write_page(report, tmp_path / "new")
    assert [path.name for path in files] == ["report.md", "report.json", "execution-time.png", "acceptance.png"]
    assert all(path.stat().st_size > 0 for path in files)
    document = json.loads(files[1].read_text())
    assert document["ways"][1]["name"] == "speculative"
    assert set(document["seconds_by_draft_length"]) == {"0", "1", "2"}
    assert "entropy-1" in files[0].read_text()


class HeadsAlone(InProcess):
    """The same server, if its endpoints had heads and no other proposers."""

    def _request(self, path: str, body: Mapping[str, object] | None = None) -> Reply:
        reply = super()._request(path, body)
        for card in reply.document["data"] if path == "/v1/models" else ():
            card.update(drafter=None, ngram=False, proposers=["eagle3"])
        return reply


def test_heads_are_measured_too(fake: TestClient) -> None:
    report = Reporter(HeadsAlone(fake), max_tokens=4, temperature=0).run(None, ["import os"], lengths=(1,))
    assert [way.way.name for way in report.ways] == ["plain", "speculative"]
    assert list(report.seconds) == [0, 1]


def test_without_matplotlib_all_but_the_pictures_is_written(
    fake: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = Reporter(InProcess(fake), max_tokens=4, temperature=0).run(None, ["import os"], lengths=(1,))
    monkeypatch.setattr(report_page, "has_pictures", lambda: False)
    assert write_page(report, tmp_path) == [tmp_path / "report.md", tmp_path / "report.json"]
    assert ".png" not in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_the_entropy_is_that_of_the_answers_tokens(fake: TestClient) -> None:
    report = Reporter(InProcess(fake), max_tokens=12, temperature=0).run("consort", ["import os"], lengths=())
    body = {"model": "consort", "prompt": "import os", "max_tokens": 12, "temperature": 0, "seed": 0}
    details = fake.post("/v1/completions", json={**body, "return_token_details": True}).json()["choices"][0]
    tokens = [detail["id"] for detail in details["token_details"]]
    assert report.ways[0].metrics.entropy_1 == pytest.approx(ngram_entropy(tokens, 1))


def test_acceptance_by_position_counts_drafts() -> None:
    sources = ["plain", "accepted", "accepted", "bonus", "recovered", "accepted", "recovered"]
    counts = count_accepted(sources)
    assert counts == Counter({2: 1, 0: 1, 1: 1})
    assert acceptance_by_position(counts) == pytest.approx([2 / 3, 1 / 3])
    assert acceptance_by_position(Counter()) == []
