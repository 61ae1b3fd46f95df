"""A conversation in turns. Its prompts begin with the token ids of earlier turns, which are cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ..decode.config import GenerationConfig
from ..errors import SessionError
from ..text.dialects import Message
from .answer import Stream

if TYPE_CHECKING:
    from ..text.tokenizer import Text

Pairs = tuple[tuple[str, str], ...]  # roles and texts
ROOM = 4  # when the oldest turns are dropped, at most 1 / ROOM of the context is kept free for the answer


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer. `results` stand for the question: they are those of the last answer's calls.

    `spellings`: texts of the whole conversation up to here, the longest first, each with its token ids. None
    if the ids end with more than the text, for example after a stop string.
    """

    question: str
    answer: str
    spellings: tuple[tuple[str, tuple[int, ...]], ...] = ()
    results: tuple[str, ...] = ()

    @property
    def pairs(self) -> Pairs:
        return (*_question_pairs(self.question, self.results), ("assistant", self.answer))


@dataclass(frozen=True, slots=True)
class OpenTurn:
    """A question whose answer is being generated, and its prompt."""

    question: str
    results: tuple[str, ...]
    prompt: str
    ids: tuple[int, ...]
    stream: Stream


class Conversation:
    """Turns of one user and the model. `send` asks the next question, and ends a running answer.

    The ids of answers are kept: as long as the template renders the same text, a prompt begins with exactly
    the ids of earlier turns. `ask` streams the answer to a prompt. `capacity`: tokens of the context. Not
    thread-safe.
    """

    def __init__(
        self,
        text: Text,
        ask: Callable[[list[int], GenerationConfig], Stream],
        capacity: int,
        system: str | None = None,
        *,
        drop_oldest: bool = False,
    ) -> None:
        self._text, self._ask, self._capacity = text, ask, capacity
        self.system, self.drop_oldest = system, drop_oldest
        self.dropped = 0  # turns that the last `send` dropped to make room
        self._turns: list[Turn] = []
        self._open: OpenTurn | None = None

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The finished turns."""
        if self._open is not None and self._open.stream.is_over:
            self._settle()
        return tuple(self._turns)

    @property
    def messages(self) -> list[Message]:
        """The finished turns as chat messages, after the system message."""
        return self._messages(self.turns)

    def send(self, text: str, config: GenerationConfig | None = None) -> Stream:
        """Ask a question and stream the answer. If it raises SessionError, the conversation is unchanged.

        At the end of the context the oldest turns are dropped if that is allowed; `dropped` counts them.
        """
        self._settle()
        return self._send(self._turns, text, (), config or GenerationConfig())

    def give(self, results: Sequence[str], config: GenerationConfig | None = None) -> Stream:
        """Give the results of the last answer's calls, one text each, and stream the next answer.

        `config` must have the same tools. Raises SessionError as `send` does.
        """
        self._settle()
        if not results or not self._turns:
            raise SessionError("results must follow an answer with calls; give one for each of its calls")
        return self._send(self._turns, "", tuple(results), config or GenerationConfig())

    def edit(self, text: str, config: GenerationConfig | None = None, *, turn: int = -1) -> Stream:
        """Ask `text` instead of the question of `turn`, an index of `turns`. Later turns are removed."""
        self._settle()
        if not -len(self._turns) <= turn < len(self._turns):
            raise SessionError(f"there is no turn {turn}: the conversation has {len(self._turns)}")
        return self._send(self._turns[: turn % len(self._turns)], text, (), config or GenerationConfig())

    def undo(self, turns: int = 1) -> None:
        """Remove the last turns."""
        if turns < 1:
            raise SessionError(f"turns must be 1 or more, not {turns}")
        self._settle()
        del self._turns[max(0, len(self._turns) - turns) :]

    def reset(self) -> None:
        """Remove all turns; the system message stays."""
        self._settle()
        self._turns = []

    def resume(self, messages: Sequence[Message]) -> None:
        """Replace the conversation by `messages`: an optional system message, then questions with answers.

        After an answer with calls, tool messages stand for a question. Turns that equal those of this
        conversation keep their ids. Raises SessionError for messages in another order.
        """
        self._settle()
        pairs = [(m["role"], m["content"]) for m in messages]
        has_system = bool(pairs) and pairs[0][0] == "system"
        system = pairs[0][1] if has_system else None
        turns = list(_turns(pairs[has_system:]))
        # The ids of a turn are those of the whole conversation up to there.
        equal = 0
        if system == self.system:
            both = zip(self._turns, turns, strict=False)
            equal = sum(1 for _ in takewhile(lambda pair: pair[0].pairs == pair[1].pairs, both))
        self.system = system
        self._turns = self._turns[:equal] + turns[equal:]

    def _send(
        self, turns: Sequence[Turn], question: str, results: tuple[str, ...], config: GenerationConfig
    ) -> Stream:
        num_turns = len(turns)
        prompt, ids = self._prompt(turns, question, results, config.tools)
        room = min(config.max_new_tokens, self._capacity // ROOM)
        if self.drop_oldest and len(ids) + room > self._capacity:
            # Drop more than is needed now: every drop means that the rest must be read again.
            while turns and (len(ids) + 2 * room > self._capacity or turns[0].results):
                turns = turns[1:]
                prompt, ids = self._prompt(turns, question, results, config.tools)
            if results and not turns:
                raise SessionError(self._full(len(ids), 1))
        if len(ids) > self._capacity:
            raise SessionError(self._full(len(ids), len(turns)))
        stream = self._ask(ids, config)
        self._turns, self.dropped = list(turns), num_turns - len(turns)
        self._open = OpenTurn(question, results, prompt, tuple(ids), stream)
        return stream

    def _settle(self) -> None:
        """End a running answer. It becomes a turn unless it failed or is empty."""
        turn, self._open = self._open, None
        if turn is None:
            return
        turn.stream.close()
        answer = turn.stream.completion
        if turn.stream.failed or not answer.token_ids:
            return
        text, ids = turn.prompt + answer.text, (*turn.ids, *answer.token_ids)
        spellings: tuple[tuple[str, tuple[int, ...]], ...] = ((text, ids),)
        if answer.finish_reason == "eos":
            # The end is one of the ids but not in the text. The template may write it, or another one.
            spellings = ((text + self._text.spelled(ids[-1:]), ids), (text, ids[:-1]))
        elif answer.finish_reason == "stop":
            spellings = ()
        self._turns.append(Turn(turn.question, answer.text, spellings, turn.results))

    def _messages(
        self, turns: Sequence[Turn], question: str | None = None, results: Sequence[str] = ()
    ) -> list[Message]:
        system = () if self.system is None else (("system", self.system),)
        new = () if question is None else _question_pairs(question, results)
        pairs = [*system, *(pair for turn in turns for pair in turn.pairs), *new]
        return [{"role": role, "content": content} for role, content in pairs]

    def _prompt(
        self, turns: Sequence[Turn], question: str, results: Sequence[str], tools: Any
    ) -> tuple[str, list[int]]:
        """Text and ids of the next prompt; it begins with the last turn's ids if their text is the same."""
        prompt = self._text.rendered(self._messages(turns, question, results), tools=tools)
        ids = self._text.encode_part(prompt)
        for text, text_ids in turns[-1].spellings if turns else ():
            if prompt.startswith(text):
                spliced = [*text_ids, *self._text.encode_part(prompt[len(text) :])]
                # A tokenizer may treat the beginning of a text specially: both must decode to the same text.
                if self._text.spelled(spliced) == self._text.spelled(ids):
                    return prompt, spliced
        return prompt, ids

    def _full(self, length: int, num_turns: int) -> str:
        holds = f"this bundle's context holds {self._capacity}"
        if not num_turns:
            return f"the question and the system message have {length} tokens, {holds}; shorten them"
        return (
            f"the conversation has {length} tokens with this question, {holds}; remove turns (undo), start"
            " over (reset), or open it with drop_oldest=True (--drop-oldest), which drops the oldest turns"
        )


def _question_pairs(question: str, results: Sequence[str]) -> Pairs:
    return tuple(("tool", result) for result in results) or (("user", question),)


def _turns(pairs: Sequence[tuple[str, str]]) -> Iterator[Turn]:
    """The turns of messages after the system message. Raises SessionError for messages in another order."""
    rest = list(pairs)
    while rest:
        is_first = len(rest) == len(pairs)
        results = [text for _, text in takewhile(lambda pair: pair[0] == "tool", rest)]
        num = len(results) or 1
        roles = [role for role, _ in rest[: num + 1]]
        if roles != (["tool"] * num if results else ["user"]) + ["assistant"] or (results and is_first):
            raise SessionError(
                "a conversation must consist of questions and their answers in turn; give user and assistant"
                " messages in pairs, a system message only before them, and results of calls, as tool"
                " messages, only between two answers"
            )
        yield Turn("" if results else rest[0][1], rest[num][1], results=tuple(results))
        rest = rest[num + 1 :]
