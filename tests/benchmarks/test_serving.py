"""The load benchmark without a server or a load generator: its requests and findings."""

import json
from pathlib import Path

import pytest

from benchmarks.serving.__main__ import OFF, ON, VLLM, LoadComparison, as_text
from benchmarks.serving.servers import Load, LoadGenerator, LoadResult
from evaluation.prompts import read_prompts

PROMPTS = Path("models/heldout.jsonl")
RESULT = {
    "failed": 0,
    "total_output_tokens": 12,
    "errors": ["", ""],
    "output_throughput": 50.0,
    "request_throughput": 2.0,
    "itls": [[0.1, 0.1], [0.1]],
    **{f"p{p}_{name}_ms": float(p) for name in ("ttft", "tpot", "itl") for p in (50, 99)},
}
# Stands in for the generator and its environment: returns a prepared result, and records its arguments.
FAKE_GENERATOR = """#!/usr/bin/env python3
import sys
from pathlib import Path
folder = Path(__file__).parent
for line in sys.stdin:
    (folder / "asked.json").write_text(line)
    print((folder / "result.json").read_text(), flush=True)
"""


def measured(rate: float) -> LoadResult:
    return LoadResult(2, rate, 1.0, 10.0, 20.0, 3.0, 4.0, 5.0, 6.0, 2.5)


def load() -> Load:
    return Load(PROMPTS, Path("models/target"), 2, 2, 6, 0.0, seed=3)


def ask(folder: Path, result: dict[str, object]) -> LoadResult:
    python = folder / "python"
    python.write_text(FAKE_GENERATOR, encoding="utf-8")
    python.chmod(0o755)
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    with LoadGenerator(python, log=folder / "log") as generator:
        return generator.run("http://x", "m", load(), {"speculate": False})


def test_the_generator_is_asked_and_read(tmp_path: Path) -> None:
    result = ask(tmp_path, RESULT)
    assert (result.tokens_per_s, result.ttft_p50_ms, result.itl_p99_ms) == (50.0, 50.0, 99.0)
    assert result.tokens_per_event == 12 / 5
    asked = json.loads((tmp_path / "asked.json").read_text(encoding="utf-8"))
    options = dict(zip(asked[::2], asked[1::2], strict=False))
    assert options["--max-concurrency"] == "2"
    assert json.loads(options["--extra-body"]) == {"speculate": False}
    assert "--ignore-eos" in asked
    number, *words = read_prompts(Path(options["--dataset-path"]))[0].split(" ")
    assert number.isdigit()
    assert " ".join(words) == read_prompts(PROMPTS)[0]


@pytest.mark.parametrize("wrong", [{"failed": 1, "errors": ["", "refused"]}, {"total_output_tokens": 11}])
def test_a_run_with_missing_answers_does_not_count(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(RuntimeError, match="refused" if "errors" in wrong else "11 of 12 tokens"):
        ask(tmp_path, RESULT | wrong)


def test_ratios_are_taken_within_repetitions() -> None:
    rates = {ON: [20.0, 40.0, 30.0], OFF: [10.0, 20.0, 30.0], VLLM: [10.0, 10.0, 10.0]}
    comparison = LoadComparison(0.0, 2, {name: [measured(rate) for rate in values] for name, values in rates.items()})
    assert comparison.ratios(ON, OFF) == [2.0, 2.0, 1.0]
    text = as_text([comparison])
    for shown in ("2.00", "(1.00 – 2.00)", "on / vLLM", "TTFT p50"):
        assert shown in text
