"""A fake server and a real Chromium, for the tests that carry the mark `browser`."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.playground.driving import send, switch_markdown, wait_until_done
from tests.playground.fake_server import KEY, Fake, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

PATIENCE_MS = 15_000
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="package")
def browser() -> "Iterator[Browser]":
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if executable is None:
        pytest.skip(f"none of {', '.join(CHROMIUMS)} is installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def one_server() -> Iterator[Fake]:
    with serving(Fake()) as fake:
        yield fake


@pytest.fixture
def fake(one_server: Fake) -> Fake:
    one_server.bodies.clear()
    one_server.hung_up.clear()
    return one_server


@pytest.fixture
def locked() -> Iterator[Fake]:
    """A server that wants an API key."""
    with serving(Fake(key=KEY)) as fake:
        yield fake


@pytest.fixture(scope="package")
def context(browser: "Browser") -> "Iterator[BrowserContext]":
    context = browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    context.set_default_timeout(PATIENCE_MS)
    yield context
    context.close()


@pytest.fixture
def page(context: "BrowserContext", fake: Fake) -> "Iterator[Page]":
    """The page, with answers as written."""
    with opened(context, fake) as page:
        switch_markdown(page)
        yield page


@pytest.fixture(scope="module")
def answered(context: "BrowserContext", one_server: Fake) -> "Iterator[Page]":
    """The page with a formatted answer. The tests of a module share it and only look."""
    with opened(context, one_server) as page:
        send(page, "markdown")
        wait_until_done(page)
        yield page


@contextmanager
def opened(context: "BrowserContext", fake: Fake) -> "Iterator[Page]":
    """The page, with its endpoints there. Nothing may go wrong in it, and it may ask no other server."""
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("request", lambda request: None if request.url.startswith(fake.url) else problems.append(request.url))
    page.goto(fake.url)
    page.get_by_text("target target").wait_for()
    yield page
    page.close()
    assert [problem for problem in problems if "the server responded with a status of 4" not in problem] == []
