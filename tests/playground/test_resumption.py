"""The page's client resumes streams that break off. Runs it in Node.js, which is skipped where there is none."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deployments.configuration.paths import ROOT

# Answers requests by what SCRIPTS says: the body of a stream, a status, or null where nobody listens.
DRIVER = """
globalThis.document = { baseURI: "http://127.0.0.1:9/" };
const [scripts, asked, documents] = [SCRIPTS, [], []];
let opened = 0, failure = null;
globalThis.fetch = async (url, options) => {
  asked.push(options.headers["Last-Event-ID"]);
  const script = scripts.shift();
  if (script === null) throw new TypeError("refused");
  return typeof script === "number" ? new Response("{}", { status: script }) : new Response(script);
};
const { Api } = await import("./request/api.js");
const options = { opened: () => (opened += 1) };
try {
  for await (const document of new Api(() => "").stream("v1/completions", {}, options)) documents.push(document.a);
} catch (error) {
  failure = error.message;
}
console.log(JSON.stringify({ asked, documents, opened, failure }));
"""


def run(folder: Path, *scripts: str | int | None) -> dict[str, Any]:
    node = shutil.which("node") or pytest.skip("Node.js is not installed")
    page = shutil.copytree(ROOT / "playground", folder / "page")
    (page / "package.json").write_text('{"type": "module"}')
    (page / "driver.js").write_text(DRIVER.replace("SCRIPTS", json.dumps(scripts)))
    printed = subprocess.run([node, "driver.js"], cwd=page, capture_output=True, text=True, check=True, timeout=60)
    result: dict[str, Any] = json.loads(printed.stdout)
    return result


def test_a_stream_is_resumed_after_the_last_event_that_came_whole(tmp_path: Path) -> None:
    first = 'id: a/1\ndata: {"a": 1}\n\nid: a/2\ndata: {"a": 2}\n\nid: a/3\nda'
    last = 'id: a/3\ndata: {"a": 3}\n\ndata: [DONE]\n\n'
    assert run(tmp_path, first, 503, None, last) == {
        "asked": ["0", "a/2", "a/2", "a/2"],
        "documents": [1, 2, 3],
        "opened": 1,
        "failure": None,
    }


@pytest.mark.parametrize(
    ("scripts", "failure"),
    [
        (['data: {"a": 1}\n\n'], "The answer broke off before its end."),
        (['id: a/1\ndata: {"a": 1}\n\nevent: error\ndata: {"error": {"message": "gone"}}\n\n'], "gone"),
        (['id: a/1\ndata: {"a": 1}\n\n', 400], ""),
    ],
    ids=["no ids", "error event", "refused"],
)
def test_what_can_not_go_on_is_an_error(tmp_path: Path, scripts: list[str | int | None], failure: str) -> None:
    result = run(tmp_path, *scripts)
    assert (result["documents"], result["failure"], len(result["asked"])) == ([1], failure, len(scripts))
