"""Tools that fastmcp makes of the API document for an agent: they are small, take matrices and return the output."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import httpx2
import pytest
from fastmcp import Client, FastMCP
from fastmcp.exceptions import ToolError

EYE = [[1.0, 0.0], [0.0, 1.0]]
VALUE = [[1.0, 2.0], [3.0, 4.0]]
# By hand: each query has the scores 1/√2, with its own key, and 0.
MORE = math.exp(2**-0.5) / (math.exp(2**-0.5) + 1)
OUTPUT = [[3 - 2 * MORE, 4 - 2 * MORE], [1 + 2 * MORE, 2 + 2 * MORE]]


def with_tools(client: httpx.Client, use: Callable[[Client[Any]], Awaitable[Any]]) -> Any:
    """What `use` returns for a client of the tools that are made of the document of a running service."""

    async def run() -> Any:
        async with httpx2.AsyncClient(base_url=str(client.base_url)) as service:
            document = client.get("/openapi.json").json()
            tools = FastMCP.from_openapi(document, client=service, dereference_schemas=False)
            async with Client(tools) as agent:
                return await use(agent)

    return asyncio.run(run())


def call(client: httpx.Client, tool: str, **arguments: Any) -> dict[str, Any]:
    """The structured result of a tool."""
    result = with_tools(client, lambda agent: agent.call_tool(tool, arguments))
    content: dict[str, Any] = result.structured_content
    return content


def test_the_tool_of_attention_is_small(client: httpx.Client) -> None:
    """Name, description and both schemas: what an agent reads before it calls the tool."""
    tools = {tool.name: tool for tool in with_tools(client, lambda agent: agent.list_tools())}
    shown = tools["computeAttention"].model_dump(mode="json", exclude_none=True)
    assert len(json.dumps(shown, ensure_ascii=False, separators=(",", ":")).encode()) <= 30_000
    assert {"computeCall", "compareAttention", "drawAttention", "mergeAttention"} < tools.keys()


def test_matrices_give_the_output(client: httpx.Client) -> None:
    answer = call(client, "computeAttention", query=EYE, key=EYE, value=VALUE)
    assert answer["output"] == [pytest.approx(row, rel=1e-12) for row in OUTPUT]
    assert answer["metadata"]["query_length"] == 2


def test_a_request_that_extends_another_takes_the_fields_of_both(client: httpx.Client) -> None:
    request = {"query": EYE, "key": EYE, "value": VALUE, "dtype": "float32"}
    right = call(client, "compareAttention", **request, actual={"output": OUTPUT})
    wrong = call(client, "compareAttention", **request, actual={"output": VALUE})
    assert (right["verdict"]["status"], wrong["verdict"]["status"]) == ("correct", "wrong")


def test_an_error_says_where_the_fault_is(client: httpx.Client) -> None:
    with pytest.raises(ToolError, match=r"/value.*shape_mismatch"):
        call(client, "computeAttention", query=EYE, key=[[1.0, 0.0]], value=VALUE)
