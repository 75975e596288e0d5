"""Pydantic models that refuse what they don't know, and one sentence that says why. For configuration and requests alike."""

import difflib
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

_SHOWN_CHARACTERS = 60  # of a wrong value


class StrictModel(BaseModel):
    """No unknown keys, no conversion between types, no NaN. An unknown key's error names the nearest known one."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: object) -> object:
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    raise PydanticCustomError("unknown_key", "{problem}", _unknown(str(key), cls.model_fields))
        return data


def nearest(name: str, known: Iterable[str]) -> str:
    """What to append to a message about an unknown name: a suggestion, or the known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names) or 'none'}"


def first_problem(errors: Iterable[ErrorDetails]) -> tuple[str, str]:
    """The dotted path to the first field that is wrong ("" for the whole), and what is wrong with it."""
    error = next(iter(errors))
    path = [str(part) for part in error["loc"]]
    context = error.get("ctx", {})
    if error["type"] == "unknown_key":
        return ".".join([*path, context["key"]]), error["msg"]
    if error["type"] == "missing":
        return ".".join(path), "is required"
    reason = str(context.get("error", error["msg"])).removeprefix("Input ")
    if error["type"] in ("value_error", "json_invalid"):
        return ".".join(path), reason
    return ".".join(path), f"{reason}, not {_shorten(error['input'])}"


def problem_of(error: ValidationError) -> tuple[str, str]:
    """`first_problem` of what a model raised."""
    return first_problem(error.errors(include_url=False))


def _unknown(key: str, known: Iterable[str]) -> dict[str, str]:
    return {"key": key, "problem": f"is not known; {nearest(key, known)}"}


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
