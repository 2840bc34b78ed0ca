"""What a request asks of sampling, with its ranges; light, for the bridge and the wire.

`sampler` picks. The order of its steps: logit bias and penalties on the logits, temperature, then
top-k, top-p of what is left, min-p relative to the likeliest. Penalties look at the request's whole
text so far, prompt included. Reported log-probabilities are the model's own, before any of these.
"""

from dataclasses import dataclass, fields

from kvasir_core.plan import LOGPROBS_MAX
from kvasir_rt.errors import SamplingError

LOGIT_BIAS_MAX = 300  # Entries, as the OpenAI API allows.

# Inclusive ranges of the real-valued parameters.
RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are picked; the defaults pick the likeliest.

    Attributes:
        temperature: 0 is greedy.
        top_k: Keep the k likeliest; 0 keeps all.
        top_p: Keep the likeliest until they hold this share; 1 keeps all.
        min_p: Keep what is at least this share of the likeliest; 0 keeps all.
        repetition_penalty: Divides positive, multiplies negative logits of seen tokens; 1 is none.
        frequency_penalty: Taken from a token's logit for each time it was seen.
        presence_penalty: Taken once if it was seen.
        seed: Any 64-bit number; requests with the same seed and prompt get the same tokens.
        logprobs: Alternatives to report beside the chosen token's log-probability; None: neither.
        logit_bias: (token, added to its logit).

    Raises:
        SamplingError: A value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if not least <= value <= most:  # Written so that a NaN fails.
                raise SamplingError(f"{name} is {value}; it must be from {least} to {most}")
        if self.top_k < 0:
            raise SamplingError(f"top_k is {self.top_k}; it must be at least 1, or 0 for all")
        if not 0 <= (self.logprobs or 0) <= LOGPROBS_MAX:
            raise SamplingError(f"logprobs is {self.logprobs}; it must be from 0 to {LOGPROBS_MAX}")
        if not -(1 << 63) <= self.seed < 1 << 64:
            raise SamplingError(f"seed is {self.seed}; it must be a 64-bit number")
        if len(self.logit_bias) > LOGIT_BIAS_MAX:
            raise SamplingError(
                f"logit_bias has {len(self.logit_bias)} tokens; the limit is {LOGIT_BIAS_MAX}"
            )
        for token, bias in self.logit_bias:
            if token < 0 or not -100.0 <= bias <= 100.0:
                raise SamplingError(
                    f"logit_bias of token {token} is {bias}; it must be from -100 to 100"
                )

    @property
    def needs_history(self) -> bool:
        """Whether the tail must know the request's tokens so far."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the likeliest of the untouched logits is the answer."""
        return self.temperature == 0 and not self.logit_bias and not self.needs_history


SAMPLING_BYTES_MAX = 64 * len(fields(SamplingParams)) + 32 * LOGIT_BIAS_MAX
"""Bytes of one `SamplingParams` in a message, generously."""
