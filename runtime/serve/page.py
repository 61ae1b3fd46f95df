"""The page and the header that keeps it harmless: nothing from elsewhere, no script but its own."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files


@cache
def page() -> bytes:
    """The HTML, UTF-8."""
    return files(__package__).joinpath("page.html").read_bytes()


@cache
def policy() -> str:
    """What to send as Content-Security-Policy: the hashes are those of its one script and one style."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_hash('script')}'",
            f"style-src '{_hash('style')}'",
            "connect-src 'self'",
            "img-src data:",  # the icon
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",  # so that no text can become HTML, by mistake or not
            "trusted-types 'none'",
        ]
    )


def headers() -> dict[str, str]:
    """All headers of the page."""
    return {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy(),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }


def _hash(element: str) -> str:
    """Of the element's contents, as browsers count it: between its tags, with every white space."""
    (content,) = re.findall(rf"<{element}>(.*?)</{element}>".encode(), page(), re.DOTALL)
    return "sha256-" + base64.b64encode(hashlib.sha256(content).digest()).decode()
