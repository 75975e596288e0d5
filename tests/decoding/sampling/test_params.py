"""Bad values are refused with the name of their field."""

import math
from typing import Any

import msgspec
import pytest

from decoding.errors import InvalidRequestError
from decoding.sampling.params import SamplingParams


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
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("typical_p", 0.0),
        ("epsilon_cutoff", 1.0),
        ("eta_cutoff", math.nan),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("no_repeat_ngram_size", -1),
        ("min_tokens", 2),
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
        {"min_p": 1, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 0.01},
        {"min_tokens": 1, "logit_bias": ((1, -100.0),), "bad_words_ids": ((1,), (2, 3)), "forced_bos_token_id": 4},
    ],
)
def test_limits_are_allowed_and_cross_the_wire(values: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=1, **values)
    assert params.greedy == (values.get("temperature") == 0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("attribute", "field", "value"),
    [
        ("bad_words_ids", "bad_words", ((1,), ())),
        ("bad_words_ids", "bad_words", ((1, -2),)),
        ("logit_bias", "logit_bias", ((1, 0.0), (2, 101.0))),
        ("logit_bias", "logit_bias", ((-1, 1.0),)),
        ("suppress_tokens", "suppress_tokens", (3, -1000)),
        ("forced_bos_token_id", "forced_bos_token_id", -1),
    ],
)
def test_a_bad_list_names_its_field(attribute: str, field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        SamplingParams(max_tokens=1, **{attribute: value})
    assert caught.value.field == field
