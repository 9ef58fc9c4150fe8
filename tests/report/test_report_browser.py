"""The report in a real browser: `tox -e browser`, on a machine that has Chromium or Chrome.

Marked `browser` and run only in that environment. Without a browser it is skipped with the package to install.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bumpgate.core.findings import TimedOutcome
from bumpgate.core.rows import Verdict, write_record
from bumpgate.gate.verdict import Side
from bumpgate.history.archive import Archive
from bumpgate.report import command as report
from bumpgate.report import dashboard
from tests.support.reports import (
    HERE,
    gate_of_day,
    held,
    judged,
    many_readings,
    paired,
    record,
    row,
    write_gate,
)

pytestmark = pytest.mark.browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ROWS = "#rows tbody tr:not([hidden])"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    reason = "playwright is not installed: pip install playwright"
    sync_playwright = pytest.importorskip("playwright.sync_api", reason=reason).sync_playwright
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser is installed: none of {', '.join(BROWSERS)}; apt-get install chromium")
    with sync_playwright() as driver:
        # The sandbox does not start for root, the user in a container; the page is our own.
        opened = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def tab(browser: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Open a gate's report in a window of (width, scheme); fail on any console output or network request."""
    width, scheme = getattr(request, "param", (1200, "light"))
    (html,) = report.render(held(tmp_path), {"html": tmp_path / "gate.html"})
    opened = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    printed: list[str] = []
    requested: list[str] = []
    opened.on("console", lambda message: printed.append(message.text))
    opened.on("pageerror", lambda error: printed.append(str(error)))
    opened.on("dialog", lambda dialog: (printed.append(dialog.message), dialog.dismiss()))
    opened.on("request", lambda sent: requested.append(sent.url))
    opened.goto(html.as_uri())
    yield opened
    opened.close()
    assert printed == []
    assert [url for url in requested if not url.startswith("data:")] == [html.as_uri()]


def column(tab: Any, number: int) -> list[str]:
    return [text.strip() for text in tab.locator(f"{ROWS} > :nth-child({number})").all_inner_texts()]


def names(tab: Any) -> list[str]:
    return [text.splitlines()[0] for text in column(tab, 2)]


def test_header_click_sorts_and_second_click_reverses(tab: Any) -> None:
    assert column(tab, 1)[:2] == ["CHANGED", "SLOWER"], "worst first"
    head = tab.get_by_role("columnheader", name="Row")
    head.get_by_role("button").click()
    assert names(tab) == sorted(names(tab))
    assert head.get_attribute("aria-sort") == "ascending"
    head.get_by_role("button").click()
    assert names(tab) == sorted(names(tab), reverse=True)
    assert head.get_attribute("aria-sort") == "descending"


def test_numbers_sort_as_numbers_and_empty_cells_come_last(tab: Any) -> None:
    for _ in range(2):
        tab.get_by_role("columnheader", name="Change").get_by_role("button").click()
    shown = column(tab, 5)
    numbers = [float(text.split()[0]) for text in shown if text]
    assert numbers == sorted(numbers, reverse=True)
    assert len(numbers) > 2
    assert shown[: len(numbers)] == [text for text in shown if text]


def test_table_can_be_sorted_by_keyboard(tab: Any) -> None:
    tab.locator("#label").focus()
    tab.keyboard.press("Tab")
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.textContent.trim()") == "Row"
    tab.keyboard.press("Enter")
    assert names(tab) == sorted(names(tab))


def test_rows_are_filtered_by_words_and_verdict(tab: Any) -> None:
    total = tab.locator(ROWS).count()
    tab.get_by_label("Filter rows by words").fill("throughput SECONDS")
    assert 0 < tab.locator(ROWS).count() < total
    assert all("seconds" in name for name in names(tab))
    tab.get_by_label("Filter rows by verdict").select_option("SLOWER")
    assert names(tab) == ["throughput/nam52-regional/seconds"]
    assert tab.locator("#shown").inner_text() == f"1 of {total} rows"
    tab.get_by_label("Filter rows by words").fill("no such row")
    assert tab.locator(ROWS).count() == 0


