"""Parsed requests: forms of prompts, aliases, defaults."""

import json
from dataclasses import fields
from typing import Any

import pytest
from pydantic import ValidationError

from decoding.grammars.grammar import MAX_DEFINITION
from decoding.sampling.params import Structure
from deployments.apis.chat.request import ChatRequest
from deployments.apis.completions.request import CompletionRequest
from deployments.apis.messages.request import MessagesRequest
from deployments.apis.responses.request import ResponsesRequest
from deployments.fields.generation import GenerationRequest
from deployments.fields.sampling import SamplingFields
from deployments.fields.strict import IgnoredFields


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_forms_of_prompts(prompt: object, parsed: object) -> None:
    body = CompletionRequest.model_validate({"model": "m", "prompt": prompt})
    assert body.prompt == parsed
    assert body.prompt_count == len(body.prompt)


def completion(**fields: object) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "prompt": "x", **fields})


def test_defaults_are_openais() -> None:
    params = CompletionRequest(model="m", prompt=["x"]).sampling(max_tokens=5, eos_token_ids=[2], seed=9)
    assert (params.temperature, params.top_p, params.top_k, params.stop) == (1.0, 1.0, 0, ())
    assert (params.max_tokens, params.eos_token_ids, params.seed) == (5, (2,), 9)


def test_ignored_eos_ids_do_not_reach_the_decoder() -> None:
    body = CompletionRequest.model_validate({"model": "m", "prompt": "x", "ignore_eos": True})
    assert body.sampling(max_tokens=5, eos_token_ids=[2], seed=0).eos_token_ids == ()


def test_what_changes_nothing_is_taken() -> None:
    neutral = {
        **dict.fromkeys(["repetition_penalty", "length_penalty", "typical_p"], 1.0),
        **dict.fromkeys(["presence_penalty", "frequency_penalty", "min_p", "epsilon_cutoff", "eta_cutoff"], 0),
        **{name: [] for name in ("tools", "functions", "stop", "stop_token_ids", "suppress_tokens", "bad_words")},
        **dict.fromkeys(["ignore_eos", "store", "use_beam_search", "logprobs", "include_stop_str_in_output"], False),
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "service_tier": "auto",
        "metadata": {"a": "b"},
        "modalities": ["text"],
        "n": 1,
    }
    for given in (neutral, dict.fromkeys(neutral)):
        params = chat(**given).sampling(max_tokens=5, eos_token_ids=[2], seed=0)
        assert params == chat().sampling(max_tokens=5, eos_token_ids=[2], seed=0)


SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "typical_p": 0.8,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.02,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "no_repeat_ngram_size": 3,
    "allowed_token_ids": [5, 6],
    "suppress_tokens": [7],
    "begin_suppress_tokens": [8],
    "forced_bos_token_id": 5,
    "forced_eos_token_id": 6,
    "min_tokens": 2,
    "stop": ["a", "b"],
    "stop_token_ids": [9],
    "include_stop_str_in_output": True,
    "verification": "rejection",
    "logprobs": 3,
    "prompt_logprobs": 4,
}


def test_every_parameter_reaches_the_decoder() -> None:
    body = completion(**SAMPLING, logit_bias={"5": 1.5}, max_time=2.5, structured_outputs={"choice": ["a"]})
    params = body.sampling(max_tokens=5, eos_token_ids=[2], seed=3, bad_words_ids=[(1, 2)])
    for name, value in SAMPLING.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value), name
    assert params.logit_bias == ((5, 1.5),)
    assert params.max_time_s == 2.5
    assert params.bad_words_ids == ((1, 2),)
    assert params.structure == Structure(kind="choice", definition='["a"]')
    unset = {field.name for field in fields(params) if getattr(params, field.name) == field.default}
    assert unset == {"prompt_attention"}  # which only compression asks for


@pytest.mark.parametrize(("given", "taken"), [(1e-8, 0.001), (5e-324, 0.001), (0.001, 0.001), (0, 0), (0.3, 0.3)])
def test_clients_that_write_a_tiny_temperature_for_a_greedy_one_are_answered(given: float, taken: float) -> None:
    params = completion(temperature=given).sampling(max_tokens=5, eos_token_ids=[2], seed=3)
    assert params.temperature == taken


