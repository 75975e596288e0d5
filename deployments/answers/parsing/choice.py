"""Chooses the parser of an answer, by the model's formats and the request. Knows no syntax."""

from collections.abc import Sequence

from deployments.answers.parsing.parser import AnswerParser
from deployments.answers.parsing.reasoning_parser import ReasoningParser
from deployments.answers.parsing.tool_call_parser import ToolCallParser
from deployments.requests.tool_fields import ToolUse
from deployments.tokenizers.token_decoder import TokenDecoder
from deployments.tokenizers.tool_format import THINK_OPEN

_PROMPT_END = 16  # tokens; enough for a tag and the white space around it


def make_parser(body: ToolUse, prompt: Sequence[int], decoder: TokenDecoder, *, structured: bool) -> AnswerParser:
    """Parser of one answer to the request. structured: the answer follows a grammar from its first token on."""
    tools = body.offered_tools
    if decoder.response_template is not None and not structured:
        # Only here, since older releases of transformers lack what it imports.
        from deployments.answers.parsing.template_parser import TemplateParser

        text = decoder.decode_with_special(list(prompt))
        schemas = [tool.model_dump(exclude_none=True) for tool in tools]
        return TemplateParser(decoder.response_template, text, schemas, reads_calls=bool(tools))
    if tools:
        name = None if body.tool_choice is None else body.tool_choice.name
        calls = ToolCallParser(decoder.tool_format, must_call=body.must_call, name=name)
    else:
        calls = ToolCallParser(None)
    if not decoder.has_think_tags or structured:
        return calls
    end = decoder.decode_with_special(list(prompt[-_PROMPT_END:]))
    return ReasoningParser(calls, has_begun=end.rstrip().endswith(THINK_OPEN))
