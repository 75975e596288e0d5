"""Compiles what answers are asked to match, so that what can't be is refused before it reaches a model."""

import asyncio
from collections.abc import Callable
from functools import cache

from transformers import PreTrainedTokenizerBase

from actors.loading.grammar_tokenizer import structure_tokenizer
from decoding.errors import ConfigError, InvalidRequestError
from decoding.grammars.grammar import GrammarCompiler
from decoding.sampling.params import Structure


class StructureChecker:
    """Of an endpoint. Its compiler is made when it is first needed, which takes up to a second."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: tuple[int, ...]) -> None:
        def compiler() -> GrammarCompiler:
            return GrammarCompiler(structure_tokenizer(tokenizer, eos_token_ids))

        self._compiler: Callable[[], GrammarCompiler] = cache(compiler)

    async def check(self, structure: Structure, *, field: str) -> None:
        """Raises InvalidRequestError, naming the field, if no answer could match or the model can't be held to it."""
        try:
            compiler = await asyncio.to_thread(self._compiler)
            await asyncio.shield(asyncio.wrap_future(compiler.start(structure)))  # the compilation is shared
        except InvalidRequestError as error:
            wrong = error.field or ""
            shown = wrong if wrong.startswith(field) else field
            raise InvalidRequestError(f"{shown}{str(error).removeprefix(wrong)}", field=shown) from error
        except ConfigError as error:
            raise InvalidRequestError(f"{field}: {error}", field=field) from error
