"""An adapter that was loaded at run time outlives its coordinator and the replica that read it first."""

import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from deployments.configuration.paths import ROOT
from tests.server.conftest import Server
from tests.server.test_failures import TARGET, coordinator_pids, wait_for_another
from tests.support.adapters import save_adapter
from tests.support.waiting import wait_until

pytestmark = pytest.mark.cluster

BODY = {"prompt": "def read_lines(path):\n", "max_tokens": 32, "temperature": 0}


def post(server: Server, path: str, body: dict[str, Any]) -> tuple[int, str]:
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def text(server: Server, model: str) -> str | None:
    """Return a greedy answer; None while there is none."""
    status, answer = post(server, "completions", {"model": model, **BODY})
    return str(json.loads(answer)["choices"][0]["text"]) if status == 200 else None


@pytest.mark.slow
def test_a_loaded_adapter_outlives_coordinators_and_replicas(server: Server, tmp_path: Path) -> None:
    save_adapter(tmp_path, AutoModelForCausalLM.from_pretrained(ROOT / "models" / "target"), 1)
    plain = text(server, "consort")
    status, reason = post(server, "load_lora_adapter", {"lora_name": "tuned", "lora_path": str(tmp_path)})
    assert status == 200, reason
    tuned = text(server, "tuned")
    assert tuned not in (None, plain)
    (pid,) = coordinator_pids()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: text(server, "tuned") == tuned, "the next coordinator knows the adapter", timeout_s=120)
    (before,) = server.replicas(TARGET)
    os.kill(before.pid, signal.SIGKILL)
    wait_for_another(server, TARGET, before.pid)
    wait_until(lambda: text(server, "tuned") == tuned, "the next replica reads the adapter", timeout_s=120)
    assert text(server, "consort") == plain
    assert post(server, "unload_lora_adapter", {"lora_name": "tuned"})[0] == 200
    assert post(server, "completions", {"model": "tuned", **BODY})[0] == 404
