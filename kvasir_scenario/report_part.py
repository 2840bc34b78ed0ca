"""What every part of a report is: immutable, complete, and free of NaN."""

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """A part of the report: immutable, nothing unknown, no NaN."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        json_schema_serialization_defaults_required=True,
        use_attribute_docstrings=True,
    )
