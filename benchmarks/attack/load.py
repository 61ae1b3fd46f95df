"""One round of load on a batcher, by its seed: threads and an event loop at once, with cancels, bad input,
changes of tau, grammars, deadlines and slow readers. Every answer is compared with that of a single request.
"""

from __future__ import annotations

import asyncio
import queue
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from mars_export import (
    Batcher,
    Completion,
    GenerationConfig,
    Limits,
    Overloaded,
    Request,
    Session,
    SessionError,
)
from mars_export.runtime.decode.backend import Backend, StepOutput

HABITS = ("read", "read", "result", "slow", "leave", "cancel", "change", "deadline")
WORDS = ("light", "on", " ", "the", "été", "\n", "🙂", "door")
SHAPES: tuple[dict[str, Any], ...] = (
    {"schema": {"type": "array", "items": {"type": "integer"}}},
    {"regex": "[a-f]{3,9}(-[0-9]+)*"},
    {"choice": ("light on", "light off", "été 🙂")},
)  # what an answer may have to look like
CACHE_BYTES = 64 << 20  # of prefixes: full within minutes, so that entries go as well
REPEATS, LAST_BITS = 200, 3e-6
STUCK = 120.0  # seconds after which a client counts as waiting for ever


@dataclass(frozen=True, slots=True)
class Asked:
    """What one client asks for, and how it behaves. A bad prompt must be refused."""

    prompt: Any
    config: GenerationConfig
    habit: str
    at: int  # events after which it does what its habit says
    deadline: float | None
    is_bad: bool


