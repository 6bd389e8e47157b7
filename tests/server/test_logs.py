import logging

import pytest

from server.logs import _is_no_probe, set_up_logging


def access(path: str) -> logging.LogRecord:
    """A record as uvicorn makes it."""
    arguments = ("127.0.0.1:1234", "GET", path, "1.1", 200)
    return logging.LogRecord("uvicorn.access", logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', arguments, None)


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_probes_are_not_logged(path: str) -> None:
    assert not _is_no_probe(access(path))


def test_requests_are_logged() -> None:
    assert _is_no_probe(access("/v1/chat/completions"))
    assert _is_no_probe(logging.LogRecord("uvicorn.access", logging.INFO, "", 0, "plain", None, None))


@pytest.mark.parametrize(("level", "expected"), [("info", logging.WARNING), ("error", logging.ERROR)])
def test_uvicorn_is_quiet_about_itself(monkeypatch: pytest.MonkeyPatch, level: str, expected: int) -> None:
    for name in ("", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "level", logger.level)
        monkeypatch.setattr(logger, "filters", list(logger.filters))
    logging.getLogger().setLevel(level.upper())
    set_up_logging(level)
    assert logging.getLogger("uvicorn.error").level == expected