@pytest.mark.parametrize(
    "tab", [(400, "dark"), (400, "light"), (1160, "light"), (1200, "dark")], indirect=True, ids=str
)
def test_page_fits_the_window_and_is_readable(tab: Any, tmp_path: Path) -> None:
    check_fits(tab)
    smallest = tab.evaluate("Math.min(...[...document.querySelectorAll('figure text')].map(t => "
                            "t.getBoundingClientRect().height))")  # fmt: skip
    assert smallest >= 8, "text of a plot in pixels"
    tab.get_by_label("Filter rows by words").fill("graph_breaks")
    assert tab.locator(ROWS).count() == 1
    tab.locator(ROWS).get_by_text("evidence").click()
    assert "GB0098" in tab.locator(ROWS).inner_text()
    picture = tab.screenshot(path=tmp_path / "report.png", full_page=True)
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(picture) > 50_000, "not an empty page"


def check_fits(tab: Any) -> None:
    """No part of the page is wider than the window, or than the frame that would hide the rest."""
    width = tab.viewport_size["width"]
    assert tab.evaluate("document.scrollingElement.scrollWidth") == width, "no horizontal scrolling"
    cut = tab.evaluate(
        """[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > 1 + Math.min(
             innerWidth, e.closest('.frame')?.getBoundingClientRect().right ?? innerWidth)).length"""
    )
    assert cut == 0


def first_run(folder: Path) -> Path:
    write_record(
        folder / "record.json", HERE, [judged(Verdict.NEW, row(f"a/case{i}/bytes", i)) for i in range(9)]
    )
    return folder / "record.json"


def unknown(folder: Path) -> Path:
    right = record(judged(Verdict.PASS, row()), judged(Verdict.PASS, row("a/b/c")))
    open_time = {"throughput/x/seconds": paired(TimedOutcome.INCONCLUSIVE, 1.0)}
    return write_gate(folder, Side("torch 2.13.0", right), Side("torch 2.14.0", right), open_time)[0]


def history(folder: Path, rows: int) -> Path:
    archive, last = Archive(f"sqlite:///{folder / 'h.sqlite'}"), dashboard.today()
    if rows:
        many_readings(archive, rows, 30, last)
        archive.add(gate_of_day(folder, 7))
    start = last - timedelta(364)
    dashboard.write(folder / "site", dashboard.read(archive, start), start, archive.findings())
    return folder / "site" / "index.html"


PAGES = {
    "first run": lambda folder: report.render(first_run(folder), {"html": folder / "page.html"})[0],
    "unknown gate": lambda folder: report.render(unknown(folder), {"html": folder / "page.html"})[0],
    "gate": lambda folder: report.render(held(folder), {"html": folder / "page.html"})[0],
    "dashboard": lambda folder: history(folder, 20),
    "empty dashboard": lambda folder: history(folder, 0),
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("name", PAGES)
def test_page_passes_the_checks_of_axe(
    browser: Any, name: str, width: int, scheme: str, tmp_path: Path
) -> None:
    """All of its rules: contrast, names, landmarks, order of headings, tables."""
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python"
    )
    opened = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    opened.goto(PAGES[name](tmp_path).as_uri())
    check_fits(opened)
    violations = axe.Axe().run(opened).response["violations"]
    found = {each["id"]: [node["html"][:200] for node in each["nodes"]][:3] for each in violations}
    opened.close()
    assert found == {}


@pytest.mark.parametrize("width", [400, 1200])
def test_dashboard_has_its_chart_on_the_first_screen_and_links_to_rows(
    browser: Any, tmp_path: Path, width: int
) -> None:
    opened = browser.new_page(viewport={"width": width, "height": 900})
    printed: list[str] = []
    opened.on("console", lambda message: printed.append(message.text))
    opened.on("pageerror", lambda error: printed.append(str(error)))
    opened.goto(history(tmp_path, 20).as_uri())
    box = opened.locator("svg.strip").first.bounding_box()
    assert box["y"] + box["height"] < 900
    opened.get_by_label("Filter rows by words").fill("case7/")
    assert opened.locator(ROWS).count() == 1
    assert opened.locator(f"{ROWS} svg").bounding_box()["width"] >= 200
    opened.get_by_role("link", name="a/case7/count").click()
    check_fits(opened)
    assert opened.get_by_role("heading", name="a/case7/count").count() == 1
    opened.close()
    assert printed == []
