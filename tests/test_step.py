"""Small requests that are at work together are worked on in step; a request by itself waits for nobody."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from typing import Any

import pytest

from service import engine
from service.app import Application
from service.http.cycle import AT_WORK
from service.stop import Stop
from tests.conftest import app

BODY = json.dumps({"query": [[1, 2]], "key": [[1, 0]], "value": [[3, 4]]}).encode()
HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(BODY))]
ONE_BY_ONE = ["a asked", "computed", "a answered", "b asked", "computed", "b answered"]
IN_STEP = ["a asked", "b asked", "computed", "computed", "a answered", "b answered"]


async def ask(service: Application, name: str, at_work: Collection[object], events: list[str]) -> None:
    """One request, as a server gives it to the application; what happens to it."""

    async def receive() -> dict[str, Any]:
        events.append(f"{name} asked")
        return {"type": "http.request", "body": BODY, "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            assert json.loads(message["body"])["output"] == [[3.0, 4.0]]
            events.append(f"{name} answered")

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/attention", "headers": HEADERS}
    await service({**scope, "extensions": {AT_WORK: at_work}}, receive, send)


@pytest.mark.parametrize(
    ("at_work", "large", "expected"), [(1, False, ONE_BY_ONE), (2, False, IN_STEP), (3, True, ONE_BY_ONE)]
)
def test_who_waits_for_whom(at_work: int, large: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """at_work: how many requests are; large: whether one of them is"""
    service, events = app(), list[str]()
    run = engine.run

    def noted(*given: Any) -> Any:
        events.append("computed")
        return run(*given)

    monkeypatch.setattr(engine, "run", noted)

    async def both() -> None:
        if large:
            await service.api.state.engine.bodies.enter(2**20, Stop(30))
        await asyncio.gather(*(ask(service, name, range(at_work), events) for name in "ab"))

    asyncio.run(both())
    assert events == expected
