"""Writes prompts and messages from named templates."""

from collections.abc import Mapping

from pydantic import BaseModel

from decoding.errors import InvalidRequestError
from deployments.apis.chat.request import ChatRequest
from deployments.apis.completions.request import CompletionRequest
from deployments.configuration.templates import EXAMPLES, PromptTemplate
from deployments.fields.conversation import Message
from deployments.fields.generation import GenerationRequest
from deployments.fields.prompts import TemplateFields
from deployments.fields.strict import nearest


class TemplateCard(BaseModel):
    """A template in GET /v1/templates."""

    id: str
    object: str = "template"
    template: str  # its Jinja source
    variables: list[str]


class TemplateList(BaseModel):
    """Response of GET /v1/templates."""

    object: str = "list"
    data: list[TemplateCard]


class PromptTemplates:
    """The templates of a server, by name."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        """sources: Jinja templates, by name."""
        self._templates = {name: PromptTemplate(name, source) for name, source in sources.items()}

    def cards(self) -> TemplateList:
        """List the templates."""
        templates = self._templates.values()
        return TemplateList(
            data=[TemplateCard(id=each.name, template=each.source, variables=each.variables) for each in templates]
        )

    def fill(self, body: GenerationRequest) -> None:
        """Write the body's prompt or messages from the template that it names, if it does.

        In a completion, examples come before the prompt, each with its answer. In a chat, each example is a user's turn
        and an answer, after the messages that the body has. A template with a variable `examples` shows them itself.
        Raises InvalidRequestError if there is no such template, or a variable is missing or unknown.
        """
        match body:
            case CompletionRequest(template=str(name)):
                turns = self._turns(name, body)
                body.prompt = ["\n\n".join([*("".join(turn) for turn in turns[:-1]), turns[-1][0]])]
            case ChatRequest(template=str(name)):
                *examples, (question, _) = self._turns(name, body)
                turns = [pair for asked, answer in examples for pair in (("user", asked), ("assistant", answer))]
                turns.append(("user", question))
                written = [Message.model_validate({"role": role, "content": text}) for role, text in turns]
                body.messages = [*body.messages, *written]

    def _turns(self, name: str, body: TemplateFields) -> list[tuple[str, str]]:
        """Return the rendered examples with their answers; last the rendered prompt, without an answer."""
        template = self._templates.get(name)
        if template is None:
            suggestion = nearest(name, self._templates)
            raise InvalidRequestError(f"template: there is no template {name!r}; {suggestion}", field="template")
        variables, examples = body.variables or {}, body.examples or []
        if template.shows_examples:
            filled = [{**example.variables, "answer": example.answer} for example in examples]
            return [(template.render({**variables, EXAMPLES: filled}), "")]
        shown = [
            (template.render(example.variables, field=f"examples.{index}.variables"), example.answer)
            for index, example in enumerate(examples)
        ]
        return [*shown, (template.render(variables), "")]
