"""From a request's text to deltas of its answer: template, token ids, queue, engine, detokenizer, stop strings."""

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.client import EngineClient
from engine.errors import ContextLengthError, RequestError
from engine.protocol import Capabilities, Finished, Prefill, SamplingParams, Submit, Traced
from server.admission import Admission, QueueFullError, Ticket
from server.detokenizer import Detokenizer
from server.errors import shutting_down
from server.metrics import Metrics
from server.observer import RequestObserver
from server.output import FinishReason, OutputText

if TYPE_CHECKING:
    # Importing it takes seconds, in which the listener should be up.
    from server.tokenizer import Tokenizer


@dataclass(frozen=True)
class GenerationOptions:
    max_tokens: int | None
    """None: all that fit the context."""
    stop: list[str]
    sampling: SamplingParams
    ignore_eos: bool


class Delta(NamedTuple):
    """A piece of the answer; only the last has a reason, and there is always a last."""

    text: str
    finish_reason: FinishReason | None = None


class Generation:
    """One request with a place in the queue. `deltas` may be iterated once; `close` must be called in the end."""

    def __init__(
        self,
        engine: EngineClient,
        submit: Submit,
        output: OutputText,
        ticket: Ticket,
        observer: RequestObserver,
        max_model_len: int,
    ) -> None:
        self._engine = engine
        self._submit = submit
        self._output = output
        self._ticket = ticket
        self._observer = observer
        self._max_model_len = max_model_len

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._submit.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self._output.num_tokens

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Wait for the engine, then yield the answer; leaving early frees the engine at its next step."""
        outcome = "abort"
        try:
            await self._ticket.turn()
            self._observer.admitted()
            finish_reason: FinishReason = "stop"
            text = ""
            async with aclosing(self._engine.generate(self._submit)) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        if event.reason == "abort":
                            raise shutting_down()
                        finish_reason = event.reason
                        break
                    if isinstance(event, Traced):
                        continue
                    self._observer.cycle(event.cycle)
                    if isinstance(event, Prefill):
                        continue
                    if event.estimates is not None:
                        self._observer.estimates(event.estimates)
                    text = self._push(event.token_ids)
                    if self._output.stopped:
                        break
                    if text:
                        yield Delta(text)
                        text = ""
            outcome = finish_reason
            self._ticket.leave()
            yield Delta(text + self._output.finish(), finish_reason)
        except Exception:
            outcome = "error"
            raise
        finally:
            self._ticket.leave()
            self._observer.finished(outcome)

    def close(self) -> None:
        """Leave the queue, also where `deltas` was never started; idempotent."""
        self._ticket.leave()

    def _push(self, token_ids: list[int]) -> str:
        num_before = self._output.num_tokens
        text = self._output.push(token_ids)
        self._observer.tokens(self._output.num_tokens - num_before, self.num_prompt_tokens, self._max_model_len)
        return text


class Generator:
    """Starts generations with the loaded model."""

    def __init__(
        self,
        engine: EngineClient,
        capabilities: Capabilities,
        tokenizer: "Tokenizer",
        default_sampling: SamplingParams,
        admission: Admission,
        metrics: Metrics,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._admission = admission
        self._metrics = metrics
        self._vocab_size = capabilities.vocab_size
        self._eos_token_ids = frozenset(capabilities.eos_token_ids)
        self.max_model_len = capabilities.plan.max_model_len
        self.default_sampling = default_sampling

    async def chat(
        self, messages: list[dict[str, Any]], template_kwargs: dict[str, Any], options: GenerationOptions
    ) -> Generation:
        """Raises RequestError for messages that the template or the context does not take, QueueFullError."""
        observer = RequestObserver(self._metrics)
        token_ids = await asyncio.to_thread(self._tokenizer.apply_chat_template, messages, template_kwargs)
        return self._enter(token_ids, options, observer)

    async def complete(self, prompt: str | list[int], options: GenerationOptions) -> Generation:
        """Raises RequestError for a prompt that is empty, too long or outside the vocabulary, QueueFullError."""
        observer = RequestObserver(self._metrics)
        if isinstance(prompt, str):
            prompt = await asyncio.to_thread(self._tokenizer.encode, prompt)
        elif unknown := next((token_id for token_id in prompt if token_id >= self._vocab_size), None):
            raise RequestError(f"Token id {unknown} in 'prompt' is beyond the vocabulary of {self._vocab_size}.")
        return self._enter(prompt, options, observer)

    def _enter(self, token_ids: list[int], options: GenerationOptions, observer: RequestObserver) -> Generation:
        if not token_ids:
            raise RequestError("The prompt is empty.")
        room = self.max_model_len - len(token_ids)
        if room < 1:
            self._metrics.rejected["context_length"].inc()
            raise ContextLengthError(len(token_ids), self.max_model_len)
        try:
            ticket = self._admission.enter()
        except QueueFullError:
            self._metrics.rejected["queue_full"].inc()
            raise
        observer.queued()
        submit = Submit(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=token_ids,
            max_tokens=min(options.max_tokens or room, room),
            sampling=options.sampling,
            ignore_eos=options.ignore_eos,
        )
        detokenizer = Detokenizer(self._tokenizer.decode, self._tokenizer.special_token_ids)
        output = OutputText(detokenizer, options.stop, () if options.ignore_eos else self._eos_token_ids)
        return Generation(self._engine, submit, output, ticket, observer, self.max_model_len)
