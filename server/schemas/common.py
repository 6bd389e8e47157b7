"""What chats and text completions have in common."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationInfo

from engine.protocol import SamplingParams
from server.sampling import override

MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
MAX_TOP_K = 2**31 - 1


def only(*accepted: Any) -> AfterValidator:
    """A field that is known and not supported: it may only have values that change nothing."""

    def check(value: Any, info: ValidationInfo) -> Any:
        # `True == 1` and `0 == False`, but a count is not a switch.
        if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in accepted):
            raise ValueError(f"'{info.field_name}' = {value!r:.100} is not supported by this server; leave it out.")
        return value

    return AfterValidator(check)


def _listed(value: Any) -> Any:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


class StreamOptions(BaseModel):
    include_usage: bool = False


class GenerationRequest(BaseModel):
    """Parameters of every generation. Unknown fields are ignored; null is the same as left out."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    model: str | None = None
    """The served model where left out: there is only one."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[list[Annotated[str, StringConstraints(min_length=1)]], BeforeValidator(_listed)] = []
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOP_K)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=MIN_SEED, le=MAX_SEED)
    ignore_eos: bool | None = None

    n: Annotated[Any, only(None, 1)] = None
    logprobs: Annotated[Any, only(None, False)] = None
    presence_penalty: Annotated[Any, only(None, 0)] = None
    frequency_penalty: Annotated[Any, only(None, 0)] = None
    repetition_penalty: Annotated[Any, only(None, 1)] = None
    logit_bias: Annotated[Any, only(None, {})] = None
    response_format: Annotated[Any, only(None, {"type": "text"})] = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        return override(
            defaults,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
        )


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
