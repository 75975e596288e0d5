"""Every response has one id, the client's if it sent one, behind Serve's proxy."""

import http.client
import json
from contextlib import closing

import pytest

from tests.server.conftest import Server

pytestmark = pytest.mark.cluster

BODY = {"model": "consort", "prompt": "import os\n", "max_tokens": 4}


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"temperature": -1}])
@pytest.mark.parametrize("given", [None, "mine-1"])
def test_an_answer_has_one_id(server: Server, fields: dict[str, object], given: str | None) -> None:
    headers = {"Content-Type": "application/json"} | ({} if given is None else {"X-Request-Id": given})
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(BODY | fields), headers)
        ids = connection.getresponse().headers.get_all("X-Request-Id")
    assert ids is not None
    assert len(ids) == 1
    assert given in (None, ids[0])
