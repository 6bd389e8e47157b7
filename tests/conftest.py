import hypothesis
import pytest

# On a busy machine one example may take long, and that says nothing.
hypothesis.settings.register_profile("specter", deadline=None)
hypothesis.settings.load_profile("specter")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
