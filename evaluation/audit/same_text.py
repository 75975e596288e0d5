"""Checks that a request gets the same answer, whatever goes on beside it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from evaluation.audit.answer import Answer, Choice
from evaluation.audit.check import Check, Difference, NotOfferedError, Probe
from evaluation.audit.server import Body, Server

_CHOICES = 3
_OTHER_SEEDS = 1000
_SHOWN = 40  # characters around what differs


def _repeated(server: Server, probe: Probe) -> Iterator[Difference]:
    """The same request gets the same text, sampled ones by their seed."""
    for body in probe.bodies:
        yield from _compared(server.reference(body).first, server.ask(body).first, [body, body])


def _seed_matters(server: Server, probe: Probe) -> Iterator[Difference]:
    """Another seed gets another text."""
    others = [body | {"seed": body["seed"] + _OTHER_SEEDS} for body in probe.bodies]
    pairs = zip(probe.bodies, server.together(others), strict=True)
    if all(server.reference(body).first.shown == other.first.shown for body, other in pairs):
        yield Difference("another text with another seed", "the same texts", [probe.bodies[0], others[0]])


def _without_drafts(server: Server, probe: Probe) -> Iterator[Difference]:
    """The text is the same with drafts and without."""
    if server.engine.plain is None:
        raise NotOfferedError("no field turns drafts off; audit --against a server without them")
    for body in probe.bodies:
        plain = body | server.engine.plain
        yield from _compared(server.reference(body).first, server.ask(plain).first, [body, plain])


def _on_the_other(server: Server, probe: Probe) -> Iterator[Difference]:
    """The text is that of the server it is audited against."""
    if server.other is None:
        raise NotOfferedError("there is no other server: --against URL")
    for body in probe.bodies:
        yield from _compared(server.other.reference(body).first, server.reference(body).first, [body])


def _in_company(server: Server, probe: Probe) -> Iterator[Difference]:
    """The text is the same alone and beside others, even so many that the server may have to interrupt some."""
    expected = [server.reference(body) for body in probe.bodies]
    answers = server.together(probe.bodies, probe.neighbours)
    for index, (body, reference, answer) in enumerate(zip(probe.bodies, expected, answers, strict=True)):
        others = (*probe.bodies[:index], *probe.bodies[index + 1 :], *probe.neighbours)
        yield from _compared(reference.first, answer.first, [body], others)


def _beside_cancelled(server: Server, probe: Probe) -> Iterator[Difference]:
    """The text is the same beside streams whose clients hang up."""
    expected = [server.reference(body) for body in probe.bodies]
    answers = server.together(probe.bodies, probe.neighbours, abandoned=True)
    for body, reference, answer in zip(probe.bodies, expected, answers, strict=True):
        for difference in _compared(reference.first, answer.first, [body], probe.neighbours):
            yield replace(difference, abandoned=True)


def _several_choices(server: Server, probe: Probe) -> Iterator[Difference]:
    """The first of n choices is what the request gets alone; greedy ones are all the same, sampled ones differ."""
    for body in probe.bodies:
        several = body | {"n": _CHOICES}
        answer, alone = server.ask(several), server.reference(body)
        if len(answer.choices) != _CHOICES:
            yield Difference(f"{_CHOICES} choices", f"{len(answer.choices)}", [several])
        elif body["temperature"] == 0:
            for choice in answer.choices:
                yield from _compared(alone.first, choice, [body, several])
            count, counted = _CHOICES * alone.usage["completion_tokens"], answer.usage["completion_tokens"]
            if count != counted:
                yield Difference(f"{count} tokens of all choices in usage", f"{counted}", [body, several])
        else:
            yield from _compared(alone.first, answer.first, [body, several])
            yield from _copies(server, body, answer)


def _copies(server: Server, body: Body, answer: Answer) -> Iterator[Difference]:
    """Compare choices that should differ as answers with other seeds do."""
    several = body | {"n": _CHOICES}
    for expected, choice in zip(answer.choices, server.ask(several).choices, strict=True):
        yield from _compared(expected, choice, [several, several])
    if len({choice.shown for choice in answer.choices}) < _CHOICES:
        others = server.together([body | {"seed": body["seed"] + _OTHER_SEEDS + more} for more in range(4 * _CHOICES)])
        if len({other.first.shown for other in others}) == len(others):
            yield Difference(f"{_CHOICES} different choices", "two that are the same", [several])


def _streamed(server: Server, probe: Probe) -> Iterator[Difference]:
    """A stream's pieces add up to the whole answer, with its end and its usage."""
    for body in probe.bodies:
        whole, stream, asked = server.reference(body), server.stream(body), [body, body | {"stream": True}]
        yield from _compared(whole.first, stream.first, asked)
        if not stream.ended:
            yield Difference("a stream that ends with [DONE]", f"one without ({stream.error})", asked[1:])
        elif stream.usage and _counts(stream) != _counts(whole):
            yield Difference(f"the usage {_counts(whole)}", f"{_counts(stream)} in the stream", asked)


def _counts(answer: Answer) -> dict[str, int]:
    return {name: answer.usage.get(name, 0) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def _compared(
    expected: Choice, actual: Choice, requests: Sequence[Body], neighbours: Sequence[Body] = ()
) -> Iterator[Difference]:
    """Yield the difference of two choices that should have the same text and end for the same reason."""
    if expected.shown != actual.shown:
        pairs = enumerate(zip(expected.shown, actual.shown, strict=False))
        shorter = min(len(expected.shown), len(actual.shown))
        begin = next((index for index, (one_of, other) in pairs if one_of != other), shorter)
        parts = [repr(text[max(begin - _SHOWN // 4, 0) : begin + _SHOWN]) for text in (expected.shown, actual.shown)]
        yield Difference(f"{parts[0]} around character {begin}", parts[1], requests, neighbours)
    elif expected.finishes != actual.finishes:
        yield Difference(f"finish_reason {expected.finish}", actual.finish, requests, neighbours)


def _alone(bodies: Sequence[Body]) -> list[Probe]:
    return [Probe((body,)) for body in bodies]


SAME_TEXT = (
    Check("greedy, repeated", _repeated, lambda sample: _alone(sample.greedy)),
    Check("seed, repeated", _repeated, lambda sample: _alone(sample.sampled)),
    Check("another seed", _seed_matters, lambda sample: [Probe(sample.sampled)] if sample.sampled else []),
    Check("without drafts", _without_drafts, lambda sample: _alone(sample.all)),
    Check("the other server", _on_the_other, lambda sample: _alone(sample.all)),
    Check("in company", _in_company, lambda sample: [Probe(sample.all)]),
    Check("cancelled neighbours", _beside_cancelled, lambda sample: [Probe(sample.all[::2], sample.crowd[:8])]),
    Check("in a crowd", _in_company, lambda sample: [Probe(sample.all, sample.crowd)]),
    Check("n choices", _several_choices, lambda sample: _alone(sample.greedy[:2] + sample.sampled[:2])),
    Check("streams", _streamed, lambda sample: _alone(sample.all)),
)
