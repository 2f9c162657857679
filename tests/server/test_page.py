"""The page as a user sees it, in Chromium."""

import shutil

import pytest
from server_of_tests import serving

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
if CHROMIUM is None:
    pytest.skip("there is no Chromium; on Debian: apt-get install chromium", allow_module_level=True)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A page that blocks all requests except to its server, and records errors."""
    page = browser.new_page()
    page.wrong = []
    page.on("pageerror", lambda error: page.wrong.append(str(error)))

    def pass_on(route):
        if route.request.url.startswith("http://127.0.0.1:"):
            return route.continue_()
        page.wrong.append(route.request.url)
        return route.abort()

    page.route("**/*", pass_on)
    yield page
    page.close()


def test_a_prompt_is_typed_and_its_answer_read(served, page, engine):
    _, url = served
    page.goto(url)
    playwright.expect(page.locator("#model")).to_have_text("toy")
    page.get_by_label("Message").fill("hello there")
    page.keyboard.press("Enter")
    answer = page.locator("#said > .assistant")
    playwright.expect(page.locator("#speed")).to_contain_text("tokens/s", timeout=30_000)
    assert page.locator("#said > .user").inner_text() == "hello there"
    tokens = engine.tokenizer.encode_chat([{"role": "user", "content": "hello there"}])
    assert "of the prompt cached" in page.locator("#speed").inner_text()
    assert answer.count() == 1
    assert len(tokens) > 1
    playwright.expect(page.locator("#load")).to_contain_text("0 under way")
    assert page.wrong == []


def test_a_line_is_begun_by_shift_and_enter(served, page):
    page.goto(served[1])
    page.get_by_label("Message").fill("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    assert page.locator("#said > .user").text_content() == "one\ntwo"


def test_a_new_chat_forgets(served, page):
    page.goto(served[1])
    page.get_by_label("Message").fill("hello")
    page.keyboard.press("Enter")
    playwright.expect(page.locator("#speed")).to_contain_text("tokens/s", timeout=30_000)
    page.get_by_role("button", name="New chat").click()
    assert page.locator("#said > *").count() == 0


def test_an_error_is_shown_and_the_turn_left_out(served, page):
    page.goto(served[1])
    page.get_by_label("Message").fill("hello " * 200)
    page.keyboard.press("Enter")
    playwright.expect(page.locator("#said > .error")).to_contain_text("context holds 128 tokens")
    page.get_by_label("Message").fill("hi")
    page.keyboard.press("Enter")
    playwright.expect(page.locator("#speed")).to_contain_text("tokens/s", timeout=30_000)


def test_the_key_goes_with_every_request(engine, page):
    with serving(engine, api_keys={"one": "right"}) as (_, url):
        page.goto(url)
        page.get_by_label("Message").fill("hi")
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#said > .error")).to_contain_text("API key")
        page.get_by_label("API key").fill("right")
        page.get_by_label("Message").fill("hi")
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#speed")).to_contain_text("tokens/s", timeout=30_000)
        page.goto("about:blank")


def test_a_script_that_is_not_the_pages_own_does_not_run(served, page):
    page.goto(served[1])
    page.evaluate(
        "() => { const own = document.createElement('script'); own.textContent = 'window.ran = 1';"
        " document.body.append(own); }"
    )
    assert page.evaluate("window.ran") is None
    assert page.wrong == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_accessible(served, browser, scheme):
    """Every control has a name, and text contrasts with its background."""
    page = browser.new_page(color_scheme=scheme)
    page.goto(served[1])
    for control in page.locator("button, input, textarea").all():
        assert control.evaluate("e => e.labels?.length || e.textContent.trim().length || e.ariaLabel?.length")
    background, ink = page.evaluate(
        "() => { const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]; }"
    )
    assert background in ("rgba(0, 0, 0, 0)", "rgb(255, 255, 255)", "rgb(18, 18, 18)")
    assert ink == {"light": "rgb(0, 0, 0)", "dark": "rgb(255, 255, 255)"}[scheme]
    assert page.evaluate("document.documentElement.lang") == "en"
    page.close()
