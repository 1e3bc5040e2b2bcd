"""Writes `library/functions.py`: the functions of the library, with a parameter for each field of a request."""

from __future__ import annotations

import json
import textwrap
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from attention_service.attention import spec
from attention_service.schemas import arrays, compare, request

# Columns of a line.
WIDTH: Final = 120
LITERALS: Final = (
    "Layout",
    "DType",
    "Backend",
    "Normalization",
    "NormKind",
    "NormOver",
    "NormPosition",
    "Activation",
    "Included",
    "AllGradients",
)
# The types of fields by their names; all literals in a request have one. Editors complete a literal also beside str,
# and a variable that is a str needs no cast.
NAMED: Final[tuple[tuple[str, Any], ...]] = (
    *((f"{name} | str", getattr(spec, name)) for name in LITERALS),
    ("Encoding | str", request.Encoding),
    ("LogsumexpBase | str", compare.LogsumexpBase),
    ("Liberty | str", compare.Liberty),
    ("int | Array", arrays.IntegerOrIntegers),
    ("float | Array", arrays.NumberOrNumbers),
    ("Labels", arrays.TokenLabels),
)
HEAD: Final = '''\
"""attend(), compare() and assert_attention(), with a parameter for each field of a request.

`make openapi` generates this module from service/attention_service/schemas; openapi/functions.py has its text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Never, TypedDict

from attention_service.attention.spec import (
    Activation,
    AllGradients,
    Backend,
    DType,
    Included,
    Layout,
    Normalization,
    NormKind,
    NormOver,
    NormPosition,
)
from attention_service.errors import InvalidRequest
from attention_service.library import calls
from attention_service.library.result import AttentionResult
from attention_service.library.types import Array, Labels
from attention_service.schemas.compare import CompareReport, Liberty, LogsumexpBase
from attention_service.schemas.request import Encoding
'''
ATTEND: Final = """\
The exact attention of query, key and value, in any variant, with the intermediate results of `include`.

    result = attend(query, key, value, is_causal=True, include=["attention_weights", "logsumexp"])
    result.output, result.attention_weights, result["logsumexp"], result.metadata.fully_masked_rows

Arrays are ndarrays, nested lists, tensors of torch on any device, arrays of JAX, or whatever else NumPy can read.
Their types count for the type of the result; lists have none. Nested fields are dicts, like `window={"left": 3}`.
None stands for a field that is left out. docs/attention.md defines every field.

Shapes, with b batch entries, h heads, q queries, k keys, d features of queries and keys, e features of values:

    layout  query         key           value         output        attention_weights
    ld      (q, d)        (k, d)        (k, e)        (q, e)        (q, k), rows sum to one
    dl      (d, q)        (d, k)        (e, k)        (e, q)        (k, q), columns sum to one
    bld     (b, q, d)     (b, k, d)     (b, k, e)     (b, q, e)     (b, q, k)
    bhld    (b, h, q, d)  (b, h, k, d)  (b, h, k, e)  (b, h, q, e)  (b, h, q, k)

In layouts without h, num_heads above 1 packs the heads in d and e; attention_weights then have h after b.

Unlike over HTTP, a hidden key or value may be inf or NaN: what cannot be seen cannot poison. There is no limit on
memory but the machine's.
"""
COMPARE: Final = """\
The report on what an attention kernel returned: is it right, and if not, which mistake was made?

    report = compare(my_kernel(query, key, value), query, key, value, is_causal=True)
    report.verdict.status, report.hypotheses[0].name

All other arguments are those of `attend`; docs/compare-report.md describes the report.
"""
ACTUAL: Final = (
    "The output; a tuple of output and logsumexp; a dict of arrays by their names in a response (output, logsumexp, "
    "attention_weights, …), which the result of `attend` is, too; or None to ask which mistakes the request could show."
)
ASSERT: Final = """\
Raise AssertionError unless an output is right, or at least not known to be wrong; else return the report.

    assert_attention(my_kernel(query, key, value), query, key, value, is_causal=True)

The error says what is wrong in a few lines, its `report` all. All other arguments are those of `attend`.
"""
MUST_SHOW: Final = (
    "What the inputs must be able to show. options: raise WeakInputs, an AssertionError, where a kernel could ignore "
    "an option of the request unseen. None: pass, whatever they can show."
)
ROWS: Final = (
    "Judge only so many rows of each head, where mistakes sit: ends of sequences, tiles, windows and segments. All is "
    "compared if one of them is wrong, or for reference, tolerance or against. Which mistakes the inputs can show is "
    "not looked at. Default: all rows."
)
UNKNOWN: Final = "Any other name is an error, which translates the names of other libraries, like attn_mask."
RETURNS: Final = "Returns: the results by name, and the metadata; see its class."
ERRORS: Final = "Errors: attention_service.errors.InvalidRequest, with a pointer to each field at fault."


