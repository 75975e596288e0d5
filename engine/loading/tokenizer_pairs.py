"""Mappings between the tokenizers of two models, from Hugging Face tokenizers.

Knows nothing of requests, and of models only how many logits they have.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, TypeVar

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from decoding.errors import ConfigError
from decoding.tokenizers.alignment import compare_vocabularies
from decoding.tokenizers.text_aligner import Speller
from decoding.tokenizers.vocabulary import Vocabulary
from engine.loading.settings import load_tokenizer, read_header, vocabulary_size
from engine.tokenizers.draft_mapping import DraftMapping
from engine.tokenizers.logits_mapping import LogitsMapping

if TYPE_CHECKING:
    from engine.loading.checkpoint import ModelSpec

_ROLES = ("eos", "bos", "unk", "pad", "sep", "cls", "mask")  # the first counts if a token has several
_Loaded = tuple[PreTrainedTokenizerBase, int]  # the tokenizer, V
_Mapping = TypeVar("_Mapping", DraftMapping, LogitsMapping)


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, size: int) -> Vocabulary:
    """Return the tokenizer's tokens. size: V, how many logits the model has."""
    added = [token for token in tokenizer.added_tokens_decoder.values() if not token.special]
    return Vocabulary.build(
        tokenizer.get_vocab(), control=_control(tokenizer), added=[token.content for token in added], size=size
    )


def speller_of(tokenizer: PreTrainedTokenizerBase, size: int) -> Speller:
    """Return what writes texts in the tokenizer's tokens, over a copy of it. size: V, as in `vocabulary_of`."""
    return Speller(vocabulary_of(tokenizer, size), _encoder(tokenizer))


def begins_texts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer puts its "bos" token before a text."""
    begin: list[int] = tokenizer.encode("a")
    return tokenizer.bos_token_id is not None and begin[:1] == [tokenizer.bos_token_id]


def load_draft_mappings(drafter: "ModelSpec", targets: "Sequence[ModelSpec]") -> dict[str, DraftMapping]:
    """Return a mapping for each target that has another tokenizer than the drafter, by the target's name.

    Raises:
        ConfigError: a tokenizer can't be loaded, or drafts can't be translated.
    """

    def differ(target: _Loaded, own: _Loaded) -> bool:
        return target[0].get_vocab() != own[0].get_vocab()

    return _load_mappings(DraftMapping, drafter, targets, differ, "draft for")


def load_logits_mappings(member: "ModelSpec", leaders: "Sequence[ModelSpec]") -> dict[str, LogitsMapping]:
    """Return a mapping for each leader that has another tokenizer than the member, by the leader's name.

    Raises:
        ConfigError: a tokenizer can't be loaded, or the two have too little in common.
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


def _control(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the role of each control token, or its name if it has no role."""
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    control = {token: token for token in (*special, *tokenizer.all_special_tokens)}
    named = ((getattr(tokenizer, f"{role}_token", None), role) for role in reversed(_ROLES))
    return control | {token: role for token, role in named if token is not None}


def _encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """Return a function from text to ids. Fast tokenizers treat the names of control tokens in it as text."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        own = deepcopy(tokenizer)
        return lambda text: list(own.encode(text, add_special_tokens=False))
    backend = deepcopy(tokenizer.backend_tokenizer)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return lambda text: list(backend.encode(text, add_special_tokens=False).ids)
