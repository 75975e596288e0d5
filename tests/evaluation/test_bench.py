"""`consort bench`: on the bundled pair, and its arithmetic on invented times."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console

from cli import shell
from decoding.errors import ConfigError
from deployments.configuration.config import TINY_CONFIG, load_config
from deployments.configuration.paths import ROOT
from deployments.planning.model_size import ModelSize
from evaluation import speculation
from evaluation.advice import advise, as_json, show
from evaluation.profiling import DRAFT_LENGTHS, STREAMS, Profile
from evaluation.prompts import read_prompts
from evaluation.speculation import accepted_lengths
from evaluation.workload import drafting_endpoint, pair_config

SHORT = ("--count", "2", "--new-tokens", "20")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(shell.main, ["bench", *arguments])


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "_TIMING_S", 0.0)


def profile(*, growth: float = 0.0, draft_step_s: float = 0.01, agrees: float = 1.0) -> Profile:
    """A step of the target takes 1 s, and `growth` s more per token; `agrees` of every ten draft tokens are right."""
    widths = (1, *(1 + draft_length for draft_length in DRAFT_LENGTHS))
    steps = {(streams, width): 1 + growth * (width - 1) for streams in STREAMS for width in widths}
    agreement = torch.tensor(([True] * round(10 * agrees) + [False] * round(10 - 10 * agrees)) * 20)
    drafts, calls = dict.fromkeys(STREAMS, draft_step_s), dict.fromkeys(STREAMS, 0.0)
    return Profile("t", "d", "drafter", 0.0, steps, drafts, calls, [accepted_lengths(agreement)])


def test_a_good_pair_is_worth_it() -> None:
    for advice in advise(profile(agrees=0.9)):
        assert advice.pays
        assert advice.best.draft_length in DRAFT_LENGTHS
        assert f"draft length {advice.best.draft_length}" in advice.sentence
    perfect = advise(profile())[0]
    assert perfect.best.draft_length == max(DRAFT_LENGTHS)
    assert perfect.best.hidden == pytest.approx(max(DRAFT_LENGTHS) + 1)


@pytest.mark.parametrize(
    ("hopeless", "why"),
    [
        (profile(agrees=0.0), "the acceptance is too low; the drafter has the target's token 0% of the time"),
        (profile(draft_step_s=5.0), "the drafter is too slow; a draft token takes 5.00 of a step"),
        (profile(growth=2.0), "bound by compute; 2 tokens of each stream take 3.00 times as long as one"),
    ],
)
def test_a_hopeless_pair_is_named_so_with_the_reason(hopeless: Profile, why: str) -> None:
    for advice in advise(hopeless):
        assert not advice.pays
        assert "speculation will not pay" in advice.sentence
        assert why in advice.sentence


def test_a_noisy_machine_is_said_to_be_so() -> None:
    assert not as_json(profile())["noisy"]
    console = Console(record=True, width=200)
    show(console, replace(profile(), spread=0.4))
    assert "The machine is noisy: repeated steps differ by 40%" in console.export_text()


def test_what_a_token_reads_is_shown_where_it_is_known() -> None:
    sizes = {
        "target": ModelSize(weights_bytes=90, kv_bytes=2048, step_bytes=3 * 2**20),
        "drafter": ModelSize(weights_bytes=1),
    }
    console = Console(record=True, width=200)
    show(console, replace(profile(), sizes=sizes))
    assert "target: a token reads 3.0 MiB, and 2.0 KiB for each before it" in console.export_text()


def test_short_answers_leave_out_long_drafts() -> None:
    short = replace(profile(), accepted=[accepted_lengths(torch.ones(4))])
    assert short.draft_lengths == [1, 2, 3]
    assert as_json(short)["answer_tokens"] == 4


@pytest.mark.slow
@pytest.mark.usefixtures("_quick")
def test_the_bundled_pair_is_measured() -> None:
    result = invoke(*SHORT)
    assert result.exit_code == 0, result.output
    for text in ("models/target", "ms per step", "draft length", "16 streams"):
        assert text in result.output


def test_heads_are_in_the_step_and_as_long_as_they_can_be() -> None:
    measured, calls = profile(agrees=0.9, draft_step_s=0.1), dict.fromkeys(STREAMS, 0.2)
    heads = replace(measured, proposer="eagle3", draft_call_s=calls, longest_draft=3)
    assert heads.draft_lengths == [1, 2, 3]
    limits = heads.limits(1, 3)
    assert limits.verify_step_s == pytest.approx(1.5)
    assert limits.hidden == limits.alternating
    assert "take turns" not in advise(heads)[0].sentence


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_quick")
def test_the_default_models_heads_are_measured() -> None:
    result = invoke(*SHORT, "--config", "deployments/default.yaml", "--json")
    measured = json.loads(result.stdout)
    assert measured["proposer"] == "eagle3"
    assert measured["acceptance"] > 0.3


@pytest.mark.usefixtures("_quick")
def test_json_is_all_there_is_on_standard_output() -> None:
    result = invoke(*SHORT, "--json", "--temperature", "0.7")
    measured = json.loads(result.stdout)
    assert measured["temperature"] == 0.7
    assert 0.3 < measured["acceptance"] <= 1
    assert {row["streams"] for row in measured["advice"]} == set(STREAMS)
    assert set(measured["bytes_per_token"]) == {"target", "drafter"}
    assert all(step["seconds"] > 0 for step in (*measured["target_steps"], *measured["draft_steps"]))


@pytest.mark.usefixtures("_quick")
def test_a_target_that_drafts_for_itself_is_always_right() -> None:
    """Coupled sampling: the same model under the same noise has the same token (float32, so nearly everywhere)."""
    model = str(ROOT / "models" / "drafter")
    measured = json.loads(
        invoke(
            "--target", model, "--drafter", model, "--dtype", "float32", *SHORT, "--json", "--temperature", "1"
        ).stdout
    )
    assert measured["acceptance"] > 0.97


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "x"], "--target and --drafter go together"),
        (["--target", "a", "--drafter", "b", "--config", "c.yaml"], "either --target and --drafter, or --config"),
        (["--dtype", "float32"], "are in the configuration"),
        (["--target-threads", "2"], "are in the configuration"),
        (["--target", "./nowhere", "--drafter", "./nowhere"], "there is no folder or .gguf file './nowhere'"),
        (["--endpoint", "nobody"], "no endpoint nobody of one model that drafts; those that do: consort"),
        (["--config", "nowhere.yaml"], "can't read nowhere.yaml"),
        (["--prompts", "nowhere.txt"], "can't read prompts from nowhere.txt"),
        (["--temperature", "-1"], "temperature must be 0 (greedy)"),
        (["--new-tokens", "600"], "don't fit into the context of 512"),
    ],
)
def test_mistakes_are_one_message(arguments: list[str], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code != 0
    assert message in result.output.replace("\n", " ")
    assert "Traceback" not in result.output


def test_pairs() -> None:
    config, endpoint = pair_config(
        "models/target",
        "models/drafter",
        target_options={"device": "cuda", "dtype": None},
        drafter_options={"threads": 2},
    )
    assert config.endpoints[endpoint].drafter == "drafter"
    assert (config.models["target"].num_gpus, config.models["target"].dtype) == (1, "auto")
    assert config.models["drafter"].threads == 2
    config, endpoint = drafting_endpoint(TINY_CONFIG, None)
    assert endpoint == "consort"
    assert {model.slots for model in config.models.values()} == {max(STREAMS)}
    assert load_config(TINY_CONFIG).models["target"].max_length is None


def test_prompts(tmp_path: Path) -> None:
    text, lines, broken = tmp_path / "p.txt", tmp_path / "p.jsonl", tmp_path / "q.jsonl"
    text.write_text("one\n\ntwo\nthree\n", encoding="utf-8")
    assert read_prompts(text, 2) == ["one", "two"]
    lines.write_text('{"prompt": "a\\nb"}\n{"prompt": "c\u2028d"}\n', encoding="utf-8")
    assert read_prompts(lines, 9) == ["a\nb", "c\u2028d"]
    for content in ("", "{}", "[]", '{"prompt": 5}', "nonsense"):
        broken.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError):
            read_prompts(broken, 9)
