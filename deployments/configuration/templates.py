"""Prompt templates of the configuration: Jinja in the sandbox that chat templates have."""

from collections.abc import Mapping
from typing import Annotated, Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError
from jinja2.ext import loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from decoding.errors import InvalidRequestError
from deployments.fields.strict import nearest

EXAMPLES = "examples"  # the variable of a template that shows few-shot examples itself

# transformers' options of chat templates; a variable that is missing is an error.
_SANDBOX = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], undefined=StrictUndefined
)


def _check_syntax(source: str) -> str:
    try:
        _SANDBOX.from_string(source)  # parsing alone would not look up filters
    except TemplateSyntaxError as error:
        problem = {"problem": f"is no Jinja template: line {error.lineno}: {error.message}"}
        raise PydanticCustomError("field", "{problem}", {**problem, "field": ""}) from error
    return source


TemplateSource = Annotated[str, AfterValidator(_check_syntax)]


class PromptTemplate:
    """A named template."""

    def __init__(self, name: str, source: str) -> None:
        self.name, self.source = name, source
        self.variables = sorted(find_undeclared_variables(_SANDBOX.parse(source)))
        self._template = _SANDBOX.from_string(source)

    @property
    def shows_examples(self) -> bool:
        return EXAMPLES in self.variables

    def render(self, variables: Mapping[str, Any], *, field: str = "variables") -> str:
        """Fill the template; raises InvalidRequestError if it can't be. field: where the variables are."""
        unknown = sorted(variables.keys() - set(self.variables))
        if unknown:
            reason = f"is no variable of the template {self.name!r}; {nearest(unknown[0], self.variables)}"
            raise InvalidRequestError(f"{field}.{unknown[0]}: {reason}", field=field)
        try:
            return self._template.render(variables)
        except (TemplateError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            missing = [name for name in self.variables if str(error) == f"'{name}' is undefined"]
            reason = f"{field}: the template {self.name!r} can't use them: {error}"
            if missing:
                reason = f"{field}.{missing[0]}: is required by the template {self.name!r}"
            raise InvalidRequestError(reason, field=field) from error
