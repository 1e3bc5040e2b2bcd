"""`from attention_service import attend`: the same engine without a server."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, Final, get_type_hints

import httpx
import numpy as np
import pytest
from pydantic import BaseModel

import attention_service
from attention_service import assert_attention, attend, compare
from attention_service.errors import (
    InvalidArray,
    InvalidRequest,
    InvalidValue,
    Overflow,
    ServiceError,
    UnknownField,
)
from attention_service.library import calls, functions
from attention_service.schemas.closed import Part
from attention_service.schemas.compare import OwnTolerance
from attention_service.schemas.request import AttentionRequest
from tests.cases import CASES, Case, as_array
from tests.helpers.backends import BACKENDS
from tests.test_layouts import post


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden_cases_give_the_same_numbers_on_every_backend(case: Case, backend: str, client: httpx.Client) -> None:
    """`attend` and HTTP give the same numbers, to the last printed digit."""
    result = attend(**case.request, backend=backend)
    answer = post(client, **case.request, backend=backend)
    for expected in case.expected:
        expected.compare(result.arrays)
        expected.compare(answer)
    np.testing.assert_allclose(as_array(answer["output"]), result.output, rtol=1e-15)
    assert answer["metadata"]["backend"] == backend


def test_arrays_set_the_dtype_and_lists_do_not() -> None:
    single = np.eye(2, dtype=np.float32)
    assert attend(single, single, single).output.dtype == np.float32
    assert attend(single, [[1, 0], [0, 1]], single).output.dtype == np.float32
    assert attend([[1, 0]], [[1, 0]], [[1, 0]]).output.dtype == np.float64


COMPARED: Final = ["actual", "tolerance", "legal", "reference", "time_limit", "logsumexp_base", "against"]


@pytest.mark.parametrize(
    ("function", "own"),
    [
        (attend, []),
        (compare, COMPARED),
        (assert_attention, [*COMPARED, "must_show", "rows"]),
    ],
)
def test_signatures_name_exactly_the_fields_of_a_request(function: Callable[..., Any], own: list[str]) -> None:
    """In their order, with their defaults; query, key and value also by position."""
    found = dict(inspect.signature(function).parameters)
    assert found.pop("unknown").kind is inspect.Parameter.VAR_KEYWORD
    fields = {name: field for name, field in AttentionRequest.model_fields.items() if name != "layer"}
    assert list(found) == [*own[:1], *fields, *own[1:]]
    defaults = {name: field.default for name, field in fields.items()} | {"include": None}  # it depends on `gradients`
    assert {name: found[name].default for name in fields} == defaults
    by_position = [name for name, one in found.items() if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert by_position == [*own[:1], "query", "key", "value"]
    assert all(one.kind is inspect.Parameter.KEYWORD_ONLY for name, one in found.items() if name not in by_position)
    types = get_type_hints(function)
    assert types.keys() == {*found, "unknown", "return"}
    assert len(function.__doc__ or "") > 500


def test_the_types_of_nested_fields_have_their_names() -> None:
    models: list[type[BaseModel]] = [*Part.__subclasses__(), OwnTolerance]
    assert len(models) == 8
    for model in models:
        assert getattr(functions, model.__name__).__annotations__.keys() == model.model_fields.keys()


def test_every_argument_is_described() -> None:
    text = attend.__doc__ or ""
    for name, field in AttentionRequest.model_fields.items():
        if name == "layer":  # only a service has layers
            continue
        described = " ".join(text.split()).partition(f" {name}: ")[2]
        assert described.startswith(" ".join((field.description or "missing").split())[:60]), name


def test_names_of_other_libraries_are_translated() -> None:
    fields: dict[str, Any] = {"input": [[1.0]], "attn_mask": [[True]]}
    for call in (attend, compare, partial(assert_attention, [[1.0]])):
        with pytest.raises(InvalidRequest, match=r"/attn_mask: expected a known field.*send booleans as mask"):
            call(**fields)
    with pytest.raises(InvalidRequest, match="/unknown: expected a known field"):
        attend(input=[[1.0]], unknown=1)  # type: ignore[arg-type]  # no parameter takes it


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"query_tokens": ["\ud800"]}, "/query_tokens/0: expected Unicode text, got half a surrogate pair"),
        ({"include": "scores"}, '/include: expected a list, got string .scores. (write ["scores"])'),
        (
            {"window": 3},
            'got number 3 (write {"left": 3, "right": 0} for the key at the query and 3 before it, '
            '{"left": 3, "right": 3} for 3 on both sides)',
        ),
        ({"window": np.int64(3)}, 'got number 3 (write {"left": 3, "right": 0} for the key'),
        ({"window": -1}, "got number -1 (leave window out)"),
        ({"window": (3, 0)}, 'got array of 2 (write {"left": 3, "right": 0})'),
        ({"window": (3, -1)}, '(write {"left": 3})'),
        ({"window": np.array([-1, 2])}, 'got integers of shape (2,) (write {"right": 2})'),
        ({"window": (-1, -1)}, "(leave window out)"),
        ({"include": ["score"]}, "got string 'score' (did you mean scores?)"),
        ({"include": ["weights"]}, "(did you mean attention_weights?)"),
        ({"normalization": "Softmax"}, "(did you mean softmax?)"),
        ({"layout": "lhd"}, "(did you mean blhd?)"),
        ({"mask": [[1]]}, "/mask/0/0: expected true or false, got number 1 (if 1 means takes part, send true for 1"),
        ({"key_mask": [0]}, "got number 0 (if 1 means takes part, send true for 1 and false for 0; else"),
        ({"mask": np.ones((1, 1))}, "if 1 means takes part, send mask != 0; else mask == 0"),
    ],
)
def test_an_almost_right_value_is_corrected(fields: dict[str, Any], said: str) -> None:
    pattern = re.escape(said).replace(re.escape(".scores."), ".scores.")
    for call in (attend, compare):
        with pytest.raises(InvalidRequest, match=pattern):
            call(**{"input": [[1.0]], **fields})


def test_a_value_that_is_like_nothing_gets_no_hint() -> None:
    windows = [True, 2.5, "3", 2**70, (1, 2, 3), (1, 2.5), np.ones((2, 2)), [1, None]]
    others: list[dict[str, Any]] = [{"include": ["qq"]}, {"include": 1}, {"mask": [[2]]}, {"mask": [["yes"]]}]
    for fields in [*others, *({"window": window} for window in windows)]:
        with pytest.raises(InvalidRequest) as error:
            attend(input=[[1.0]], **fields)
        assert error.value.faults[0].hint == "", fields


def test_attend_works_within_a_running_event_loop() -> None:
    async def main() -> float:
        return float(attend([[1.0]], [[1.0]], [[2.5]]).output[0, 0])

    assert asyncio.run(main()) == 2.5


def test_errors_point_at_the_field() -> None:
    with pytest.raises(InvalidRequest, match="/num_head: expected a known field, got 'num_head'"):
        attend(input=[[1]], num_head=2)  # type: ignore[arg-type]  # no parameter takes it
    with pytest.raises(ServiceError, match="/key"):
        attend([[1, 2]], [[1]], [[1]])


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"layout": "xyz"}, InvalidValue),
        ({"softcap": -1}, InvalidValue),
        ({"softcap": "much"}, InvalidValue),
        ({"num_head": 2}, UnknownField),
        ({"mask": [["yes"]]}, InvalidArray),
        ({"layout": "xyz", "softcap": "much"}, InvalidValue),
        ({"layout": "xyz", "num_head": 2}, InvalidRequest),
    ],
)
def test_an_error_has_the_class_of_its_faults(fields: dict[str, Any], error: type[ServiceError]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        attend(**{"input": [[1.0]], **fields})
    assert type(raised.value) is error


class Refusing:
    """An array that cannot be read."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise TypeError("no array today")


