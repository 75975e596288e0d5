"""Mappings between the tokens of two models: a drafter's and its targets', a member's and its leaders'."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from transformers import PreTrainedTokenizerBase

from decoding.errors import ConfigError
from decoding.tokenizers.draft_mapping import DraftMapping
from decoding.tokenizers.logits_mapping import LogitsMapping
from decoding.tokenizers.vocabulary import compare_vocabularies
from engine.loading.settings import load_tokenizer, read_header, vocabulary_size
from engine.loading.tokenizers import begins_texts, speller_of, vocabulary_of

if TYPE_CHECKING:
    from engine.loading.checkpoint import ModelSpec

_Loaded = tuple[PreTrainedTokenizerBase, int]  # the tokenizer, V
_Mapping = TypeVar("_Mapping", DraftMapping, LogitsMapping)


def load_draft_mappings(drafter: "ModelSpec", targets: "Sequence[ModelSpec]") -> dict[str, DraftMapping]:
    """Return a mapping for each target that has another tokenizer than the drafter, by the target's name.

    Raises ConfigError if a tokenizer can't be loaded, or drafts can't be translated.
    """

    def differ(target: _Loaded, own: _Loaded) -> bool:
        return target[0].get_vocab() != own[0].get_vocab()

    return _load_mappings(DraftMapping, drafter, targets, differ, "draft for")


def load_logits_mappings(member: "ModelSpec", leaders: "Sequence[ModelSpec]") -> dict[str, LogitsMapping]:
    """Return a mapping for each leader that has another tokenizer than the member, by the leader's name.

    Raises ConfigError if a tokenizer can't be loaded, or the two have too little in common.
    """

    def differ(leader: _Loaded, own: _Loaded) -> bool:
        return not compare_vocabularies(vocabulary_of(*leader), vocabulary_of(*own)).identical

    return _load_mappings(LogitsMapping, member, leaders, differ, "join")


def _load_mappings(
    kind: type[_Mapping],
    model: "ModelSpec",
    others: "Sequence[ModelSpec]",
    differ: Callable[[_Loaded, _Loaded], bool],
    purpose: str,
) -> dict[str, _Mapping]:
    mappings: dict[str, _Mapping] = {}
    if not others:
        return mappings
    own = _load(model)
    for spec in others:
        other = _load(spec)
        if differ(other, own):
            try:
                mappings[spec.name] = kind.build(
                    speller_of(*other), speller_of(*own), begins_texts=begins_texts(own[0])
                )
            except ConfigError as error:
                raise ConfigError(f"models.{model.name} can't {purpose} {spec.name!r}: {error}") from error
    return mappings


def _load(spec: "ModelSpec") -> _Loaded:
    trusted = spec.trust_remote_code
    tokenizer = load_tokenizer(spec.path, spec.revision, trust_remote_code=trusted)
    header = read_header(spec.path, spec.revision, trust_remote_code=trusted)
    return tokenizer, vocabulary_size(header)
