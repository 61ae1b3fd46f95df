"""What a model says can do nothing to the page: it is text, and the page's policy allows nothing else."""

from __future__ import annotations

import re

from support.missing import need
from support.page import Open, ended, write

from mars_export.runtime.serve.page import headers
from mars_export.runtime.serve.page import page as page_bytes

need("uvicorn", "serve")

from support.fake_serve import FakeServe  # noqa: E402

HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    " </div>\u202e<a href='javascript:alert(1)'>&lt;b&gt; \u0007"
)


def test_what_a_model_says_is_text(visit: Open) -> None:
    fake = FakeServe(
        [[(HOSTILE, 0.9)], [(f'[{{"name": "{"<b>x</b>"}", "arguments": {{"<i>": "<u>"}}}}]', 0.9)]]
    )
    tab = visit(fake)
    write(tab, "<b>me</b>")
    ended(tab)
    assert tab.locator("article .t").inner_text() == HOSTILE
    tab.locator("article .t").hover()
    assert "U+202E" in tab.get_by_role("tooltip").inner_text()
    write(tab, "more")
    ended(tab)
    assert tab.locator(".call").inner_text().split() == ["<b>x</b>", "tool", "call", "<i>", '"<u>"']
    assert tab.locator("#talk :is(img, script, a, b:not(.foot b), i:not(.track i), u)").count() == 0
    tab.reload()
    assert tab.locator("article .t").first.inner_text() == HOSTILE
    assert tab.title() == "mars-export"


def test_one_file_and_its_policy() -> None:
    """What the header promises the file holds: no markup from text, no handlers, nothing from elsewhere."""
    source = page_bytes().decode()
    code = source.partition("<script>")[2]
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert word not in source
    assert "http://" not in code and "https://" not in code
    assert re.search(r"<[^>]*\s(on\w+|style|src)=", source.partition("<script>")[0]) is None
    policy = headers()["Content-Security-Policy"]
    kinds = dict(part.split(" ", 1) for part in policy.split("; "))
    assert kinds["default-src"] == kinds["base-uri"] == kinds["frame-ancestors"] == "'none'"
    assert kinds["script-src"].startswith("'sha256-") and "unsafe" not in policy
