"""Everything that Specter raises on purpose.

SpecterError
+-- ConfigError                 a setting has a value that cannot be used
+-- ModelNotFoundError          the model is neither a directory, nor a hub id that can be fetched, nor "demo"
+-- UnsupportedModelError       the architecture, its cache or its experts cannot be served
+-- InsufficientMemoryError     a part of the model does not fit its memory budget
+-- PackError                   a packed model is damaged or cannot be written
+-- TransferError               an expert could not be moved to the device
+-- RequestError                one request cannot be served; the engine goes on
|   +-- ContextLengthError      the prompt does not fit the model's context
|   +-- RequestFailedError      the engine failed while serving it: its fault, not the request's
+-- EngineDiedError             the engine process ended

Messages are one sentence for the user, with the value that is wrong and the remedy.
"""


class SpecterError(Exception):
    """Base of all errors that are raised on purpose; `str(error)` is meant for the user."""


class ConfigError(SpecterError):
    pass


class ModelNotFoundError(SpecterError):
    pass


class UnsupportedModelError(SpecterError):
    pass


class InsufficientMemoryError(SpecterError):
    pass


class PackError(SpecterError):
    pass


class TransferError(SpecterError):
    pass


class RequestError(SpecterError):
    pass


class ContextLengthError(RequestError):
    def __init__(self, num_prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{num_prompt_tokens} tokens in the prompt. Please shorten it."
        )


class RequestFailedError(RequestError):
    pass


class EngineDiedError(SpecterError):
    pass


def first_line(error: Exception) -> str:
    """What a library says, cut to the line that fits into a message of ours."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
