"""Checks of what an answer says about itself: its end, its counts, its log-probabilities, its structure."""

import math
from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import BaseModel, Field

from decoding.errors import InvalidRequestError
from evaluation.audit.answer import Answer, Choice
from evaluation.audit.check import Check, Difference, NotOfferedError, Probe, Sample
from evaluation.audit.server import Body, Server, route

_LENGTHS = (1, 2, 5)
_STOP_CHARACTERS = 7  # so that most stop strings lie across tokens
_LOGPROB_GAP = 0.1  # nats by which rounding may change a log-probability between a prompt and an answer
_ROUNDING = 1e-3
_BAD: tuple[Body | str, ...] = (  # no JSON, and fields of the wrong type
    '{"prompt": ',
    {"prompt": {"a": 1}, "max_tokens": 1},
    {"prompt": "A", "max_tokens": "many"},
    {"prompt": "A", "max_tokens": 1, "temperature": "hot"},
    {"prompt": "A", "max_tokens": 1, "temperature": "hot", "stream": True},
)


class Reply(BaseModel, extra="forbid", strict=True):
    """What structured answers are asked for: short, whatever the model."""

    answer: Literal["yes", "no", "unknown"]
    count: int = Field(ge=0, le=99)
    sure: bool


_SCHEMA = Reply.model_json_schema()
_TOOL = {"type": "function", "function": {"name": "note", "description": "Notes an answer.", "parameters": _SCHEMA}}


def _max_tokens(server: Server, probe: Probe) -> Iterator[Difference]:
    """An answer has no more tokens than asked for, and says so."""
    for body in probe.bodies:
        whole = server.reference(body)
        for length in (length for length in _LENGTHS if length < whole.usage["completion_tokens"]):
            short = body | {"max_tokens": length}
            answer = server.ask(short)
            count, finish = answer.usage["completion_tokens"], answer.first.finish
            if (count, finish) != (length, "length"):
                yield Difference(f"{length} tokens, finish_reason length", f"{count}, {finish}", [short])
            elif not whole.first.shown.startswith(answer.first.shown.rstrip("\ufffd")):
                yield Difference(f"the beginning of {whole.first.shown!r}", repr(answer.first.shown), [body, short])


def _stop_strings(server: Server, probe: Probe) -> Iterator[Difference]:
    """The text ends before a stop string, also one across tokens."""
    for body in probe.bodies:
        whole = server.reference(body).first.text
        stop = _stop_in(whole)
        if stop is None:
            raise NotOfferedError("the answers are too short for a stop string")
        expected, stopped = whole[: whole.index(stop)], body | {"stop": [stop]}
        for answer, asked in ((server.ask(stopped), stopped), (server.stream(stopped), stopped | {"stream": True})):
            if answer.first.text != expected:
                yield Difference(f"{expected!r}, before {stop!r}", repr(answer.first.text), [body, asked])
            elif answer.first.finish != "stop":
                yield Difference("finish_reason stop", answer.first.finish, [asked])


def _stop_in(text: str) -> str | None:
    """Return some characters from the middle of a text that every server can name."""
    begin = len(text) // 2
    stop = text[begin : begin + _STOP_CHARACTERS]
    return stop if len(stop) == _STOP_CHARACTERS and "\ufffd" not in stop and stop.strip() else None


