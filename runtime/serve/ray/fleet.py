"""The configuration of a fleet: bundles, their replicas, and the front."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ...decode.schedule import Limits
from ...errors import SessionError
from ...rules import is_integer, number
from ..logs import FORMATS, LEVELS
from ..options import ServeOptions

SPARE = 2  # requests beyond its rows that a replica may have, so that no row idles
AMOUNT = number("a number of 0 or more")


@dataclass(frozen=True, slots=True)
class Share:
    """One bundle and its replicas.

    name: of the model
    path: of the bundle
    least, most: number of replicas
    threads: of each replica
    gpus: of each replica; a share of a GPU is allowed
    device, variant, accuracy_level, cache_bytes, prefix_dir, prefix_bytes, safe, parse_special: as in
        Session.open
    """

    name: str
    path: str
    least: int = 1
    most: int = 1
    threads: int = 1
    gpus: float = 0.0
    device: str = "cpu"
    variant: str | None = None
    accuracy_level: int | None = None
    cache_bytes: int | None = None
    prefix_dir: str | None = None
    prefix_bytes: int = 4 << 30
    safe: bool = False
    parse_special: bool = False


@dataclass(frozen=True, slots=True)
class Fleet:
    """All bundles with their replicas, and the front.

    shares: the bundles
    options: of the server
    key_file: file of API keys, on every machine
    fronts: number of fronts
    front_cpus: CPUs of a front; above 0, fronts are not placed on a head node without CPUs, and outlive it
    bound: requests that a replica may have more than the least busy one to get a request for its prefix cache
    log_level, log_format: of the log
    """

    shares: tuple[Share, ...]
    options: ServeOptions = field(default_factory=ServeOptions)
    key_file: str | None = None
    fronts: int = 1
    front_cpus: float = 0.0
    bound: int = 2
    log_level: str = "info"
    log_format: str = "text"

    @property
    def ongoing(self) -> int:
        """Most requests of a replica at a time."""
        return self.options.limits.max_rows + SPARE

    @property
    def most_threads(self) -> int:
        """CPUs of all replicas."""
        return sum(share.most * share.threads for share in self.shares)


OF_LIMITS = {f.name for f in fields(Limits)}
OF_OPTIONS = {f.name for f in fields(ServeOptions)} - {"limits", "keys"}
OF_SHARE = ({f.name for f in fields(Share)} - {"name", "path", "least", "most"}) | {"replicas"}
OF_FLEET = {f.name for f in fields(Fleet)} - {"shares", "options"}


def read_fleet(arguments: Mapping[str, Any]) -> Fleet:
    """Read the arguments of a configuration.

    `bundles` has names with paths, or with mappings that have a `path`. Fields of Share, such as replicas (N
    or "MIN:MAX") and threads, are for all bundles, or in such a mapping for one. Fields of Fleet,
    ServeOptions and Limits follow. Raises a SessionError that lists every problem.
    """
    wrong: list[str] = []
    known = OF_LIMITS | OF_OPTIONS | OF_SHARE | OF_FLEET | {"bundles"}
    names = ", ".join(sorted(known))
    wrong += [f"unknown {name!r}; known are {names}" for name in arguments if name not in known]
    common = {name: arguments[name] for name in OF_SHARE if name in arguments}
    bundles = arguments.get("bundles")
    shares = []
    if not isinstance(bundles, Mapping) or not bundles:
        wrong.append("bundles must be a mapping of names to paths, with at least one")
    else:
        shares = [_share(str(name), entry, common, wrong) for name, entry in bundles.items()]
    own = {name: arguments[name] for name in OF_FLEET if name in arguments}
    for name, least in (("fronts", 1), ("bound", 0)):
        if not is_integer(own.get(name, least), least):
            wrong.append(f"{name} must be an integer of {least} or more, not {own[name]!r}")
    if not AMOUNT.holds(own.get("front_cpus", 0.0)):
        wrong.append(f"front_cpus must be a number of 0 or more, not {own['front_cpus']!r}")
    for name, words in (("log_level", LEVELS), ("log_format", FORMATS)):
        if own.get(name, words[0]) not in words:
            wrong.append(f"{name} must be one of {', '.join(words)}, not {own[name]!r}")
    options = ServeOptions()
    try:
        options = _options(arguments)
    except (SessionError, TypeError, ValueError) as error:
        wrong.append(str(error))
    if wrong:
        raise SessionError("; ".join(wrong))
    return Fleet(tuple(share for share in shares if share is not None), options, **own)


def _options(arguments: Mapping[str, Any]) -> ServeOptions:
    limits = Limits(**{name: arguments[name] for name in OF_LIMITS if name in arguments})
    values = {name: arguments[name] for name in OF_OPTIONS if name in arguments}
    for name in ("cors_origins", "adaptive"):
        if name in values:
            values[name] = tuple(values[name])
    if values.get("hosts") is not None:
        values["hosts"] = frozenset(values["hosts"])
    return ServeOptions(limits=limits, **values)


def _share(name: str, entry: Any, common: Mapping[str, Any], wrong: list[str]) -> Share | None:
    own = {"path": entry} if isinstance(entry, str | Path) else entry
    if not isinstance(own, Mapping) or not isinstance(own.get("path"), str | Path):
        wrong.append(f"bundles.{name} must be a path, or a mapping with one")
        return None
    values = {**common, **own}
    before = len(wrong)
    wrong += [f"bundles.{name}: unknown {key!r}" for key in own if key not in OF_SHARE | {"path"}]
    if not name or any(character in name for character in "#/ \n"):
        wrong.append(f"bundles.{name}: a name must not have spaces, / or #")
    number = values.get("replicas", 1)
    replicas = read_replicas(number)
    if replicas is None:
        wrong.append(f"bundles.{name}: replicas must be N or MIN:MAX, 1 or more, not {number!r}")
    if not is_integer(values.get("threads", 1), 1):
        wrong.append(f"bundles.{name}: threads must be an integer of 1 or more, not {values['threads']!r}")
    if not AMOUNT.holds(values.get("gpus", 0.0)):
        wrong.append(f"bundles.{name}: gpus must be a number of 0 or more, not {values['gpus']!r}")
    if len(wrong) > before or replicas is None:
        return None
    least, most = replicas
    names = {f.name for f in fields(Share)} - {"name", "least", "most"}
    settings = {key: values[key] for key in names if key in values}
    return Share(name, least=least, most=most, **{**settings, "path": str(settings["path"])})


def read_replicas(value: Any) -> tuple[int, int] | None:
    """The numbers of "N" or "MIN:MAX"; None for any other value."""
    least, colon, most = str(value).partition(":")
    numbers = [least, most if colon else least]
    if isinstance(value, bool) or not all(n.isascii() and n.isdigit() and 0 < len(n) < 6 for n in numbers):
        return None
    first, last = map(int, numbers)
    return (first, last) if 1 <= first <= last else None
