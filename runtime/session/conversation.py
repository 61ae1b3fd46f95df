"""A talk in turns: what was said is not read again. Knows messages, texts and ids; no session, no device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Generic, Protocol, TypeVar

from ..decode.config import GenerationConfig
from ..errors import SessionError
from ..text.tokenizer import Message, Text

Pairs = tuple[tuple[str, str], ...]  # roles and texts
ROOM = 4  # where the oldest turns go, an answer finds up to this part of the context free


class Said(Protocol):
    """An answer as far as it came."""

    @property
    def text(self) -> str: ...

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def finish_reason(self) -> str: ...


class Reply(Protocol):
    """An answer that grows."""

    @property
    def completion(self) -> Said: ...

    @property
    def is_over(self) -> bool: ...

    @property
    def failed(self) -> bool: ...

    def close(self) -> None:
        """End it where it is."""
        ...


R = TypeVar("R", bound=Reply)


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and the text of its answer. `results`: of the calls of the answer before, in their place.

    `spellings`: texts of all that was read and said, the longest first, each with the ids that stand for it.
    None where the ids end with more than the text, as behind a stop string.
    """

    question: str
    answer: str
    spellings: tuple[tuple[str, tuple[int, ...]], ...] = ()
    results: tuple[str, ...] = ()

    @property
    def said(self) -> tuple[tuple[str, str], ...]:
        """Roles and texts."""
        return (*_asked(self.question, self.results), ("assistant", self.answer))


@dataclass(frozen=True, slots=True)
class Asked(Generic[R]):
    """A question whose answer is being made, and the prompt that asks it."""

    question: str
    results: tuple[str, ...]
    prompt: str
    ids: tuple[int, ...]
    reply: R


