"""Writes answers to /v1/completions."""

from collections.abc import Sequence

from deployments.apis.choices import AnswerWriter, CompletionChoice
from deployments.apis.completions.request import CompletionRequest
from deployments.apis.parts import EchoedPrompt, Part
from deployments.apis.token_details import completion_logprobs


class CompletionWriter(AnswerWriter):
    """POST /v1/completions."""

    id_prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"
    _body: CompletionRequest

    def _echoed_prompt(self, prompt_index: int, prompt: Sequence[int]) -> EchoedPrompt | None:
        if not self._body.echo:
            return None
        given = self._body.prompt[prompt_index]
        text = given if isinstance(given, str) else self._decoder.decode(given)
        return EchoedPrompt(text, prompt, self._decoder)

    def _choice(self, index: int, part: Part) -> CompletionChoice:
        count = self._body.logprob_count
        logprobs = None if count is None else completion_logprobs(part, count, self._decoder)
        choice = CompletionChoice(text=part.text, logprobs=logprobs, **self._common(index, part))
        of_prompt = self._prompt_logprobs(index, part)
        if of_prompt is not None:
            choice.prompt_logprobs = of_prompt
        return choice
