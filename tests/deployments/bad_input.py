"""Requests that must be refused with 400, and the field that the message must name. For tests with and without Ray."""

import json
from typing import Any

PROMPT = {"model": "consort", "prompt": "x"}
MESSAGES = {"model": "consort", "messages": [{"role": "user", "content": "x"}]}

COMMON: list[tuple[dict[str, Any], str]] = [
    ({"max_token": 3}, "max_token"),
    ({"logprobs": 1}, "logprobs"),
    ({"model": 5}, "model"),
    ({"model": None}, "model"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 2000}, "max_tokens"),
    ({"max_tokens": 10**300}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 1e9}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": 2**63}, "top_k"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"stop": ""}, "stop.0"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop.1"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "\ud800"}, "stop.0"),
    ({"n": 2}, "n"),
    ({"n": 0}, "n"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"repetition_penalty": "1"}, "repetition_penalty"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": -2}, "frequency_penalty"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 0}, "logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream": True, "stream_options": {"include_usag": True}}, "stream_options.include_usag"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"speculate": 1}, "speculate"),
    ({"\ud800": 1}, "?"),
]
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": ["a", [[1]]]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [2048]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": [1] * 1024}, "prompt"),
    ({"prompt": "x " * 1500}, "prompt"),
    ({"prompt": "x" * 3_000_000}, "prompt"),
    ({"prompt": ["x"] * 10_000}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"messages": []}, "messages"),
]
CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages.0.name"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "text": "x"}]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content.0.text"),
    ({"messages": [{"role": "user", "content": "x " * 1500}]}, "messages"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_tokens"),
    ({"prompt": "x"}, "prompt"),
]


def _case(path: str, valid: dict[str, Any], change: dict[str, Any], field: str) -> tuple[str, str, str]:
    return path, json.dumps({**valid, **change}), field


CASES = [
    *(_case("/v1/completions", PROMPT, change, field) for change, field in [*COMMON, *COMPLETIONS]),
    *(_case("/v1/chat/completions", MESSAGES, change, field) for change, field in [*COMMON, *CHAT]),
]
NO_OBJECTS = ["", "{", "[1]", "null", '"x"', "\ud800", "[" * 100_000, '{"model": ' + "9" * 5000 + "}"]
