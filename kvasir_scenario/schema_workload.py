"""Section `workload`: which requests come, when, and how long they are."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, Tag, model_validator

from kvasir_scenario.schema_types import (
    AsTuple,
    Count,
    Factor,
    PathText,
    PositiveSeconds,
    Seconds,
    Section,
    Share,
    Text,
    Whole,
    broken,
    broken_at,
    choose,
    is_number,
)

TOKENS_MAX = 100_000_000  # Of one request; a hundred times the longest context.
SAMPLES_MAX = 50_000

Tokens = Annotated[int, Field(ge=1, le=TOKENS_MAX), Whole]
TokensOrZero = Annotated[int, Field(ge=0, le=TOKENS_MAX), Whole]
ArrivalRate = Annotated[float, Field(gt=0, le=1e6)]


def _percentile_keys(value: Any) -> Any:
    """Keys of a YAML map arrive as text; here they are numbers."""
    if not isinstance(value, dict):
        return value
    points: dict[Any, Any] = {}
    for key, tokens in value.items():
        try:
            point = float(key)
        except (TypeError, ValueError):
            raise broken_at((key,), "a percentile must be a number from 0 to 100") from None
        if not 0 <= point <= 100:
            raise broken_at((key,), "a percentile must be a number from 0 to 100")
        if point in points:
            raise broken_at((key,), f"the percentile {point:g} stands here twice")
        points[point] = tokens
    return points


class Lognormal(Section):
    """Log-normal by its median and its 90th percentile."""

    median: Annotated[float, Field(gt=0, le=TOKENS_MAX)]
    p90: Annotated[float, Field(gt=0, le=TOKENS_MAX)]

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.p90 < self.median:
            raise broken("p90", f"found {self.p90:g}; it must be at least the median")
        return self


class Distribution(Section):
    """Exactly one of the forms; `min` and `max` clip what is drawn."""

    percentiles: Annotated[
        dict[float, Annotated[float, Field(ge=0, le=TOKENS_MAX)]] | None,
        BeforeValidator(_percentile_keys),
    ] = None
    """{50: 120, 90: 400}: linear between the points, flat beyond them."""
    lognormal: Lognormal | None = None
    empirical: Annotated[
        tuple[Annotated[float, Field(ge=0, le=TOKENS_MAX)], ...] | None,
        AsTuple,
        Field(min_length=1, max_length=SAMPLES_MAX),
    ] = None
    """Values to draw from, each as often as it stands here."""
    uniform: Annotated[
        tuple[
            Annotated[float, Field(ge=0, le=TOKENS_MAX)],
            Annotated[float, Field(ge=0, le=TOKENS_MAX)],
        ]
        | None,
        AsTuple,
    ] = None
    """[least, most], both possible."""
    min: Annotated[float, Field(ge=0, le=TOKENS_MAX)] | None = None
    max: Annotated[float, Field(ge=0, le=TOKENS_MAX)] | None = None

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        forms = {
            "percentiles": self.percentiles,
            "lognormal": self.lognormal,
            "empirical": self.empirical,
            "uniform": self.uniform,
        }
        given = [name for name, value in forms.items() if value is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise broken("", f"found {found}; give exactly one of {', '.join(forms)}")
        if self.percentiles is not None:
            _check_percentiles(self.percentiles)
        if self.uniform and self.uniform[0] > self.uniform[1]:
            raise broken("uniform", f"found {list(self.uniform)}; the least stands first")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise broken("min", f"found {self.min:g}; it must be at most max ({self.max:g})")
        return self


def _check_percentiles(points: dict[float, float]) -> None:
    if not points:
        raise broken("percentiles", "found none; give at least one, for example {50: 120}")
    values = [points[point] for point in sorted(points)]
    if values != sorted(values):
        raise broken("percentiles", "a higher percentile has a smaller value; they must not fall")


def _number_or_map(value: Any) -> str | None:
    if is_number(value):
        return "number"
    return "map" if isinstance(value, dict | Distribution | RateProfile) else None


Lengths = Annotated[
    Annotated[Tokens, Tag("number")] | Annotated[Distribution, Tag("map")],
    choose(
        _number_or_map, "it must be a number, or a distribution such as {percentiles: {50: 120}}"
    ),
]
Durations = Annotated[
    Annotated[Seconds, Tag("number")] | Annotated[Distribution, Tag("map")],
    choose(_number_or_map, "it must be seconds, or a distribution such as {uniform: [20, 120]}"),
]


class RatePhase(Section):
    """A rate and how long it holds."""

    rate_per_s: Annotated[float, Field(ge=0, le=1e6)]
    for_s: Durations


class RateProfile(Section):
    """A rate that changes: its phases in order, again from the first when `repeat`."""

    phases: Annotated[tuple[RatePhase, ...], AsTuple, Field(min_length=1, max_length=10_000)]
    repeat: bool = False
    """Without it the last phase's rate goes on."""

    @model_validator(mode="after")
    def _check_comes_to_something(self) -> Self:
        if not any(phase.rate_per_s > 0 for phase in self.phases):
            raise broken("phases", "every rate is 0; at least one must be above 0")
        if self.repeat and all(phase.for_s == 0 for phase in self.phases):
            raise broken("phases", "every phase lasts 0 s; at least one must last longer")
        return self


