"""Compiled grammars, which the answers of structured requests must match.

The engine is llguidance (Earley parser over derivative-based lexers, https://github.com/guidance-ai/llguidance).
"""

import ctypes
import json
import re
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock, Thread, stack_size
from typing import TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.gbnf_to_lark import is_lark_syntax

from decoding.errors import InvalidRequestError
from decoding.grammars.json_schema import strict
from decoding.sampling.params import Structure, StructureKind

# Maximum characters. Time and memory of a regular expression, also within a grammar, grow with its length squared.
MAX_DEFINITION: dict[StructureKind, int] = {"json": 65_536, "choice": 65_536, "grammar": 16_384, "regex": 8_192}
NO_TOKEN = "no token leads on to a match"
_TOO_DEEP = "it is nested too deeply"
# A lexer state takes 1 to 2 KiB. Time per step stays at llguidance's own limit, about 20 ms.
_LIMITS = LLParserLimits(max_lexer_states=50_000, max_grammar_size=250_000, verbose_errors=False)
# Compiling recurses along chains of rules. 8 MiB are too few for the longest that a definition can hold.
_STACK_BYTES = 64 * 2**20
_LEAST_BYTES = 2**18  # of a compiled grammar
_PAGE_BYTES = resource.getpagesize()
_stack_size = Lock()  # the stack size is a setting of the process

# Of GBNF, llama.cpp's notation.
_ITEM = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\])*") | (?P<characters>\[(?:\\.|[^\]\\])*\]) | (?P<comment>\#[^\n]*) | (?P<any>\.)""",
    re.VERBOSE | re.DOTALL,
)
_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ANY = "[\\x00-\U0010ffff]"  # a line's end, too

T = TypeVar("T")


class Grammar:
    """A structure compiled for one tokenizer. Any number of matchers can use it at once; they share its lexer."""

    def __init__(self, structure: Structure, tokenizer: LLTokenizer) -> None:
        """Compile. Takes 1 ms for a usual JSON schema, up to 1 s at the size limit; other threads run meanwhile.

        Raises InvalidRequestError if the definition is wrong, too large, uses an unsupported feature, or matches
        nothing.
        """
        self.structure = structure
        self.tokenizer = tokenizer
        self.must_recompile = False  # set once a matcher failed, perhaps in the lexer that all matchers share
        self.held_bytes = _LEAST_BYTES + len(structure.definition)  # grows with the lexer; an estimate
        notation = _notation(structure)
        try:
            self._matcher = _on_deep_stack(lambda: self._compiled(notation))
        except Exception as error:
            raise structure_error(structure, f"it can't be compiled: {error!r}") from error
        if self._matcher.is_error():
            raise self.error(self._matcher)

    def _compiled(self, notation: str) -> LLMatcher:
        with self.count_memory():
            matcher = LLMatcher(self.tokenizer, notation, log_level=0, limits=_LIMITS)
            if not matcher.is_error():
                matcher.compute_bitmask()  # slow the first time
        return matcher

    def matcher(self) -> LLMatcher:
        """Return a matcher at the start of an answer, for one thread at a time."""
        return self._matcher.deep_copy()

    @contextmanager
    def count_memory(self) -> Iterator[None]:
        """Add the memory that this thread takes from the system meanwhile; llguidance does not tell what it holds.

        Counts some 100 kB twice whenever the cache drops another, so one that sees hundreds go is compiled anew.
        """
        before = _page_faults()
        try:
            yield
        finally:
            self.held_bytes += (_page_faults() - before) * _PAGE_BYTES

    def error(self, matcher: LLMatcher) -> InvalidRequestError:
        """Return the error of a matcher that failed."""
        reason = matcher.get_error().removesuffix("<non-verbose/>").strip()
        if reason == "NoExtensionBias":
            reason = NO_TOKEN
        elif "recursion limit" in reason:
            reason = _TOO_DEEP
        elif any(word in reason for word in ("limit", "too big", "too large", "too many")):
            reason = f"too complex ({reason})"
        return structure_error(self.structure, reason)


