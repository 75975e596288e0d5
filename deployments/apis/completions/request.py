"""Body of POST /v1/completions, OpenAI's oldest API."""

from typing import Annotated, Any

from pydantic import Field

from decoding.sampling.params import MAX_LOGPROBS
from deployments.fields.generation import GenerationRequest
from deployments.fields.prompts import CompressionFields, TemplateFields
from deployments.fields.types import Prompts, only


class CompletionRequest(GenerationRequest, TemplateFields, CompressionFields):
    """POST /v1/completions."""

    prompt_field = "prompt"
    logprobs_field = "logprobs"
    default_max_tokens = 16

    prompt: Prompts = Field([], description="A text or a list of token ids, or a list of either: one choice for each.")
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="Report the answer's tokens and this many most probable ones per position."
    )
    echo: bool | None = Field(
        None, description="Begin the text with the prompt, which may be all of it (`max_tokens: 0`)."
    )
    suffix: Annotated[str, only("", why="insertion is not supported")] | None = Field(
        None, description="Only an empty text."
    )

    def _conditions(self) -> list[tuple[bool, str, str]]:
        return [
            *super()._conditions(),
            *self.template_conditions(),
            (bool(self.prompt) or self.template is not None, "prompt", "is required, or else a template"),
            (not self.prompt or self.template is None, "prompt", "has no place beside template; set one of them"),
        ]

    @property
    def prompt_count(self) -> int:
        return len(self.prompt) or 1

    @property
    def compressed_prompt(self) -> str | list[str] | list[dict[str, Any]] | None:
        if not (self.prompt_compression and self.prompt_compression.return_prompt):
            return None
        texts = [prompt for prompt in self.prompt if isinstance(prompt, str)]
        if self.compressed and self.compressed.prompts:
            texts = [prompt.text for prompt in self.compressed.prompts]
        return texts[0] if len(texts) == 1 else texts

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def prompt_only(self) -> bool:
        return self.echoes and self.max_tokens == 0

    @property
    def logprob_count(self) -> int | None:
        return self.logprobs

    @property
    def prompt_logprob_count(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        counts = [count for count in (self.prompt_logprobs, echoed) if count is not None]
        return max(counts, default=None)
