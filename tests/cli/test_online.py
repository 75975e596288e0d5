"""`consort complete`, `consort status` and `consort chat` in pipes, against a scripted server."""

import copy
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from cli import shell
from cli.console.printer import complete
from cli.status import StatusReader, render, watch
from deployments.client import Client
from deployments.configuration.paths import ROOT
from tests.cli.conftest import shown
from tests.cli.fake_server import SHORTAGE, STATUS, FakeServer


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONSORT_URL", "CONSORT_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def invoke(*arguments: str, url: str, text: str = "") -> Result:
    return CliRunner().invoke(shell.main, [*arguments, "--url", url], input=text)


def test_a_pipe_gets_the_continuation_alone(server: FakeServer) -> None:
    result = invoke("complete", "a b", "--temperature", "0", "--seed", "4", "--set", "stop=END", url=server.url)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Once upon a time\n", "")
    body = server.bodies[-1]
    assert (body["prompt"], body["temperature"], body["seed"], body["stop"]) == ("a b", 0.0, 4, "END")
    assert (body["max_tokens"], body["model"]) == (128, "consort")


def test_the_text_may_come_from_standard_input(server: FakeServer) -> None:
    result = invoke("complete", "--no-speculate", "--json", url=server.url, text="a\n")
    document = json.loads(result.stdout)
    assert document["prompt"] == server.bodies[-1]["prompt"] == "a\n"
    assert (document["text"], document["seed"], document["completion_tokens"]) == ("Once upon a time", 77, 4)
    assert document["token_sources"] == {"plain": 1, "accepted": 2, "recovered": 1}
    assert server.bodies[-1]["speculate"] is False


def test_characters_that_the_terminal_lacks_are_replaced(server: FakeServer) -> None:
    server.tokens = [("naïve – 日本", "plain")]
    arguments, terminal = ["complete", "x", "--url", server.url], CliRunner(charset="latin-1")
    assert terminal.invoke(shell.main, arguments).stdout == "naïve ? ??\n"
    assert json.loads(terminal.invoke(shell.main, [*arguments, "--json"]).stdout)["text"] == "naïve – 日本"


def test_files_that_are_not_utf_8(server: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("naïve".encode("latin-1"))
    result = invoke("report", "--prompts", str(file), url=server.url)
    assert (result.exit_code, result.output) == (1, f"Error: can't read {file}: it is not UTF-8 text\n")


def test_both_ways(server: FakeServer) -> None:
    result = invoke("complete", "a", "--compare", url=server.url)
    assert "same text: yes" in result.stdout
    assert invoke("complete", "a", "--compare", "--json", url=server.url).exit_code == 2


def test_a_terminal_gets_the_prompt_too_and_statistics(server: FakeServer, terminal: Console) -> None:
    complete(Client(server.url), {"model": "m", "prompt": "Tell"}, terminal, terminal, colours=False)
    assert "Tell\x1b[0mOnce upon a time\n" in shown(terminal)
    assert "4 tokens" in shown(terminal)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("complete", ""), 2, "no text to continue"),
        (("complete", "x", "--temperature", "-1"), 1, "Error: temperature must be"),
        (("complete", "x", "--set", "tempratur=1"), 1, "Error: tempratur: is not known; did you mean 'temperature'?"),
        (("complete", "x", "--model", "sol"), 1, "Error: there is no model 'sol'; did you mean 'solo'?"),
        (("complete", "x", "--set", "temperature=9"), 1, "Error: temperature is too high."),
        (("chat", "--set", "max_tok=1"), 1, "did you mean 'max_tokens'?"),
    ],
)
def test_mistakes(server: FakeServer, arguments: tuple[str, ...], code: int, message: str) -> None:
    result = invoke(*arguments, url=server.url)
    assert result.exit_code == code
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("command", ["chat", "complete", "status"])
def test_no_server_is_one_sentence_that_says_how_to_start_one(command: str) -> None:
    result = invoke(command, *["x"] * (command == "complete"), url="localhost:1")
    assert result.exit_code == 1
    reason = "no Consort server answers at http://localhost:1 (Connection refused); `consort serve` starts one"
    assert result.output == f"Error: {reason}\n"


