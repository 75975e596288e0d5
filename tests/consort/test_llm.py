"""`LLM` writes what transformers writes and what a server would, with a drafter or without, alone or in a batch."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.verifier import policy
from consort import (
    LLM,
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    SamplingParams,
    UnavailableError,
    UnknownModelError,
)
from deployments.configuration.paths import ROOT
from tests.support.adapters import save_adapter

TARGET, DRAFTER = ROOT / "models" / "target", ROOT / "models" / "drafter"
PROMPTS = ["def add(a, b):", "class Stack:\n", "import os\n\n"]
GREEDY = SamplingParams(max_tokens=16, temperature=0)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=3)
QUESTION = [{"role": "user", "content": "Write a function that adds two numbers."}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(TARGET, drafter=DRAFTER, dtype="float32", threads=1, max_length=256) as llm:
        yield llm


def test_greedy_texts_are_those_of_transformers(llm: LLM) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    for prompt, answer in zip(PROMPTS, llm.generate(PROMPTS, GREEDY), strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        expected = model.generate(ids, max_new_tokens=GREEDY.max_tokens, do_sample=False)[0, ids.shape[1] :]
        assert answer.text == tokenizer.decode(expected, skip_special_tokens=True)
        assert answer.prompt_tokens == ids.shape[1]


def test_a_seed_names_a_text(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in the batch, with drafts or without, whole or in pieces."""
    _draft_always(monkeypatch)
    together = llm.generate(PROMPTS, SAMPLED)
    plain = llm.generate(PROMPTS, replace(SAMPLED, speculate=False))
    assert sum(answer.drafted for answer in together) > 0 == sum(answer.drafted for answer in plain)
    for prompt, answer, other in zip(PROMPTS, together, plain, strict=True):
        (alone,) = llm.generate(prompt, SAMPLED)
        pieces = list(llm.stream(prompt, SAMPLED))
        assert answer.text == other.text == alone.text == "".join(piece.text for piece in pieces)
        assert answer.seed == SAMPLED.seed
        assert pieces[-1].finish_reason == answer.choices[0].finish_reason


