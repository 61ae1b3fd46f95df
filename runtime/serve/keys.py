"""The API keys of a server."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path

from ..errors import MarsError

CLIENT_DIGITS = 16  # hexadecimal digits of a key's hash that name its client, also in the log


class Keys:
    """The accepted keys, as hashes; without keys, everyone may use the server. Comparing takes the same time
    for wrong keys as for right ones.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._hashes: list[bytes] = []
        self.replace(keys)

    @property
    def is_open(self) -> bool:
        return not self._hashes

    def replace(self, keys: Sequence[str]) -> int:
        """Accept these keys from now on, and return how many they are. Running requests continue."""
        self._hashes = [_hash(key) for key in keys]
        return len(self._hashes)

    def find(self, authorization: str | None) -> str | None:
        """The client with the key in an Authorization header, or None: a digest of the key, the same in every
        process. Every key is compared every time.
        """
        scheme, _, key = (authorization or "").partition(" ")
        digest, client = _hash(key.strip()), None
        for known in self._hashes:
            if hmac.compare_digest(digest, known):
                client = known.hex()[:CLIENT_DIGITS]
        return client if scheme.lower() == "bearer" else None


def _hash(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file, one per line, without empty lines and comments (#). Raises MarsError."""
    try:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise MarsError(f"{path}: cannot be read as a file of API keys ({error})") from error
    return parse_keys([line for line in lines if line and not line.startswith("#")], str(path))


def parse_keys(keys: Iterable[str], where: str) -> tuple[str, ...]:
    """Distinct keys that a header can carry. Raises MarsError."""
    unique = tuple(dict.fromkeys(keys))
    if not unique:
        raise MarsError(f"{where}: no key in it; write one per line", field="keys")
    if wrong := [i for i, key in enumerate(unique, 1) if not re.fullmatch("[!-~]+", key)]:
        what = f"{where}: keys {wrong[:5]} have spaces or characters that a header cannot carry"
        raise MarsError(what, field="keys")
    return unique