def _usage(server: Server, probe: Probe) -> Iterator[Difference]:
    """Usage counts the tokens of prompt and answer."""
    for body in probe.bodies:
        asked = body | _with_logprobs(body)
        answer = server.ask(asked)
        usage, choice = answer.usage, answer.first
        prompt, count = usage["prompt_tokens"], usage["completion_tokens"]
        hidden = count - len(choice.tokens)  # the token that ended the text may count, and have no entry
        if usage["total_tokens"] != prompt + count:
            yield Difference(f"{prompt} + {count} tokens in total", f"{usage['total_tokens']}", [asked])
        elif choice.tokens and hidden not in ({0} if choice.finish == "length" else {0, 1}):
            yield Difference(f"{len(choice.tokens)} tokens, as there are log-probabilities", f"{count}", [asked])
        elif choice.finish == "length" and count != body["max_tokens"]:
            yield Difference(f"{body['max_tokens']} tokens at finish_reason length", f"{count}", [asked])
        ids = server.prompt_ids(body["prompt"]) if "prompt" in body else None
        if ids is not None and len(ids) != prompt:
            yield Difference(f"{len(ids)} tokens of the prompt, as /tokenize has them", f"{prompt}", [asked])


def _log_probabilities(server: Server, probe: Probe) -> Iterator[Difference]:
    """Log-probabilities are at most 0, and a greedy token has the highest."""
    for body in probe.bodies:
        asked = body | _with_logprobs(body)
        choice = server.ask(asked).first
        if not choice.tokens:
            raise NotOfferedError("answers have no log-probabilities")
        for index, (token, logprob, tops) in enumerate(zip(choice.tokens, choice.logprobs, choice.tops, strict=True)):
            if logprob is None or logprob > _ROUNDING:
                yield Difference("a log-probability of at most 0", f"{logprob} for {token!r}, token {index}", [asked])
            elif sum(map(math.exp, tops)) > 1 + _ROUNDING:
                yield Difference("probabilities that add up to at most 1", f"{tops} at token {index}", [asked])
            elif body["temperature"] == 0 and tops and logprob < max(tops) - _ROUNDING:
                yield Difference(f"the most probable token, {max(tops)}", f"{logprob} for {token!r}", [asked])
            else:
                continue
            break


def _scored(server: Server, probe: Probe) -> Iterator[Difference]:
    """An answer that is read as a prompt has the log-probabilities it was written with."""
    for body in probe.bodies:
        if "prompt" not in body:
            raise NotOfferedError("there is no /v1/completions")
        asked = body | _with_logprobs(body)
        ids = server.prompt_ids(body["prompt"])
        choice = server.ask(asked, **(server.engine.token_ids or {})).first
        text = [*ids, *choice.ids] if ids and len(choice.ids) == len(choice.tokens) else body["prompt"] + choice.text
        scoring, scored = _scoring(server, text, choice)
        for token, written, read in zip(choice.tokens, choice.logprobs, scored, strict=True):
            if written is None or read is None or abs(written - read) > _LOGPROB_GAP:
                yield Difference(f"{written} for {token!r}, as while it was written", f"{read}", [asked, scoring])
                break


def _scoring(server: Server, text: object, choice: Choice) -> tuple[Body, list[float | None]]:
    """Return the request that reads an answer as part of its prompt, and what log-probabilities it gives the answer."""
    refusal: InvalidRequestError | None = None
    for more in (0, 1):  # some servers can't add nothing
        asked = {"prompt": text, "max_tokens": more, "temperature": 0, "echo": True, "logprobs": 1}
        try:
            scored = server.ask(asked).first
        except InvalidRequestError as error:
            refusal = error
            continue
        end = len(scored.tokens) - more
        begin = end - len(choice.tokens)
        if choice.tokens and scored.tokens[begin:end] == choice.tokens:
            return asked, scored.logprobs[begin:end]
        raise NotOfferedError("prompts have no log-probabilities, or the answer has other tokens as part of one")
    raise refusal or NotOfferedError("no echo")


def _structures(server: Server, probe: Probe) -> Iterator[Difference]:
    """A structured answer is JSON by its schema."""
    format_ = {"type": "json_schema", "json_schema": {"name": "reply", "schema": _SCHEMA, "strict": True}}
    for body in probe.bodies:
        asked = body | {"response_format": format_}
        for answer, sent in ((server.ask(asked), asked), (server.stream(asked), asked | {"stream": True})):
            if not _fits(answer.first.text):
                _complete(answer)
                yield Difference("JSON by the schema", repr(answer.first.text), [sent])


