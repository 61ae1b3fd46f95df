"""Build hook of the documentation site: links to files outside docs/ become plain text."""

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace `[text](../path)` by `text`: the site has no page for files of the repository."""
    return re.sub(r"\[([^\]]*)\]\(\.\./[^)]*\)", r"\1", markdown)