class Conversation(Generic[R]):
    """Turns of one user and the model. `send` asks the next question, and ends an answer that still runs.

    The ids of answers are kept: as long as the template renders the same text, a prompt begins with the very
    ids that were read and said. `ask` streams the answer to a prompt. `capacity`: tokens of a context. For
    one thread at a time.
    """

    def __init__(
        self,
        text: Text,
        ask: Callable[[list[int], GenerationConfig], R],
        capacity: int,
        system: str | None = None,
        *,
        drop_oldest: bool = False,
    ) -> None:
        self._text, self._ask, self._capacity = text, ask, capacity
        self.system, self.drop_oldest = system, drop_oldest
        self.dropped = 0  # turns that the last `send` let go to make room
        self._turns: list[Turn] = []
        self._asked: Asked[R] | None = None

    @property
    def turns(self) -> tuple[Turn, ...]:
        """What was said; an answer that is still being made is not among them."""
        if self._asked is not None and self._asked.reply.is_over:
            self._settle()
        return tuple(self._turns)

    @property
    def messages(self) -> list[Message]:
        """The same as chat messages, the system message first."""
        return self._messages(self.turns)

    def send(self, text: str, config: GenerationConfig | None = None) -> R:
        """Ask, and stream the answer. Raises SessionError for what cannot be asked, and is then as it was.

        Where the context ends, the oldest turns go if that was allowed; `dropped` says how many.
        """
        self._settle()
        return self._send(self._turns, text, (), config or GenerationConfig())

    def give(self, results: Sequence[str], config: GenerationConfig | None = None) -> R:
        """Give what the calls of the last answer came to, one text each, and stream what is said to that.

        `config` names the same tools. Raises SessionError as `send` does.
        """
        self._settle()
        if not results or not self._turns:
            raise SessionError("results must follow an answer with calls; give one for each of its calls")
        return self._send(self._turns, "", tuple(results), config or GenerationConfig())

    def edit(self, text: str, config: GenerationConfig | None = None, *, turn: int = -1) -> R:
        """Ask `text` in place of the question of `turn`, an index of `turns`; all behind it is forgotten."""
        self._settle()
        if not -len(self._turns) <= turn < len(self._turns):
            raise SessionError(f"there is no turn {turn}: the conversation has {len(self._turns)}")
        return self._send(self._turns[: turn % len(self._turns)], text, (), config or GenerationConfig())

    def undo(self, turns: int = 1) -> None:
        """Take the last turns back."""
        if turns < 1:
            raise SessionError(f"turns must be 1 or more, not {turns}")
        self._settle()
        del self._turns[max(0, len(self._turns) - turns) :]

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self._settle()
        self._turns = []

    def resume(self, messages: Sequence[Message]) -> None:
        """Let `messages` be what was said: a system message or none, then questions with their answers.

        Behind an answer with calls, tool messages stand for a question. Turns that are the same as here keep
        their ids. Raises SessionError for messages in another order.
        """
        self._settle()
        said = [(m["role"], m["content"]) for m in messages]
        system, rest = (said[0][1], said[1:]) if said[:1] and said[0][0] == "system" else (None, said)
        turns = list(_turns(rest))
        # Ids stand for all that was said up to there: they hold as far as nothing is another.
        same = 0
        if system == self.system:
            pairs = zip(self._turns, turns, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0].said == pair[1].said, pairs))
        self.system = system
        self._turns = self._turns[:same] + turns[same:]

    def _send(
        self, turns: Sequence[Turn], question: str, results: tuple[str, ...], config: GenerationConfig
    ) -> R:
        first = len(turns)
        prompt, ids = self._prompt(turns, question, results, config.tools)
        need = min(config.max_new_tokens, self._capacity // ROOM)
        if self.drop_oldest and len(ids) + need > self._capacity:
            # Room for two answers: where a turn went each time, all would be read again each time.
            while turns and (len(ids) + 2 * need > self._capacity or turns[0].results):
                turns = turns[1:]
                prompt, ids = self._prompt(turns, question, results, config.tools)
            if results and not turns:
                raise SessionError(self._full(len(ids), 1))
        if len(ids) > self._capacity:
            raise SessionError(self._full(len(ids), len(turns)))
        reply = self._ask(ids, config)
        self._turns, self.dropped = list(turns), first - len(turns)
        self._asked = Asked(question, results, prompt, tuple(ids), reply)
        return reply

    def _settle(self) -> None:
        """The answer in hand is over: what was said of it is a turn, unless it failed or nothing was."""
        asked, self._asked = self._asked, None
        if asked is None:
            return
        asked.reply.close()
        said = asked.reply.completion
        if asked.reply.failed or not said.token_ids:
            return
        written, ids = asked.prompt + said.text, (*asked.ids, *said.token_ids)
        spellings: tuple[tuple[str, tuple[int, ...]], ...] = ((written, ids),)
        if said.finish_reason == "eos":
            # The end is one of the ids and not in the text: the template writes it, or another one.
            spellings = ((written + self._text.spelled(ids[-1:]), ids), (written, ids[:-1]))
        elif said.finish_reason == "stop":
            spellings = ()
        self._turns.append(Turn(asked.question, said.text, spellings, asked.results))

    def _messages(
        self, turns: Sequence[Turn], question: str | None = None, results: Sequence[str] = ()
    ) -> list[Message]:
        asked = () if question is None else _asked(question, results)
        said = [("system", self.system), *(pair for turn in turns for pair in turn.said), *asked]
        return [{"role": role, "content": content} for role, content in said if content is not None]

    def _prompt(
        self, turns: Sequence[Turn], question: str, results: Sequence[str], tools: Any
    ) -> tuple[str, list[int]]:
        """Text and ids of the next prompt: known ids as far as the text is the one they stand for."""
        prompt = self._text.rendered(self._messages(turns, question, results), tools=tools)
        ids = self._text.encode_part(prompt)
        for written, known in turns[-1].spellings if turns else ():
            if prompt.startswith(written):
                spliced = [*known, *self._text.encode_part(prompt[len(written) :])]
                # A tokenizer may treat the beginning of a text in its own way: both must spell the same.
                if self._text.spelled(spliced) == self._text.spelled(ids):
                    return prompt, spliced
        return prompt, ids

    def _full(self, length: int, num_turns: int) -> str:
        holds = f"this bundle's context holds {self._capacity}"
        if not num_turns:
            return f"the question and the system message have {length} tokens, {holds}; shorten them"
        return (
            f"the conversation has {length} tokens with this question, {holds}; take turns back (undo), start"
            " over (reset), or open it with drop_oldest=True (--drop-oldest), which lets the oldest turns go"
        )


def _asked(question: str, results: Sequence[str]) -> Pairs:
    return tuple(("tool", result) for result in results) or (("user", question),)


def _turns(said: Sequence[tuple[str, str]]) -> Iterator[Turn]:
    """Turns of messages behind the system message. Raises SessionError for another order."""
    rest = list(said)
    while rest:
        is_first = len(rest) == len(said)
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