def _tool_calls(server: Server, probe: Probe) -> Iterator[Difference]:
    """A function that must be called is called by its schema."""
    for body in probe.bodies:
        if "messages" not in body:
            raise NotOfferedError("there is no /v1/chat/completions")
        for choice in ({"type": "function", "function": {"name": "note"}}, "required"):
            asked = {"tools": [_TOOL], "tool_choice": choice, "parallel_tool_calls": False}
            yield from _called(server, body | asked)


def _called(server: Server, asked: Body) -> Iterator[Difference]:
    whole, stream = server.ask(asked), server.stream(asked)
    for answer, sent in ((whole, asked), (stream, asked | {"stream": True})):
        calls = list(answer.first.calls.values())
        shown = f"{answer.first.shown!r}, finish_reason {answer.first.finish}"
        if [call.name for call in calls] != ["note"] or not _fits(calls[0].arguments):
            _complete(answer)
            yield Difference("one call of `note` by its schema", shown, [sent])
        elif len(calls[0].ids) != 1:
            yield Difference("one id of the call", f"{sorted(calls[0].ids)}", [sent])
        elif answer.first.finish not in ("tool_calls", "stop"):
            yield Difference("finish_reason tool_calls", shown, [sent])
    if whole.first.shown != stream.first.shown:
        yield Difference(repr(whole.first.shown), f"{stream.first.shown!r} in the stream", [asked])


def _complete(answer: Answer) -> None:
    if answer.first.finish == "length":
        raise NotOfferedError("the model does not come to an end within the tokens that this check asks for")


def _fits(text: str) -> bool:
    """Whether a text is JSON by the schema."""
    try:
        Reply.model_validate_json(text)
    except ValueError:
        return False
    return True


def _identifiers(server: Server, probe: Probe) -> Iterator[Difference]:
    """Each answer has an id of its own, the same in all its chunks."""
    for body in probe.bodies:
        answers = [server.ask(body), server.ask(body), server.stream(body)]
        if any(len(answer.ids) != 1 or "" in answer.ids for answer in answers):
            yield Difference(
                "one id per answer, in all its chunks", f"{[sorted(each.ids) for each in answers]}", [body]
            )
        elif len(set.union(*(answer.ids for answer in answers))) != len(answers):
            yield Difference("another id for each answer", f"{answers[0].ids} again", [body, body])


def _errors(server: Server, _: Probe) -> Iterator[Difference]:
    """What can't be served is refused with 4xx, and JSON that says why."""
    for body in _BAD:
        response = server.send(body)
        try:
            error = response.json().get("error")
        except (ValueError, AttributeError):
            error = None
        is_told = bool(error.get("message") if isinstance(error, Mapping) else error)
        if not (response.is_client_error and is_told):
            actual = f"HTTP {response.status_code}: {response.text[:200]!r}"
            yield Difference("a status of 4xx, and JSON with an error and its message", actual, [body])


def _with_logprobs(body: Body) -> Body:
    return {"logprobs": 1} if route(body).endswith("/v1/completions") else {"logprobs": True, "top_logprobs": 1}


def _every(sample: Sample) -> list[Probe]:
    return [Probe((body,)) for body in sample.all]


def _structured(sample: Sample) -> list[Probe]:
    return [Probe((body,)) for body in sample.structured]


FORM = (
    Check("max_tokens", _max_tokens, _every),
    Check("stop strings", _stop_strings, _every),
    Check("usage", _usage, _every),
    Check("log-probabilities", _log_probabilities, _every),
    Check("scoring", _scored, _every),
    Check("JSON schema", _structures, _structured),
    Check("tool calls", _tool_calls, _structured),
    Check("identifiers", _identifiers, _every),
    Check("errors", _errors, lambda _: [Probe(({},))]),
)
