"""The HTTP server, with the APIs of OpenAI and Anthropic. `app` makes an ASGI application of sessions."""

from .options import ServeOptions
from .routes import app

__all__ = ["ServeOptions", "app"]
