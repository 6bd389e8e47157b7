import asyncio
import subprocess
import sys

import pytest

from server.waiting import both


def test_the_engine_is_started_before_the_servers_heavy_imports() -> None:
    """Both processes import for seconds, and should do so at the same time."""
    code = "import sys, server.__main__, server.listener, server.serve; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(output.split())
    assert "engine.client" in loaded
    assert not loaded & {"fastapi", "uvicorn", "starlette", "prometheus_client", "rich", "transformers", "torch"}


@pytest.mark.anyio
async def test_the_first_failure_cancels_the_other() -> None:
    cancelled = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await both(wait(), fail())
    assert cancelled.is_set()
