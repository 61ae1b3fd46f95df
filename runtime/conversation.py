"""A talk in turns: what was said is not read again. Knows messages, texts and ids; no session, no device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from .decode.config import GenerationConfig
from .errors import SessionError
from .text import Message, Text

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
    """A question and the text of its answer.

    `spellings`: texts of all that was read and said, the longest first, each with the ids that stand for it.
    None where the ids end with more than the text, as behind a stop string.
    """

    question: str
    answer: str
    spellings: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Asked(Generic[R]):
    """A question whose answer is being made, and the prompt that asks it."""

    question: str
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
        return self._send(self._turns, text, config or GenerationConfig())

    def edit(self, text: str, config: GenerationConfig | None = None, *, turn: int = -1) -> R:
        """Ask `text` in place of the question of `turn`, an index of `turns`; all behind it is forgotten."""
        self._settle()
        if not -len(self._turns) <= turn < len(self._turns):
            raise SessionError(f"there is no turn {turn}: the conversation has {len(self._turns)}")
        return self._send(self._turns[: turn % len(self._turns)], text, config or GenerationConfig())

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

        Turns that are the same as here keep their ids. Raises SessionError for messages in another order.
        """
        self._settle()
        said = [(m["role"], m["content"]) for m in messages]
        system, rest = (said[0][1], said[1:]) if said[:1] and said[0][0] == "system" else (None, said)
        if [role for role, _ in rest] != ["user", "assistant"] * (len(rest) // 2):
            raise SessionError(
                "a conversation goes on behind questions and their answers in turn; give user and assistant"
                " messages in pairs, a system message only before them"
            )
        pairs = [(rest[i][1], rest[i + 1][1]) for i in range(0, len(rest), 2)]
        # Ids stand for all that was said up to there: they hold as far as nothing is another.
        same = 0
        if system == self.system:
            here = [(turn.question, turn.answer) for turn in self._turns]
            while same < min(len(here), len(pairs)) and here[same] == pairs[same]:
                same += 1
        self.system = system
        self._turns = self._turns[:same] + [Turn(question, answer) for question, answer in pairs[same:]]

    def _send(self, turns: Sequence[Turn], question: str, config: GenerationConfig) -> R:
        first = len(turns)
        prompt, ids = self._prompt(turns, question)
        need = min(config.max_new_tokens, self._capacity // ROOM)
        if self.drop_oldest and len(ids) + need > self._capacity:
            # Room for two answers: where a turn went each time, all would be read again each time.
            while turns and len(ids) + 2 * need > self._capacity:
                turns = turns[1:]
                prompt, ids = self._prompt(turns, question)
        if len(ids) > self._capacity:
            raise SessionError(self._full(len(ids), len(turns)))
        reply = self._ask(ids, config)
        self._turns, self.dropped = list(turns), first - len(turns)
        self._asked = Asked(question, prompt, tuple(ids), reply)
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
        self._turns.append(Turn(asked.question, said.text, spellings))

    def _messages(self, turns: Sequence[Turn], question: str | None = None) -> list[Message]:
        said = [
            ("system", self.system),
            *(pair for turn in turns for pair in _pairs(turn)),
            ("user", question),
        ]
        return [{"role": role, "content": content} for role, content in said if content is not None]

    def _prompt(self, turns: Sequence[Turn], question: str) -> tuple[str, list[int]]:
        """Text and ids of the next prompt: known ids as far as the text is the one they stand for."""
        prompt = self._text.render(self._messages(turns, question))
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
            f"the conversation has {length} tokens with this question, {holds}; take turns back (undo), begin"
            " anew (reset), or open it with drop_oldest=True (--drop-oldest), which lets the oldest turns go"
        )


def _pairs(turn: Turn) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("user", turn.question), ("assistant", turn.answer)
