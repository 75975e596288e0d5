"""Whether an endpoint's drafter can draft for its target: how their vocabularies fit together, in one line."""

import logging

from transformers import PreTrainedTokenizerBase

from actors.loading.tokenizer_pairs import vocabulary_of
from decoding.errors import ConfigError
from decoding.tokenizers.alignment import Compatibility, compare_vocabularies
from deployments.configuration.endpoint import EndpointConfig

_logger = logging.getLogger(__name__)


def check_drafter(
    name: str,
    endpoint: EndpointConfig,
    target: tuple[PreTrainedTokenizerBase, int],
    drafter: tuple[PreTrainedTokenizerBase, int],
) -> Compatibility | None:
    """How the drafter's tokens fit the target's if they are others; the log says it, too. None: they are the same.

    Args:
        name: of the endpoint.
        target: its tokenizer, and V.
        drafter: likewise.

    Raises:
        ConfigError: no drafts can come through text.
    """
    if target[0].get_vocab() == drafter[0].get_vocab():
        return None
    found = compare_vocabularies(vocabulary_of(*target), vocabulary_of(*drafter))
    obstacle = found.drafting_obstacle
    if obstacle:
        raise ConfigError(
            f"endpoints.{name}.drafter: {endpoint.drafter!r} can't draft for {endpoint.target!r}: {obstacle}"
        )
    _logger.warning("endpoints.%s: %s drafts for %s through text: %s", name, endpoint.drafter, endpoint.target, found)
    return found
