"""Fixtures that show reports in headless Chromium."""

from __future__ import annotations

import os
import shutil

import pytest
import report_cases
from browser_cases import DIFFICULT, LAPTOP

ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="640pt" viewBox="0 0 640 300">'
    '<path d="M0 0h640v300"/></svg>'
)


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium; tests are skipped where none is installed."""
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("SPECJAX_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if not path:
        pytest.skip("no Chromium is installed; install one, or set SPECJAX_CHROMIUM to its path")
    with sync.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=ARGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def report(tmp_path_factory):
    """A report with four traces: a chain, trees, plain decoding, and the difficult tokens."""
    tokens = [
        {"out": [[text, n, 3, 0.5, None, 0]], "draft": []} for n, text in enumerate(DIFFICULT)
    ]
    traces = [
        report_cases.trace(80),
        report_cases.trace(30, tree=True),
        report_cases.plain_trace(),
        report_cases.trace(1, method="difficult") | {"rounds": tokens},
    ]
    path = tmp_path_factory.mktemp("report") / "report.html"
    report_cases.write(
        path,
        report_cases.results(),
        traces,
        "Stories",
        plots={"one": SVG, "two": SVG},
        notices=["line 3 is left out: why"],
    )
    return path


@pytest.fixture
def visit(browser):
    """A function that opens a file and returns the page.

    After the test it checks that the page made no request and logged nothing to the console.
    """
    contexts, requests, messages = [], [], []

    def open_page(path, size=LAPTOP, **keys):
        contexts.append(browser.new_context(viewport=size, offline=True, **keys))
        page = contexts[-1].new_page()
        page.set_default_timeout(5000)
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.goto(path.as_uri())
        requests.remove(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [url for url in requests if not url.startswith("data:")] == [] and messages == []


@pytest.fixture
def run(capsys):
    """Runs ``python -m specjax.report`` in this process: (exit status, stdout, stderr)."""
    from specjax.report import __main__ as program

    def call(*argv) -> tuple[int, str, str]:
        capsys.readouterr()
        status = program.main([str(arg) for arg in argv])
        return status, *capsys.readouterr()

    return call
