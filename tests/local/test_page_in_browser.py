"""The page of ds-dynmo-plot in a real browser, on screens of a phone and of a desk."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_dynmo.cli import plot
from tests.local.browser import Browser, chromium_or_skip
from tests.local.test_plot import run_records, write_report, write_trace

NARROW, WIDE = (320, 360, 412), 1280
BEYOND_THE_SCREEN = """
    [...document.querySelectorAll('body *')]
        .filter(one => !one.parentElement.closest('.wide, pre') && one.getBoundingClientRect().right > innerWidth)
        .map(one => one.outerHTML.slice(0, 80))
"""
PICTURES = """
    [...document.images].map(one => [one.alt, one.complete && one.naturalWidth > 0, one.width / one.naturalWidth])
"""
FONT_SIZES = "[...document.querySelectorAll('h1, td, th, pre')].map(one => parseFloat(getComputedStyle(one).fontSize))"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with all pictures, and with a partition, a reason and a configuration that are longer than any screen."""
    chromium_or_skip()
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("page")
    start, *records, end = run_records()
    start["config"] = {"dynmo": {"report": "/a_folder" * 50}}
    records[6]["reason"] = "frozen" * 20
    end["partition"] = [*range(65)]
    report, trace = write_report(folder, [start, *records, end]), write_trace(folder)
    assert plot.main([str(report), "--trace", str(trace), "--out", str(folder / "pictures")]) == 0
    return folder / "pictures" / "report.html"


def test_the_page_reads_well_on_every_screen(page: Path, tmp_path: Path) -> None:
    with Browser(chromium_or_skip(), tmp_path) as browser:
        for width in (*NARROW, WIDE):
            browser.open(page, width=width)
            browser.value("document.querySelector('details').open = true")
            assert browser.value("innerWidth") == width  # as wide as the screen, not a page for a desk made small
            assert browser.value("document.documentElement.scrollWidth") <= width
            assert browser.value(BEYOND_THE_SCREEN) == []
            pictures = browser.value(PICTURES)
            assert len(pictures) == 5 and all(loaded for _, loaded, _ in pictures)
            scales = {name: scale for name, _, scale in pictures}
            assert all(0.69 < scale <= 1.01 for scale in scales.values()), scales  # small text is 12 pixels high
            assert min(browser.value(FONT_SIZES)) >= 12
            reached = browser.value(
                "[...document.querySelectorAll('.wide, pre')].map(one => "
                "(one.scrollLeft = 1e6, one.scrollLeft + one.clientWidth >= one.scrollWidth - 1))"
            )
            assert reached and all(reached)  # what is wider than the screen can be scrolled to its end
            assert problems(browser) == []


def problems(browser: Browser) -> list[str]:
    """Return what the browser complained of, and what the page fetched besides itself and what it holds."""
    found = []
    for event in browser.events:
        method, content = event["method"], event["params"]
        if method in ("Log.entryAdded", "Runtime.exceptionThrown", "Network.loadingFailed"):
            found.append(f"{method}: {content}")
        elif method == "Network.requestWillBeSent" and not content["request"]["url"].startswith(("file:", "data:")):
            found.append(content["request"]["url"])
    return found
