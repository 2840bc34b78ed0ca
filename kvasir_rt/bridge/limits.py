"""Every limit of the bridge, with its reason. What is beyond one is refused before it costs."""

from dataclasses import dataclass

MEBIBYTE = 1 << 20
HEADER_BYTES_MAX = 32 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on what one client, and all clients together, can make the bridge hold or wait for."""

    # One request.
    body_bytes_max: int = 8 * MEBIBYTE  # About 2 million words: above any context we can serve.
    bodies_bytes_max: int = 128 * MEBIBYTE  # All bodies being read at once.
    body_s_max: float = 30.0  # From the headers to the last byte of the body.
    header_bytes_max: int = HEADER_BYTES_MAX
    header_s_max: float = 15.0  # From the connection (or the last answer) to complete headers.
    linger_s_max: float = 2.0  # An answer was sent before the body had arrived: let it be read.
    write_s_max: float = 60.0  # A client that reads nothing for so long is gone.
    # What a request may ask for.
    prompts_max: int = 64  # In one completions request.
    choices_max: int = 16  # `n`.
    submissions_max: int = 128  # prompts x n: places in the queue that one request can take.
    messages_max: int = 4096
    stops_max: int = 4  # As the OpenAI API.
    stop_characters_max: int = 1024
    output_tokens_default: int = 16  # Of /v1/completions, as the OpenAI API.
    deadline_s: float = 600.0  # From arrival to the last token, unless the request asks for less.
    stream_opens_s: float = 1.0  # A refusal in this time still gets its own status.
    comment_s: float = 15.0  # A comment keeps proxies from closing a stream that waits.
    # All requests together.
    waiting_max: int = 256  # Submissions beyond `running_max` that may wait.
    connections_max: int = 2048  # Each costs some 40 KiB and a descriptor.
    tokenising_max: int = 4  # Prompts being tokenised at once, in threads.
    # Health.
    lap_age_s_max: float = 2.0  # A lap this recent proves the ring; an older one needs a probe.
    probe_s_max: float = 5.0  # What a probe's lap may take before the ring counts as stuck.