def ask(seed: int, session: Session) -> Asked:
    """The request of a seed."""
    draw = random.Random(seed)
    vocabulary, context = session.bundle.manifest.model.vocab_size, session.backend.max_capacity
    habit, at = draw.choice(HABITS), draw.randrange(4)
    length = min(draw.choice((1, 2, 7, 30, 90, 1500)), context // 4)
    mask = session.bundle.manifest.tokens.mask
    ids = [draw.randrange(vocabulary) for _ in range(length)]
    ids = [(mask + 1) % vocabulary if i == mask else i for i in ids]
    prompt: Any = ids
    if session.text is not None and draw.random() < 0.2:
        prompt = "".join(draw.choice(WORDS) for _ in range(draw.randint(1, min(40, context // 8))))
    is_bad = draw.random() < 0.1
    if is_bad:
        bad = [[], "", 5, None, b"light", [True], [vocabulary], [-1], "\ud800", ["a"], [{}], {1: 2}]
        prompt = draw.choice([*bad, [1] * (context + 1), "light " * 40 * context])
    settings: dict[str, Any] = {"max_new_tokens": draw.randint(1, 40)}
    if draw.random() < 0.3:
        settings["eos_ids"] = ()
    if session.text is not None and draw.random() < 0.2:
        settings["stop"] = (chr(draw.randrange(97, 123)),)
    kind = draw.random()
    if habit == "change":
        settings["tau"] = 1.0  # and exact later: the same text
    elif kind < 0.4:
        settings["lookup"] = draw.choice((0, 0, 1, 2))
    else:
        settings |= {"tau": draw.choice((1.0, 0.9, 0.4, 0.0)), "window": draw.choice((1, 2, "full"))}
        if "logits" in session.backend.outputs and draw.random() < 0.3:
            settings |= {"temperature": 0.8, "seed": seed}
    if "logits" in session.backend.outputs and session.text is not None and draw.random() < 0.1:
        settings |= draw.choice(SHAPES)
    deadline = draw.choice((0.0005, 0.005, 0.05)) if habit == "deadline" else None
    return Asked(prompt, GenerationConfig(**settings), habit, at, deadline, is_bad)


@dataclass(slots=True)
class Tally:
    """What came of the requests; `wrong` says what should not have happened."""

    whole: int = 0
    ties: int = 0  # another answer, which last bits bring about
    begun: int = 0  # ended early by their clients or a deadline: the beginning of the answer alone
    refused: int = 0
    overloaded: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)


class Load:
    """The clients of one round."""

    def __init__(self, session: Session, batcher: Batcher, seeds: Sequence[int]) -> None:
        self.session, self.batcher, self.seeds = session, batcher, list(seeds)
        self.tally = Tally()
        self._left: queue.SimpleQueue[int] = queue.SimpleQueue()
        for seed in self.seeds:
            self._left.put(seed)
        self._done: list[tuple[int, Asked, Completion]] = []
        self._lock = threading.Lock()

    def run(self, num_threads: int, num_tasks: int) -> Tally:
        """Serve all seeds, then compare."""
        threads = [threading.Thread(target=self._client, daemon=True) for _ in range(num_threads)]
        threads.append(threading.Thread(target=lambda: asyncio.run(self._clients(num_tasks)), daemon=True))
        for thread in threads:
            thread.start()
        until = time.monotonic() + STUCK
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                self._note("a client waits for ever")
        self._compare()
        counts = self.batcher.counts
        if counts.ended != counts.accepted or counts.accepted != len(self._done):
            self._note(f"{len(self._done)} answers, but {counts}")
        if self.batcher.num_running or self.batcher.num_waiting:
            self._note("the batcher keeps requests that are over")
        return self.tally

    def _note(self, words: str) -> None:
        with self._lock:
            self.tally.wrong.append(words)

    def _next(self) -> tuple[int, Asked] | None:
        try:
            seed = self._left.get_nowait()
        except queue.Empty:
            return None
        return seed, ask(seed, self.session)

    # --- clients in threads ---

    def _client(self) -> None:
        while (found := self._next()) is not None:
            seed, asked = found
            try:
                request = self._submit(seed, asked)
                if request is not None:
                    self._read(request, asked, seed)
            except BaseException as error:
                self._note(f"seed {seed}: {type(error).__name__}: {error}")

    def _submit(self, seed: int, asked: Asked) -> Request | None:
        wait = 0 if seed % 3 == 0 else None
        while True:
            try:
                request = self.batcher.submit(
                    asked.prompt, asked.config, wait=wait, deadline=asked.deadline, client=seed % 4
                )
            except Overloaded as error:
                self._overloaded(seed, error)
                wait = None
            except SessionError as error:
                self._refused(seed, asked, error)
                return None
            else:
                return self._accepted(seed, asked, request)

    def _read(self, request: Request, asked: Asked, seed: int) -> None:
        if asked.habit == "result":
            request.result(STUCK)
        else:
            for i, _ in enumerate(request):
                if self._act(request, asked, i):
                    break
                if asked.habit == "slow":
                    time.sleep(0.002)
        self._finished(seed, asked, request)

    # --- clients of the event loop ---

    async def _clients(self, number: int) -> None:
        await asyncio.gather(*(self._task() for _ in range(number)))

    async def _task(self) -> None:
        while (found := self._next()) is not None:
            seed, asked = found
            try:
                request = await self._asubmit(seed, asked)
                if request is not None:
                    await self._aread(request, asked, seed)
            except BaseException as error:
                self._note(f"seed {seed}: {type(error).__name__}: {error}")

    async def _asubmit(self, seed: int, asked: Asked) -> Request | None:
        while True:
            try:
                request = await self.batcher.asubmit(
                    asked.prompt, asked.config, wait=None, deadline=asked.deadline, client="loop"
                )
            except Overloaded as error:  # its deadline came before there was room
                self._overloaded(seed, error)
            except SessionError as error:
                self._refused(seed, asked, error)
                return None
            else:
                return self._accepted(seed, asked, request)

    async def _aread(self, request: Request, asked: Asked, seed: int) -> None:
        if asked.habit == "result":
            await request.aresult()
        else:
            i = 0
            async for _ in request:
                if self._act(request, asked, i):
                    request.cancel()
                i += 1
                await asyncio.sleep(0.002 if asked.habit == "slow" else 0)
        self._finished(seed, asked, request)

    # --- both ---

    def _act(self, request: Request, asked: Asked, i: int) -> bool:
        """What a client does after its event `i`; whether it leaves."""
        if i == asked.at and asked.habit == "cancel":
            request.cancel()
        if asked.habit == "change":
            if i % 2:
                request.tau = 1.0
            else:
                request.exact = True
        return i == asked.at and asked.habit == "leave"

    def _overloaded(self, seed: int, error: Overloaded) -> None:
        with self._lock:
            self.tally.overloaded += 1
        if not 1 <= error.retry_after <= 60:
            self._note(f"seed {seed}: retry after {error.retry_after} s")

    def _refused(self, seed: int, asked: Asked, error: SessionError) -> None:
        with self._lock:
            self.tally.refused += 1
        if not asked.is_bad:
            self._note(f"seed {seed}: refused: {error}")

    def _accepted(self, seed: int, asked: Asked, request: Request) -> Request:
        if asked.is_bad:
            self._note(f"seed {seed}: a bad prompt was taken: {asked.prompt!r:.200}")
        return request

    def _finished(self, seed: int, asked: Asked, request: Request) -> None:
        with self._lock:
            self._done.append((seed, asked, request.completion))

    def _compare(self) -> None:
        for seed, asked, got in self._done:
            alone = self.session.generate(asked.prompt, asked.config)
            self.tally.tokens += len(got.token_ids)
            early = {"leave": "cancelled", "cancel": "cancelled", "deadline": "deadline"}
            is_early = got.finish_reason in ("cancelled", "deadline")
            if is_early:
                self.tally.begun += 1
            else:
                self.tally.whole += 1
            if is_early and early.get(asked.habit) != got.finish_reason:
                self._note(f"seed {seed}: {asked.habit}: ended by {got.finish_reason}")
            elif not is_same(got, alone):
                if any(is_same(got, other) for other in in_other_bits(self.session, asked)):
                    self.tally.ties += 1
                else:
                    self._note(f"seed {seed}: {asked.habit}: {got!r:.1500} instead of {alone!r:.1500}")


def is_same(got: Completion, alone: Completion) -> bool:
    """Whether it is the answer alone, or the beginning of it where it was ended early."""
    if got.finish_reason in ("cancelled", "deadline"):
        return alone.token_ids[: len(got.token_ids)] == got.token_ids
    of_both = [(a.token_ids, a.text, a.finish_reason) for a in (got, alone)]
    return of_both[0] == of_both[1]


class Shaken:
    """A backend whose predictions differ from another's in the last bits, drawn anew in each step."""

    def __init__(self, backend: Backend, seed: int) -> None:
        self._backend, self._random = backend, np.random.default_rng(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def step(self, *arguments: Any) -> StepOutput:
        output = self._backend.step(*arguments)
        changed = {"confidence": self._shaken(output.confidence)}
        if output.logits is not None:
            changed["logits"] = self._shaken(output.logits)
        if output.topk_ids is not None and output.topk_logprobs is not None:
            of_two = output.topk_logprobs[..., 0] - output.topk_logprobs[..., 1] < LAST_BITS
            other = of_two & (self._random.random(of_two.shape) < 0.5)
            changed["token_ids"] = np.where(other, output.topk_ids[..., 1], output.token_ids)
        return replace(output, **changed)

    def _shaken(self, array: np.ndarray) -> np.ndarray:
        return array * (1 + LAST_BITS * self._random.standard_normal(array.shape, np.float32))


def in_other_bits(session: Session, asked: Asked) -> Iterator[Completion]:
    """The answer alone, again and again, with other last bits.

    Kernels add up in another order where a step has more rows, so a token that is as likely as another but
    for the last bits, or a draw between the two, may be the other one beside neighbours. An answer that last
    bits do not bring about is a fault.
    """
    backend = session.backend
    try:
        for i in range(REPEATS):
            session.backend = cast(Backend, Shaken(backend, i))
            yield session.generate(asked.prompt, asked.config)
    finally:
        session.backend = backend


def limits_of(seed: int) -> Limits:
    draw = random.Random(seed)
    return Limits(
        max_rows=draw.choice((1, 2, 5, 8)),
        max_waiting=draw.choice((2, 8, 32)),
        prefill_tokens=draw.choice((8, 32, 128)),
        kv_bytes=draw.choice((None, 2_000_000)),
        client_share=draw.choice((1.0, 0.5)),
    )


def play(session: Session, seed: int, requests: int, num_threads: int = 12, num_tasks: int = 6) -> Tally:
    """One round."""
    with Batcher(session, limits_of(seed)) as batcher:
        seeds = range(seed * requests, (seed + 1) * requests)
        return Load(session, batcher, seeds).run(num_threads, num_tasks)


def exact_session(bundle: Path) -> Session:
    """A session in which a row's numbers do not depend on its neighbours, but for the last bits."""
    session = Session.open(bundle, threads=1, cache_bytes=CACHE_BYTES)
    if session.variant.precision not in ("int4", "int8"):
        return session
    # Activations that are rounded to 8 bits make another token of a last bit.
    return Session.open(bundle, threads=1, accuracy_level=0, cache_bytes=CACHE_BYTES)
