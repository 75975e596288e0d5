"""Two coordinators on a live Serve: limits of keys hold for both, prompts find their target, and one of them drains."""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import httpx
import pytest

from benchmarks.processes import free_port
from deployments.configuration.paths import ROOT
from tests.server.conftest import requests_by_coordinator

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = [f"# file {number}\n" + "import sys\n" * 60 for number in range(4)]
BODY = {"model": "consort", "prompt": "def f(x):\n", "max_tokens": 8, "seed": 1}
REPORT_S = 1.5  # until all coordinators know that nothing is in progress
LONG = {**BODY, "max_tokens": 400, "ignore_eos": True}


class Coordinators:
    """A server in a process of its own, whose number of coordinators can be set."""

    def __init__(self, process: "subprocess.Popen[str]", url: str) -> None:
        self._process, self.url = process, url

    def set(self, count: int) -> None:
        """Have so many, and wait until none is starting or stopping."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        assert any(line == "ready\n" for line in self._process.stdout)


@pytest.fixture(scope="module")
def coordinators() -> Iterator[Coordinators]:
    port = free_port()
    command = [sys.executable, "-m", "tests.server.coordinators", str(port)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    ) as process:
        coordinators = Coordinators(process, f"http://127.0.0.1:{port}")
        coordinators.set(2)
        yield coordinators
        process.communicate()


@pytest.fixture
def url(coordinators: Coordinators) -> str:
    return coordinators.url


def ask(url: str, key: str | None, body: dict[str, Any]) -> httpx.Response:
    """Ask on a connection of its own, so that either coordinator may answer."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)


def at_once(url: str, key: str | None, body: dict[str, Any], count: int) -> list[httpx.Response]:
    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(ask, url, key, body) for _ in range(count)]]


def test_all_get_the_same_text_and_both_coordinators_answer(url: str) -> None:
    assert {reply.status_code for reply in at_once(url, None, BODY, 8)} == {401}
    replies = [reply for _ in range(3) for reply in at_once(url, "key-free", BODY, 8)]
    assert [reply.status_code for reply in replies] == [200] * 24
    assert len({reply.json()["choices"][0]["text"] for reply in replies}) == 1
    counts = requests_by_coordinator(url)
    assert len(counts) == 2
    assert min(counts.values()) > 0, counts


def test_nothing_is_kept_without_a_store_that_both_share(url: str) -> None:
    def respond(**fields: Any) -> httpx.Response:
        body = {"model": "consort", "input": "hi", "max_output_tokens": 2, **fields}
        return httpx.post(f"{url}/v1/responses", json=body, headers={"Authorization": "Bearer key-free"}, timeout=120)

    replies = [respond() for _ in range(8)]
    assert [reply.json()["store"] for reply in replies] == [False] * 8
    refused = respond(previous_response_id=replies[0].json()["id"])
    assert (refused.status_code, "responses.store" in refused.text) == (400, True)


def test_a_limit_per_minute_holds_for_both_together(url: str) -> None:
    before = requests_by_coordinator(url)
    statuses = [reply.status_code for _ in range(5) for reply in at_once(url, "key-slow", BODY, 4)]
    assert Counter(statuses) == {200: 10, 429: 10}
    assert min((requests_by_coordinator(url) - before).values()) > 0


def test_a_limit_at_once_holds_for_both_together(url: str) -> None:
    statuses = Counter(reply.status_code for reply in at_once(url, "key-few", LONG, 12))
    assert statuses == {200: 3, 429: 9}
    assert ask(url, "key-few", BODY).status_code == 200  # once they have ended


def test_a_prompt_finds_its_target_again(url: str) -> None:
    """Idle coordinators agree on a target. They know of each other's requests from reports a second old."""
    cached: dict[str, list[int]] = {}
    for prompt in PROMPTS * 4:
        time.sleep(REPORT_S)
        usage = ask(url, "key-free", {**BODY, "prompt": prompt}).json()["usage"]
        cached.setdefault(prompt, []).append(usage["prompt_tokens_details"]["cached_tokens"])
    for tokens in cached.values():
        assert min(tokens[1:]) > 100, list(cached.values())


def test_a_withdrawn_coordinator_ends_its_streams(coordinators: Coordinators) -> None:
    """The proxy can't resume streams of this route, so each has to be ended by the coordinator that began it."""
    fields = {"model": "consort", "input": "def f(x):\n", "max_output_tokens": 700, "ignore_eos": True, "stream": True}
    begun, ends = Barrier(7), list[tuple[str, float]]()

    def stream() -> None:
        last = ""
        headers = {"Authorization": "Bearer key-free"}
        with httpx.stream(
            "POST", f"{coordinators.url}/v1/responses", json=fields, headers=headers, timeout=120
        ) as reply:
            events = (line for line in reply.iter_lines() if line.startswith("event: "))
            for number, line in enumerate(events):
                last = line
                if number == 5:
                    begun.wait(60)
        ends.append((last, time.monotonic()))

    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(stream) for _ in range(6)]
        begun.wait(60)
        withdrawn_s = time.monotonic()
        coordinators.set(1)
        for future in futures:
            future.result(120)
    assert {last for last, _ in ends} == {"event: response.incomplete"}
    assert max(ended_s for _, ended_s in ends) > withdrawn_s + 3  # it was draining by then
    assert ask(coordinators.url, "key-free", BODY).status_code == 200
