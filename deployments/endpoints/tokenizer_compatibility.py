"""Whether an endpoint's members can be blended with the one that leads: how their vocabularies fit together."""

import logging
from collections.abc import Mapping

from decoding.errors import ConfigError
from decoding.tokenizers.alignment import Compatibility, compare_vocabularies
from decoding.tokenizers.vocabulary import Vocabulary
from deployments.configuration.endpoint import EndpointConfig

_logger = logging.getLogger(__name__)


def check_members(
    name: str, endpoint: EndpointConfig, leader: Vocabulary, others: Mapping[str, Vocabulary]
) -> dict[str, Compatibility]:
    """How those members' tokens fit whose tokens are not the leader's; the log says it, too.

    Args:
        name: of the endpoint.
        others: of the other members, by name.

    Raises:
        ConfigError: one of them can't join.
    """
    found = {model: compare_vocabularies(leader, vocabulary) for model, vocabulary in others.items()}
    found = {model: one for model, one in found.items() if not one.identical}
    for model, one in found.items():
        obstacle = one.blending_obstacle
        if obstacle is None and endpoint.vocabulary == "shared":
            obstacle = f"its tokens are others: {one}; set vocabulary to union or topk_union"
        if obstacle is not None:
            key = "amateur" if endpoint.kind == "contrastive" else "members"
            raise ConfigError(f"endpoints.{name}.{key}: {model!r} can't join {endpoint.target!r}: {obstacle}")
        _logger.warning("endpoints.%s: %s joins %s through text: %s", name, model, endpoint.target, one)
    return found
