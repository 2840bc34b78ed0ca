"""The words that every section of the schema is spelled in: bounded numbers, names, choices.

Numbers are strict: text and `true` are not numbers, and each has bounds, so that no scenario can
ask for an endless run or overflow the clock. The unit is part of the key's name.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Strict,
    model_validator,
)
from pydantic_core import PydanticCustomError

COUNT_MAX = 1_000_000_000  # Requests, tokens, bytes of width: far above use, far below overflow.
SECONDS_MAX = 1e9  # 31 years; as nanoseconds this still fits 63 bits nine times over.
HOLD_S_MAX = 1e6  # Eleven days for one pass or one hop: beyond it a unit is mistaken.
RATE_MAX = 1e18  # FLOP/s, bytes/s: a thousand times the largest device.
PRICE_MAX = 1e6  # US dollars per hour of one device.
BYTES_MAX = 10**15  # A petabyte; still exact as a double.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"  # Becomes a folder's name and a label.


def _whole(value: Any) -> Any:
    """`1e5` is a whole number too."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= BYTES_MAX:
        return int(value)
    return value


Whole = BeforeValidator(_whole)
Count = Annotated[int, Field(ge=1, le=COUNT_MAX), Whole]
CountOrZero = Annotated[int, Field(ge=0, le=COUNT_MAX), Whole]
Bytes = Annotated[int, Field(ge=1, le=BYTES_MAX), Whole]
Seconds = Annotated[float, Field(ge=0, le=SECONDS_MAX)]
PositiveSeconds = Annotated[float, Field(gt=0, le=SECONDS_MAX)]
Hold = Annotated[float, Field(ge=0, le=HOLD_S_MAX)]
Price = Annotated[float, Field(ge=0, le=PRICE_MAX)]
Rate = Annotated[float, Field(ge=1, le=RATE_MAX)]
Factor = Annotated[float, Field(gt=0, le=1e6)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Text = Annotated[str, Field(max_length=4096)]
PathText = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f]+$")]
"""A path as the user wrote it; `data_paths.expand_path` makes a `Path` of it."""

AsTuple = Strict(strict=False)
"""Lists are read as tuples; the items stay strict."""


def choose(tag_of: Callable[[Any], str | None], what: str) -> Discriminator:
    """A union told apart by the value's form; `what` names all forms for the error message."""
    return Discriminator(tag_of, custom_error_type="form", custom_error_message=what)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def broken(key: str, message: str) -> PydanticCustomError:
    """A rule between keys is broken; `key` (dotted, relative to the section) gets the blame."""
    path = tuple(int(part) if part.isdecimal() else part for part in key.split(".") if part)
    return broken_at(path, message)


def broken_at(path: tuple[str | int, ...], message: str) -> PydanticCustomError:
    """As `broken`, for keys that are not plain words."""
    return PydanticCustomError("rule", "{message}", {"message": message, "path": path})


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean X? Known here: ...`, for a word that is none of `known`."""
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{hint}Known here: {', '.join(names)}" if names else "nothing is known here"


class Section(BaseModel):
    """One map of the scenario: strict, frozen, without unknown keys or NaN."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            for key in data:
                if key not in cls.model_fields:
                    message = f"unknown key; {did_you_mean(str(key), cls.model_fields)}"
                    context = {"message": message, "path": (key,)}
                    raise PydanticCustomError("unknown_key", "{message}", context)
        return data