def test_an_endpoints_defaults_fill_what_is_open() -> None:
    defaults = SamplingFields(temperature=0.3, stop=["x"], ignore_eos=True)
    params = completion(temperature=0).sampling(max_tokens=5, eos_token_ids=[2], seed=3, defaults=defaults)
    assert (params.temperature, params.stop, params.eos_token_ids) == (0, ("x",), ())
    params = completion(ignore_eos=False).sampling(max_tokens=5, eos_token_ids=[2], seed=3, defaults=defaults)
    assert (params.temperature, params.eos_token_ids) == (0.3, (2,))


@pytest.mark.parametrize(
    ("wanted", "kind", "definition"),
    [
        ({"response_format": {"type": "json_object"}}, "json", '{"type": "object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"a": 1}}}},
            "json",
            '{"a": 1}',
        ),
        ({"structured_outputs": {"json": {"a": 1}}}, "json", '{"a": 1}'),
        ({"structured_outputs": {"json": '{"a":1}'}}, "json", '{"a":1}'),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
    ],
)
def test_structures(wanted: dict[str, object], kind: Any, definition: str) -> None:
    assert chat(**wanted).structure == Structure(kind=kind, definition=definition)


@pytest.mark.parametrize(
    ("name", "value", "kind", "definition"),
    [
        ("guided_json", {"a": 1}, "json", '{"a": 1}'),
        ("guided_json", '{"a":1}', "json", '{"a":1}'),
        ("json_schema", {"a": "é"}, "json", '{"a": "é"}'),
        ("guided_regex", "a+", "regex", "a+"),
        ("regex", "a+", "regex", "a+"),
        ("guided_choice", ["yes", "é"], "choice", '["yes", "é"]'),
        ("guided_grammar", 'start: "a"', "grammar", 'start: "a"'),
        ("ebnf", 'root ::= "a"', "grammar", 'root ::= "a"'),
        ("grammar", 'root ::= "a"', "grammar", 'root ::= "a"'),
    ],
)
def test_structures_by_the_names_of_other_servers(name: str, value: object, kind: Any, definition: str) -> None:
    wanted = Structure(kind=kind, definition=definition)
    messages: dict[str, object] = {"messages": [{"role": "user", "content": "x"}], name: value}
    requests: list[tuple[type[GenerationRequest], dict[str, object]]] = [
        (CompletionRequest, {"prompt": "x", name: value, "strict": True}),
        (ChatRequest, messages),
        (ResponsesRequest, {"input": "x", name: value}),
        (MessagesRequest, messages),
    ]
    for model, body in requests:
        ignored = IgnoredFields()
        request = model.model_validate(body, context=None if "strict" in body else ignored)
        assert request.structure == wanted
        assert name not in ignored.names
        assert completion(**{name: None}).structure is None
        for other in ({"structured_outputs": {"regex": "b"}}, {"response_format": {"type": "json_object"}}):
            with pytest.raises(ValidationError, match="has no place beside"):
                model.model_validate(body | other, context=ignored)


@pytest.mark.parametrize(
    ("name", "value", "harmless"),
    [
        ("max_new_tokens", 5, None),
        ("n_predict", 5, -1),
        ("truncate_prompt_tokens", 5, -1),
        ("stop_regex", "a", []),
        ("min_new_tokens", 5, 0),
        ("logits_processors", ["x"], []),
        ("custom_logit_processor", "x", None),
        ("chat_template", "{{ messages }}", None),
        ("documents", [{"text": "x"}], []),
        ("prompt_embeds", "AAAA", []),
        ("input_embeds", [[0.5]], []),
        ("lora", [{"id": 0, "scale": 1}], []),
        ("lora_path", "poet", None),
        ("structural_tag", {"a": 1}, None),
        ("guided_json_object", True, False),
        ("guided_whitespace_pattern", " ", None),
    ],
)
def test_what_would_change_the_answer_is_refused(name: str, value: object, harmless: object) -> None:
    context = IgnoredFields()
    with pytest.raises(ValidationError, match="would change the answer"):
        CompletionRequest.model_validate({"prompt": "x", name: value}, context=context)
    for given in (harmless, None):
        CompletionRequest.model_validate({"prompt": "x", name: given}, context=context)
    assert list(context.names) == [name]


