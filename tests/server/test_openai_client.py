"""The real openai client against a real server."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from deployments.configuration.paths import ROOT
from tests.server.conftest import Server

pytestmark = pytest.mark.cluster

PROMPT = "def read_lines(path):\n"
MESSAGES = [{"role": "user", "content": "What does close in the module socket do?"}]


def test_models_are_listed(client: Any) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["consort"]
    assert client.models.retrieve("consort").model_extra["ready"] is True


def test_a_stream_brings_the_same_text_as_one_answer(client: Any) -> None:
    options = {"model": "consort", "prompt": PROMPT, "max_tokens": 40, "seed": 3}
    whole = client.completions.create(**options)
    *chunks, last = client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == []
    assert last.usage == whole.usage
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    for answer in (whole, last):
        speculation = answer.model_extra["speculation"]
        assert 0 <= speculation["accepted"] <= speculation["drafted"]
        assert answer.model_extra["seed"] == 3


def test_chat_streams_and_answers(client: Any) -> None:
    options = {"model": "consort", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 30}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert whole.choices[0].message.role == chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.role for chunk in chunks[1:]] == [None] * (len(chunks) - 1)
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole.choices[0].message.content
    assert whole.choices[0].message.content


def test_an_ignored_end_of_text_does_not_end_the_answer(client: Any) -> None:
    options = {"model": "consort", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 400}
    ended = client.chat.completions.create(**options)
    assert ended.choices[0].finish_reason == "stop"
    ignored = client.chat.completions.create(**options, extra_body={"ignore_eos": True})
    assert ignored.choices[0].finish_reason == "length"
    assert ignored.usage.completion_tokens == 400
    assert ignored.choices[0].message.content.startswith(ended.choices[0].message.content)


def test_a_hundred_requests_at_once_get_a_hundred_answers(server: Server) -> None:
    """By the client as it is without options: two retries, ten minutes."""

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client, ThreadPoolExecutor(100) as pool:

        def ask(seed: int) -> str:
            answer = client.completions.create(model="consort", prompt=PROMPT, max_tokens=24, seed=seed)
            return answer.choices[0].text

        assert all(pool.map(ask, range(100)))


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_the_drafter_does_not_change_the_text(client: Any, temperature: float) -> None:
    options = {"model": "consort", "prompt": PROMPT, "max_tokens": 60, "seed": 11, "temperature": temperature}
    drafted = client.completions.create(**options)
    plain = client.completions.create(**options, extra_body={"speculate": False})
    assert drafted.choices[0].text == plain.choices[0].text
    assert plain.model_extra["speculation"]["drafted"] == 0
    assert plain.model_extra["speculation"]["steps"] == plain.usage.completion_tokens


def test_the_drawn_seed_reproduces_the_text(client: Any) -> None:
    options = {"model": "consort", "prompt": PROMPT, "max_tokens": 30}
    drawn = client.completions.create(**options)
    again = client.completions.create(**options, seed=drawn.model_extra["seed"])
    assert again.choices[0].text == drawn.choices[0].text


def test_several_prompts_give_several_choices(client: Any) -> None:
    prompts = ["import os\n", [1, 50, 60], "class A:\n"]
    options = {"model": "consort", "max_tokens": 12, "seed": 1}
    together = client.completions.create(prompt=prompts[:1] + prompts[2:], **options)
    alone = [client.completions.create(prompt=prompt, **options).choices[0].text for prompt in prompts]
    assert [choice.text for choice in together.choices] == [alone[0], alone[2]]
    assert [choice.index for choice in together.choices] == [0, 1]
    pieces = ["", ""]
    for chunk in client.completions.create(prompt=prompts[:1] + prompts[2:], stream=True, **options):
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    assert pieces == [alone[0], alone[2]]


def test_a_stop_string_ends_the_text_before_it(client: Any) -> None:
    options = {"model": "consort", "prompt": PROMPT, "max_tokens": 60, "temperature": 0}
    text = client.completions.create(**options).choices[0].text
    stop = text[10:14]
    stopped = client.completions.create(**options, stop=stop).choices[0]
    assert stopped.text == text[: text.index(stop)]
    assert stopped.finish_reason == "stop"


def test_the_documented_example_runs(server: Server) -> None:
    page = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
    program = page.split("```python\n")[1].split("```")[0]
    program = program.replace("http://127.0.0.1:8000", server.url).replace("smollm2", "consort")
    program = program.replace("stream=True", "stream=True, seed=1")  # or one answer in some hundred is empty
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout


def test_progress_was_shown_until_all_were_ready(server: Server) -> None:
    last = {progress.deployment: progress.state for progress in server.seen}
    assert last == {
        "Ray": "loading",
        "LocalCoordinator": "ready",
        "Target-target": "ready",
        "Drafter-drafter": "ready",
    }
    assert "importing torch" in {progress.state for progress in server.seen if progress.deployment == "Target-target"}
