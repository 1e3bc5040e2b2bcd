"""GET /, for people who open the service in a browser."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import RedirectResponse

router = APIRouter(include_in_schema=False)


@router.get("/")
async def root() -> RedirectResponse:
    """Redirects to the documentation."""
    return RedirectResponse("/docs")
