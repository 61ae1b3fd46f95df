"""Build hooks of the documentation site: links to files outside docs/, and names that stay on one line."""

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace `[text](../path)` by `text`: the site has no page for files of the repository."""
    return re.sub(r"\[([^\]]*)\]\(\.\./[^)]*\)", r"\1", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Mark short code without spaces, such as an option: browsers would break it after a hyphen."""
    return re.sub(r"<code>([^\s<]{1,32})</code>", r'<code class="name">\1</code>', html)
