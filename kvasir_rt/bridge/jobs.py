"""From a checked request to a job: prompts to token ids, defaults filled in, lengths checked."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kvasir_core.plan import Plan
from kvasir_rt.bridge.errors import ApiError, bad_request
from kvasir_rt.bridge.generation import TokenizerPort
from kvasir_rt.bridge.limits import Limits
from kvasir_rt.bridge.schemas import (
    ChatRequest,
    CompletionRequest,
    Message,
    Options,
    TokenizeRequest,
    stops_of,
)
from kvasir_rt.bridge.submissions import EnginePort, Job
from kvasir_rt.errors import ChatError, SamplingError
from kvasir_rt.sampling import SamplingParams
from kvasir_scenario.digits import whole_number

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What is being served, once it is loaded."""

    model: str
    engine: EnginePort
    tokenizer: TokenizerPort
    plan: Plan
    vocabulary: int  # Ids that a request may use.
    created: int  # Seconds since 1970, for /v1/models.

    @property
    def positions_max(self) -> int:
        """Most positions (prompt + output) of one request."""
        return min(self.plan.context, self.plan.kv_blocks * self.plan.kv_block)


class JobMaker:
    """Makes jobs for one served model; tokenises in threads, a few at once."""

    def __init__(self, served: Served, limits: Limits) -> None:
        self._served = served
        self._limits = limits
        self._tokenising = asyncio.Semaphore(limits.tokenising_max)

    async def completion(self, request: CompletionRequest) -> Job:
        """Raises ApiError (400) when a prompt is empty, out of the vocabulary or too long."""
        self._check_model(request.model)
        texts = self._prompts(request.prompt)
        choices = request.n or 1
        self._check_places(len(texts), choices)
        prompts = tuple(
            [self._checked_ids(p) if isinstance(p, list) else await self._encode(p) for p in texts]
        )
        room = self._served.positions_max
        outputs = tuple(
            self._output_tokens(
                len(ids),
                request.max_tokens,
                default=min(self._limits.output_tokens_default, max(1, room - len(ids))),
            )
            for ids in prompts
        )
        return self._job(request, prompts, outputs, request.logprobs)

    async def chat(self, request: ChatRequest) -> Job:
        """Raises ApiError (400) when the template refuses the messages or they are too long."""
        self._check_model(request.model)
        self._check_places(1, request.n or 1)
        ids = await self.chat_ids(request.messages)
        asked = request.max_completion_tokens or request.max_tokens
        outputs = self._output_tokens(
            len(ids), asked, default=max(1, self._served.positions_max - len(ids))
        )
        top = (request.top_logprobs or 0) if request.logprobs else None
        return self._job(request, (ids,), (outputs,), top)

    async def tokenize(self, request: TokenizeRequest) -> list[int]:
        self._check_model(request.model)
        if request.messages is not None:
            return await self.chat_ids(request.messages)
        add_bos = request.add_special_tokens is not False
        return await self._encode(request.prompt or "", add_bos=add_bos, may_be_empty=True)

    async def chat_ids(self, messages: list[Message]) -> list[int]:
        self._check_text_length(sum(len(m.as_template_input["content"]) for m in messages))
        inputs = [message.as_template_input for message in messages]
        try:
            ids = await self._in_thread(lambda: self._served.tokenizer.chat(inputs))
        except ChatError as error:
            raise bad_request(f"messages: {error}") from None
        if not ids:
            raise bad_request("messages: the chat template made no token of them.")
        return ids

    def _job(
        self,
        request: Options,
        prompts: tuple[list[int], ...],
        outputs: tuple[int, ...],
        top: int | None,
    ) -> Job:
        ignores_eos = bool(request.ignore_eos)
        return Job(
            prompts=prompts,
            choices=request.n or 1,
            output_tokens_max=outputs,
            sampling=sampling_of(request, top, self._served.vocabulary),
            seed=request.seed,
            stops=stops_of(request),
            stop_ids=frozenset() if ignores_eos else self._served.tokenizer.eos_ids,
            wants_logprobs=top is not None,
            deadline_s=min(request.deadline_s or self._limits.deadline_s, self._limits.deadline_s),
        )

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self._served.model:
            raise ApiError(
                404,
                f"There is no model {model[:80]!r} here; this server has {self._served.model!r}.",
                code="model_not_found",
            )

    def _check_places(self, prompts: int, choices: int) -> None:
        limit = self._limits.submissions_max
        if prompts * choices > limit:
            raise bad_request(
                f"{prompts} prompts with n = {choices} are {prompts * choices} generations; "
                f"the limit is {limit}."
            )

    def _prompts(self, prompt: Any) -> list[str | list[int]]:
        """The four forms: a string, strings, token ids, lists of token ids."""
        rule = "prompt must be a string, a list of strings, token ids, or a list of lists of them"
        if isinstance(prompt, str):
            return [prompt]
        if not isinstance(prompt, list):
            raise bad_request(f"{rule}.")
        if not prompt:
            raise bad_request("prompt is an empty list; it must hold at least one prompt.")
        if all(type(item) is int for item in prompt):
            return [prompt]
        if len(prompt) > self._limits.prompts_max:
            raise bad_request(
                f"prompt has {len(prompt)} prompts; the limit is {self._limits.prompts_max}."
            )
        is_text = all(isinstance(item, str) for item in prompt)
        is_ids = all(
            isinstance(item, list) and all(type(id_) is int for id_ in item) for item in prompt
        )
        if not (is_text or is_ids):
            raise bad_request(f"{rule}, not a mixture.")
        return prompt

    def _checked_ids(self, ids: list[int]) -> list[int]:
        if not ids:
            raise bad_request("A prompt has no token ids; it must have at least one.")
        low, high = min(ids), max(ids)
        if low < 0 or high >= self._served.vocabulary:
            raise bad_request(
                f"Token id {low if low < 0 else high} is outside the vocabulary: ids are from 0 to "
                f"{self._served.vocabulary - 1}."
            )
        return ids

    async def _encode(
        self, text: str, *, add_bos: bool = True, may_be_empty: bool = False
    ) -> list[int]:
        self._check_text_length(len(text))
        ids = await self._in_thread(
            lambda: self._served.tokenizer.encode(text, add_bos=add_bos, parse_special=True)
        )
        if not ids and not may_be_empty:
            raise bad_request(
                "The prompt is empty and this model's files add no beginning-of-text token; "
                "give at least one token."
            )
        return ids

    def _check_text_length(self, characters: int) -> None:
        """Refuses, before any work, a text that cannot fit however well it is tokenised."""
        fewest = characters // self._served.tokenizer.token_bytes_max
        if fewest > self._served.positions_max:
            raise self._too_long(f"at least {fewest} prompt tokens")

    def _output_tokens(self, prompt_tokens: int, asked: int | None, *, default: int) -> int:
        output = default if asked is None else asked
        if prompt_tokens + output > self._served.positions_max:
            raise self._too_long(
                f"{prompt_tokens} prompt tokens and {output} output tokens, "
                f"{prompt_tokens + output} together"
            )
        return output

    def _too_long(self, found: str) -> ApiError:
        return bad_request(
            f"This server's context length is {self._served.positions_max} tokens; the request "
            f"has {found}. Shorten the prompt or ask for fewer tokens.",
            code="context_length_exceeded",
        )

    async def _in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        async with self._tokenising:
            return await asyncio.to_thread(work)


