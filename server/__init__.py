"""The server process: text, chat templates, HTTP and metrics. It never touches a tensor or a device."""

import time
from importlib.metadata import PackageNotFoundError, version

STARTED_SECONDS = time.monotonic()
"""When the process began, but for the interpreter's own start."""

try:
    __version__ = version("specter")
except PackageNotFoundError:
    # Run from a checkout that is not installed.
    __version__ = "0+unknown"
