"""How figures read on a screen: each with the unit that reads best."""

UNDEFINED = "-"
SCALES = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "us"))


def duration(value: float | None) -> str:
    """Seconds in the unit that reads best."""
    if value is None:
        return UNDEFINED
    if not value:
        return "0 s"
    _, factor, unit = next(scale for scale in SCALES if abs(value) >= scale[0])
    return f"{value * factor:,.4g} {unit}" if abs(value) < 10_000 else f"{value:,.0f} s"


def rate(value: float | None, unit: str) -> str:
    """A rate with its unit."""
    return UNDEFINED if value is None else f"{value:,.4g} {unit}"
