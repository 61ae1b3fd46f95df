"""The HTTP server, with the APIs of OpenAI and Anthropic. `app` makes an ASGI application of sessions."""

from typing import TYPE_CHECKING, Any

from .options import ServeOptions

if TYPE_CHECKING:
    from .routes import app

__all__ = ["ServeOptions", "app"]


def __getattr__(name: str) -> Any:
    """`app` is imported when it is used: the command line needs the options only."""
    if name != "app":
        raise AttributeError(name)
    from .routes import app

    return app
