"""The HTTP server, with the APIs of OpenAI and Anthropic. `app` makes an ASGI application of sessions."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .options import ServeOptions
    from .routes import app

_LAZY = {"app": "routes", "ServeOptions": "options"}

__all__ = ["ServeOptions", "app"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
