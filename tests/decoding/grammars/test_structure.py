"""Masks along draft trees against fresh matchers, and answers against independent validators."""

import json
import re

import jsonschema  # type: ignore[import-untyped]
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from decoding.drafts.draft import Draft
from decoding.errors import InvalidRequestError
from decoding.grammars.grammar import Grammar, GrammarCompiler
from decoding.grammars.structure import MaskThread, StructureState
from decoding.sampling.params import Structure
from tests.support.properties import repeatable
from tests.support.schemas import SchemaGenerator
from tests.support.structures import (
    END,
    NO_DRAFT,
    VOCAB_SIZE,
    Drafts,
    Writer,
    allowed,
    compiled,
    follow,
    tokenizer,
)

RECORD = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name"],
        "additionalProperties": False,
    }
)
GRAMMARS = [
    compiled("json", RECORD),
    compiled("regex", "[a-z]{1,8}( [a-z]{1,8}){0,3}\\."),
    compiled("regex", "(ab|a)*"),
    compiled("choice", '["yes", "no", "yes and no"]'),
    compiled("grammar", 'start: sum\nsum: NUMBER | sum ("+" | "-") NUMBER | "(" sum ")"\nNUMBER: /[0-9]{1,3}/'),
]


def tokens_of(text: str) -> list[int]:
    return tokenizer().tokenize_str(text)


def text_of(tokens: list[int]) -> str:
    assert tokens[-1] == END
    return tokenizer().decode_bytes(tokens[:-1]).decode()


def expected(grammar: Grammar, path: list[int]) -> set[int] | None:
    """Return the tokens that a fresh matcher allows after a path, with the end token; None if it does not match."""
    matcher: LLMatcher = grammar.matcher()
    if matcher.try_consume_tokens(path) < len(path):
        return None
    ends = {END} if matcher.is_accepting() else set()
    return ends if matcher.is_stopped() else allowed(torch.tensor(list(matcher.compute_bitmask())).byte()) | ends


def draw_text(data: st.DataObject, grammar: Grammar, limit: int) -> list[int]:
    """Draw a text that matches so far, without an end token."""
    tokens: list[int] = []
    for _ in range(data.draw(st.integers(0, limit))):
        fitting = sorted((expected(grammar, tokens) or set()) - {END})
        if not fitting:
            break
        tokens.append(fitting[data.draw(st.integers(0, len(fitting) - 1))])
    return tokens


def draw_tree(data: st.DataObject, grammar: Grammar, text: list[int]) -> tuple[Draft, list[list[int]]]:
    """Draw a draft of mostly matching tokens, some of them end tokens, and the path to each."""
    draft = Draft([], [])
    paths: list[list[int]] = []
    for _ in range(data.draw(st.integers(0, 10))):
        parent = data.draw(st.integers(-1, len(draft.tokens) - 1))
        above = paths[parent] if parent >= 0 else []
        fitting = sorted(expected(grammar, [*text, *above]) or set())
        token = data.draw(st.integers(2, VOCAB_SIZE - 1))
        if fitting and data.draw(st.integers(0, 3)) > 0:
            token = fitting[token % len(fitting)]
        draft.tokens.append(token)
        draft.parents.append(parent)
        paths.append([*above, token])
    return draft, paths


