"""Chat templates of other people, run in a sandbox with a budget. The only room that knows jinja2."""
