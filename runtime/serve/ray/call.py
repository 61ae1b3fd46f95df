"""What goes from the front to a replica, and what comes back, part by part. Values only."""

from __future__ import annotations

from dataclasses import dataclass

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request for any replica of a bundle.

    keys: what its prompt begins with, the longest last (`affinity`). avoid: replicas that were lost with it.
    """

    method: str
    path: str
    headers: Headers
    body: bytes
    keys: tuple[str, ...] = ()
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Begun:
    """The replica has it: the first part of every answer."""

    replica: str


@dataclass(frozen=True, slots=True)
class Start:
    """Status and headers, before the bytes of the body."""

    status: int
    headers: Headers


Part = Begun | Start | bytes


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole answer of one replica."""

    replica: str
    status: int
    body: bytes


class Lost(Exception):
    """The replica that had a call is no more, or let go of it."""