def _draft_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft whether it pays on this machine or not."""
    monkeypatch.setattr(policy.SpeculationPolicy, "speculates", lambda self: True)
    monkeypatch.setattr(policy, "choose_draft_lengths", lambda rates, limits, *_, **__: list(limits))
    monkeypatch.setattr(policy, "choose_draft_tokens", lambda probabilities, _: [len(draft) for draft in probabilities])


def test_token_ids_are_prompts_too(llm: LLM) -> None:
    ids = AutoTokenizer.from_pretrained(TARGET)(PROMPTS[0]).input_ids
    assert llm.generate(ids, GREEDY)[0].text == llm.generate([ids], GREEDY)[0].text
    assert llm.generate(ids, GREEDY)[0].text == llm.generate(PROMPTS[0], GREEDY)[0].text
    assert llm.generate([]) == []


def test_conversations(llm: LLM) -> None:
    answer = llm.chat(QUESTION, SAMPLED)
    assert [other.text for other in llm.chat_all([QUESTION, QUESTION], SAMPLED)] == [answer.text] * 2
    assert "".join(piece.text for piece in llm.stream_chat(QUESTION, SAMPLED)) == answer.text


def test_parameters_are_the_servers(llm: LLM) -> None:
    (answer,) = llm.generate(PROMPTS[0], replace(SAMPLED, n=3, logprobs=2))
    assert len({choice.text for choice in answer.choices}) > 1
    assert all(choice.logprobs and len(choice.logprobs["tokens"]) > 0 for choice in answer.choices)
    (number,) = llm.generate("x = ", replace(SAMPLED, structured_outputs={"regex": "[0-9]{3}"}))
    assert number.text.isdigit()
    assert number.choices[0].finish_reason == "stop"
    (searched,) = llm.generate("x = ", SamplingParams(max_tokens=5, num_beams=3, n=2))
    assert len(searched.choices) == 2
    (short,) = llm.generate(PROMPTS[0], replace(GREEDY, stop="return"))
    assert "return" not in short.text


def test_documents_are_json_that_says_what_answers_say(llm: LLM) -> None:
    """What a server encodes early, because it may be long, is decoded: log-probabilities, and details of tokens."""
    (answer,) = llm.generate(PROMPTS[0], replace(SAMPLED, logprobs=2, prompt_logprobs=1, return_token_details=True))
    assert json.loads(json.dumps(answer.document)) == answer.document
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert all(len(tops) >= 2 and max(tops.values()) <= 0 for tops in logprobs["top_logprobs"])
    choice = answer.document["choices"][0]
    assert choice["logprobs"] == logprobs
    assert "".join(detail["text"] for detail in choice["token_details"]) == answer.text
    assert len(choice["prompt_logprobs"]) == answer.prompt_tokens
    chat = llm.chat(QUESTION, replace(SAMPLED, logprobs=1))
    content = (chat.choices[0].logprobs or {})["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode().startswith(chat.text)


def test_weights_are_replaced(tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "new")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    with LLM(TARGET, drafter=DRAFTER, dtype="float32", threads=1, max_length=64, weights_at_run_time=True) as llm:
        (before,) = llm.generate(PROMPTS[0], GREEDY)
        version = llm.load_weights(tmp_path / "new")
        (answer,) = llm.generate(PROMPTS[0], GREEDY)
        with pytest.raises(InvalidRequestError, match="is of another model"):
            llm.load_weights(DRAFTER)
        assert llm.generate(PROMPTS[0], GREEDY)[0].text == answer.text
    expected = model.generate(ids, max_new_tokens=GREEDY.max_tokens, do_sample=False)[0, ids.shape[1] :]
    assert answer.text == tokenizer.decode(expected, skip_special_tokens=True) != before.text
    assert (before.document["system_fingerprint"], answer.document["system_fingerprint"]) == ("0", version)


def test_adapters_are_chosen_by_name(tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    adapted: Any = save_adapter(tmp_path / "a", base, seed=1)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    expected = adapted.generate(input_ids=ids, max_new_tokens=GREEDY.max_tokens, do_sample=False)[0, ids.shape[1] :]
    text = tokenizer.decode(expected, skip_special_tokens=True)
    options = {"dtype": "float32", "threads": 1, "max_length": 256}
    with LLM(TARGET, adapters={"poet": str(tmp_path / "a")}, **options) as llm:  # type: ignore[arg-type]
        (plain,) = llm.generate(PROMPTS[0], GREEDY)
        (answer,) = llm.generate(PROMPTS[0], GREEDY, model="poet")
        assert (answer.text, answer.document["model"]) == (text, "poet")
        assert plain.text != text == "".join(piece.text for piece in llm.stream(PROMPTS[0], GREEDY, model="poet"))
        chat = llm.chat(QUESTION, GREEDY, model="poet")
        assert chat.document["model"] == "poet"
        assert chat.text != llm.chat(QUESTION, GREEDY).text
        with pytest.raises(UnknownModelError, match=r"^model: there is no model 'poets'; did you mean 'poet'"):
            llm.chat(QUESTION, model="poets")
        with pytest.raises(UnknownModelError, match=r"^model: "):
            list(llm.stream(PROMPTS[0], model="poets"))


@pytest.mark.parametrize(("prompts", "n"), [(300, 1), (100, 3)])
def test_a_batch_may_be_larger_than_what_a_server_takes(llm: LLM, prompts: int, n: int) -> None:
    answers = llm.generate(["x"] * prompts, SamplingParams(max_tokens=1, n=n))
    assert [len(answer.choices) for answer in answers] == [n] * prompts


@pytest.mark.parametrize("text", ["a\u2028b", "a\u0085b"])
def test_streams_keep_line_separators(llm: LLM, text: str) -> None:
    params = SamplingParams(max_tokens=16, structured_outputs={"choice": [text]})
    assert "".join(piece.text for piece in llm.stream("x = ", params)) == text
    assert "".join(piece.text for piece in llm.stream_chat(QUESTION, params)) == text


def test_templates_of_a_configuration(tmp_path: Path) -> None:
    config = {
        "models": {"target": {"path": str(TARGET), "threads": 1, "max_length": 256}},
        "endpoints": {"consort": {"target": "target"}},
        "templates": {"adds": "Write a function that adds {{ what }}."},
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))
    with LLM.from_config(path) as llm:
        answer = llm.chat([], SAMPLED, template="adds", variables={"what": "two numbers"})
        assert answer.text == llm.chat(QUESTION, SAMPLED).text
        with pytest.raises(InvalidRequestError, match=r"^template: there is no template 'add'; did you mean 'adds'"):
            llm.chat(QUESTION, template="add", variables={})


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(temperature=-1), "temperature"),
        (SamplingParams(top_k=-7), "top_k"),
        (SamplingParams(stop=[""]), "stop"),
        (SamplingParams(structured_outputs={"regex": "("}), "structured_outputs"),
        (SamplingParams(proposers=["ngram"]), "proposers"),
    ],
)
def test_a_wrong_parameter_is_one_line_that_names_it(llm: LLM, params: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^{field}[^\n]*$"):
        llm.generate(PROMPTS, params)


def test_other_mistakes(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"^messages\.0\.role: "):
        llm.chat([{"role": "robot", "content": "Hello"}])
    with pytest.raises(ContextLengthError):
        llm.generate(PROMPTS, SamplingParams(max_tokens=10_000))
    with pytest.raises(InvalidRequestError, match=r"^n: "):
        list(llm.stream(PROMPTS[0], SamplingParams(n=2)))
    with pytest.raises(InvalidRequestError, match="chat_template_kwarg"):
        llm.chat(QUESTION, chat_template_kwarg={})
    with pytest.raises(InvalidRequestError, match=r"^prompt_compression: .*`consort serve`"):
        llm.chat(QUESTION, prompt_compression={"rate": 0.5})


def test_wrong_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        LLM("./nowhere")
    with pytest.raises(ConfigError, match=r"models\.llm\.slots"):
        LLM(TARGET, slots=0)
    with pytest.raises(ConfigError, match="there is no endpoint 'emsemble'; did you mean 'ensemble'"):
        LLM.from_config("deployments/ensemble.yaml", "emsemble")
    with pytest.raises(ConfigError, match="only a server has strategies"):
        LLM.from_config("deployments/ensemble.yaml", "majority")


def test_an_ensemble_of_a_configuration() -> None:
    with LLM.from_config("deployments/ensemble.yaml", "ensemble") as ensemble:
        (answer,) = ensemble.generate(PROMPTS[0], SAMPLED)
        assert answer.text == ensemble.generate(PROMPTS[0], replace(SAMPLED, speculate=False))[0].text
    with pytest.raises(UnavailableError, match="closed"):
        ensemble.generate(PROMPTS[0])


def test_a_configured_corpus_drafts(tmp_path: Path) -> None:
    config = {
        "models": {"target": {"path": str(TARGET), "threads": 1, "max_length": 256}},
        "endpoints": {"consort": {"target": "target", "corpus": {}}},
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))
    with LLM.from_config(path) as llm:  # on a machine that is busy, speculation may rest for a while
        assert any(llm.generate(PROMPTS[0], SAMPLED)[0].accepted for _ in range(20))


def test_importing_all_names_is_cheap() -> None:
    program = (
        "import sys, consort; [getattr(consort, n) for n in consort.__all__]; print({'torch', 'ray'} & {*sys.modules})"
    )
    process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "set()"