def test_keys(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.api_key = "secret"
    assert "the API key is missing or wrong" in invoke("status", url=server.url).stderr
    assert invoke("status", "--api-key", "secret", url=server.url).exit_code == 0
    monkeypatch.setenv("CONSORT_API_KEY", "secret")
    assert invoke("complete", "x", url=server.url).stdout == "Once upon a time\n"


def test_a_chat_in_a_pipe(server: FakeServer) -> None:
    result = invoke("chat", "--system", "S", "--model", "solo", url=server.url, text='one\\\ntwo\n"""a\n\nb"""\nc')
    assert result.stdout == "Once upon a time\n" * 3
    output = [message["content"] for message in server.bodies[-1]["messages"] if message["role"] != "assistant"]
    assert output == ["S", "one\ntwo", "a\n\nb", "c"]
    assert invoke("chat", url=server.url, text="/frob\n").exit_code == 1


def test_status_fits_80_columns(server: FakeServer, terminal: Console) -> None:
    server.status = copy.deepcopy(STATUS)
    server.status["replicas"][0] |= {"name": "drafter-d15710f259d06f1c", "drafting": False}
    terminal.print(render(StatusReader(Client(server.url)).read()))
    lines = shown(terminal).splitlines()
    assert any("2 running, 1 waiting" in line and "version 9.9" in line for line in lines)
    assert any("consort" in line and "2.0" in line and "75%" in line and "2.50" in line for line in lines)
    assert any("drafter-d15710f259d06f1c" in line and "not wanted" in line for line in lines)  # in one row


def test_status_names_the_weights_of_each_replica(server: FakeServer, terminal: Console) -> None:
    server.status = copy.deepcopy(STATUS)
    server.status["replicas"][0]["weights"] = {"version": "2-5f0c2a9e", "asleep": True, "error": "it has changed"}
    terminal.print(render(StatusReader(Client(server.url)).read()))
    text = shown(terminal)
    assert "2-5f0c2a9e, asleep" in text
    assert f"{STATUS['replicas'][0]['name']}: it has changed" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_names_are_never_broken(server: FakeServer, width: int) -> None:
    names = ["Target-Qwen2.5-7B-Instruct#k2v9x1ab", "qwen-2.5-7b-instruct", "smollm2-135m-instruct", "assistant-of-all"]
    server.status = copy.deepcopy(STATUS)
    server.status["replicas"][0]["name"] = names[0]
    server.status["endpoints"][0] |= {"target": names[1], "drafter": names[2], "name": names[3]}
    console = Console(width=width, record=True)
    console.print(render(StatusReader(Client(server.url)).read()))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    for name in names:
        assert any(name in line for line in lines), name


def test_replicas_that_are_missing(server: FakeServer) -> None:
    output = invoke("status", url=server.url).stdout
    assert "ready, incomplete" in output
    assert f"large: 1 of 2 replicas, {SHORTAGE}" in " ".join(output.split())
    assert "small: " not in output


def test_what_waits_what_drafts_and_what_failed(server: FakeServer) -> None:
    output = " ".join(invoke("status", url=server.url).stdout.split())
    assert "2 running, 1 waiting" in output
    assert "consort: a request that comes now waits for 3 s" in output
    assert "consort: drafter 75% accepted, 12% of the time" in output
    assert "large: a replica was replaced at 2027-01-1" in output
    assert ": its node died" in output


def test_scale_waits_until_all_replicas_are_up(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.status = copy.deepcopy(STATUS)
    large = server.status["models"][0]
    looks = iter([{"reason": "1 loading"}, {"running": 2, "reason": None}])
    monkeypatch.setattr(time, "sleep", lambda _: large.update(next(looks)))
    result = invoke("scale", "large", "2", "--wait", url=server.url)
    assert server.bodies == [{"model": "large", "replicas": 2}]
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"large: 1 of 2 replicas, {SHORTAGE}",
        "large: 1 of 2 replicas, 1 loading",
        "large: 2 replica(s)",
    ]


def test_scale_fails_when_replicas_are_not_up_in_time(server: FakeServer) -> None:
    result = invoke("scale", "large", "2", "--wait", "--timeout", "0", url=server.url)
    assert result.exit_code == 1
    expected = f"large: not 2 replica(s) after 0 s: 1 of 2 replicas, {SHORTAGE}"
    assert result.stderr == f"Error: {expected}\n"
    result = invoke("scale", "large", "2", url=server.url)
    assert (result.exit_code, result.stdout.split(";")[0]) == (0, "large: 2 replica(s) wanted")


def test_rates_are_those_since_the_last_look(server: FakeServer) -> None:
    server.status = copy.deepcopy(STATUS)
    reader = StatusReader(Client(server.url))
    reader.read()
    server.status["uptime_s"] += 2
    server.status["endpoints"][0]["totals"] |= {"tokens": 110, "steps": 44, "drafted": 90, "accepted": 61}
    (endpoint,) = reader.read()["endpoints"]
    expected = {"tokens_per_s": 5.0, "acceptance_rate": 0.1, "acceptance_length": 2.5, "hit_rate": None}
    assert endpoint["rates"] == expected
    server.status["uptime_s"] = 10.0  # it was started anew
    (endpoint,) = reader.read()["endpoints"]
    assert endpoint["rates"]["tokens_per_s"] == 11.0


def test_status_as_json(server: FakeServer) -> None:
    document = json.loads(invoke("status", "--json", url=server.url).stdout)
    assert document["endpoints"][0]["rates"]["acceptance_rate"] == 0.75
    assert [replica["slots"] for replica in document["replicas"]] == [4, 4]
    assert [count["running"] for count in document["models"]] == [1, 1]
    assert document["url"] == server.url


@pytest.mark.parametrize("as_json", [False, True])
def test_watching_goes_on_while_the_server_is_away(
    server: FakeServer, terminal: Console, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    looks = iter([True, False, True])

    def sleep(_: float) -> None:
        try:
            server.is_up = next(looks)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        watch(StatusReader(Client(server.url)), terminal, interval_s=1, as_json=as_json)
    assert "ready" in shown(terminal)
    assert as_json or "no models yet" in shown(terminal)


def test_a_reader_that_leaves_ends_the_command(server: FakeServer) -> None:
    """As in `consort complete … | head -1`."""
    server.tokens, server.token_s = [("line\n", "plain")] * 1000, 0.002
    command = [sys.executable, "-m", "cli", "complete", "x", "--url", server.url]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1
    assert server.hung_up.wait(5)
