"""What tests do with the page again and again."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

# How much an element's words stand out from their ground, from 1 to 21, as WCAG 2 has it.
CONTRAST = """(element) => {
    const parts = (colour) => {
        const numbers = colour.match(/[\\d.]+/g).map(Number);
        return colour.startsWith("color(srgb") ? numbers.map((n, i) => (i < 3 ? n * 255 : n)) : numbers;
    };
    const light = (colour) => parts(colour).slice(0, 3)
        .map((c) => c / 255).map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    let ground = element;
    while (parts(getComputedStyle(ground).backgroundColor)[3] === 0) ground = ground.parentElement;
    const both = [getComputedStyle(element).color, getComputedStyle(ground).backgroundColor].map(light);
    return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
}"""


def send(page: "Page", text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send", exact=True).click()


def switch_markdown(page: "Page") -> None:
    """Show answers formatted instead of as written, or the other way round. The focus stays."""
    page.locator("#formatted").evaluate("box => box.click()")


def wait_until_done(page: "Page", answers: int = 1) -> None:
    page.locator(".card").nth(answers - 1).wait_for()
    page.locator(".card[aria-busy]").first.wait_for(state="detached")
    page.locator("#stop").wait_for(state="hidden")


def tokens_of(card: "Locator") -> list[tuple[str, str]]:
    """Text and source of each token."""
    spans = card.locator(".token").evaluate_all("spans => spans.map((span) => [span.textContent, span.className])")
    return [(text, name.split()[1]) for text, name in spans]
