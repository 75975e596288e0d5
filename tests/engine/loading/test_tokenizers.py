"""Grammars get the right bytes of each token, for tokenizers of several kinds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from decoding.errors import ConfigError
from decoding.grammars.grammar import Grammar
from decoding.sampling.noise import gumbel
from decoding.sampling.noise_keys import noise_key
from decoding.sampling.params import SamplingParams, Structure
from decoding.tokenizers.draft_mapping import DraftMapping
from decoding.tokenizers.text_aligner import Speller
from engine.loading.checkpoint import ModelSpec
from engine.loading.token_mappings import load_draft_mappings
from engine.loading.tokenizers import begins_texts, copy_tokenizer, speller_of, structure_tokenizer, vocabulary_of
from tests.support import tokenizers
from tests.support.byte_level import byte_level_tokenizer
from tests.support.permuted import permutation, permuted_tokenizer
from tests.support.structures import allowed
from tests.support.tokenizers import BUNDLED_ROLES, sentencepiece_tokenizer

CORPUS = ['the cat sat on the mat, {"a": 1} and {"b": [2, 3]}'] * 20
SPECIAL = {"unk_token": "[UNK]", "eos_token": "[SEP]"}
V = 2048
TARGET, DRAFTER = Path("models/target"), Path("models/drafter")


def fast(model: Any, trainer: Any, pre_tokenizer: Any, decoder: Any) -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def word_pieces() -> PreTrainedTokenizerBase:
    trainer = trainers.WordPieceTrainer(vocab_size=100, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    model = models.WordPiece(unk_token="[UNK]")
    return fast(model, trainer, pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False))


def unigrams() -> PreTrainedTokenizerBase:
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["[UNK]", "[SEP]"], unk_token="[UNK]", show_progress=False
    )
    return fast(models.Unigram(), trainer, pre_tokenizers.Metaspace(), decoders.Metaspace())


KINDS = {
    "byte-level": lambda: AutoTokenizer.from_pretrained(Path("models/target")),
    "word pieces": word_pieces,
    "unigrams": unigrams,
    "in Python": ByT5Tokenizer,
}


def allowed_texts(tokenizer: LLTokenizer, pattern: str) -> set[bytes]:
    """Return what the first token of an answer may write."""
    matcher = Grammar(Structure(kind="regex", definition=pattern), tokenizer).matcher()
    mask = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.int32)
    ends = {*tokenizer.eos_tokens}
    return {bytes(tokenizer.decode_bytes([token])) for token in allowed(mask) - ends}


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_has_the_same_tokens_and_settings_of_its_own(kind: str) -> None:
    tokenizer: Any = KINDS[kind]()
    tokenizer.add_tokens(["<first>", AddedToken("<second>", special=True), "<third>"])
    copied: Any = copy_tokenizer(tokenizer)
    text = "the cat <first>sat <second>on<third> the mat"
    tokens = tokenizer.encode(text)
    assert copied.encode(text) == tokens
    assert copied.get_vocab() == tokenizer.get_vocab()
    assert copied.decode(tokens, skip_special_tokens=True) == tokenizer.decode(tokens, skip_special_tokens=True)
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        assert copied.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
        copied.backend_tokenizer.enable_truncation(3)
        assert tokenizer.encode(text) == tokens


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_write_what_they_decode_to(kind: str) -> None:
    tokenizer: PreTrainedTokenizerBase = KINDS[kind]()
    known = structure_tokenizer(tokenizer)
    assert known.vocab_size == len(tokenizer)
    tokens: list[int] = tokenizer.encode(CORPUS[0], add_special_tokens=False)
    first = str(tokenizer.decode(tokens[:1]))
    for end in range(2, len(tokens) + 1):
        text = first + known.decode_bytes(tokens[1:end]).decode()
        assert text == str(tokenizer.decode(tokens[:end]))
    assert known.eos_tokens == [tokenizer.eos_token_id]
    texts = allowed_texts(known, "[a-z ]+")
    assert {text.decode().strip(" abcdefghijklmnopqrstuvwxyz") for text in texts} == {""}
    assert any(b"a" in text for text in texts)


def test_special_tokens_are_no_text() -> None:
    known = structure_tokenizer(AutoTokenizer.from_pretrained(Path("models/target")))
    assert all(not text.startswith(b"<|") for text in allowed_texts(known, "(.|\n)*"))


def test_the_end_tokens_of_the_model_count() -> None:
    tokenizer = AutoTokenizer.from_pretrained(Path("models/target"))
    assert structure_tokenizer(tokenizer, (0, 2, 4_000)).eos_tokens == [0, 2]
    assert structure_tokenizer(tokenizer, (4_000,)).eos_tokens == [2]


def test_without_an_end_token_there_is_no_structure() -> None:
    tokenizer = word_pieces()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="end token"):
        structure_tokenizer(tokenizer)


def test_a_decoder_that_looks_around_is_refused() -> None:
    class Shouting(ByT5Tokenizer):
        def decode(self, token_ids: Any, skip_special_tokens: bool = False, **kwargs: Any) -> str:
            text = str(super().decode(token_ids, skip_special_tokens=skip_special_tokens, **kwargs))
            return text.upper() if len(text) > 9 else text

    with pytest.raises(ConfigError, match="depends on those around it"):
        structure_tokenizer(Shouting())


def test_a_tokenizer_without_letters_is_refused() -> None:
    class Silent(ByT5Tokenizer):
        def encode(self, text: Any, *arguments: Any, **options: Any) -> list[int]:
            return []

    with pytest.raises(ConfigError, match="the letter a"):
        structure_tokenizer(Silent())


@pytest.fixture(scope="module")
def bundled() -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(TARGET)
    return tokenizer


def wrapped(tokenizer: Tokenizer, **names: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def other(bundled: PreTrainedTokenizerBase) -> DraftMapping:
    """Return the mapping for a drafter with SentencePiece's tokens."""
    return DraftMapping.build(speller_of(bundled, V), tokenizers.speller_of(sentencepiece_tokenizer()))


