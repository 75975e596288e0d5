"""A Hugging Face tokenizer as the table of tokens and the function by which texts are aligned.

Knows nothing of requests, and of models only how many tokens they have.
"""

from collections.abc import Callable, Iterable
from copy import deepcopy

from transformers import AutoConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from actors.loading.checkpoint import ModelSpec, load_tokenizer
from actors.tokenizers.draft_mapping import DraftMapping
from actors.tokenizers.logits_mapping import LogitsMapping
from decoding.errors import ConfigError
from decoding.tokenizers.alignment import compare_vocabularies
from decoding.tokenizers.text_aligner import Speller
from decoding.tokenizers.vocabulary import Vocabulary

_ROLES = ("eos", "bos", "unk", "pad", "sep", "cls", "mask")  # of a token that has several, the first counts


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, size: int) -> Vocabulary:
    """The tokenizer's tokens. size: V, how many logits the model has."""
    added = [token for token in tokenizer.added_tokens_decoder.values() if not token.special]
    return Vocabulary.build(
        tokenizer.get_vocab(), control=_control(tokenizer), added=[token.content for token in added], size=size
    )


def speller_of(tokenizer: PreTrainedTokenizerBase, size: int) -> Speller:
    """Writes texts in the tokenizer's tokens, with a copy of its own. size: V, how many logits the model has."""
    return Speller(vocabulary_of(tokenizer, size), _encoder(tokenizer))


def begins_texts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether it puts its "bos" token before a text by itself."""
    begin: list[int] = tokenizer.encode("a")
    return tokenizer.bos_token_id is not None and begin[:1] == [tokenizer.bos_token_id]


def load_draft_mappings(drafter: ModelSpec, targets: Iterable[ModelSpec]) -> dict[str, DraftMapping]:
    """For those of a drafter's targets that have another tokenizer, by their names.

    Raises:
        ConfigError: a tokenizer can't be loaded, or no drafts can come from one to the other.
    """
    own, own_size = _load(drafter)
    draft_mappings: dict[str, DraftMapping] = {}
    for spec in targets:
        tokenizer, size = _load(spec)
        if tokenizer.get_vocab() != own.get_vocab():
            speller = speller_of(own, own_size)
            try:
                draft_mapping = DraftMapping.build(speller_of(tokenizer, size), speller, begins_texts=begins_texts(own))
            except ConfigError as error:
                raise ConfigError(f"models.{drafter.name} can't draft for {spec.name!r}: {error}") from error
            draft_mappings[spec.name] = draft_mapping
    return draft_mappings


def load_logits_mappings(member: ModelSpec, leaders: Iterable[ModelSpec]) -> dict[str, LogitsMapping]:
    """For those of a member's leaders that have another tokenizer, by their names.

    Raises:
        ConfigError: a tokenizer can't be loaded, or the two have too little in common.
    """
    own, own_size = _load(member)
    logits_mappings: dict[str, LogitsMapping] = {}
    for spec in leaders:
        speller, reader = speller_of(*_load(spec)), speller_of(own, own_size)
        if not compare_vocabularies(speller.vocabulary, reader.vocabulary).identical:
            try:
                logits_mappings[spec.name] = LogitsMapping.build(speller, reader, begins_texts=begins_texts(own))
            except ConfigError as error:
                raise ConfigError(f"models.{member.name} can't join {spec.name!r}: {error}") from error
    return logits_mappings


def _load(spec: ModelSpec) -> tuple[PreTrainedTokenizerBase, int]:
    """The tokenizer, and V."""
    trusted = spec.trust_remote_code
    tokenizer = load_tokenizer(spec.path, spec.revision, trust_remote_code=trusted)
    config = AutoConfig.from_pretrained(spec.path, revision=spec.revision, trust_remote_code=trusted)
    return tokenizer, int(config.get_text_config().vocab_size)


def _control(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """The role of each token that is not text, or else its name."""
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    control = {token: token for token in (*special, *tokenizer.all_special_tokens)}
    named = ((getattr(tokenizer, f"{role}_token", None), role) for role in reversed(_ROLES))
    return control | {token: role for token, role in named if token is not None}


def _encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """Text to ids; the names of control tokens are text, where the tokenizer can see them so."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        own = deepcopy(tokenizer)
        return lambda text: list(own.encode(text, add_special_tokens=False))
    backend = deepcopy(tokenizer.backend_tokenizer)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return lambda text: list(backend.encode(text, add_special_tokens=False).ids)
