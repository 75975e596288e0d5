"""Checks that the tokenizers of an endpoint's drafter and members fit the target's. Loads no tokenizers."""

import logging
from collections.abc import Mapping

from transformers import PreTrainedTokenizerBase

from decoding.errors import ConfigError
from decoding.tokenizers.alignment import Compatibility, compare_vocabularies
from decoding.tokenizers.vocabulary import Vocabulary
from deployments.configuration.endpoint import EndpointConfig
from engine.loading.tokenizer_pairs import vocabulary_of

_logger = logging.getLogger(__name__)


def check_drafter(
    name: str,
    endpoint: EndpointConfig,
    target: tuple[PreTrainedTokenizerBase, int],
    drafter: tuple[PreTrainedTokenizerBase, int],
) -> Compatibility | None:
    """How a drafter's tokens fit the target's, also logged; None: both have the same tokens.

    Args:
        name: the endpoint's.
        target: tokenizer and V.
        drafter: tokenizer and V.

    Raises:
        ConfigError: the drafter's tokens can't be translated.
    """
    if target[0].get_vocab() == drafter[0].get_vocab():
        return None
    compatibility = compare_vocabularies(vocabulary_of(*target), vocabulary_of(*drafter))
    obstacle = compatibility.drafting_obstacle
    if obstacle:
        raise ConfigError(
            f"endpoints.{name}.drafter: {endpoint.drafter!r} can't draft for {endpoint.target!r}: {obstacle}"
        )
    _logger.warning(
        "endpoints.%s: %s drafts for %s through text: %s", name, endpoint.drafter, endpoint.target, compatibility
    )
    return compatibility


def check_members(
    name: str, endpoint: EndpointConfig, leader: Vocabulary, others: Mapping[str, Vocabulary]
) -> dict[str, Compatibility]:
    """How members' tokens fit the leader's, also logged. Members with the leader's tokens are left out.

    Args:
        name: the endpoint's.
        others: vocabularies of the other members, by model.

    Raises:
        ConfigError: a member can't be blended with the leader.
    """
    compared = {model: compare_vocabularies(leader, vocabulary) for model, vocabulary in others.items()}
    different = {model: compatibility for model, compatibility in compared.items() if not compatibility.identical}
    for model, compatibility in different.items():
        obstacle = compatibility.blending_obstacle
        if obstacle is None and endpoint.vocabulary == "shared":
            obstacle = f"its tokens are others: {compatibility}; set vocabulary to union or topk_union"
        if obstacle is not None:
            key = "amateur" if endpoint.kind == "contrastive" else "members"
            raise ConfigError(f"endpoints.{name}.{key}: {model!r} can't join {endpoint.target!r}: {obstacle}")
        _logger.warning("endpoints.%s: %s joins %s through text: %s", name, model, endpoint.target, compatibility)
    return different