def test_the_bundled_tokenizer(bundled: PreTrainedTokenizerBase) -> None:
    vocabulary = vocabulary_of(bundled, V)
    assert (vocabulary.size, vocabulary.convention) == (V, "byte_level")
    ids = bundled.get_vocab()
    assert {token: vocabulary.meanings[ids[token]] for token in BUNDLED_ROLES} == BUNDLED_ROLES
    assert begins_texts(bundled)


def test_ids_beyond_the_model_are_left_out_and_missing_ones_stand_for_nothing(bundled: PreTrainedTokenizerBase) -> None:
    assert vocabulary_of(bundled, 300).size == 300
    assert vocabulary_of(bundled, V + 8).meanings[V:] == (None,) * 8


def test_names_of_control_tokens_are_text(bundled: PreTrainedTokenizerBase) -> None:
    speller = speller_of(bundled, V)
    text = "a <|end|> b"
    assert speller.vocabulary.decode_bytes(speller.encode(text)) == text.encode()
    assert bundled("<|end|>", add_special_tokens=False).input_ids == [bundled.eos_token_id]


def test_a_token_of_several_roles_has_the_first_and_added_text_is_as_it_is_written() -> None:
    base = Tokenizer.from_str(byte_level_tokenizer().to_str())
    base.add_special_tokens(["<|endoftext|>"])
    base.add_tokens([AddedToken("two words", normalized=False)])
    tokenizer = wrapped(base, bos_token="<|endoftext|>", eos_token="<|endoftext|>", unk_token="<|endoftext|>")
    vocabulary = vocabulary_of(tokenizer, len(tokenizer))
    assert vocabulary.meanings[tokenizer.get_vocab()["<|endoftext|>"]] == "eos"
    assert vocabulary.meanings[tokenizer.get_vocab()["two words"]] == b"two words"
    assert "bos" not in vocabulary.ids
    assert not begins_texts(tokenizer)


def test_tokens_of_the_same_string_draw_the_same_noise(bundled: PreTrainedTokenizerBase) -> None:
    order = permutation(V)
    own = speller_of(permuted_tokenizer(bundled, order), V)
    draft_mapping = DraftMapping.build(speller_of(bundled, V), own)
    keys = torch.tensor([noise_key(7, position) for position in range(3)], dtype=torch.int32)
    assert torch.equal(gumbel(keys, draft_mapping.noise_ids)[:, order], gumbel(keys, V))
    assert not draft_mapping.impossible.any()


