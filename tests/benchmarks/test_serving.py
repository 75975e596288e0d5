"""The load benchmark without models: its client and load against a small server, its peers and findings."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from benchmarks.serving.__main__ import OFF, ON, VLLM, LoadComparison, as_text, chosen_peers, peer_servers
from benchmarks.serving.client import Exchange, Load, LoadGenerator, LoadResult, measured
from deployments.configuration.config import TINY_CONFIG, load_config
from evaluation.prompts import read_prompts

PROMPTS = Path("models/heldout.jsonl")
TOKENS = 6
LOAD = Load(requests=5, concurrency=2, new_tokens=TOKENS, temperature=0.0, seed=3)


def event(text: str = "", tokens: int | None = None) -> bytes:
    usage = None if tokens is None else {"completion_tokens": tokens}
    return b"data: " + json.dumps({"choices": [{"text": text}], "usage": usage}).encode() + b"\n\n"


class Server(ThreadingHTTPServer):
    """Answers with `tokens` tokens, two in an event, and counts how many requests it has at once."""

    def __init__(self, tokens: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokens, self.bodies, self.at_once, self.most_at_once = tokens, list[dict[str, Any]](), 0, 0
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        server = self.server
        with server.lock:
            server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in (*[event("a b")] * (server.tokens // 2), event(tokens=server.tokens), b"data: [DONE]\n\n"):
            time.sleep(0.01)
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        with server.lock:
            server.at_once -= 1
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(getattr(request, "param", TOKENS)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run(server: Server) -> LoadResult:
    url = f"http://127.0.0.1:{server.server_port}"
    return LoadGenerator(PROMPTS).run(url, "m", LOAD, {"speculate": False})


def test_so_many_requests_are_in_flight_each_with_a_prompt_of_its_own(server: Server) -> None:
    result = run(server)
    assert (result.concurrency, result.tokens_per_event) == (2, 2.0)
    assert 0 < result.ttft_p50_ms <= result.ttft_p99_ms
    assert (len(server.bodies), server.most_at_once) == (LOAD.requests, LOAD.concurrency)
    assert all(body["ignore_eos"] and body["stream"] and not body["speculate"] for body in server.bodies)
    known = set(read_prompts(PROMPTS))
    prompts = [body["prompt"].split(" ", 1) for body in server.bodies]
    assert all(number.isdigit() and prompt in known for number, prompt in prompts)
    assert len({prompt for _, prompt in prompts}) == LOAD.requests


@pytest.mark.parametrize("server", [TOKENS - 2], indirect=True)
def test_a_run_with_short_answers_does_not_count(server: Server) -> None:
    with pytest.raises(RuntimeError, match="4 of 6 tokens of an answer came: status 200"):
        run(server)


def test_a_server_that_is_gone_is_named_so() -> None:
    with pytest.raises(RuntimeError, match="0 of 6 tokens of an answer came: status 0"):
        LoadGenerator(PROMPTS).run("http://127.0.0.1:9", "m", LOAD, {})


def test_times_are_those_of_events() -> None:
    """The second of three events comes at 1.5 s with a part of the third, whose rest comes at 2 s."""
    parts = [event("a"), event("b") + event("c d e f")[:9], event("c d e f")[9:] + event(tokens=6) + b"data: [DONE]\n"]
    ends = [sum(map(len, parts[: index + 1])) for index in range(3)]
    arrivals = list(zip(ends, (1.0, 1.5, 2.0), strict=True))
    exchange = Exchange(0.0, 3.0, 1.0, 200, None, b"".join(parts), arrivals)
    result = measured([exchange], LOAD)
    assert (result.ttft_p50_ms, result.tpot_p50_ms, result.itl_p99_ms) == (1000.0, 200.0, 500.0)
    assert (result.tokens_per_s, result.tokens_per_event) == (2.0, 2.0)


def test_peers_take_part_that_are_at_hand(tmp_path: Path) -> None:
    here, missing = tmp_path / "here", tmp_path / "missing"
    here.touch()
    options = {"streams": (4,), "peer_threads": 2, "output": tmp_path / "serve.json", "peers": (), "no_peers": False}
    config = load_config()
    config.models["smollm2"].path = "some.gguf"

    def names(llama: Path, vllm: Path) -> list[str]:
        return [*peer_servers(SimpleNamespace(**options, llama_server=llama, vllm_python=vllm), config)]

    assert names(missing, missing) == []
    assert names(here, missing) == ["llama.cpp", "llama.cpp+ngram"]
    assert names(missing, here) == ["vLLM", "vLLM+ngram", "vLLM+eagle3"]
    config = load_config(TINY_CONFIG)
    assert names(here, here) == ["vLLM", "vLLM+ngram"]
    options["streams"] = (1, 4)
    assert names(missing, missing) == ["HF", "HF+ngram"]
    options["streams"] = (4,)
    chosen = SimpleNamespace(**options | {"peers": ("other=http://x", "vLLM")}, llama_server=here, vllm_python=here)
    assert [*chosen_peers(chosen, config)] == ["other", "vLLM"]
    with pytest.raises(click.ClickException, match=r"llama\.cpp can't serve this target here, .*: vLLM, vLLM\+ngram;"):
        chosen_peers(SimpleNamespace(**vars(chosen) | {"peers": ("llama.cpp",)}), config)


def measured_at(rate: float) -> LoadResult:
    return LoadResult(2, rate, 1.0, 10.0, 20.0, 3.0, 4.0, 5.0, 6.0, 2.5)


def test_ratios_are_taken_within_repetitions() -> None:
    rates = {ON: [20.0, 40.0, 30.0], OFF: [10.0, 20.0, 30.0], VLLM: [10.0, 10.0, 10.0]}
    comparison = LoadComparison(0.0, 2, {name: list(map(measured_at, values)) for name, values in rates.items()})
    assert comparison.ratios(ON, OFF) == [2.0, 2.0, 1.0]
    text = as_text([comparison])
    for shown in ("2.00", "(1.00 – 2.00)", "on / vLLM", "TTFT p50"):
        assert shown in text
