"""`consort scale` adds and removes drafters during a stream."""

import time

import pytest
from click.testing import CliRunner, Result

from cli import shell
from tests.server.conftest import Server

BODY = {"model": "consort", "prompt": "import os\n", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def invoke(server: Server, *arguments: str) -> Result:
    return CliRunner().invoke(shell.main, [*arguments, "--url", server.url])


def scale(server: Server, model: str, replicas: int) -> str:
    return invoke(server, "scale", model, str(replicas)).output


def wait_for_drafters(server: Server, count: int) -> None:
    ends_at_s = time.monotonic() + 60
    while len(server.replicas("Drafter-drafter")) != count:
        assert time.monotonic() < ends_at_s, f"no {count} drafters came to be"
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.cluster
def test_to_zero_drafters_and_back_under_a_stream(server: Server) -> None:
    undisturbed = server.client.post("/v1/completions", BODY).document["choices"][0]["text"]
    stream = server.client.stream("/v1/completions", BODY)
    text = next(stream)["choices"][0]["text"]
    assert "drafter: 0 replica(s)" in scale(server, "drafter", 0)
    text += "".join(event["choices"][0]["text"] for event in stream if event["choices"])
    assert text == undisturbed
    wait_for_drafters(server, 0)
    assert server.client.post("/v1/completions", BODY).document["choices"][0]["text"] == undisturbed
    scale(server, "drafter", 1)
    wait_for_drafters(server, 1)
    assert "there is no model 'draftr'; did you mean 'drafter'?" in scale(server, "draftr", 1)


@pytest.mark.slow
@pytest.mark.cluster
def test_a_replica_without_room_is_seen(server: Server) -> None:
    try:
        result = invoke(server, "scale", "target", "2", "--wait", "--timeout", "5")
        shortage = "1 can't be placed: each needs 1 unit, and the cluster has 0 unit free"
        assert result.exit_code == 1
        assert shortage in result.output
        status = invoke(server, "status")
        assert status.exit_code == 0  # the other replica answers
        assert "ready, incomplete" in status.output
        assert shortage in " ".join(status.output.split())
    finally:
        result = invoke(server, "scale", "target", "1", "--wait")
    assert result.exit_code == 0
    assert "incomplete" not in invoke(server, "status").output
