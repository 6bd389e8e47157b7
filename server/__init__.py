"""The server process: text, chat templates, HTTP and metrics. It never touches a tensor or a device."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("specter")
except PackageNotFoundError:
    # Run from a checkout that is not installed.
    __version__ = "0+unknown"