def functions() -> str:
    """The module."""
    fields, own = of_library(request.AttentionRequest), of_library(compare.CompareRequest)
    described = {name: described_field(field) for name, field in fields.items()}
    described["encoding"] += " It has no effect here."
    compared = {name: described_field(field) for name, field in own.items() if name not in [*fields, "actual"]}
    documents = {
        "attend": [ATTEND, arguments(described), UNKNOWN, RETURNS, ERRORS],
        "compare": [COMPARE, arguments({"actual": ACTUAL} | compared), UNKNOWN, ERRORS],
        "assert_attention": [
            ASSERT,
            arguments(
                {"actual": ACTUAL.partition("; or None")[0] + "."} | compared | {"must_show": MUST_SHOW, "rows": ROWS}
            ),
            UNKNOWN,
            ERRORS,
        ],
    }
    heads = {
        "attend": (list(parameters(fields)), "AttentionResult"),
        "compare": (["actual: Any = None", *parameters(own)], "CompareReport"),
        "assert_attention": (
            [
                "actual: Any",
                *parameters(own),
                'must_show: Literal["options"] | None = "options"',
                "rows: int | None = None",
            ],
            "CompareReport",
        ),
    }
    parts = [HEAD, *(typed_dict(model) for model in parts_of(compare.CompareRequest))]
    parts += [function(name, *heads[name], "\n\n".join(map(str.strip, documents[name]))) for name in documents]
    return "\n\n".join(parts)


def of_library(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a request that can be sent without a service, which has layers."""
    return {name: field for name, field in model.model_fields.items() if name != "layer"}


def function(name: str, given: list[str], returned: str, text: str) -> str:
    """A function that hands its arguments on to the one of the same name in `calls`, and ends its tracebacks there."""
    lines = "".join(f"    {parameter},\n" for parameter in given)
    body = "__tracebackhide__ = True  # pytest then shows the call, not all these parameters"
    document = textwrap.indent(f'"""{text}\n"""', "    ", lambda line: bool(line.strip()))
    return (
        f"def {name}(\n{lines}    **unknown: Never,\n) -> {returned}:\n"
        f"{document}\n    {body}\n    try:\n        return calls.{name}(locals())\n"
        "    except InvalidRequest as error:  # a mistake of the caller, who has no use for the lines that found it\n"
        "        raise error.with_traceback(None) from None\n"
    )


def parameters(fields: Mapping[str, FieldInfo]) -> Iterator[str]:
    """The parameters of these fields: sources by position too, all others by name only."""
    for name, field in fields.items():
        if name == "actual":
            continue
        if name == "against":
            yield "against: Any = None"
            continue
        yield f"{name}: {type_of(field.annotation, field.metadata)} = {default_of(field)}"
        if name == "value":
            yield "*"


def typed_dict(model: type[BaseModel]) -> str:
    """The class for the dict of a nested field."""
    (base,) = model.__bases__
    inherited = base.model_fields
    named = base.__name__ if inherited else "TypedDict"
    lines = [f"class {model.__name__}({named}, total=False):", f'    """{model.__doc__}"""', ""]
    for name, field in model.model_fields.items():
        if name in inherited:
            continue
        lines.append(f"    {name}: {type_of(field.annotation, field.metadata, nested=True)}")
        text = textwrap.wrap(described_field(field) + '"""', WIDTH - 4, initial_indent='"""')
        lines += [f"    {line}" for line in text]
    return "\n".join(lines) + "\n"


def parts_of(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """The models of nested fields, inner ones first, without that of `actual`."""
    found: dict[type[BaseModel], None] = {}

    def visit(outer: type[BaseModel]) -> None:
        for name, field in outer.model_fields.items():
            for option in get_args(field.annotation) if name not in ("actual", "against") else ():
                if isinstance(option, type) and issubclass(option, BaseModel) and option not in found:
                    visit(option)
                    found[option] = None

    visit(model)
    yield from found


def type_of(annotation: Any, metadata: list[Any] | None = None, *, nested: bool = False) -> str:
    """The type of an argument. metadata: what pydantic took from an annotation that is not a union"""
    if metadata:
        whole = Annotated[annotation, *metadata]  # type: ignore[valid-type]
        if get_origin(annotation) not in (Union, types.UnionType):
            annotation = whole
    for name, known in NAMED:
        if annotation == known:
            return name
    if annotation is type(None):
        return "None"
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " | ".join(type_of(option, nested=nested) for option in inner)
    if origin is Annotated:
        return "Array" if arrays.ProtocolTensor in map(type, annotation.__metadata__) else type_of(inner[0])
    if origin is list:
        return f"Sequence[{type_of(inner[0])}]"
    assert origin is not Literal, f"a literal without a name: {annotation}"
    if issubclass(annotation, BaseModel):
        return annotation.__name__ if nested else f"{annotation.__name__} | Mapping[str, Any]"
    return str(annotation.__name__)


def default_of(field: FieldInfo) -> str:
    """The default of a field as Python."""
    value = field.default
    if isinstance(value, tuple):  # which depends on other fields
        return "None"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def described_field(field: FieldInfo) -> str:
    """The description of a field, and the values that it can have."""
    text = " ".join((field.description or "").split())
    for option in get_args(field.annotation):
        if get_origin(option) is Literal:
            text += f" One of {', '.join(get_args(option))}."
    return text


def arguments(described: Mapping[str, str]) -> str:
    """The section of a docstring on its arguments."""
    lines = ["Args:"]
    for name, text in described.items():
        lines += textwrap.wrap(f"{name}: {text}", WIDTH - 4, initial_indent=" " * 4, subsequent_indent=" " * 8)
    return "\n".join(lines)
