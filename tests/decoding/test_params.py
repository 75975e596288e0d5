"""Bad values are refused with the name of their field."""

import math

import msgspec
import pytest

from decoding.errors import InvalidRequestError
from decoding.params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("temperature", 1e-9),
        ("temperature", 101),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -1),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", ("",)),
        ("stop", ("a", "")),
    ],
)
def test_a_bad_value_names_its_field_and_itself(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        SamplingParams(**{"max_tokens": 1, field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"temperature": 0.001},
        {"temperature": 100},
        {"top_p": 1},
        {"top_p": 1e-6},
        {"seed": 2**63 - 1},
        {"top_k": 0},
    ],
)
def test_limits_are_allowed_and_cross_the_wire(values: dict[str, float]) -> None:
    params = SamplingParams(max_tokens=1, **values)  # type: ignore[arg-type]
    assert params.greedy == (values.get("temperature") == 0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
