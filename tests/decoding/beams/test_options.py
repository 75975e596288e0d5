"""Options of beam searches whose scores would not be numbers are refused."""

import math

import pytest

from decoding.beams.options import BeamOptions
from decoding.errors import InvalidRequestError


@pytest.mark.parametrize("value", [50.1, -300, 1e308, math.inf, math.nan])
def test_length_penalties_are_bounded(value: float) -> None:
    with pytest.raises(InvalidRequestError, match="length_penalty must be from -50 to 50"):
        BeamOptions(num_beams=2, length_penalty=value)


@pytest.mark.parametrize("value", [-1, 1e39, math.inf, math.nan])
def test_diversity_penalties_are_bounded(value: float) -> None:
    with pytest.raises(InvalidRequestError, match="diversity_penalty must be from 0"):
        BeamOptions(num_beams=2, num_beam_groups=2, diversity_penalty=value)
