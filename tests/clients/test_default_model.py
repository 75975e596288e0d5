"""Tools with the default model, which never learnt to call: forms are right whatever it writes.

Forced calls follow their schemas. Under `auto` a small model may write anything, and no client may stumble over it.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jsonschema  # type: ignore[import-untyped]
import pytest
from pydantic import BaseModel, Field

openai: Any = pytest.importorskip("openai")

NAME = "smollm2"
ASK = [{"role": "user", "content": "What is the weather in Bern, and what time is it there?"}]
# Bounds keep a small model from writing on.
CITY = {"type": "string", "maxLength": 24}
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"city": CITY, "unit": {"type": "string", "enum": ["C", "F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "clock": {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Of a city.", "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
BLOCK_TOOLS = [{"name": name, "description": "Of a city.", "input_schema": SCHEMAS[name]} for name in SCHEMAS]


class City(BaseModel):
    """What an answer is parsed into."""

    name: Annotated[str, Field(max_length=20)]
    people: Annotated[int, Field(ge=0, le=9_999_999)]
    size: Literal["small", "large"]


def weather(city: Annotated[str, Field(max_length=24)], unit: Literal["C", "F"]) -> str:
    """The weather in a city."""
    return f"sunny in {city}, 20 {unit}"


def check_call(name: str, arguments: str | dict[str, Any]) -> None:
    jsonschema.validate(json.loads(arguments) if isinstance(arguments, str) else arguments, SCHEMAS[name])


@pytest.fixture
def client(default_url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{default_url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_the_server_says_whose_place_for_tools_it_is(client: Any) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.tools) == (NAME, "built-in")


CHOICES = [{"type": "function", "function": {"name": "weather"}}, "required", "auto", "none"]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("parallel", [True, False])
def test_openai_chat(client: Any, choice: Any, parallel: bool) -> None:
    options = {
        "model": NAME,
        "messages": ASK,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "seed": 1,
        "max_completion_tokens": 200,
    }
    whole = client.chat.completions.create(**options).choices[0]
    with client.chat.completions.stream(**options) as stream:
        streamed = stream.get_final_completion().choices[0]
    calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()]
    assert calls == [(call.function.name, call.function.arguments) for call in streamed.message.tool_calls or ()]
    assert (whole.message.content or "") == (streamed.message.content or "")
    assert whole.finish_reason == streamed.finish_reason
    if choice in ("auto", "none"):
        assert choice == "auto" or not calls
        return
    assert calls
    assert whole.finish_reason == ("tool_calls" if choice == "required" else whole.finish_reason)
    assert choice != "required" or parallel or len(calls) == 1
    for name, arguments in calls:
        assert choice == "required" or name == "weather"
        check_call(name, arguments)


@pytest.mark.parametrize("as_parts", [False, True])
def test_openai_chat_round_trip(client: Any, as_parts: bool) -> None:
    options = {"model": NAME, "tools": TOOLS, "seed": 1, "max_tokens": 40}
    first = client.chat.completions.create(**options, messages=ASK, tool_choice="required", parallel_tool_calls=False)
    turn = first.choices[0].message
    (call,) = turn.tool_calls
    text: Any = [{"type": "text", "text": "sunny, 20 C"}] if as_parts else "sunny, 20 C"
    turns = [*ASK, turn, {"role": "tool", "tool_call_id": call.id, "content": text}]
    answer = client.chat.completions.create(**options, messages=turns, tool_choice="none").choices[0]
    assert answer.message.content
    assert not answer.message.tool_calls
    assert answer.finish_reason in ("stop", "length")


@pytest.mark.parametrize("choice", [{"type": "function", "name": "clock"}, "required", "auto"], ids=str)
def test_openai_responses(client: Any, choice: Any) -> None:
    options = {"model": NAME, "tools": FLAT_TOOLS, "max_output_tokens": 200, "extra_body": {"seed": 1}}
    first = client.responses.create(**options, input=ASK, tool_choice=choice)
    with client.responses.stream(**options, input=ASK, tool_choice=choice) as stream:
        final = stream.until_done().get_final_response()
    calls = [item for item in first.output if item.type == "function_call"]
    assert [(call.name, call.arguments) for call in calls] == [
        (item.name, item.arguments) for item in final.output if item.type == "function_call"
    ]
    assert choice == "auto" or calls
    if choice != "auto":
        for call in calls:
            check_call(call.name, call.arguments)
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "noon"} for call in calls]
    last = client.responses.create(**options, input=[*ASK, *first.output, *results], tool_choice="none")
    assert {item.type for item in last.output} == {"message"}


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "weather"}, {"type": "any"}, {"type": "auto"}], ids=str)
def test_anthropic(default_url: str, choice: Any) -> None:
    anthropic: Any = pytest.importorskip("anthropic")
    options = {"model": NAME, "max_tokens": 200, "tools": BLOCK_TOOLS, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=default_url, api_key="none", max_retries=0, timeout=120) as client:
        first = client.messages.create(**options, messages=ASK, tool_choice=choice)
        with client.messages.stream(**options, messages=ASK, tool_choice=choice) as stream:
            final = stream.get_final_message()
        calls = [block for block in first.content if block.type == "tool_use"]
        assert [(block.name, block.input) for block in calls] == [
            (block.name, block.input) for block in final.content if block.type == "tool_use"
        ]
        assert choice["type"] == "auto" or (calls and first.stop_reason == "tool_use")
        if choice["type"] != "auto":
            for call in calls:
                check_call(call.name, call.input)
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls]
        turns = [
            *ASK,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": results or "Go on."},
        ]
        last = client.messages.create(**options, messages=turns, tool_choice={"type": "none"})
        assert {block.type for block in last.content} == {"text"}
        count = client.messages.count_tokens(
            model=NAME, messages=turns, tools=BLOCK_TOOLS, tool_choice={"type": "none"}
        )
        assert count.input_tokens == last.usage.input_tokens + last.usage.cache_read_input_tokens


@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
def test_langchain(default_url: str, api: str) -> None:
    messages: Any = pytest.importorskip("langchain_core.messages")
    common = {"api_key": "none", "model": NAME, "max_retries": 0, "max_tokens": 200, "temperature": 0}
    if api == "anthropic":
        kind: Any = pytest.importorskip("langchain_anthropic").ChatAnthropic
        model = kind(base_url=default_url, **common)
    else:
        kind = pytest.importorskip("langchain_openai").ChatOpenAI
        model = kind(base_url=f"{default_url}/v1", use_responses_api=api == "responses", **common)
    question = ASK[0]["content"]
    methods = (
        ["function_calling", "json_schema"] if api == "anthropic" else ["function_calling", "json_schema", "json_mode"]
    )
    for method in methods:
        if method == "json_mode":
            assert isinstance(model.with_structured_output(None, method=method).invoke(question), dict)
        else:
            assert isinstance(model.with_structured_output(City, method=method).invoke(question), City)
    for choice in ("any", "weather"):
        with_tools = model.bind_tools([weather], tool_choice=choice)
        turns = [messages.HumanMessage(question), with_tools.invoke(question)]
        assert turns[1].tool_calls
        assert sum((chunk for chunk in with_tools.stream(question)), messages.AIMessageChunk("")).tool_calls
        turns += [
            messages.ToolMessage(weather(**call["args"]), tool_call_id=call["id"]) for call in turns[1].tool_calls
        ]
        assert model.bind_tools([weather]).invoke(turns).type == "ai"


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_pydantic_ai(default_url: str, api: str) -> None:
    ai: Any = pytest.importorskip("pydantic_ai")
    models: Any = pytest.importorskip("pydantic_ai.models.openai")
    provider: Any = pytest.importorskip("pydantic_ai.providers.openai").OpenAIProvider
    kind = models.OpenAIChatModel if api == "chat" else models.OpenAIResponsesModel
    model = kind(NAME, provider=provider(base_url=f"{default_url}/v1", api_key="none"))
    settings = {"max_tokens": 200, "temperature": 0.0}
    question = ASK[0]["content"]
    kinds: list[Any] = [City, ai.ToolOutput(City), ai.NativeOutput(City)]
    for kind in kinds:
        assert isinstance(ai.Agent(model, output_type=kind, model_settings=settings).run_sync(question).output, City)
    agent = ai.Agent(model, tools=[weather], model_settings=settings)
    assert isinstance(agent.run_sync(question).output, str)


def test_instructor(default_url: str) -> None:
    instructor: Any = pytest.importorskip("instructor")
    modes = [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA]
    for mode in modes:
        with openai.OpenAI(base_url=f"{default_url}/v1", api_key="none", max_retries=0) as plain:
            client = instructor.from_openai(plain, mode=mode)
            options = {"model": NAME, "messages": ASK, "response_model": City, "max_tokens": 200, "max_retries": 0}
            assert client.chat.completions.create(**options).people >= 0, mode
            if mode == instructor.Mode.TOOLS:
                *_, last = client.chat.completions.create_partial(**options)
                assert last.people >= 0


def test_llama_index(default_url: str) -> None:
    llama: Any = pytest.importorskip("llama_index.llms.openai_like")
    tools: Any = pytest.importorskip("llama_index.core.tools")
    core: Any = pytest.importorskip("llama_index.core.llms")
    model = llama.OpenAILike(
        api_base=f"{default_url}/v1",
        api_key="none",
        model=NAME,
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
        max_tokens=200,
    )
    question = ASK[0]["content"]
    asked = [core.ChatMessage(role="user", content=question)]
    prompt = pytest.importorskip("llama_index.core").PromptTemplate(question)
    assert model.structured_predict(City, prompt).people >= 0
    tool = tools.FunctionTool.from_defaults(fn=weather)
    first = model.chat_with_tools([tool], chat_history=asked, tool_required=True)
    calls = model.get_tool_calls_from_response(first)
    *_, last = model.stream_chat_with_tools([tool], chat_history=asked, tool_required=True)
    assert model.get_tool_calls_from_response(last)
    results = [
        core.ChatMessage(role="tool", content="sunny", additional_kwargs={"tool_call_id": call.tool_id})
        for call in calls
    ]
    model.chat_with_tools([tool], chat_history=[*asked, first.message, *results])


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_litellm(default_url: str, provider: str) -> None:
    litellm: Any = pytest.importorskip("litellm")
    litellm.telemetry = False
    options = {
        "model": f"{provider}/{NAME}",
        "api_base": default_url if provider == "anthropic" else f"{default_url}/v1",
        "api_key": "none",
        "max_retries": 0,
        "max_tokens": 200,
        "messages": ASK,
        "tools": TOOLS,
    }
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        message = litellm.completion(**options, tool_choice=choice).choices[0].message
        for call in message.tool_calls:
            check_call(call.function.name, call.function.arguments)
        chunks = list(litellm.completion(**options, tool_choice=choice, stream=True))
        rebuilt = litellm.stream_chunk_builder(chunks).choices[0].message
        for call in rebuilt.tool_calls:
            check_call(call.function.name, call.function.arguments)
        results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
        litellm.completion(**{**options, "messages": [*ASK, message, *results]})


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents(default_url: str, api: str) -> None:
    agents: Any = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{default_url}/v1", api_key="none", max_retries=0)
    kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
    model = kind(model=NAME, openai_client=client)
    settings = agents.ModelSettings(tool_choice="required", max_tokens=200, temperature=0)
    question = ASK[0]["content"]

    async def run() -> tuple[Any, Any]:
        helper = agents.Agent(
            name="Helper",
            model=model,
            tools=[agents.function_tool(weather)],
            model_settings=settings,
            tool_use_behavior="stop_on_first_tool",
        )
        streamed = agents.Runner.run_streamed(helper, question)
        async for _ in streamed.stream_events():
            pass
        bounded = agents.ModelSettings(max_tokens=200)
        typed = agents.Agent(name="Typed", model=model, output_type=City, model_settings=bounded)
        return streamed.final_output, (await agents.Runner.run(typed, question)).final_output

    called, typed = asyncio.run(run())
    assert called.startswith("sunny in")
    assert isinstance(typed, City)
