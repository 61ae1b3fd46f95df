"""The text of a growing answer: its tokens as text, and its stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import SessionError, no_panic
from .thinking import ThinkingStream

if TYPE_CHECKING:
    from .tokenizer import Text

MAX_STOPS, MAX_STOP = 16, 256  # stop strings of a request, and characters of each
BROKEN = "\ufffd"  # the decoder's character for bytes that are not text, or not yet
# Tokens whose text is not known; the first and the last of them, which decide about later ones; and the
# characters that later bytes may still change.
MAX_UNREAD, FIRST_UNREAD, LAST_UNREAD, OPEN = 48, 4, 16, 3


class TextStream:
    """The growing text of one answer, without incomplete characters and possible stop strings at its end.
    Stop strings in the thinking that `thinking` splits off have no effect.
    """

    def __init__(self, text: Text, stop: Sequence[str] = (), thinking: ThinkingStream | None = None) -> None:
        self._tokenizer = text.tokenizer
        if len(stop) > MAX_STOPS or any(len(s) > MAX_STOP for s in stop):
            raise SessionError(
                f"at most {MAX_STOPS} stop strings of at most {MAX_STOP} characters are allowed,"
                f" not {len(stop)} of up to {max(map(len, stop))}; use fewer or shorter ones",
                field="stop",
            )
        self._stop = [s for s in stop if s]
        self._thinking = thinking if self._stop else None
        self._searched = 0  # characters in which there is no stop string
        # The last tokens: `num_read` whose text is known, which later ones may depend on, then the others.
        self._token_ids: list[int] = []
        self._num_read = 0
        self._known = ""  # the part of their text that is in `text`
        self._token_texts: list[str] = []  # that `take_token_texts` has not returned
        self._text = ""
        self._shown = 0
        self.stop_string: str | None = None  # that ended the text

    def push(self, token: int) -> bool:
        """Add a token. True if it completes a stop string; the text then ends before that string."""
        self._token_ids.append(token)
        piece = self._next_piece()
        self._token_texts.append(piece)
        if piece:
            self._append(piece)
        return self.stop_string is not None

    def _next_piece(self) -> str:
        """The text that the last token completes. The work for each token is bounded."""
        ids, num_open = self._token_ids, 0
        whole = self._decode(ids)
        if whole.endswith(BROKEN) or len(whole) <= len(self._known):
            if len(ids) - self._num_read < MAX_UNREAD:
                return ""
            # No character has that many bytes: all but the last of them never become one.
            whole = self._continued(whole)
            num_open = min(OPEN, len(whole) - len(self._known))
            del ids[self._num_read + FIRST_UNREAD : -LAST_UNREAD]
        else:
            whole = self._continued(whole)
            del ids[: self._num_read]
            self._num_read = len(ids)
        piece = whole[len(self._known) : len(whole) - num_open]
        self._known = self._decode(ids)
        self._known = self._known[: len(self._known) - num_open]
        return piece

    def _continued(self, whole: str) -> str:
        """`whole`, the text of the last tokens, or of the unread ones alone: with byte fallback, an invalid
        byte makes the decoder take back earlier characters of its run, which were shown.
        """
        if whole.startswith(self._known):
            return whole
        del self._token_ids[: self._num_read]
        self._num_read, self._known = 0, ""
        return self._decode(self._token_ids)

    def _decode(self, token_ids: list[int]) -> str:
        with no_panic(SessionError, "the bundle's tokenizer cannot decode this answer", "export it again"):
            text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def read(self) -> str:
        """The text that became final since the last call."""
        return self._up_to(len(self._text) - (self._held() if self.stop_string is None else 0))

    def take_token_texts(self, num_tokens: int) -> tuple[str, ...]:
        """The texts of the next `num_tokens` tokens of the answer; an end-of-sequence token was not pushed.
        They are whole: a stop string, and text that is held back, are part of them. A character has
        its text at its last token.
        """
        taken, self._token_texts = self._token_texts[:num_tokens], self._token_texts[num_tokens:]
        return (*taken, *[""] * (num_tokens - len(taken)))

    def finish(self) -> str:
        """All remaining text; an incomplete character becomes U+FFFD."""
        self.complete()
        return self._up_to(len(self._text))

    def complete(self) -> None:
        """Add the text of an incomplete last character, as U+FFFD, to `text`. No token follows."""
        if self.stop_string is not None:
            return
        rest = self._continued(self._decode(self._token_ids))[len(self._known) :]
        self._token_ids, self._num_read, self._known = [], 0, ""
        self._append(rest)

    @property
    def text(self) -> str:
        """All text so far, with held-back text, without the stop string."""
        return self._text

    def _append(self, piece: str) -> None:
        self._text += piece
        start: int | None = 0
        if self._thinking is not None:
            self._thinking.push(piece)
            start = self._thinking.answer_start
        if start is None:
            return
        places = [(self._text.find(s, max(start, self._searched - len(s) + 1)), s) for s in self._stop]
        self._searched = len(self._text)
        if found := [(at, s) for at, s in places if at >= 0]:
            at, self.stop_string = min(found)
            self._text = self._text[:at]

    def _held(self) -> int:
        """The number of last characters that may begin a stop string."""
        if self._thinking is not None and self._thinking.is_undecided:
            return len(self._text)
        longest = min(len(self._text), max(map(len, self._stop), default=0))
        ends = (self._text[-count:] for count in range(longest, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stop)), 0)

    def _up_to(self, end: int) -> str:
        shown, self._shown = self._shown, max(self._shown, end)
        return self._text[shown : self._shown]
