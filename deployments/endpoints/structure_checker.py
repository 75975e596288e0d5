"""Compiles the structures of requests, so that impossible ones are refused before they reach a model."""

import asyncio
from collections.abc import Callable
from functools import cache

from transformers import PreTrainedTokenizerBase

from decoding.errors import ConfigError, InvalidRequestError
from decoding.grammars.grammar import GrammarCompiler
from decoding.sampling.params import Structure
from engine.loading.grammar_tokenizer import structure_tokenizer


class StructureChecker:
    """Checker of one endpoint. Its compiler takes up to a second to build, so it is built on first use."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: tuple[int, ...]) -> None:
        def compiler() -> GrammarCompiler:
            return GrammarCompiler(structure_tokenizer(tokenizer, eos_token_ids))

        self._compiler: Callable[[], GrammarCompiler] = cache(compiler)

    async def check(self, structure: Structure, *, field: str) -> None:
        """Raise InvalidRequestError, naming the field, if the structure is invalid or the model can't follow it."""
        try:
            compiler = await asyncio.to_thread(self._compiler)
            await asyncio.shield(asyncio.wrap_future(compiler.start(structure)))  # requests share it
        except InvalidRequestError as error:
            inner = error.field or ""
            outer = inner if inner.startswith(field) else field
            raise InvalidRequestError(f"{outer}{str(error).removeprefix(inner)}", field=outer) from error
        except ConfigError as error:
            raise InvalidRequestError(f"{field}: {error}", field=field) from error