class GrammarCompiler:
    """Compiles structures for one tokenizer in a background thread, with an LRU cache."""

    def __init__(self, tokenizer: LLTokenizer, *, capacity_bytes: int = 64 * 2**20) -> None:
        """capacity_bytes: of cached grammars. Most hold well below 1 MB; lexers of the worst grow to 100 MB."""
        self._tokenizer = tokenizer
        self._capacity_bytes = capacity_bytes
        self._grammars: dict[Structure, Future[Grammar]] = {}  # least recently used first
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    def start(self, structure: Structure) -> Future[Grammar]:
        """Compile unless cached. The future raises what `Grammar` does. It is shared, so never cancel it."""
        with self._lock:
            future = self._grammars.pop(structure, None)
            if future is None or not _is_usable(future):
                future = self._pool.submit(Grammar, structure, self._tokenizer)
            self._grammars[structure] = future
            self._drop_least_used()
        return future

    def _drop_least_used(self) -> None:
        """Keep those used last, as many as there is room for. Rows keep what they use until they end."""
        held_bytes, kept = 0, len(self._grammars)
        for structure in reversed([*self._grammars]):
            size = _held_bytes(self._grammars[structure])
            if held_bytes + size > self._capacity_bytes:
                del self._grammars[structure]
            else:
                held_bytes += size
        if len(self._grammars) < kept:
            self._pool.submit(_return_memory)  # else what grows into it would not be counted

    def compile(self, structure: Structure) -> Grammar:
        """Compile unless cached, and wait. Raises what `Grammar` does."""
        return self.start(structure).result()

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(cancel_futures=True)


def _is_usable(future: Future[Grammar]) -> bool:
    """Whether a grammar is being compiled, or was compiled and still works."""
    return not future.done() or (future.exception() is None and not future.result().must_recompile)


def _held_bytes(future: Future[Grammar]) -> int:
    return future.result().held_bytes if future.done() and future.exception() is None else _LEAST_BYTES


def _page_faults() -> int:
    """Return how often this thread touched memory that the system had to bring."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def _return_memory() -> None:
    """Give free memory back to the system, where the C library is glibc."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _notation(structure: Structure) -> str:
    definition = structure.definition
    limit = MAX_DEFINITION[structure.kind]
    if len(definition) > limit:
        raise structure_error(structure, f"{len(definition)} characters are more than the {limit} allowed")
    try:
        match structure.kind:
            case "json":
                return _json_notation(structure)
            case "regex":
                return LLMatcher.grammar_from_regex(definition)
            case "choice":
                return _choice_notation(structure)
            case "grammar":
                is_lark = is_lark_syntax(definition)
                return grammar_from("grammar", definition if is_lark else _ITEM.sub(_plain_item, definition))
    except RecursionError as error:
        raise structure_error(structure, _TOO_DEEP) from error
    except (ValueError, ArithmeticError) as error:  # JSON and Unicode errors are ValueErrors
        if isinstance(error, InvalidRequestError):
            raise
        raise structure_error(structure, str(error)) from error


def _json_notation(structure: Structure) -> str:
    schema = json.loads(structure.definition)
    if not isinstance(schema, dict):
        raise structure_error(structure, f"a schema is an object, not {structure.definition[:40]!r}")
    return LLMatcher.grammar_from_json_schema(json.dumps(strict(schema)))


def _choice_notation(structure: Structure) -> str:
    texts = json.loads(structure.definition)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise structure_error(structure, f"expected a list of at least one text, not {structure.definition[:40]!r}")
    # As one terminal: the parser follows at most 2,000 alternatives of a rule.
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in texts)


def _on_deep_stack(work: Callable[[], T]) -> T:
    """Run in a thread with a large stack, and wait."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        except BaseException as error:  # such as a panic of the engine
            future.set_exception(RuntimeError(repr(error)))

    thread = Thread(target=run, name="grammar")
    with _stack_size:
        usual = stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            stack_size(usual)
    return future.result()


def structure_error(structure: Structure, reason: str) -> InvalidRequestError:
    """Return the error for a structure that can't be served."""
    field = f"structured_outputs.{structure.kind}"
    return InvalidRequestError(f"{field}: {' '.join(reason.split())}", field=field)


def _plain_item(item: re.Match[str]) -> str:
    """Return an item in llama.cpp's notation with characters instead of their numbers, as llguidance reads it.

    Raises ValueError if there is no character of a number.
    """
    text = item[0]
    match item.lastgroup:
        case "text":
            return _CODE.sub(lambda code: _plain(code, brackets="[]"), text)
        case "characters":
            # Doubled, they are operators in the expressions that the converter makes.
            return _CODE.sub(lambda code: _plain(code, brackets=""), text).replace("&", r"\x26").replace("~", r"\x7e")
        case "any":
            return _ANY
    return text


def _plain(code: re.Match[str], brackets: str) -> str:
    """Return a character for its escape; those of ASCII may have a meaning of their own, and stay escaped."""
    if code[4] is not None:
        return code[4] if code[4] in brackets else code[0]
    number = int(code[1] or code[2] or code[3], 16)
    return f"\\x{number:02x}" if number < 0x80 else chr(number)
