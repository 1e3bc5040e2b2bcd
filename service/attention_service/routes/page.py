"""The page at /: pictures of every stage of attention, from files in `service/attention_service/page`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request, Response
from starlette.datastructures import Headers
from starlette.staticfiles import NotModifiedResponse, StaticFiles

from attention_service.errors import NotFound

router = APIRouter(include_in_schema=False)

FOLDER: Final = Path(__file__).parents[1] / "page"
MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
}
# The page loads nothing from elsewhere, and runs no script but its own modules.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
METHODS: Final = ["GET", "HEAD"]
# Decides on conditional requests. The files themselves are sent from memory, each as its ETag says.
static: Final = StaticFiles(directory=FOLDER)


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page, as it is sent."""

    content: bytes
    headers: dict[str, str]


@cache
def page_files() -> dict[str, PageFile]:
    """The files of the page by name. They are read once."""
    files = {}
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in MEDIA_TYPES:
            content = path.read_bytes()
            headers = {
                "Content-Type": MEDIA_TYPES[path.suffix],
                "Content-Security-Policy": POLICY,
                "Referrer-Policy": "no-referrer",
                "Cache-Control": "no-cache",
                "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
            }
            files[path.name] = PageFile(content, headers)
    return files


def respond(file: PageFile, request: Request) -> Response:
    """The file, or 304 without a body if the client has it."""
    headers = Headers(file.headers)
    if static.is_not_modified(headers, request.headers):
        return NotModifiedResponse(headers)
    return Response(file.content, headers=file.headers)


@router.api_route("/", methods=METHODS)
async def get_page(request: Request) -> Response:
    """Returns the page."""
    return respond(page_files()["index.html"], request)


@router.api_route("/page/{name}", methods=METHODS)
async def get_page_file(name: str, request: Request) -> Response:
    """Returns a file of the page: a style sheet, a module, the examples."""
    file = page_files().get(name)
    if file is None:
        raise NotFound.at("", "a file of the page", "another name")
    return respond(file, request)
