"""An engine process that takes part: started inside its control group, asked, and closed with its group."""

import sys
from collections.abc import Sequence
from pathlib import Path

from engine.client import EngineClient
from engine.config import BenchConfig
from engine.errors import EngineDiedError, SpecterError
from engine.protocol import Capabilities, OnProgress, Submit
from server.bench.cgroup import MemoryGroup, MemoryGroups
from server.bench.machine import peak_rss_bytes
from server.bench.reply import Reply, ask
from server.formats import megabytes

GRACE_SECONDS = 5.0
"""For the process to end by itself after it was told to."""


class BenchEngine:
    """Mutable; belongs to one event loop; `close` must be awaited in the end."""

    def __init__(self, client: EngineClient, groups: MemoryGroups, group: MemoryGroup | None) -> None:
        self._client = client
        self._groups = groups
        self._group = group
        self.model_path = Path()
        """Where the tokenizer is; set, as the capabilities are, once `start` returns."""
        self.capabilities: Capabilities

    @classmethod
    async def start(
        cls,
        config: BenchConfig,
        command: Sequence[str],
        groups: MemoryGroups,
        limit_bytes: int | None,
        on_progress: OnProgress,
    ) -> "BenchEngine":
        """Start the process and wait until it has loaded; raises SpecterError, and then nothing is left of it.

        Without `limit_bytes`, and where no group can be made, it runs in this process's group.
        """
        group = groups.make(limit_bytes) if limit_bytes else None
        try:
            client = await EngineClient.start(config, "bench", group.command(command) if group else command)
        except BaseException:
            if group:
                groups.remove(group)
            raise
        engine = cls(client, groups, group)
        try:
            engine.model_path = Path(await client.wait_located(on_progress))
            engine.capabilities = await client.wait_ready(on_progress)
        except SpecterError as error:
            reason = engine._explained(error)
            await engine.close()
            raise reason from None
        except BaseException:
            await engine.close()
            raise
        return engine

    @property
    def limit_bytes(self) -> int | None:
        return self._group.limit_bytes if self._group else None

    @property
    def peak_rss_bytes(self) -> int | None:
        return peak_rss_bytes(self._client.pid)

    async def ask(self, submit: Submit) -> Reply:
        """Raises SpecterError where there is no reply."""
        try:
            return await ask(self._client, submit)
        except SpecterError as error:
            raise self._explained(error) from None

    async def close(self) -> None:
        """Idempotent; also where it is cancelled, no process and no group is left."""
        try:
            await self._client.close(GRACE_SECONDS)
        finally:
            if self._group:
                self._groups.remove(self._group)

    def _explained(self, error: SpecterError) -> SpecterError:
        """The kernel kills without a word; whether it was for the group's limit, the group tells."""
        if isinstance(error, EngineDiedError) and self._group and self._group.num_kills:
            limit = megabytes(self._group.limit_bytes)
            return EngineDiedError(f"The kernel ended the engine, which took more than its control group's {limit}.")
        return error


def engine_command(module: str, stand_in: Sequence[str] | None) -> list[str]:
    """What runs the engine `module`; the `stand_in` of a test instead of any."""
    return list(stand_in) if stand_in else [sys.executable, "-m", module]
