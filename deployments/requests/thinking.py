"""Switches of models that can reason before they answer, as variables of their chat templates. Knows no templates."""

from collections.abc import Mapping
from typing import Any


def thinking_variables(effort: str | None, enabled: bool | None) -> Mapping[str, Any]:
    """Variables for the chat template, under the names that templates have.

    Args:
        effort: how much to think; `none`: not at all; None: not said.
        enabled: whether to think; None: as the effort says.
    """
    thinks = enabled if enabled is not None or effort is None else effort != "none"
    # Qwen 3 and GLM, DeepSeek and Granite, GPT-OSS.
    variables = {
        "enable_thinking": thinks,
        "thinking": thinks,
        "reasoning_effort": None if effort == "none" else effort,
    }
    return {name: value for name, value in variables.items() if value is not None}
