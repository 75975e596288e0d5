"""Fields of beam search. Knows nothing of tokenizers."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from decoding.beams.options import MAX_BEAMS, BeamOptions
from deployments.requests.fields import Items, Words
from deployments.validation.strict import StrictModel

_DEFAULT_BEAMS = 4
_MAX_ALTERNATIVES = 32


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Alternatives = Annotated[Items[Words], Field(min_length=1, max_length=_MAX_ALTERNATIVES), BeforeValidator(_as_list)]


class BeamFields(StrictModel):
    """Fields of beam search, named as in vLLM's API and transformers' `generate`."""

    use_beam_search: bool | None = Field(
        None, description="true: search for the `n` most probable answers; deterministic without `temperature`."
    )
    num_beams: Annotated[int, Field(ge=1, le=MAX_BEAMS)] | None = Field(
        None, description="Beams of the search; by default `best_of` or `n`, or 4. More than one make a search."
    )
    length_penalty: float | None = Field(
        None, description="Answers are compared by log-probability / length to this power; 1 by default."
    )
    early_stopping: Literal[True, False, "never"] | None = Field(
        None, description='When as many answers as beams are there: true, false or `"never"`, as transformers has it.'
    )
    num_beam_groups: Annotated[int, Field(ge=1, le=MAX_BEAMS)] | None = Field(
        None, description="Groups of beams that avoid each other's tokens (arXiv 1610.02424); 1 by default."
    )
    diversity_penalty: float | None = Field(None, description="How strongly they avoid them; needs `num_beam_groups`.")
    force_words: Annotated[list[Alternatives], Field(max_length=64)] | None = Field(
        None, description="Texts that every answer of a search must have; for a list of texts, one of them."
    )

    @property
    def searches(self) -> bool:
        return self.use_beam_search is True or (self.num_beams or 1) > 1

    def beams(
        self, *, choices: int, best_of: int | None, force_words_ids: tuple[tuple[tuple[int, ...], ...], ...]
    ) -> BeamOptions:
        """Build the decoder's options; raises InvalidRequestError if one is out of range."""
        given = {
            "length_penalty": self.length_penalty,
            "early_stopping": self.early_stopping,
            "num_beam_groups": self.num_beam_groups,
            "diversity_penalty": self.diversity_penalty,
        }
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        answers = max(choices, best_of or 1)
        return BeamOptions(
            num_beams=self.num_beams or (answers if answers > 1 else _DEFAULT_BEAMS),
            num_return_sequences=choices,
            force_words_ids=force_words_ids,
            **options,
        )

    def beam_conditions(self) -> Iterator[tuple[bool, str, str]]:
        """Conditions on the fields: whether each holds, the field that is wrong if not, and the problem."""
        yield (self.use_beam_search is not False or not self.searches, "num_beams", "above 1 needs use_beam_search")
        if not self.searches:
            yield (self.length_penalty in (None, 1), "length_penalty", "needs use_beam_search: true")
            yield (not self.early_stopping, "early_stopping", "needs use_beam_search: true")
            yield (self.num_beam_groups in (None, 1), "num_beam_groups", "needs use_beam_search: true")
            yield (not self.diversity_penalty, "diversity_penalty", "needs use_beam_search: true")
            yield (not self.force_words, "force_words", "needs use_beam_search: true")