def sampling_of(request: Options, top: int | None, vocabulary: int) -> SamplingParams:
    """The sampler's parameters; what the request leaves out has the API's default.

    Raises:
        ApiError: 400, a parameter is out of its range.
    """

    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    try:
        return SamplingParams(
            temperature=given(request.temperature, 1.0),
            top_k=max(0, request.top_k or 0),
            top_p=given(request.top_p, 1.0),
            min_p=given(request.min_p, 0.0),
            repetition_penalty=given(request.repetition_penalty, 1.0),
            frequency_penalty=given(request.frequency_penalty, 0.0),
            presence_penalty=given(request.presence_penalty, 0.0),
            logprobs=top,
            logit_bias=_bias(request.logit_bias, vocabulary),
        )
    except SamplingError as error:
        raise bad_request(str(error)) from None


def _bias(given: dict[str, float] | None, vocabulary: int) -> tuple[tuple[int, float], ...]:
    bias = []
    for text, value in (given or {}).items():
        token = whole_number(text, 0, vocabulary - 1)
        if token is None or str(token) != text:  # Neither too long nor a second "7" as "07".
            raise bad_request(
                f"logit_bias has the key {text[:80]!r}; keys are token ids from 0 to "
                f"{vocabulary - 1}."
            )
        bias.append((token, value))
    return tuple(bias)
