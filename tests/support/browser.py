"""A real Chromium for the tests of the page: Debian's, driven by playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.missing import lacking, need

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def chromium() -> str:
    """Where it is."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        lacking(f"none of {', '.join(NAMES)} is installed (Debian: apt-get install chromium)")
    return found


@contextmanager
def browser() -> Iterator[Any]:
    """One browser process, headless. No sandbox: root may run it, and the pages are our own."""
    need("playwright", "browser")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        instance = driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield instance
        instance.close()