@pytest.mark.parametrize(
    "fields",
    [{"layout": "xyz"}, {"num_head": 2}, {"input": Refusing()}, {"input": [[1e200]], "context": [[1e200]]}],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize("call", [attend, partial(compare, None), partial(assert_attention, [[1.0]])])
def test_a_traceback_ends_where_the_library_is_called(call: Callable[..., Any], fields: dict[str, Any]) -> None:
    """No line of the library but that of the function, and no error that another one came of."""
    with pytest.raises(InvalidRequest) as raised:
        call(**{"input": [[1.0]], **fields})
    function = call.func if isinstance(call, partial) else call
    own = traceback.extract_tb(raised.value.__traceback__)
    assert [frame.name for frame in own[1:]] == [function.__name__]
    text = "".join(traceback.format_exception(raised.value))
    assert text.count("Traceback") == 1
    assert len(text.splitlines()) <= 8


def test_the_traceback_of_a_defect_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "make_spec_and_plan", lambda *given, **options: 1 // 0)
    with pytest.raises(ZeroDivisionError) as raised:
        attend(input=[[1.0]])
    assert [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)][1:] == [
        "attend",
        "attend",
        "computed",
        "<lambda>",
    ]


@pytest.mark.parametrize("field", ["query", "key", "past_value"])
def test_the_error_for_inf_and_nan_names_the_place_and_the_number(field: str) -> None:
    arrays: dict[str, Any] = {name: np.ones((2, 2)) for name in ("query", "key", "value")}
    arrays |= {"past_key": np.ones((1, 1, 2)), "past_value": np.ones((1, 1, 2))}
    arrays[field].flat[1] = np.nan
    place = str([0, 1] if arrays[field].ndim == 2 else [0, 0, 1])
    with pytest.raises(
        InvalidArray, match=re.escape(f"/{field}: expected finite numbers, got nan at {place} (inf and")
    ):
        attend(**arrays)
    arrays[field].flat[0] = -np.inf
    with pytest.raises(InvalidArray, match=r"got -inf at \[0(, 0)+\] and in 1 more places"):
        attend(**arrays)
    with pytest.raises(Overflow, match="numbers too large for it"):
        attend(query=[[1e200]], key=[[1e200]], value=[[1.0]])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["key", "value", "query"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_visible_number_that_is_not_finite_is_an_error(where: str, poison: float, backend: str) -> None:
    arrays: dict[str, Any] = {name: np.ones((2, 2)) for name in ("query", "key", "value")}
    arrays[where][1, 1] = poison
    with pytest.raises(InvalidArray):
        attend(**arrays, backend=backend)
    with pytest.raises(InvalidArray):
        attend(**arrays, backend=backend, is_causal=True)  # it is visible to the last query


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_visible_value_that_is_not_finite_is_an_error_even_at_weight_zero(backend: str) -> None:
    with pytest.raises(InvalidArray):
        attend([[1.0]], [[0.0], [-1e6]], [[1.0], [np.inf]], scale=1, backend=backend)


@pytest.mark.torch
@pytest.mark.slow
def test_importing_the_service_does_not_import_torch() -> None:
    code = "import attention_service.app, attention_service.library, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_package_has_nine_names() -> None:
    functions = [
        "assert_attention",
        "assert_call",
        "attend",
        "call",
        "compare",
        "compare_call",
        "judge_recording",
        "merge",
    ]
    assert attention_service.__all__ == ["__version__", *functions]


# Prints the response to a request with torch made to appear as not installed.
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from starlette.testclient import TestClient
from attention_service.app import create_app
from attention_service.settings import Settings
client = TestClient(create_app(Settings.model_construct()))
for options in ({"backend": "torch"}, {"device": "cuda"}, {"device": "cuda:1"}):
    print(client.post("/attention", json={"input": [[1]]} | options).text)
"""


@pytest.mark.slow
def test_requests_for_torch_without_torch_name_the_extra() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], stdout=subprocess.PIPE, text=True, check=True)
    problems = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(problem["status"], problem["code"]) for problem in problems] == [(422, "unknown_backend")] * 3
    for problem in problems:
        (fault,) = problem["errors"]
        assert fault["pointer"] == "/backend"
        assert fault["hint"] == "install attention-service[torch] where the service runs"


@pytest.mark.torch
def test_the_metadata_name_the_kernel(client: httpx.Client) -> None:
    def kernel(**fields: object) -> str:
        return str(post(client, input=[[1.0, 2.0], [3.0, 4.0]], backend="torch", **fields)["metadata"]["kernel"])

    fused = "scaled_dot_product_attention"
    assert kernel(include=[]) == fused
    assert kernel(include=["query", "present_key"]) == fused
    assert kernel(include=[], is_causal=True) == fused
    assert kernel(include=[], is_causal=True, scale=-1) == fused
    assert kernel(include=[], bias=[0.5, None], alibi_slopes=[1]) == fused
    assert kernel() == "dense"
    assert kernel(include=["logsumexp"]) == "dense"
    assert kernel(include=[], softcap=1) == "dense"
    assert kernel(include=[], sinks=[1]) == "dense"
    assert kernel(include=[], normalization="sum") == "dense"


@pytest.mark.torch
def test_scores_that_may_overflow_are_checked(client: httpx.Client) -> None:
    """The fused kernel would not report that a score overflowed to minus infinity."""
    request = {"query": [[1e20]], "key": [[-1e20], [1]], "value": [[1], [2]], "dtype": "float32", "include": []}
    response = client.post("/attention", json={**request, "backend": "torch"})
    assert (response.status_code, response.json()["code"]) == (422, "overflow")


@pytest.mark.torch
def test_an_absent_device_is_refused(client: httpx.Client) -> None:
    response = client.post("/attention", json={"input": [[1]], "device": "cuda:999"})
    assert (response.status_code, response.json()["errors"][0]["pointer"]) == (422, "/device")
