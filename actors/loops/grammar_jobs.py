"""Compiles the grammars of structured answers in a thread beside a replica's loop."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

from llguidance import LLTokenizer

from actors.loops.row import Row
from decoding.errors import ConfigError
from decoding.grammars.grammar import GrammarCompiler
from decoding.grammars.structure import StructureState

LoadTokenizer = Callable[[], LLTokenizer]


class GrammarJobs:
    """Grammar compilation for one model. The tokenizer is loaded when the first request needs it."""

    def __init__(self, load_tokenizer: LoadTokenizer | None, vocab_size: int) -> None:
        """load_tokenizer: None refuses structured answers. vocab_size: of the model's logits."""
        self._load_tokenizer, self._vocab_size = load_tokenizer, vocab_size
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="structures")

    def begin(self, row: Row) -> None:
        """Start to compile the row's grammar, if it has one. The row is not ready until that is done."""
        if row.params.structure is not None:
            row.preparing = self._pool.submit(self._prepare, row)

    def close(self) -> None:
        """Stop the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, row: Row) -> StructureState:
        assert row.params.structure is not None
        return StructureState(
            self._compiler.compile(row.params.structure),
            row.tokens,
            row.prompt_length,
            end_token_ids=row.params.eos_token_ids,
            vocab_size=self._vocab_size,
        )

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        if self._load_tokenizer is None:
            raise ConfigError("structured answers need the model's tokenizer, which is not here")
        return GrammarCompiler(self._load_tokenizer())
