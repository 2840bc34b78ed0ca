"""The runtime's exceptions, drawn as one tree under the core's `KvasirError`.

KvasirError
├── ModelFileError         a model file is hostile, truncated, not GGUF, or lacks a key or tensor
│   └── UnsupportedModel   a sound file that asks for something this runtime does not do; named
├── ModelMemoryError       weights or KV memory cannot fit this machine; both numbers are named
├── StageStateError        a micro-batch does not continue the rows that this stage holds
├── SamplingError          a sampling parameter is out of range, or logits are not finite
├── ChatError              messages that the model's chat template cannot render
└── ServeError             what was asked of `kvasir-rt serve` contradicts itself or is not allowed
"""

from kvasir_core.errors import KvasirError


class ModelFileError(KvasirError):
    """A model file cannot be used; the message names path, what was found and what is right."""


class UnsupportedModel(ModelFileError):
    """The file is sound, but needs an architecture or feature that is not implemented."""


class ModelMemoryError(KvasirError):
    """A stage asked for more memory than this machine has; nothing was allocated."""

    exit_status = 1


class SamplingError(KvasirError, ValueError):
    """A sampling parameter is out of range; the message names it, its value and the range."""


class ChatError(KvasirError):
    """The chat template refused the messages, or the model has none."""


class ServeError(KvasirError):
    """What was asked for cannot be served as it stands; the message says what to change."""


class StageStateError(KvasirError):
    """A micro-batch does not continue what this stage holds; the stage cannot go on with it."""
