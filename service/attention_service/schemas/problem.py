"""Problem details (RFC 9457), as the API document describes them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from attention_service.errors import error_classes

# One of the codes of the error classes, which type checkers cannot know.
ProblemCode = Annotated[str, Field(json_schema_extra={"enum": [*error_classes()]})]


class ProblemFault(BaseModel):
    """A fault of a request."""

    pointer: str = Field(description="JSON pointer to the place; empty for the body.")
    code: ProblemCode
    expected: str = Field(description="What would have been valid.")
    got: str = Field(description="What came instead.")
    hint: str | None = Field(None, description="How to correct it.")


class Problem(BaseModel):
    """Problem details (RFC 9457)."""

    type: str = Field(description="/problems/ and the code.")
    title: str = Field(description="The code in words.")
    status: int = Field(description="The HTTP status.")
    detail: str = Field(description="What went wrong, in words.")
    instance: str = Field(description="Path of the request.")
    code: ProblemCode = Field(description="Stable; a later version may have more.")
    request_id: str = Field(description="The X-Request-ID.")
    errors: list[ProblemFault] = Field(description="The faults of the request.")
