"""What is logged to stderr."""

import logging

PROBES = ("/health", "/ready", "/metrics")


def set_up_logging(level: str) -> None:
    """Log from `level` on: "debug", "info", "warning" or "error"."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if level != "debug":
        # uvicorn announces its own start and end there, long before and after Specter's.
        logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.getLogger().level))
        logging.getLogger("uvicorn.access").addFilter(_is_no_probe)


def _is_no_probe(record: logging.LogRecord) -> bool:
    """Probes come every few seconds, and their lines would bury the others."""
    path = record.args[2] if isinstance(record.args, tuple) and len(record.args) > 2 else ""
    return not str(path).startswith(PROBES)
