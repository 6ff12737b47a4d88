"""The command line: one file a command; results on stdout, progress on stderr, exit 0 / 1 wrong / 2 usage."""

from .app import app, main

__all__ = ["app", "main"]
