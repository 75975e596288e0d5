"""The benchmark runs with the bundled pair, goes on where it was interrupted, and shortens as it says."""

import json
from pathlib import Path

import pytest

from benchmarks.compression.__main__ import main
from benchmarks.compression.task import make_task
from engine.loading.settings import load_tokenizer

PAIR = ["--target", "models/target", "--compressor", "models/drafter"]
SMALL = [*PAIR, "--lengths", "300", "--rates", "0.5", "--tasks", "1", "--facts", "2", "--repeats", "1"]


def test_a_task_hides_its_answer() -> None:
    tokenizer = load_tokenizer("models/target")
    task = make_task(tokenizer, 300, 0, facts=2)
    assert task == make_task(tokenizer, 300, 0, facts=2)
    assert task.document.count(task.answer) == 1
    assert task.answer not in task.question
    assert 0.6 < len(tokenizer(task.document).input_ids) / 300 < 1.4


def test_it_measures_all_methods_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plot = tmp_path / "results.json", tmp_path / "plot.png"
    main([*SMALL, "--output", str(output)])
    outcomes = json.loads(output.read_text())["outcomes"]
    assert [outcome["method"] for outcome in outcomes] == ["none", "perplexity", "sentence", "attention", "random"]
    assert all(0.3 < outcome["kept"] < 0.7 for outcome in outcomes[1:])
    capsys.readouterr()
    main([*SMALL, "--output", str(output)])
    assert capsys.readouterr().out == ""
    main([*SMALL, "--output", str(output), "--only", "ttft", "--plot", str(plot)])
    times = json.loads(output.read_text())["first_token"]
    assert [time["method"] for time in times] == ["none", "perplexity", "sentence", "attention"]
    assert plot.stat().st_size > 0
