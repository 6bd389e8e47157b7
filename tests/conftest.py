import os

import hypothesis
import pytest

# Before anything imports torch: threads that spin while they wait lose most of a busy machine's time (see
# `engine.process`).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# On a busy machine one example may take long, and that says nothing. A run repeats the one before it; look further with
# --hypothesis-profile=explore.
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.register_profile("specter", deadline=None, derandomize=True)
hypothesis.settings.load_profile("specter")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
