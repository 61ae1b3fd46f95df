"""The server on Ray Serve: replicas behind one address. `build` makes an application of the arguments in a
configuration file, `app` one of environment variables. Both are imported at first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .application import app, build

_LAZY = {"app": "application", "build": "application"}

__all__ = ["app", "build"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
