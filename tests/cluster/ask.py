"""A client for a while: `python -m tests.cluster.ask URL SECONDS` prints what came of its requests, as JSON."""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import openai

CASES = 8  # as many streams at once


@dataclass
class Outcome:
    """What the requests of one case came to."""

    answers: int = 0
    drafted: int = 0
    slowest_s: float = 0.0
    pause_s: float = 0.0  # the longest between two chunks
    texts: list[str] = field(default_factory=list)  # all that differ
    errors: list[str] = field(default_factory=list)

    def note(self, text: str, drafted: int, took_s: float, pause_s: float) -> None:
        self.answers += 1
        self.drafted += drafted
        self.slowest_s = max(self.slowest_s, took_s)
        self.pause_s = max(self.pause_s, pause_s)
        if text not in self.texts:
            self.texts.append(text)


def request(case: int) -> dict[str, Any]:
    """A request that has one right answer: greedy, or sampled with its seed."""
    prompt = "import sys\n" * (1 + case) + f"def value_{case}(path):\n"
    return {"model": "consort", "prompt": prompt, "max_tokens": 300, "seed": case, "temperature": (case % 3) / 2}


def ask(client: openai.OpenAI, case: int) -> tuple[str, int, float]:
    """The text of one streamed answer, how many draft tokens were verified for it, and its longest pause in seconds."""
    text, drafted, finish, pause_s = "", 0, None, 0.0
    heard_s = time.monotonic()
    for chunk in client.completions.create(**request(case), stream=True):
        pause_s, heard_s = max(pause_s, time.monotonic() - heard_s), time.monotonic()
        if chunk.choices:
            text += chunk.choices[0].text
            finish = finish or chunk.choices[0].finish_reason
        speculation = (chunk.model_extra or {}).get("speculation")
        drafted = speculation["drafted"] if speculation else drafted
    if finish is None:
        raise ConnectionError(f"the stream of case {case} ended after {len(text)} characters")
    return text, drafted, pause_s


def ask_again_and_again(client: openai.OpenAI, case: int, until_s: float) -> Outcome:
    outcome = Outcome()
    while not outcome.answers or time.monotonic() < until_s:
        begun_s = time.monotonic()
        try:
            text, drafted, pause_s = ask(client, case)
            outcome.note(text, drafted, time.monotonic() - begun_s, pause_s)
        except (openai.OpenAIError, ConnectionError) as error:
            outcome.errors.append(repr(error))
            return outcome
    return outcome


def main(url: str, seconds: str) -> None:
    until_s = time.monotonic() + float(seconds)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    with client, ThreadPoolExecutor(CASES) as pool:
        outcomes = list(pool.map(lambda case: ask_again_and_again(client, case, until_s), range(CASES)))
    print(json.dumps([asdict(outcome) for outcome in outcomes]))


if __name__ == "__main__":
    main(*sys.argv[1:])
