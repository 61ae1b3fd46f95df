"""The messages between the front and a replica."""

from __future__ import annotations

from dataclasses import dataclass

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request for any replica of a bundle.

    `keys` are hashes of its prompt's beginnings (see affinity.py), `avoid` replicas that failed with it.
    """

    method: str
    path: str
    headers: Headers
    body: bytes
    keys: tuple[str, ...] = ()
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Begun:
    """The replica has the request: the first part of every answer."""

    replica: str


@dataclass(frozen=True, slots=True)
class Start:
    """Status and headers."""

    status: int
    headers: Headers


Part = Begun | Start | bytes


@dataclass(frozen=True, slots=True)
class Whole:
    """The whole answer of one replica."""

    replica: str
    status: int
    body: bytes


class Lost(Exception):
    """The replica of a call has ended, or dropped the call."""