@repeatable
@given(st.data())
def test_masks_along_a_tree_are_those_of_fresh_matchers(data: st.DataObject) -> None:
    grammar = data.draw(st.sampled_from(GRAMMARS))
    text: list[int] = []
    state = follow(grammar, text)
    for token in draw_text(data, grammar, 12):  # the state catches up with several tokens at once, or one by one
        text.append(token)
        if data.draw(st.booleans()):
            assert allowed(state.masks(NO_DRAFT)[0]) == expected(grammar, text)
    draft, paths = draw_tree(data, grammar, text)
    masks = state.masks(draft)
    assert masks.shape == (len(paths) + 1, VOCAB_SIZE // 32)
    assert masks.dtype == torch.int32
    fits = []
    for path, mask in zip([[], *paths], masks, strict=True):
        fresh = None if END in path else expected(grammar, [*text, *path])
        assert allowed(mask) == (fresh or {END})
        above = None if END in path[:-1] else expected(grammar, [*text, *path[:-1]])
        fits.append(not path or (above is not None and path[-1] in above))
    kept = [index for index, fit in enumerate(fits[1:]) if fit]
    pruned = state.prune(draft)
    assert pruned.tokens == [draft.tokens[index] for index in kept]
    assert [kept[parent] if parent >= 0 else -1 for parent in pruned.parents] == [draft.parents[p] for p in kept]
    assert torch.equal(state.masks(pruned), masks[[0, *(index + 1 for index in kept)]])
    wanted = data.draw(st.lists(st.integers(0, len(paths)), max_size=4))
    assert torch.equal(state.masks_after([[[], *paths][row] for row in wanted]), masks[wanted])


@pytest.mark.parametrize("vocab_size", [2100, 2048, 2040, 1000, 32])
def test_the_vocabulary_of_the_logits_may_differ(vocab_size: int) -> None:
    grammar = compiled("regex", ".{0,9}")
    whole = allowed(follow(grammar, []).masks(NO_DRAFT)[0])
    mask = follow(grammar, [], vocab_size=vocab_size).masks(NO_DRAFT)
    assert mask.shape == (1, -(-vocab_size // 32))
    assert allowed(mask[0]) == {token for token in whole if token < vocab_size}


def test_other_end_tokens_than_the_tokenizers() -> None:
    grammar = compiled("regex", "a?")
    tokens: list[int] = []
    state = StructureState(grammar, tokens, 0, end_token_ids=(0, 2090), vocab_size=2100)
    letter = tokens_of("a")[0]
    assert allowed(state.masks(NO_DRAFT)[0]) == {letter, 0, 2090}
    tokens.append(letter)
    assert allowed(state.masks(NO_DRAFT)[0]) == {0, 2090}
    assert state.prune(Draft([0, 2, 2090, 0], [-1, -1, -1, 0])).tokens == [0, 2090]


def test_an_end_token_is_needed() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StructureState(GRAMMARS[0], [], 0, end_token_ids=(), vocab_size=VOCAB_SIZE)
    assert caught.value.field == "ignore_eos"


def test_the_prompt_is_not_part_of_the_answer() -> None:
    prompt = tokens_of("Say yes or no: ")
    text = [*prompt]
    state = StructureState(
        compiled("choice", '["yes", "no"]'), text, len(prompt), end_token_ids=(END,), vocab_size=2048
    )
    for more in (tokens_of("y"), tokens_of("es")):
        assert not state.complete
        text += more
    assert state.complete
    text.append(END)
    assert state.complete
    assert allowed(state.masks(NO_DRAFT)[0]) == {END}


def test_a_text_that_leaves_the_grammar_is_an_error() -> None:
    text = tokens_of("maybe")
    state = follow(compiled("choice", '["yes", "no"]'), text)
    draft = Draft(tokens_of("yes"), list(range(-1, len(tokens_of("yes")) - 1)))
    assert state.prune(draft).tokens == []
    assert all(allowed(mask) == {END} for mask in state.masks(draft))
    assert "the answer left it" in str(state.error_after(-1))


@pytest.mark.parametrize("begins_with", ["masks", "prune", "follow"])
def test_a_fault_of_the_engine_is_an_error_of_this_text_alone(begins_with: str) -> None:
    class Broken:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("the engine is out of order")

    grammar = compiled("choice", '["yes", "no"]')
    state, other = follow(grammar, []), follow(grammar, [])
    state._matcher = Broken()  # type: ignore[assignment]
    draft = Draft(tokens_of("yes"), list(range(-1, len(tokens_of("yes")) - 1)))
    if begins_with == "prune":
        assert state.prune(draft).tokens == []
    elif begins_with == "follow":
        _, errors = state.follow([[], draft.tokens])
        assert all("out of order" in str(error) for error in errors)
    for _ in range(2):
        assert [allowed(mask) for mask in state.masks(draft)] == [{END}] * (len(draft.tokens) + 1)
    error = state.error_after(-1)
    assert error is not None
    assert "structured_outputs.choice: it can't be followed" in str(error)
    assert other.prune(draft).tokens == draft.tokens


def test_tokens_that_the_tokenizer_does_not_have() -> None:
    """Models have more logits than their tokenizers tokens, and drafts may contain such ids."""
    text: list[int] = []
    state = follow(compiled("regex", "[a-z]{9}"), text, vocab_size=2100)
    letter = tokens_of("a")[0]
    for _ in range(20):
        draft = Draft([2048, letter, 2099, letter, -1], [-1, -1, 1, 0, 1])
        assert state.prune(draft).tokens == [letter]
        assert [allowed(mask) == {END} for mask in state.masks(draft)] == [False, True, False, True, True, True]
        assert all(state.error_after(index) is None for index in range(-1, 5))
    text += [letter, 2050]
    assert allowed(state.masks(NO_DRAFT)[0]) == {END}
    assert "2050" in str(state.error_after(-1))


def test_a_dead_end_is_an_error_where_it_is_and_nowhere_else() -> None:
    """Nothing can follow `a`, which the matcher detects there. Answers that begin with `d` continue."""
    grammar = compiled("grammar", 'start: "a" NOTHING | "d" "e"\nNOTHING: /[^\\s\\S]/')
    a, d, e = (tokens_of(letter)[0] for letter in "ade")
    for tokens in ([a, d], [d, a]):  # the matcher is at `d` before it fails, or after
        state = follow(grammar, [])
        masks = state.masks(Draft([*tokens, 5], [-1, -1, 0]))
        assert allowed(masks[0]) >= {a, d}
        assert allowed(masks[1 + tokens.index(d)]) == {e}
        assert state.error_after(-1) is state.error_after(tokens.index(d)) is None
        error = state.error_after(tokens.index(a))
        assert error is not None
        assert "no token leads on" in str(error)
        assert error.field == "structured_outputs.grammar"
        assert torch.equal(state.masks(NO_DRAFT), masks[:1])
        assert state.error_after(tokens.index(a)) is None


def test_a_request_that_exceeds_the_limits_does_not_disturb_others() -> None:
    """Matchers of one grammar share a lexer. If one exhausts it, it stops for all."""
    compiler = GrammarCompiler(tokenizer())
    grammar = compiler.compile(Structure(kind="regex", definition="(foo|bar|[a-z]{3,900}){5000}"))
    texts: list[list[int]] = [[], tokens_of("foob")]
    greedy, other = (follow(grammar, text) for text in texts)
    other.masks(NO_DRAFT)
    writer = Writer(0, greedy=False)
    while greedy.error_after(-1) is None:
        texts[0].append(writer.choose(len(texts[0]), greedy.masks(NO_DRAFT)[0]))
        assert len(texts[0]) < 200
    assert grammar.matcher().try_consume_tokens(tokens_of("foo")) == 0
    fresh = follow(Grammar(grammar.structure, tokenizer()), texts[1])
    for _ in range(5):
        mask = other.masks(NO_DRAFT)[0]
        assert other.error_after(-1) is None
        assert torch.equal(mask, fresh.masks(NO_DRAFT)[0])
        texts[1].append(writer.choose(len(texts[1]), mask))
    assert compiler.compile(grammar.structure).matcher().try_consume_tokens(tokens_of("foo")) == len(tokens_of("foo"))
    compiler.close()


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("count", [150, pytest.param(500, marks=pytest.mark.slow)])
def test_answers_of_random_schemas_validate(count: int, greedy: bool) -> None:
    check = jsonschema.Draft202012Validator
    for seed in range(count):
        schema = SchemaGenerator(seed).schema()
        grammar = Grammar(Structure(kind="json", definition=json.dumps(schema)), tokenizer())
        answer = Writer(seed, greedy=greedy).write(grammar)
        check(schema, format_checker=check.FORMAT_CHECKER).validate(json.loads(text_of(answer)))
        if seed % 10 == 0:
            assert Writer(seed, greedy=greedy).write_with(grammar, Drafts(answer, seed)) == answer


REGEXES = [
    "[A-Z]{2}-[0-9]{4}",
    "(red|green|blue)(, (red|green|blue)){0,3}",
    "-?(0|[1-9][0-9]{0,3})(\\.[0-9]{1,2})?",
    "a/b\\\\c\"d'[\\]\\[]{1,3}",
    "[α-ω]{1,5}|日本?",
    "(?i)yes|no",
    "x*?y{0,5}",
]


@pytest.mark.parametrize("pattern", REGEXES)
def test_answers_match_a_regular_expression(pattern: str) -> None:
    for seed in range(10):
        answer = Writer(seed, greedy=seed % 2 == 0).write(grammar := compiled("regex", pattern))
        assert re.fullmatch(pattern, text_of(answer))
        assert Writer(seed, greedy=seed % 2 == 0).write_with(grammar, Drafts(answer, seed)) == answer


@repeatable
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), min_size=1, max_size=6), st.data())
def test_answers_are_one_of_the_choices(texts: list[str], data: st.DataObject) -> None:
    grammar = Grammar(Structure(kind="choice", definition=json.dumps(texts)), tokenizer())
    assert text_of(Writer(data.draw(st.integers(0, 99)), greedy=False).write(grammar)) in texts


