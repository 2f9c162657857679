"""Tests of a report's script in a browser: a table is sorted, a task is hovered, a timeline is enlarged."""

import re

import pytest
from chromium import PROGRAM, browser
from fixture_checkpoints import checkpoint

import chunkrt
from chunkrt.simulate import find_device, find_shape, simulate

pytestmark = pytest.mark.skipif(not PROGRAM, reason="Chromium and bash are not installed")

COLUMN = "[...document.querySelectorAll('#prefills th')].findIndex(th => th.textContent === {name!r})"
HEAD = "document.querySelectorAll('#prefills th')[" + COLUMN + "].firstElementChild"
CELLS = "[...document.querySelectorAll('#prefills tbody tr')].map(row => row.cells[" + COLUMN + "]{key})"
TIP = "document.getElementById('tip')"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Return the path of a report about 120 predictions and one simulated prompt."""
    rows = chunkrt.experiment(
        checkpoint("llama_biased_gguf"),
        devices=["sd8gen3", "sd8elite"],
        chunk_lengths=[8, 16, 32],
        policies=["in_order", "look_ahead"],
        schemes=["w8a16"],
        prompt_lengths=list(range(12, 22)),
        workers=1,
    )
    plan, device = find_shape("qwen2.5-0.5b").plan(), find_device("sd8gen3")
    simulation = simulate(plan, device, prompt_length=96, chunk_length=32, policy="in_order", scheme="w8a16")
    path = tmp_path_factory.mktemp("report") / "report.html"
    chunkrt.report({"study": rows, "prompt": simulation}, path)
    return path


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture
def page(window, report):
    """Open the report again, and check at the end that no script failed and that only the report was loaded."""
    window.open(report)
    yield window
    assert not window.errors
    assert set(window.requests) == {report.as_uri()}


def test_click_on_a_heading_sorts_the_table(page):
    name = "tokens/s"
    cells = CELLS.format(name=name, key=".dataset.k")
    before = [float(value) for value in page.value(cells)]
    assert before not in (sorted(before), sorted(before, reverse=True))
    page.click(HEAD.format(name=name))
    page.until(f"{HEAD.format(name=name)}.parentElement.getAttribute('aria-sort') === 'ascending'")
    assert [float(value) for value in page.value(cells)] == sorted(before)
    page.click(HEAD.format(name=name))
    page.until(f"{HEAD.format(name=name)}.parentElement.getAttribute('aria-sort') === 'descending'")
    assert [float(value) for value in page.value(cells)] == sorted(before, reverse=True)
    page.value(f"{HEAD.format(name='device')}.focus()")
    page.press("Enter")
    page.until(f"{HEAD.format(name='device')}.parentElement.getAttribute('aria-sort') === 'ascending'")
    devices = page.value(CELLS.format(name="device", key=".textContent"))
    assert devices == sorted(devices, key=str.lower)  # as in a dictionary, not by code points
    assert len(set(devices)) == 3


def test_long_table_shows_all_rows_on_request(page):
    visible = "[...document.querySelectorAll('#prefills tbody tr')].filter(row => row.offsetParent).length"
    assert page.value(visible) == 100
    page.click("document.querySelector('#prefills .more button')")
    page.until(f"{visible} === 121")


def test_hovered_task_shows_its_name_processor_start_and_duration(page):
    task = "document.querySelector('.timeline rect[class=k0]')"  # linear layers
    page.hover(task)
    page.until(f"!{TIP}.hidden")
    name, processor, start, duration, origin = page.value(f"{TIP}.textContent").split("\n")
    assert name == "static.0 chunk 0"
    assert processor == "NPU"
    assert re.fullmatch(r"start \d+\.\d{3,6} ms P", start)
    assert re.fullmatch(r"duration \d+\.\d{3,6} ms P", duration)
    assert origin == "predicted"
    page.hover("document.querySelector('h1')")
    page.until(f"{TIP}.hidden")


def test_timeline_is_enlarged_and_walked_by_keys(page):
    output = "document.querySelector('.timeline output').textContent"
    whole = page.value(output)
    assert whole.startswith("0.000 ms to ")
    page.click("document.querySelector('.timeline [data-do=in]')")
    page.until(f"{output} !== {whole!r}")
    page.click("document.querySelector('.timeline [data-do=all]')")
    page.until(f"{output} === {whole!r}")
    page.value("document.querySelector('.timeline svg').focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.press(key)
    page.until(f"!{TIP}.hidden")
    assert page.value(f"{TIP}.textContent").split("\n")[1] == "CPU worker 0"
    page.press("+")
    page.until(f"{output} !== {whole!r}")
    page.press("0")
    page.until(f"{output} === {whole!r}")


def test_point_of_a_front_states_its_choices(page):
    page.hover("document.querySelector('#fronts circle.on')")
    page.until(f"!{TIP}.hidden")
    text = page.value(f"{TIP}.textContent")
    assert "chunk " in text
    assert text.endswith("\npredicted")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_page_fits_its_window_in_both_schemes(window, report, width, scheme):
    window.open(report, width=width, scheme=scheme)
    assert window.value("document.documentElement.scrollWidth") <= width
    assert (
        window.value("getComputedStyle(document.body).backgroundColor")
        == {
            "light": "rgb(255, 255, 255)",
            "dark": "rgb(22, 25, 29)",
        }[scheme]
    )
