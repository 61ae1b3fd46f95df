"""The configuration of a fleet: its bundles, and the replicas that serve them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from inspect import signature
from typing import Annotated, Any, get_args

from ...decode.limits import Limits
from ...errors import SessionError
from ...rules import Rule, broken, integer, number, one_of
from ...session.session import Session
from ..options import LogFormat, LogLevel, ServeOptions

RANGE = re.compile(r"([1-9][0-9]{0,4})(?::([1-9][0-9]{0,4}))?")


def read_replicas(value: object) -> tuple[int, int]:
    """The numbers of N or "MIN:MAX"; (0, 0) for any other value."""
    match = RANGE.fullmatch(str(value))
    smallest, largest = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    return (smallest, largest) if smallest <= largest else (0, 0)


def _is_paths(value: object) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(p, str) for p in value.values())


PATHS = Rule("a mapping of names to paths, with at least one", _is_paths)
REPLICAS = Rule("N or MIN:MAX, 1 or more", lambda value: read_replicas(value) != (0, 0))


@dataclass(frozen=True, slots=True)
class Fleet:
    """Each replica is a complete server of all bundles. Raises SessionError for invalid values.

    bundles: directories on every machine, by model name
    replicas: N, or "MIN:MAX" to follow the load
    threads, gpus: of each replica; a share of a GPU is allowed
    session: further arguments of Session.open
    options: of the server
    key_file: file of API keys, on every machine
    log_level, log_format: of the log
    """

    bundles: Annotated[Mapping[str, str], PATHS]
    replicas: Annotated[int | str, REPLICAS] = 1
    threads: Annotated[int, integer(1)] = 1
    gpus: Annotated[float, number("a number of 0 or more")] = 0.0
    session: Mapping[str, Any] = field(default_factory=dict)
    options: ServeOptions = field(default_factory=ServeOptions)
    key_file: str | None = None
    log_level: Annotated[str, one_of(get_args(LogLevel))] = "info"
    log_format: Annotated[str, one_of(get_args(LogFormat))] = "text"

    def __post_init__(self) -> None:
        if problems := broken(self):
            raise SessionError("; ".join(problems.values()), field=next(iter(problems)))


def read_fleet(arguments: Mapping[str, Any]) -> Fleet:
    """A fleet from the arguments of a configuration file: fields of Fleet, arguments of Session.open, fields
    of ServeOptions (without keys) and of Limits. Raises SessionError.
    """
    names = {
        "fleet": {f.name for f in fields(Fleet)} - {"session", "options"},
        "session": set(signature(Session.open).parameters) - {"path", "threads"},
        "options": {f.name for f in fields(ServeOptions)} - {"limits", "keys"},
        "limits": {f.name for f in fields(Limits)},
    }
    known = set().union(*names.values())
    if unknown := [repr(name) for name in arguments if name not in known]:
        raise SessionError(f"unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in arguments.items()}
    parts: dict[str, dict[str, Any]] = {
        part: {name: value for name, value in values.items() if name in names[part]} for part in names
    }
    options = ServeOptions(limits=Limits(**parts["limits"]), **parts["options"])
    return Fleet(**{"bundles": {}, **parts["fleet"]}, session=parts["session"], options=options)