def test_what_only_tunes_other_servers_is_ignored() -> None:
    context = IgnoredFields()
    given = {"guided_decoding_backend": "xgrammar", "repeat_penalty": 1.1, "mirostat": 2, "ignore_this": None}
    CompletionRequest.model_validate({"prompt": "x", **given}, context=context)
    assert list(context.names) == list(given)


def test_a_schema_in_a_string_may_not_be_nested_without_end() -> None:
    with pytest.raises(ValidationError, match="is nested too deeply"):
        completion(structured_outputs={"json": '{"items":' * 9_000 + "{}" + "}" * 9_000})


def test_many_choices_are_taken_as_they_are() -> None:
    choices = [f"é{number:04}" for number in range(5000)]
    structure = completion(structured_outputs={"choice": choices}).structure
    assert structure is not None
    assert json.loads(structure.definition) == choices
    assert len(structure.definition) <= MAX_DEFINITION["choice"]


def test_best_of_needs_logprobs_inside() -> None:
    params = completion(best_of=2).sampling(max_tokens=5, eos_token_ids=[2], seed=3)
    assert params.logprobs == 0
    assert completion(best_of=2, n=2).sampling(max_tokens=5, eos_token_ids=[2], seed=3).logprobs is None


def test_an_echoed_prompt_needs_logprobs_too() -> None:
    assert completion(echo=True, logprobs=2, prompt_logprobs=1).prompt_logprob_count == 2
    assert completion(echo=True, prompt_logprobs=1).prompt_logprob_count == 1
    assert completion(echo=True).prompt_logprob_count is None


def test_an_older_form_of_tools_is_refused_with_the_reason() -> None:
    with pytest.raises(ValidationError, match=r"should be \[\]; send tools and tool_choice"):
        chat(functions=[{"name": "f"}])


def test_one_stop_string_needs_no_list() -> None:
    assert CompletionRequest.model_validate({"model": "m", "prompt": "x", "stop": "\n"}).stop == ["\n"]


def test_a_drawn_seed_fits_into_a_double() -> None:
    body = CompletionRequest(model="m", prompt=["x"])
    assert all(0 <= body.seed_or_new() < 2**53 for _ in range(100))
    assert body.seed_or_new() != body.seed_or_new()
    assert CompletionRequest(model="m", prompt=["x"], seed=0).seed_or_new() == 0


def chat(**fields: object) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})


def test_max_completion_tokens_is_max_tokens() -> None:
    assert chat().wanted_max_tokens is None
    assert chat(max_tokens=3).wanted_max_tokens == 3
    assert chat(max_completion_tokens=3).wanted_max_tokens == 3
    assert chat(max_completion_tokens=3, max_tokens=3).wanted_max_tokens == 3
    assert chat(max_completion_tokens=3, max_tokens=4).wanted_max_tokens == 3
    with pytest.raises(ValidationError, match="differs"):
        chat(max_completion_tokens=3, max_tokens=4, strict=True)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_offered(mode: str) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "abc"]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools[1:]}}
    request = chat(tools=tools, tool_choice=allowed)
    assert [tool.function.name for tool in request.offered_tools] == ["b", "c"]
    assert request.must_call == (mode == "required")
    if request.structure is not None:
        assert '"const": "a"' not in request.structure.definition
        assert '"const": "b"' in request.structure.definition
    with pytest.raises(ValidationError, match="is 'b', which is not among the tools"):
        chat(tools=tools[:1], tool_choice=allowed)
    with pytest.raises(ValidationError, match='should be "none", "auto", "required" or'):
        chat(tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "maybe", "tools": tools}})


def test_allowed_tools_of_responses() -> None:
    tools = [{"type": "function", "name": name} for name in "ab"]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": tools[:1]}
    request = ResponsesRequest.model_validate({"model": "m", "input": "x", "tools": tools, "tool_choice": choice})
    assert [tool.function.name for tool in request.offered_tools] == ["a"]
    assert request.tool_choice is not None
    assert request.tool_choice.flat == choice


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].text == "ab"


def test_the_schema_says_what_is_accepted() -> None:
    properties = ChatRequest.model_json_schema()["properties"]
    assert properties["audio"]["type"] == "null"
    prompts = CompletionRequest.model_json_schema()["properties"]["prompt"]["anyOf"]
    assert {"type": "string", "minLength": 1} in prompts
