"""All checks of an audit, and what it says."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from decoding.errors import InvalidRequestError
from evaluation.audit.check import Check, Result, Sample, run
from evaluation.audit.form import FORM
from evaluation.audit.same_text import SAME_TEXT
from evaluation.audit.server import CHAT, COMPLETIONS, Body, Server
from evaluation.prompts import PROMPTS

CHECKS: Sequence[Check] = (*SAME_TEXT, *FORM)
_NEEDS_SEEDS = "seed, repeated"  # sampled answers are compared only where it is kept
_TEMPERATURES = (0.7, 1.0)
_CROWD_WORDS = 100
_STRUCTURED_TOKENS = 200
_QUESTIONS = ("Is the sky blue?", "Are there more than ten planets?")


def make_sample(server: Server, *, requests: int, max_tokens: int, crowd: int) -> Sample:
    """Return requests for a server, half of them greedy, by the routes that it has."""
    texts = [f"{index + 1}. {PROMPTS[index % len(PROMPTS)]}" for index in range(requests)]
    ending = {"max_tokens": max_tokens}
    has_completions = COMPLETIONS in server.routes
    bodies = [_asked(text, chat=not has_completions) | ending for text in texts]
    return Sample(
        greedy=tuple(body | {"temperature": 0} for body in bodies[::2]),
        sampled=tuple(
            body | {"temperature": _TEMPERATURES[index % 2], "seed": index} for index, body in enumerate(bodies[1::2])
        ),
        structured=tuple(
            _asked(question, chat=CHAT in server.routes) | {"max_tokens": _STRUCTURED_TOKENS, **sampling}
            for question in _QUESTIONS[: max(requests // 8, 1)]
            for sampling in ({"temperature": 0}, {"temperature": 1, "seed": 1})
        ),
        crowd=tuple(
            _asked(f"{index}: {' '.join(PROMPTS * _CROWD_WORDS)[: 6 * _CROWD_WORDS]}", chat=not has_completions)
            | {"max_tokens": 2 * max_tokens, "temperature": 1, "seed": index}
            for index in range(crowd)
        ),
    )


def audit(server: Server, sample: Sample, names: Sequence[str] = ()) -> Iterator[Result]:
    """Yield the result of each check, or of those with these names, as it ends."""
    known = [check.name for check in CHECKS]
    if unknown := set(names) - set(known):
        raise InvalidRequestError(
            f"there is no check {', '.join(sorted(unknown))}; those there are: {', '.join(known)}"
        )
    for check in (check for check in CHECKS if not names or check.name in names):
        result = run(check, server, sample)
        if check.name == _NEEDS_SEEDS and result.verdict == "differs":
            sample = replace(sample, sampled=())
        yield result


def limits(results: Sequence[Result]) -> str:
    """Return a sentence about what an audit of this size can't see."""
    fewest = min((result.tokens for result in results if result.verdict == "kept"), default=0)
    most = max((result.tokens for result in results), default=0)
    return (
        f"Checks saw {fewest:,} to {most:,} tokens of answers. Of 100 checks that see {most:,}, 5 miss a fault in one "
        f"token of {max(most // 3, 1):,}, as (1 − 1/N)^3N is 0.05, and more miss a rarer one. "
        "What requests do not ask for is not seen at all."
    )


def _asked(text: str, *, chat: bool) -> Body:
    return {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
