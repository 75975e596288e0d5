"""Frameworks that speak OpenAI's or Anthropic's API: answers, streams, tools, structured answers."""

import asyncio
import json
from typing import Any

import pytest
from pydantic import BaseModel

ASK = "What is the answer?"
ANSWER = "The answer is 42."


class City(BaseModel):
    """What an answer is parsed into."""

    name: str
    people: int


def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def test_langchain_openai(url: str) -> None:
    langchain: Any = pytest.importorskip("langchain_openai")
    messages: Any = pytest.importorskip("langchain_core.messages")
    model = langchain.ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="consort", max_retries=0)
    assert model.invoke(ASK).content == ANSWER
    assert "".join(chunk.content for chunk in model.stream(ASK)) == ANSWER
    for method in ("json_schema", "function_calling"):
        assert model.with_structured_output(City, method=method).invoke(ASK) == City(name="Bern", people=42)
    with_tools = model.bind_tools([weather])
    turns = [messages.HumanMessage(ASK), with_tools.invoke(ASK)]
    (call,) = turns[1].tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Bern"})
    turns.append(messages.ToolMessage(weather(**call["args"]), tool_call_id=call["id"]))
    assert with_tools.invoke(turns).content == ANSWER
    by_responses = langchain.ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model="consort", max_retries=0, use_responses_api=True
    )
    assert by_responses.invoke(ASK).text == ANSWER


def test_langchain_anthropic(url: str) -> None:
    langchain: Any = pytest.importorskip("langchain_anthropic")
    messages: Any = pytest.importorskip("langchain_core.messages")
    model = langchain.ChatAnthropic(base_url=url, api_key="none", model="consort", max_retries=0, max_tokens=500)
    assert model.invoke(ASK).content == ANSWER
    assert "".join(str(chunk.text) for chunk in model.stream(ASK)) == ANSWER
    assert model.with_structured_output(City).invoke(ASK) == City(name="Bern", people=42)
    with_tools = model.bind_tools([weather])
    turns = [messages.HumanMessage(ASK), with_tools.invoke(ASK)]
    (call,) = turns[1].tool_calls
    turns.append(messages.ToolMessage(weather(**call["args"]), tool_call_id=call["id"]))
    assert with_tools.invoke(turns).content == ANSWER


def test_llama_index(url: str) -> None:
    llama: Any = pytest.importorskip("llama_index.llms.openai_like")
    tools: Any = pytest.importorskip("llama_index.core.tools")
    model = llama.OpenAILike(
        api_base=f"{url}/v1",
        api_key="none",
        model="consort",
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
        should_use_structured_outputs=True,
    )
    core: Any = pytest.importorskip("llama_index.core.llms")
    asked = [core.ChatMessage(role="user", content=ASK)]
    assert model.chat(asked).message.content == ANSWER
    assert "".join(chunk.delta for chunk in model.stream_chat(asked)) == ANSWER
    assert model.structured_predict(City, pytest.importorskip("llama_index.core").PromptTemplate(ASK)).people == 42
    tool = tools.FunctionTool.from_defaults(fn=weather)
    first = model.chat_with_tools([tool], chat_history=asked)
    (call,) = model.get_tool_calls_from_response(first)
    assert call.tool_kwargs == {"city": "Bern"}
    result = core.ChatMessage(role="tool", content="sunny", additional_kwargs={"tool_call_id": call.tool_id})
    assert model.chat_with_tools([tool], chat_history=[*asked, first.message, result]).message.content == ANSWER


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_litellm(url: str, provider: str) -> None:
    litellm: Any = pytest.importorskip("litellm")
    litellm.telemetry = False
    options = {
        "model": f"{provider}/consort",
        "api_base": url if provider == "anthropic" else f"{url}/v1",
        "api_key": "none",
        "max_retries": 0,
    }
    asked = [{"role": "user", "content": ASK}]
    assert litellm.completion(**options, messages=asked).choices[0].message.content == ANSWER
    stream = litellm.completion(**options, messages=asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ANSWER
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    first = litellm.completion(**options, messages=asked, tools=tools).choices[0].message
    (call,) = first.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Bern"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    for turn in (first, first.model_dump()):
        last = litellm.completion(**options, messages=[*asked, turn, result], tools=tools)
        assert last.choices[0].message.content == ANSWER


def test_instructor(url: str) -> None:
    instructor: Any = pytest.importorskip("instructor")
    openai: Any = pytest.importorskip("openai")
    modes = [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT]
    for mode in modes:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as plain:
            client = instructor.from_openai(plain, mode=mode)
            asked = [{"role": "user", "content": ASK}]
            city = client.chat.completions.create(model="consort", messages=asked, response_model=City)
            assert city.model_dump() == {"name": "Bern", "people": 42}, mode  # of a class of its own


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_pydantic_ai(url: str, api: str) -> None:
    ai: Any = pytest.importorskip("pydantic_ai")
    models: Any = pytest.importorskip("pydantic_ai.models.openai")
    provider: Any = pytest.importorskip("pydantic_ai.providers.openai")
    kind = models.OpenAIChatModel if api == "chat" else models.OpenAIResponsesModel
    model = kind("consort", provider=provider.OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    assert ai.Agent(model, instructions="Be brief.").run_sync(ASK).output == ANSWER
    agent = ai.Agent(model, tools=[weather])
    first = agent.run_sync(ASK)
    assert first.output == ANSWER
    assert agent.run_sync(ASK, message_history=first.all_messages()).output == ANSWER
    assert ai.Agent(model, output_type=City).run_sync(ASK).output == City(name="Bern", people=42)


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents(url: str, api: str) -> None:
    agents: Any = pytest.importorskip("agents")
    openai: Any = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
    model = kind(model="consort", openai_client=client)

    async def run() -> tuple[Any, Any]:
        with_tools = agents.Agent(name="Helper", model=model, tools=[agents.function_tool(weather)])
        first = await agents.Runner.run(with_tools, ASK)
        turns = [*first.to_input_list(), {"role": "user", "content": ASK}]
        await agents.Runner.run(with_tools, turns)
        typed = await agents.Runner.run(agents.Agent(name="Typed", model=model, output_type=City), ASK)
        return first.final_output, typed.final_output

    assert asyncio.run(run()) == (ANSWER, City(name="Bern", people=42))