RateOrProfile = Annotated[
    Annotated[ArrivalRate, Tag("number")] | Annotated[RateProfile, Tag("map")],
    choose(_number_or_map, "it must be requests per second, or {phases: [{rate_per_s, for_s}]}"),
]


class Cancels(Section):
    """Clients that go away."""

    share: Share
    """Share of all requests."""
    after_s: Durations
    """Seconds from arrival to the cancel."""


class _Workload(Section):
    deadline_s: PositiveSeconds | None = None
    """A request that is unfinished so long after its arrival is given up."""
    cancels: Cancels | None = None
    max_total_tokens: Tokens | None = None
    """A prompt is cut so that prompt + output fit this; at least one prompt token stays."""


class _Synthetic(_Workload):
    prompt_tokens: Lengths
    output_tokens: Lengths
    requests: Count | None = None
    """How many requests come."""
    duration_s: PositiveSeconds | None = None
    """For how long requests come."""


class Columns(Section):
    """Names of the columns of a CSV file."""

    arrival: Text = "arrival"
    prompt: Text = "prompt_tokens"
    output: Text = "output_tokens"


class TraceWorkload(_Workload):
    """Requests written here or read from a file."""

    kind: Literal["trace"]
    requests: Annotated[
        tuple[
            Annotated[tuple[Seconds, Tokens, TokensOrZero], AsTuple],
            ...,
        ]
        | None,
        AsTuple,
        Field(min_length=1),
    ] = None
    """[arrival_s, prompt, output] each."""
    path: PathText | None = None
    format: Literal["azure", "mooncake", "burstgpt", "csv"] | None = None
    time_unit: Literal["s", "ms", "us", "ns"] | None = None
    """Unit of the arrival column, where the format does not fix it."""
    columns: Columns | None = None
    """Format csv: which columns hold arrival, prompt and output."""
    time_scale: Factor = 1.0
    """Multiplies arrival times: 0.5 is twice the load."""
    rate_scale: Factor = 1.0
    """Multiplies the rate: 2 is twice the load."""
    start_s: Seconds = 0.0
    """Slice of the trace, in its own time before scaling."""
    stop_s: PositiveSeconds | None = None
    limit: Count | None = None
    """Most requests, counted from the slice's start."""
    obtain: Text | None = None
    """Said where the file is missing: how to get it."""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.requests is None) == (self.path is None):
            found = "neither" if self.path is None else "both"
            raise broken("", f"found {found} of requests and path; a trace needs exactly one")
        if self.path is not None and self.format is None:
            raise broken("format", "missing; it must be azure, mooncake, burstgpt or csv")
        for key in ("format", "columns", "time_unit", "obtain"):
            if self.path is None and getattr(self, key) is not None:
                raise broken(key, "it describes a file, but there is no path; leave it out")
        if self.columns is not None and self.format != "csv":
            raise broken("columns", f"format {self.format} has fixed columns; use format csv")
        if self.stop_s is not None and self.stop_s <= self.start_s:
            raise broken(
                "stop_s", f"found {self.stop_s:g}; it must be above start_s ({self.start_s:g})"
            )
        if self.time_scale != 1 and self.rate_scale != 1:
            raise broken("rate_scale", "time_scale is set too; give one of the two")
        return self


class _OpenLoop(_Synthetic):
    rate_per_s: RateOrProfile
    """Requests per second."""

    @model_validator(mode="after")
    def _check_ends(self) -> Self:
        if (self.requests is None) == (self.duration_s is None):
            found = "neither" if self.requests is None else "both"
            raise broken("", f"found {found} of requests and duration_s; give exactly one")
        return self


class PoissonWorkload(_OpenLoop):
    """Independent arrivals at a rate."""

    kind: Literal["poisson"]


class GammaWorkload(_OpenLoop):
    """Arrivals with gaps of a gamma distribution: burstier than Poisson above 1."""

    kind: Literal["gamma"]
    burstiness: Annotated[float, Field(gt=0, le=100)]
    """Coefficient of variation of the gaps: 1 is Poisson, 0.1 nearly constant."""


class ConstantWorkload(_OpenLoop):
    """Arrivals at equal gaps, the first at 0."""

    kind: Literal["constant"]


class ClosedWorkload(_Synthetic):
    """So many users; each sends, waits for the answer, thinks, and sends again."""

    kind: Literal["closed"]
    users: Annotated[int, Field(ge=1, le=1_000_000), Whole]
    think_s: Durations = 0.0


Workload = Annotated[
    TraceWorkload | PoissonWorkload | GammaWorkload | ConstantWorkload | ClosedWorkload,
    Field(discriminator="kind"),
]
