"""What a person does with the server's page in a browser, what it then shows, and texts for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

WORDS = " ".join(f"w{i}" for i in range(60))
LONG = " ".join(f"w{i}" for i in range(900))  # with FOREVER: an answer that cannot end before a test wants it
FOREVER = 60.0
Open = Callable[..., Any]


def write(tab: Any, text: str) -> None:
    """Send a message."""
    tab.get_by_role("textbox", name="Message", exact=True).fill(text)
    tab.keyboard.press("Enter")


def ended(tab: Any) -> None:
    """Wait until no answer is under way."""
    tab.get_by_role("button", name="Send").wait_for()


def ask(tab: Any, text: str) -> None:
    """Send a message, and wait for the answer."""
    write(tab, text)
    ended(tab)


def slide(tab: Any, tau: float) -> None:
    tab.get_by_role("slider", name="Tau").fill(str(tau))


def runs(tab: Any) -> list[int]:
    """Tokens of each step of the last answer, as drawn."""
    last = (
        tab.content().partition('<form class="dock"')[0].rpartition("<article")[2]
    )  # one look, however long it is
    kinds = [names.split() for names in re.findall(r'class="t ([^"]*)"', last)]
    starts = [i for i, names in enumerate(kinds) if "first" in names]
    return [b - a for a, b in zip(starts, [*starts[1:], len(kinds)], strict=True)]
