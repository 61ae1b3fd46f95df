"""The chat page: one document with its styles and scripts."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

SCRIPTS = ("chats.js", "models.js", "answer.js", "talk.js", "controls.js")


@cache
def page() -> bytes:
    """The HTML with its style and its script in it, UTF-8."""
    web = files(__package__).joinpath("web")
    style = web.joinpath("page.css").read_bytes()
    script = b"\n".join(web.joinpath(name).read_bytes() for name in SCRIPTS)
    html = web.joinpath("page.html").read_bytes()
    html = html.replace(b"<style></style>", b"<style>\n%b</style>" % style)
    return html.replace(b"<script></script>", b"<script>\n%b</script>" % script)


@cache
def page_headers() -> dict[str, str]:
    """The headers of the page."""
    policy = [
        "default-src 'none'",
        f"script-src '{_hash('script')}'",
        f"style-src '{_hash('style')}'",
        "connect-src 'self'",
        "img-src data:",  # the icon
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # no text can become HTML
        "trusted-types 'none'",
    ]
    return {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }


def _hash(element: str) -> str:
    """The hash of an element's content, white space included, as browsers compute it."""
    (content,) = re.findall(rf"<{element}>(.*?)</{element}>".encode(), page(), re.DOTALL)
    return "sha256-" + base64.b64encode(hashlib.sha256(content).digest()).decode()
