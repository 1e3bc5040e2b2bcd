"""The `type` of every problem is a path of this service, which says what the code means."""

from __future__ import annotations

from fastapi import APIRouter, Path
from pydantic import BaseModel, Field

from service.errors import Fault, NotFound, error_classes
from service.routes.documented import problems

router = APIRouter(tags=["operations"])


class ProblemType(BaseModel):
    """What a problem code means."""

    code: str = Field(description="As in the `code` of a problem.")
    status: int = Field(description="The HTTP status that it comes with.")
    title: str = Field(description="The same in all answers with this code.")
    description: str = Field(description="When it happens.")


@router.get(
    "/problems/{code}",
    operation_id="describeProblem",
    summary="What does this problem code mean?",
    response_description="What it means.",
    responses=problems(404),
)
async def describe_problem(code: str = Path(description="A problem code, like shape_mismatch.")) -> ProblemType:
    """The description of a problem code. The `type` of each problem leads here."""
    kind = error_classes().get(code)
    if kind is None:
        raise NotFound(Fault("", f"one of {', '.join(error_classes())}", "another code"))
    description = " ".join((kind.__doc__ or "").split())
    return ProblemType(code=code, status=kind.status, title=kind.title, description=description)
