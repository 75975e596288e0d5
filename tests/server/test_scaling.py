"""`consort scale` adds and removes drafters during a stream."""

import time

import pytest
from click.testing import CliRunner

from deployments.ui import cli
from tests.server.conftest import Server

BODY = {"model": "consort", "prompt": "import os\n", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def scale(server: Server, model: str, replicas: int) -> str:
    return CliRunner().invoke(cli.main, ["scale", model, str(replicas), "--url", server.url]).output


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
