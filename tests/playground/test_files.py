"""The page's files as the application serves them, without a browser."""

import hashlib
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from deployments.apis.chat.request import ChatRequest
from deployments.http.page import add_page, is_page

FOLDER = Path(__file__).parents[2] / "playground"
SERVED = {".html", ".css", ".js", ".mjs", ".svg"}
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.suffix in SERVED)
OWN = [name for name in FILES if not name.startswith("vendor/")]
IMPORT = re.compile(r'^import .* from "(\.[\w./]+)";$', re.MULTILINE)
ELSEWHERE = re.compile(r"(?:https?:)?//[\w.-]+\.\w+/?")


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    api = FastAPI()
    add_page(api)
    with TestClient(api) as client:
        yield client


class Markup(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def markup() -> Markup:
    parser = Markup()
    parser.feed((FOLDER / "index.html").read_text(encoding="utf-8"))
    return parser


def test_the_page_is_html_under_a_strict_policy(client: TestClient) -> None:
    response = client.get("/")
    assert response.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert response.headers["X-Content-Type-Options"] == "nosniff"


def test_a_file_that_the_browser_has_is_not_sent_again(client: TestClient) -> None:
    tag = client.get("/page/main.js").headers["ETag"]
    again = client.get("/page/main.js", headers={"If-None-Match": f'W/"other", W/{tag}'})
    assert (again.status_code, again.content, again.headers["ETag"]) == (304, b"", tag)
    assert client.get("/page/main.js", headers={"If-None-Match": '"other"'}).status_code == 200
    assert client.get("/page/main.js").headers["Cache-Control"] == "no-cache"


def test_vendored_files_are_those_of_the_manifest() -> None:
    folder = FOLDER / "vendor"
    packages = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    hashes = {package["file"]: package["sha256"] for package in packages}
    hashes |= {package["licence_file"]: package["licence_sha256"] for package in packages}
    files = {path.name: path for path in folder.iterdir() if path.name != "manifest.json"}
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()} == hashes
    assert all(f"-{package['version']}.tgz" in package["archive"] for package in packages)


def test_head_has_no_body(client: TestClient) -> None:
    response = client.head("/")
    assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fpage.py", "../page.py", ""])
def test_nothing_else_is_served(client: TestClient, name: str) -> None:
    assert client.get(f"/page/{name}").status_code == 404


def test_the_routes_stay_out_of_the_openapi_document(client: TestClient) -> None:
    assert client.get("/openapi.json").json()["paths"] == {}


def test_which_paths_are_the_pages() -> None:
    assert all(is_page(path) for path in ("/", "/page/main.js", "/page/index.html"))
    others = ("/page", "/page/", "/page/v1/models", "/page/x/v1/completions", "/page/none.js", "/v1/models", "/metrics")
    assert not any(is_page(path) for path in others)


def test_every_file_that_is_asked_for_is_there(client: TestClient, markup: Markup) -> None:
    named = [attributes.get("src") or attributes.get("href") or "" for _, attributes in markup.elements]
    paths = {f"/{name}" for name in named if name.startswith("page/")}
    for script in FOLDER.rglob("*.js"):
        imported = [(script.parent / name).resolve() for name in IMPORT.findall(script.read_text(encoding="utf-8"))]
        paths |= {f"/page/{path.relative_to(FOLDER).as_posix()}" for path in imported}
    assert {path: client.get(path).status_code for path in paths} == dict.fromkeys(paths, 200)
    assert {path.removeprefix("/page/") for path in paths} | {"index.html"} == set(FILES)


def test_nothing_is_inline(markup: Markup) -> None:
    for tag, attributes in markup.elements:
        assert tag != "style"
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        assert tag != "script" or "src" in attributes


@pytest.mark.parametrize("name", OWN)
def test_nothing_comes_from_elsewhere(name: str) -> None:
    source = (FOLDER / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert ELSEWHERE.findall(source) == []


def test_every_control_of_the_page_is_labelled(markup: Markup) -> None:
    labelled = {attributes.get("for") for tag, attributes in markup.elements if tag == "label"}
    inside = re.compile(r"<label[^>]*>(?:(?!</label>).)*<(?:input|select|textarea)[^>]*>", re.DOTALL)
    wrapped = " ".join(inside.findall((FOLDER / "index.html").read_text(encoding="utf-8")))
    controls = [attributes for tag, attributes in markup.elements if tag in ("input", "select", "textarea")]
    for attributes in controls:
        assert attributes.get("id") in labelled or f'"{attributes.get("id") or attributes.get("value")}"' in wrapped


def test_the_parameters_are_fields_of_the_api() -> None:
    named = re.findall(r'\{ name: "([a-z]\w*)"', (FOLDER / "request" / "fields.js").read_text(encoding="utf-8"))
    assert len(named) > 15
    assert set(named) <= set(ChatRequest.model_fields)
