"""Failures: killed replicas, disconnecting clients, many requests at once, bad input."""

import asyncio
import http.client
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import openai
import psutil  # type: ignore[import-untyped]
import pytest

from cli.serving.cluster import start_standby
from deployments.replicas.environment import APP_NAME, LOCAL_COORDINATOR
from deployments.scaling.controller import set_replicas
from tests.deployments.bad_input import CASES
from tests.server.conftest import Server, requests_by_coordinator
from tests.support.waiting import wait_until

pytestmark = pytest.mark.cluster

TARGET, DRAFTER = "Target-target", "Drafter-drafter"
LONG = {
    "model": "consort",
    "prompt": "def read_lines(path):\n",
    "max_tokens": 400,
    "temperature": 1.3,
}


@pytest.fixture
def long_request(client: Any) -> tuple[dict[str, Any], str]:
    """A long request and the text that it gets without failures."""
    for seed in range(50):
        answer = client.completions.create(**LONG, seed=seed)
        if answer.usage.completion_tokens == LONG["max_tokens"]:
            return {**LONG, "seed": seed}, answer.choices[0].text
    pytest.fail("every answer ended early")


def leave_early(server: Server, request: dict[str, Any], *, stream: bool) -> None:
    """Begin a long request and disconnect once it holds its slots."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = json.dumps({**request, "stream": stream})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    if stream:
        assert connection.getresponse().read(20)
    wait_until(lambda: server.busy() > 0, "the request holds a slot")
    assert connection.sock is not None or stream
    connection.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slots(
    server: Server, long_request: tuple[dict[str, Any], str], stream: bool
) -> None:
    wait_until(lambda: server.busy() == 0, "the server is idle")
    leave_early(server, long_request[0], stream=stream)
    wait_until(lambda: server.busy() == 0, "all slots are free", timeout_s=5)


def stream_while_killing(client: Any, request: dict[str, Any], pid: int) -> str:
    """Text of a long request whose replica's process is killed after the 20th chunk."""
    text = ""
    for count, chunk in enumerate(client.completions.create(**request, stream=True)):
        text += chunk.choices[0].text
        if count == 20:
            os.kill(pid, signal.SIGKILL)
            assert chunk.choices[0].finish_reason is None
    return text


def wait_for_another(server: Server, deployment: str, pid: int) -> None:
    def is_back() -> bool:
        return any(status.pid != pid for status in server.replicas(deployment))

    wait_until(is_back, f"a new process of {deployment}", timeout_s=90)


@pytest.mark.slow
def test_killing_the_drafter_in_mid_stream_changes_nothing(
    server: Server, client: Any, long_request: tuple[dict[str, Any], str]
) -> None:
    request, undisturbed = long_request
    (before,) = server.replicas(DRAFTER)
    assert stream_while_killing(client, request, before.pid) == undisturbed

    def drafts() -> bool:
        answer = client.completions.create(**{**request, "max_tokens": 40})
        assert undisturbed.startswith(answer.choices[0].text)
        return answer.model_extra["speculation"]["drafted"] > 0

    wait_for_another(server, DRAFTER, before.pid)
    wait_until(drafts, "the new drafter drafts", timeout_s=200)  # plain decoding may be faster for a while


@pytest.mark.slow
def test_killing_the_target_in_mid_stream_only_delays(
    server: Server, client: Any, long_request: tuple[dict[str, Any], str]
) -> None:
    request, undisturbed = long_request
    (before,) = server.replicas(TARGET)
    assert stream_while_killing(client, request, before.pid) == undisturbed
    wait_for_another(server, TARGET, before.pid)


def coordinator_pids() -> set[int]:
    """Process ids of the coordinators that these tests started; other servers may run on this machine."""
    title, pids = f"ray::ServeReplica:{APP_NAME}:{LOCAL_COORDINATOR}", set[int]()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if "".join(process.cmdline()).startswith(title):
                pids.add(int(process.pid))
    return pids


def test_ray_runs_none_of_its_processes_that_only_clusters_need(server: Server) -> None:
    programs = set[str]()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            programs |= {Path(word).name for word in process.cmdline()}
    assert "gcs_server" in programs
    assert not {"dashboard.py", "monitor.py", "log_monitor.py"} & programs


@pytest.mark.slow
def test_killing_the_coordinator_in_mid_stream_only_delays(
    server: Server, client: Any, long_request: tuple[dict[str, Any], str]
) -> None:
    request, undisturbed = long_request
    (pid,) = coordinator_pids()
    assert stream_while_killing(client, request, pid) == undisturbed

    def is_back() -> bool:
        reply = server.client.get("/health")
        return reply.status == 200 and all(reply.document["models"].values())

    wait_until(is_back, "another coordinator", timeout_s=90)
    assert client.completions.create(**request).choices[0].text == undisturbed


def has_coordinators(count: int) -> bool:
    """Whether so many are up, and none is starting or stopping."""
    from ray import serve

    states = serve.status().applications[APP_NAME].deployments[LOCAL_COORDINATOR].replica_states
    return {str(state): number for state, number in states.items()} == {"RUNNING": count}


@pytest.mark.slow
def test_a_coordinator_that_stands_by_goes_on_when_the_other_dies(
    server: Server, client: Any, long_request: tuple[dict[str, Any], str]
) -> None:
    request, undisturbed = long_request
    (first,) = coordinator_pids()
    start_standby()
    wait_until(lambda: has_coordinators(2), "another coordinator stands by", timeout_s=120)
    (second,) = coordinator_pids() - {first}
    assert client.completions.create(**request).choices[0].text == undisturbed
    assert stream_while_killing(client, request, first) == undisturbed
    assert second in coordinator_pids()
    wait_until(lambda: has_coordinators(2), "a third coordinator stands by", timeout_s=120)
    assert client.completions.create(**request).choices[0].text == undisturbed
    counts = requests_by_coordinator(server.url)
    assert sum(count > 0 for count in counts.values()) == 1, counts
    asyncio.run(set_replicas(APP_NAME, LOCAL_COORDINATOR, 1))
    wait_until(lambda: has_coordinators(1), "only one coordinator", timeout_s=120)


@pytest.mark.slow
def test_many_at_once_get_what_they_get_alone(client: Any) -> None:
    """More than run at once: the others wait, or come again when `Retry-After` says."""
    client = client.with_options(max_retries=20)

    def ask(i: int) -> str:
        prompt = "import sys\n" * (1 + i % 7) + f"value_{i} = "
        options = {"max_tokens": 4 + i % 13, "seed": i, "temperature": (i % 3) / 2}
        return client.completions.create(model="consort", prompt=prompt, **options).choices[0].text

    alone = [ask(i) for i in range(64)]
    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(ask, range(64))) == alone


def test_bad_input_is_refused_by_name(server: Server) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        for path, body, field in CASES:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            error = json.load(response)["error"]
            assert (response.status, error["param"]) == (400, field), error


def test_the_client_raises_what_openai_raises(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="consort", prompt="x", extra_body={"max_token": 3, "strict": True})
    assert caught.value.param == "max_token"
    assert "did you mean 'max_tokens'?" in caught.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="concert", prompt="x")
    assert missing.value.code == "model_not_found"
    assert "did you mean 'consort'?" in missing.value.message


def test_unknown_routes_have_the_same_shape(server: Server) -> None:
    assert server.client.get("/v1/nothing").status == 404
    reply = server.client.get("/v1/completions")
    assert reply.status == 405
    assert reply.document["error"]["code"] == "method_not_allowed"
