"""`consort demo`: stream an answer with tokens coloured by source, write it again without drafts, compare speeds."""

import time
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from cli.console.generation import CHAT, Generation, Generator
from cli.console.printer import COLOURS, TextPrinter
from deployments.client import Client

_QUESTION = "What can I do to sleep better? Give me three tips."
_SEED = 7
_TOKENS = 200
_PRACTICE_S = 3.0  # in which an idle target traces its model and times its steps, after its first request
_PROPOSERS = {  # by the source of a token
    "accepted": "the drafter",
    "ngram": "n-grams of the text",
    "medusa": "the Medusa heads",
    "eagle3": "the EAGLE-3 head",
    "mtp": "the MTP layer",
    "dflash": "the DFlash head",
    "pard": "the PARD model",
    "self": "the target itself",
    "corpus": "earlier texts",
}


def run_demo(client: Client, console: Console, *, model: str) -> None:
    """Ask twice, with drafts and without; show the first answer as it comes.

    Raises UnavailableError if the server could not answer.
    """
    # All tokens that were not accepted from a draft are the target's own: they share one colour here.
    printer = TextPrinter(console, palette={source: COLOURS[source] for source in _PROPOSERS})
    generator = Generator(client)
    body = {"model": model, "messages": [{"role": "user", "content": _QUESTION}], "max_tokens": _TOKENS, "seed": _SEED}
    console.rule(f"[bold]{model}[/]", align="left")
    console.print(_QUESTION, style="bold", highlight=False)
    generator.run(CHAT, {**body, "max_tokens": 8}, lambda span: None)  # the very first request warms the models up
    time.sleep(_PRACTICE_S)
    generator.run(CHAT, {**body, "seed": _SEED + 1}, lambda span: None)  # so do the first drafts
    ours = printer.answer(generator, CHAT, body)
    plain = generator.run(CHAT, {**body, "speculate": False}, lambda span: None)
    console.print(Text("  ").join(_legend(ours)))
    console.rule("[bold]with drafts, and without[/]", align="left")
    console.print(*report(ours, plain), sep="\n", highlight=False)


def report(ours: Generation, plain: Generation) -> list[Text]:
    """Return lines that say what drafts gained. ours: the answer with drafts; plain: without."""
    lines = [_speed("with drafts", ours), _speed("without", plain), _drafts(ours)]
    if ours.tokens_per_s and plain.tokens_per_s:
        ratio = ours.tokens_per_s / plain.tokens_per_s
        lines.append(Text.assemble((f"{ratio:.2f} × as fast", "bold"), f": {_reason(ours, plain, ratio)}"))
    if ours.text == plain.text:
        lines.append(Text.assemble(("✓", "green"), " the same seed gives the same text without drafts"))
    else:
        lines.append(Text.assemble(("✗", "red"), " without drafts the text differs: please report this"))
    return lines


def _reason(ours: Generation, plain: Generation, ratio: float) -> str:
    """Say where the ratio comes from: tokens per step, and what a step with drafts costs."""
    if not ours.speculation["drafted"]:
        return "nothing was drafted. No draft was found, or trials on this machine had found plain decoding faster"
    step_s, plain_step_s = _step_s(ours), _step_s(plain)
    costs = (
        f"a step takes {step_s * 1e3:.1f} ms, drafts and their verification included, instead of "
        f"{plain_step_s * 1e3:.1f} ms, and brings {ours.speculation['acceptance_length']:.2f} tokens"
    )
    if ratio > 1:
        return costs
    needed = step_s / plain_step_s
    return f"here drafts do not pay. {costs[0].upper()}{costs[1:]}; more than {needed:.2f} would pay"


def _step_s(generation: Generation) -> float:
    """Mean seconds per target step, not counting the first, which reads the prompt."""
    steps: int = generation.speculation["steps"]
    return (generation.total_s - generation.first_s) / max(steps - 1, 1)


def _speed(name: str, generation: Generation) -> Text:
    return Text(
        f"{name}: {generation.tokens} tokens in {generation.total_s:.2f} s, {generation.tokens_per_s or 0:.1f} "
        f"tokens/s, the first after {generation.first_s * 1e3:.0f} ms"
    )


def _drafts(generation: Generation) -> Text:
    speculation = generation.speculation
    return Text(
        f"{speculation['accepted']} of {speculation['drafted']} draft tokens accepted in {speculation['steps']} steps "
        "of the target"
    )


def _legend(generation: Generation) -> Iterator[Text]:
    """Yield the number of tokens from each source, in its colour."""
    drafted = {source: count for source in _PROPOSERS if (count := generation.sources.get(source))}
    for source, count in drafted.items():
        yield Text.assemble(("■ ", COLOURS[source] or ""), (f"{count} tokens from {_PROPOSERS[source]}", "dim"))
    yield Text.assemble("■ ", (f"{(generation.tokens or 0) - sum(drafted.values())} from the target", "dim"))
