"""GET /problems/{code}: the page that the `type` of a problem refers to."""

from __future__ import annotations

from fastapi import APIRouter, Path
from pydantic import BaseModel, Field

from service.errors import Fault, NotFound, error_classes
from service.routes.documented import problems

router = APIRouter(tags=["operations"])


class ProblemType(BaseModel):
    """What a problem code means."""

    code: str = Field(description="The `code` of a problem.")
    status: int = Field(description="HTTP status of responses with this code.")
    title: str = Field(description="Title of responses with this code.")
    description: str = Field(description="When a response has this code.")


@router.get(
    "/problems/{code}",
    operation_id="describeProblem",
    summary="What does this problem code mean?",
    response_description="The meaning of the code.",
    responses=problems(404),
)
async def describe_problem(code: str = Path(description="A problem code, for example shape_mismatch.")) -> ProblemType:
    """Describes a problem code. The `type` of a problem is the path of this operation."""
    kind = error_classes().get(code)
    if kind is None:
        raise NotFound(Fault("", f"one of {', '.join(error_classes())}", "another code"))
    description = " ".join((kind.__doc__ or "").split())
    return ProblemType(code=code, status=kind.status, title=kind.title, description=description)