@pytest.mark.parametrize("notation", ["lark", "gbnf"])
def test_answers_match_a_grammar(notation: str) -> None:
    """Python evaluates every text of a grammar of sums."""
    definition = {
        "lark": 'start: term | start ("+" | "*") term\nterm: NUMBER | "(" start ")"\nNUMBER: /[1-9][0-9]{0,2}/',
        "gbnf": 'root ::= term | root ("+" | "*") term\nterm ::= number | "(" root ")"\nnumber ::= [1-9] [0-9]?',
    }[notation]
    for seed in range(10):
        writer = Writer(seed, greedy=False)
        answer = writer.write(grammar := compiled("grammar", definition), limit=150)
        if answer[-1] == END:
            assert isinstance(eval(text_of(answer)), int)
        assert writer.write_with(grammar, Drafts(answer, seed), limit=150)[:150] == answer


def test_each_row_gets_its_own_masks() -> None:
    word = compiled("regex", "[a-z ]{3,40}")
    grammars = [word, compiled("json", "{}"), word, compiled("grammar", 'start: ("a" | "b" "c")*')]
    thread = MaskThread()
    try:
        for seed in range(20):
            answers = [Writer(seed, greedy=False).write(grammar, limit=6)[:-1] for grammar in grammars]
            drafts = [Drafts(answer, seed).draft(2) for answer in answers]
            states, others = (
                [follow(grammar, answer[:2]) for grammar, answer in zip(grammars, answers, strict=True)]
                for _ in range(2)
            )
            masks = thread.start([None, *states, None], [NO_DRAFT, *drafts, NO_DRAFT])()
            assert masks[0] is masks[-1] is None
            for mask, other, draft in zip(masks[1:-1], others, drafts, strict=True):
                assert mask is not None
                assert torch.equal(mask, other.masks(draft))
    finally:
        thread.close()


def test_a_step_without_structures_starts_nothing() -> None:
    thread = MaskThread()
    thread.close()
    assert thread.start([None, None], [Draft([1], [-1]), NO_DRAFT])() == [None, None]


def test_masks_are_as_wide_as_the_logits() -> None:
    thread = MaskThread()
    try:
        (mask,) = thread.start([follow(compiled("json", "{}"), [])], [NO_DRAFT])()
        assert mask is not None
        assert mask.shape == (1, VOCAB_SIZE // 32)
    finally:
        thread.close()
