"""Chromium in tests: the one that is installed, without a sandbox and without calls home."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of Playwright's. Skips the test where there is no Chromium or no Playwright."""
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no Chromium is installed (looked for {', '.join(NAMES)})")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A page, and what it has done that a page of ours must not do. `page` is Playwright's."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.url = url
        self.context = browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(30_000)
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._see)

    def open(self) -> Any:
        """The dashboard, once it shows the cache."""
        self.page.goto(f"{self.url}/dashboard")
        self.page.wait_for_selector("#status[data-state=live]")
        self.page.wait_for_selector("#map-legend li")
        return self.page

    def close(self) -> None:
        """Close it; it must have kept to itself."""
        self.context.close()
        assert self.elsewhere == [], self.elsewhere
        assert self.errors == [], self.errors

    def _hear(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def _see(self, request: Any) -> None:
        if not request.url.startswith(self.url):
            self.elsewhere.append(request.url)
