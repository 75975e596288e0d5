"""Keys that were renamed: their old names are accepted for one version. Knows nothing of particular keys."""

import logging
from collections.abc import Mapping

from deployments.validation.strict import wrong_field

_logger = logging.getLogger(__name__)


def rename_keys(data: object, new_names: Mapping[str, str]) -> object:
    """Return the data with old keys renamed, and log a warning for each. new_names: by old name.

    Raises:
        PydanticCustomError: a key is given under both names.
    """
    if not isinstance(data, dict):
        return data
    renamed = dict(data)
    for old, new in new_names.items():
        if old in renamed:
            if new in renamed:
                raise wrong_field(old, f"is the old name of {new}, which is also given; remove {old}")
            _logger.warning("the key %s is now called %s; the next version will refuse the old name", old, new)
            renamed[new] = renamed.pop(old)
    return renamed