def test_tokens_that_the_target_lacks_draw_noise_of_their_own(bundled: PreTrainedTokenizerBase) -> None:
    draft_mapping = other(bundled)
    theirs = draft_mapping.noise_ids[draft_mapping.noise_ids >= V]
    assert 0 < len(theirs) < len(draft_mapping.noise_ids)
    assert len(set(draft_mapping.noise_ids.tolist())) == len(draft_mapping.noise_ids)
    vocabulary = draft_mapping.drafter.vocabulary
    assert [vocabulary.meanings[token] for token in draft_mapping.impossible.nonzero().flatten()] == ["unk"]


def test_parameters_that_name_tokens_are_translated_or_left_out(bundled: PreTrainedTokenizerBase) -> None:
    draft_mapping = other(bundled)
    shared, lacking = (
        next(iter(draft_mapping.ids)),
        next(token for token in range(6, V) if token not in draft_mapping.ids),
    )
    here = draft_mapping.ids[shared]
    named = (shared, lacking)
    given = SamplingParams(
        max_tokens=5,
        logit_bias=((shared, 1.0), (lacking, 2.0)),
        bad_words_ids=((shared, shared), (shared, lacking)),
        allowed_token_ids=named,
        suppress_tokens=named,
        begin_suppress_tokens=named,
        stop_token_ids=named,
        eos_token_ids=(2,),
        forced_bos_token_id=lacking,
        forced_eos_token_id=2,
        min_tokens=3,
        temperature=0.7,
        top_k=20,
        structure=Structure(kind="regex", definition="a"),
    )
    eos = draft_mapping.drafter.vocabulary.ids["eos"]
    expected = SamplingParams(
        max_tokens=64,
        logit_bias=((here, 1.0),),
        bad_words_ids=((here, here),),
        allowed_token_ids=(here,),
        suppress_tokens=(here,),
        begin_suppress_tokens=(here,),
        stop_token_ids=(here,),
        eos_token_ids=(eos,),
        forced_eos_token_id=eos,
        min_tokens=3,
        temperature=0.7,
        top_k=20,
    )
    assert draft_mapping.params(given, 64) == expected
    assert draft_mapping.params(SamplingParams(max_tokens=5, verification="rejection"), 5).greedy


def test_a_text_that_the_target_begins_without_a_token_begins_with_the_drafters(
    bundled: PreTrainedTokenizerBase,
) -> None:
    target, drafter = speller_of(bundled, V), tokenizers.speller_of(sentencepiece_tokenizer())
    bos = drafter.vocabulary.ids["bos"]
    draft_mapping = DraftMapping.build(target, drafter, begins_texts=True)
    for tokens in ([1, *target.encode("a b")], target.encode("a b")):
        aligner = draft_mapping.aligner(tokens)
        aligner.commit(tokens)
        assert aligner.tokens == [bos, *drafter.encode("a b")]


def test_translators_are_made_for_other_tokenizers_alone(tmp_path: Path, bundled: PreTrainedTokenizerBase) -> None:
    own = ModelSpec(name="drafter", path=str(DRAFTER))
    same = ModelSpec(name="same", path=str(TARGET))
    permuted_tokenizer(bundled, permutation(V)).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((TARGET / "config.json").read_text())
    draft_mappings = load_draft_mappings(own, [same, ModelSpec(name="permuted", path=str(tmp_path))])
    assert list(draft_mappings) == ["permuted"]
    assert draft_mappings["permuted"].begins_texts


def test_a_drafter_that_the_target_cannot_follow_is_refused(tmp_path: Path) -> None:
    digits = Tokenizer(models.WordLevel({"<unk>": 0} | {str(i): 1 + i for i in range(10)}, unk_token="<unk>"))
    wrapped(digits, unk_token="<unk>").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((TARGET / "config.json").read_text())
    with pytest.raises(
        ConfigError, match=r"models\.drafter can't draft for 'target': the target's tokenizer can write"
    ):
        load_draft_mappings(
            ModelSpec(name="drafter", path=str(DRAFTER)), [ModelSpec(name="target", path=str(tmp_path))]
        )


def test_spellers_have_tokenizers_of_their_own(bundled: PreTrainedTokenizerBase) -> None:
    speller: Speller = speller_of(bundled, V)
    before = speller.encode("the file")
    bundled("x" * 50, truncation=True, max_length=1)
    assert speller.encode("the file") == before
