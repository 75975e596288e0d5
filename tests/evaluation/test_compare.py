"""`consort compare`, over tiny random models in place of the bundled ones; and what is said of an ensemble."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from click.testing import CliRunner

from cli import shell
from deployments.configuration.paths import ROOT
from evaluation.comparison import Difference, judge_measure, judge_speed
from tests.deployments.conftest import tiny_runner

if TYPE_CHECKING:
    from engine.loading.checkpoint import ModelSpec
    from engine.model.runner import Runner

CONFIG = str(ROOT / "deployments" / "ensemble.yaml")
SEEDS = {"target": 0, "member": 1, "drafter": 2}


def tiny(spec: "ModelSpec", caches: int) -> "Runner":
    return tiny_runner(SEEDS[spec.name])


def compare(*options: str) -> str:
    with mock.patch("evaluation.comparison.load_runner", tiny), mock.patch.dict(os.environ):
        result = CliRunner().invoke(shell.main, ["compare", CONFIG, *options])
    assert result.exit_code == 0, result.output
    return result.stdout


def document(endpoint: str, *options: str) -> dict[str, Any]:
    shown = compare("--endpoint", endpoint, "--json", "--new-tokens", "8", "--seeds", "1", "--samples", "2", *options)
    findings: dict[str, Any] = json.loads(shown)
    return findings


def test_a_panel_with_a_writer_is_refused() -> None:
    result = CliRunner().invoke(shell.main, ["compare", CONFIG, "--endpoint", "synthesize"])
    assert result.exit_code != 0
    assert "endpoints.synthesize.strategy: only a server has a writer" in result.output


@pytest.mark.parametrize(("endpoint", "other"), [("contrastive", "drafter"), ("mbr", "member")])
def test_all_write_the_same_prompts(endpoint: str, other: str) -> None:
    findings = document(endpoint)
    names = [finding["name"] for finding in findings["contestants"]]
    assert names == ["target alone", f"{other} alone", "target, 2 samples", endpoint]
    assert len(findings["prompts"]) == 5
    for finding in findings["contestants"]:
        assert len(finding["texts"]) == len(finding["metrics"]) == 5
        assert all(len(by) == 2 and -20 < min(by) <= max(by) < 0 for by in finding["likelihoods"])
        assert finding["mean"]["tokens"] == 8
        assert finding["tokens_per_s"] > 0
    assert [finding["sentence"].split(":")[0] for finding in findings["judgements"]] == [
        "likelihood, nats per token",
        "bigram entropy, bits",
        "distinct-2",
        "freedom from repetition",
        "speed",
    ]


def test_the_table_is_for_people(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import os\ndef f\n", encoding="utf-8")
    shown = compare("--prompts", str(prompts), "--new-tokens", "6", "--seeds", "1", "--temperature", "0")
    assert "2 texts of each" in shown
    assert "by member" in shown
    assert "ensemble writes" in shown


def test_endpoints_without_members_are_refused() -> None:
    result = CliRunner().invoke(shell.main, ["compare", CONFIG, "--endpoint", "plain"])
    assert result.exit_code != 0
    assert "no endpoint plain with members; those with some: ensemble, contrastive" in result.output


@pytest.mark.parametrize(
    ("values", "others", "gains", "words"),
    [
        ([2.0, 2.1, 2.2], [1.0, 1.1, 1.3], True, "e gains over m"),
        ([1.0, 1.1, 1.3], [2.0, 2.1, 2.2], False, "mixing loses; m is better than e"),
        ([1.0, 2.0, 3.0], [3.0, 2.0, 1.1], None, "can't be told apart"),
        ([1.0], [3.0], None, "can't be told apart"),
        ([1.0, 1.0], [1.0, 1.0], None, "can't be told apart"),
    ],
)
def test_differences_are_called_what_they_are(
    values: list[float], others: list[float], gains: bool | None, words: str
) -> None:
    judgement = judge_measure("distinct-2", "e", "m", Difference.of(values, others))
    assert judgement.gains is gains
    assert words in judgement.sentence


def test_slower_is_slower() -> None:
    assert judge_speed("e", 50, "m", 100).gains is False
    assert "0.50 times as fast as m" in judge_speed("e", 50, "m", 100).sentence
    assert judge_speed("e", 150, "m", 100).gains is True
