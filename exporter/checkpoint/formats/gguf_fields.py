"""The metadata of a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....runtime.errors import CheckpointError
from ..tensors import shown

if TYPE_CHECKING:
    from gguf import GGUFReader

ORIGINAL = "export the original Hugging Face checkpoint"


class Fields:
    """GGUF metadata by name."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self.path, self._fields = path, reader.fields

    def names(self) -> list[str]:
        return list(self._fields)

    def get(self, name: str, default: Any = None) -> Any:
        """A field's value, or `default` if it is absent."""
        field = self._fields.get(name)
        return default if field is None else field.contents()

    def need(self, name: str, kind: Any, default: Any = None) -> Any:
        """A field's value. Raises CheckpointError unless it is of type `kind`."""
        value = self.get(name, default)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise CheckpointError(
                f"{self.path}: the GGUF field `{name}` cannot be {shown(value)}; {ORIGINAL}"
            )
        return value

    def token_id(self, name: str) -> int | None:
        """The id of a special token. Raises CheckpointError if it is not that of a token."""
        name = f"tokenizer.ggml.{name}_token_id"
        if name not in self._fields:
            return None
        value: int = self.need(name, int)
        if not 0 <= value < len(self.need("tokenizer.ggml.tokens", list)):
            raise CheckpointError(f"{self.path}: the GGUF field `{name}` cannot be {value}; {ORIGINAL}")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value: int = self.need(name, int, default)
        if not 0 < value < 2**31:
            raise CheckpointError(f"{self.path}: the GGUF field `{name}` cannot be {value}; {ORIGINAL}")
        return value
