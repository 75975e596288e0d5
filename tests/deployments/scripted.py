"""A model with tools: its chat template, functions to call, and a coordinator that answers with a call."""

from collections.abc import Callable

from actors.coordinator.request import Delta, Request, Statistics
from actors.wire.messages import Token
from tests.deployments.fake_coordinator import FakeCoordinator

TEMPLATE = """{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{# <tool_call> #}{% for message in messages %}
{{ message.role }}: {{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>{% endfor %}{% endfor %}"""
WEATHER = {"type": "object", "properties": {"city": {"enum": ["Bern", "Ulm"]}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


class Scripted(FakeCoordinator):
    """Answers with a fixed text, four characters per step."""

    text = f"I look.\n{CALL}"

    def submit(self, request: Request, sink: Callable[[Delta], None]) -> None:
        self.requests.append(request)
        for start in range(0, len(self.text), 4):
            last = start + 4 >= len(self.text)
            statistics = Statistics(steps=start // 4 + 1, committed=start // 4 + 1)
            sink(Delta(self.text[start : start + 4], [Token(9)], statistics, finish="stop" if last else None))
