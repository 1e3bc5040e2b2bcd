"""Where requests come from: pasted text, files, sentences, addresses; and what is shown if they are wrong."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
from playwright.sync_api import BrowserContext, Page, expect
from safetensors.numpy import save_file

from tests.conftest import app, serving
from tests.page.helpers import BY_NAME, fill, numbers, open_details, paste_text, wait

Open = Callable[..., Page]
RANDOM = np.random.default_rng(0)
ARRAYS = {name: RANDOM.normal(size=(2, 5, 4)).astype(np.float32) for name in ("query", "key", "value")}
FIELDS = {"layout": "hld", "is_causal": True, "window": {"left": 2}}
KEY = "correct horse"


def as_json(folder: Path) -> list[Path]:
    (folder / "request.json").write_text(json.dumps({**{k: v.tolist() for k, v in ARRAYS.items()}, **FIELDS}))
    return [folder / "request.json"]


def as_npz(folder: Path) -> list[Path]:
    np.savez(folder / "request.npz", request=json.dumps(FIELDS), **ARRAYS)  # type: ignore[arg-type]
    return [folder / "request.npz"]


def as_compressed_npz(folder: Path) -> list[Path]:
    content = np.frombuffer(json.dumps(FIELDS).encode(), np.uint8)
    np.savez_compressed(folder / "request.npz", request=content, **ARRAYS)  # type: ignore[arg-type]
    return [folder / "request.npz"]


def as_npy(folder: Path) -> list[Path]:
    for name, array in ARRAYS.items():
        np.save(folder / f"{name}.npy", array)
    (folder / "options.json").write_text(json.dumps(FIELDS))
    return [*(folder / f"{name}.npy" for name in ARRAYS), folder / "options.json"]


def as_safetensors(folder: Path) -> list[Path]:
    save_file(ARRAYS, folder / "request.safetensors", {"request": json.dumps(FIELDS)})
    return [folder / "request.safetensors"]


def expected(service: Any, **fields: Any) -> dict[str, Any]:
    request = {**{name: array.tolist() for name, array in ARRAYS.items()}, **FIELDS, **fields}
    answer: dict[str, Any] = service.post("/attention", json=request).json()
    return answer


@pytest.mark.parametrize(
    "write", [as_json, as_npz, as_compressed_npz, as_npy, as_safetensors], ids=lambda f: f.__name__
)
def test_files_of_each_format_are_computed_and_have_controls(
    write: Any, folder: Path, open_page: Open, service: Any
) -> None:
    page = open_page()
    page.locator("#example").select_option("data")
    page.locator("#file").set_input_files(write(folder))
    expect(page.locator("#status")).to_contain_text("5 × 5 · 2 heads")
    wait(page)
    weights = expected(service, dtype="float32")["attention_weights"]
    np.testing.assert_allclose(numbers(page, "attention_weights"), weights[0], rtol=1e-5)
    page.locator("#heads button").nth(1).click()
    np.testing.assert_allclose(numbers(page, "attention_weights"), weights[1], rtol=1e-5)
    expect(page.locator("[name='window.left']")).to_have_value("2")
    fill(page, "window.left", 0)
    assert numbers(page, "attention_weights") == np.eye(5).tolist()


def test_a_single_array_is_self_attention(folder: Path, open_page: Open) -> None:
    np.save(folder / "anything.npy", np.eye(3, dtype=np.float16))
    page = open_page()
    page.locator("#example").select_option("data")
    page.locator("#file").set_input_files(folder / "anything.npy")
    expect(page.locator("#status")).to_contain_text("3 × 3 · 1 head · float16")
    page.locator("#pasted").fill("[[1, 0], [0, 1]]")
    expect(page.locator("#status")).to_contain_text("2 × 2 · 1 head · float64")


@pytest.mark.parametrize("kind", ["int8", "int16", "uint8", "uint16", "uint32", "uint64"])
def test_files_of_integers_of_all_widths_are_read(kind: str, folder: Path, open_page: Open) -> None:
    array = np.array([[1, 0], [3, 7]], kind)
    files = [folder / "input.npy", folder / "input.safetensors"]
    np.save(files[0], array)
    save_file({"input": array}, files[1])
    for file in files:
        page = open_page()
        page.locator("#example").select_option("data")
        page.locator("#file").set_input_files(file)
        expect(page.locator("#status")).to_contain_text("2 × 2 · 1 head")
        wait(page)
        first = 1 / (1 + math.exp(math.sqrt(2)))  # scores (1, 3) / √2
        assert numbers(page, "attention_weights")[0] == pytest.approx([first, 1 - first])


def test_wrong_files_and_texts_are_told(folder: Path, open_page: Open) -> None:
    page = open_page()
    page.locator("#example").select_option("data")
    (folder / "a.npz").write_bytes(b"no zip file")
    page.locator("#file").set_input_files(folder / "a.npz")
    expect(page.locator("#problem")).to_have_text("a.npz: expected a whole file of the format that its name says")
    page.locator("#pasted").fill('{"input": [[1')
    expect(page.locator("#pasted + #problem")).to_have_text(
        "line 1, column 14: expected a number, a comma or ], got the end"
    )
    page.locator("#pasted").fill("[[1, 0], [0, \u200b1]]")
    expect(page.locator("#pasted + #problem")).to_have_text("line 1, column 14: expected a number, [ or ], got U+200B")
    expect(page.locator("#short")).to_have_attribute("inert", "")
    page.locator("#pasted").fill('{"inptu": [[1]]}')
    expect(page.locator("#pasted + #problem")).to_contain_text("/inptu: expected")
    page.locator("#pasted").fill('{"input": [[1]]}')
    expect(page.locator(".fault")).to_have_count(0)
    expect(page.locator("#problem")).to_be_hidden()
    expect(page.locator("#short")).not_to_have_attribute("inert", "")


ROWS = [[1.5, -2.0], [3.0, 0.25]]
TEXTS = {
    "CSV": "1.5,-2\n3,.25\n",
    "TSV": "1.5\t-2\r\n3\t2.5e-1\r\n",
    "semicolons": "1.5; -2\n3; .25",
    "spaces": "# from numpy.savetxt\n  1.5   -2.\n  3.0e+00 .25\n\n",
    "rows": "[1.5, -2],\n[3, 0.25],",
    "printed by NumPy": "[[ 1.5  -2.  ]\n [ 3.    0.25]]",
    "NumPy": "array([[ 1.5 , -2.  ],\n       [ 3.  ,  0.25]], dtype=float32)",
    "torch": "tensor([[ 1.5000, -2.0000],\n        [ 3.0000,  0.2500]], device='cuda:0', grad_fn=<AddmmBackward0>)",
    "TensorFlow": "tf.Tensor(\n[[ 1.5  -2.  ]\n [ 3.    0.25]], shape=(2, 2), dtype=float32)",
    "a program": "import numpy as np\n\n>>> x = np.array([(1.5, -2), (3, .25)])  # two tokens\n",
    "a dictionary": "{'input': [[1.5, -2,], [3, .25]], 'is_causal': False, 'softcap': None}",
    "x": '{"x": [[1.5, -2], [3, 0.25]]}',
}


def test_texts_of_all_forms_are_read(open_page: Open) -> None:
    page = open_page()
    for name, text in TEXTS.items():
        paste_text(page, text)
        wait(page)
        expect(page.locator("#status")).to_contain_text("2 × 2 · 1 head")
        assert numbers(page, "query") == ROWS, name


LABELLED = {
    "first column": 'cat,1.5,-2\n"a, ""b""",3,.25',
    "column and header": 'word,one,two\ncat,1.5,-2\n"a, ""b""",3,.25',
    "header": 'cat,"a, ""b"""\n1.5,3\n-2,.25',
    "tabs": 'cat\t1.5\t-2\na, "b"\t3\t.25',
}


def test_words_of_a_table_are_tokens(open_page: Open) -> None:
    page = open_page()
    for name, text in LABELLED.items():
        paste_text(page, text)
        wait(page)
        expect(page.locator("#row th[scope=row]").first).to_have_text("cat")
        expect(page.locator("#row th[scope=row]").nth(1)).to_have_text('a, "b"')
        shown = numbers(page, "query")
        assert ([list(row) for row in zip(*shown, strict=True)] if name == "header" else shown) == ROWS, name


QKV = "q = [[1, 0], [0, 1], [1, 1]]\nK = np.array([[1., 2.]])\nvalue = torch.tensor([[3., 4.]])"


def test_short_names_are_those_of_fields(open_page: Open) -> None:
    page = open_page()
    for text in (
        QKV,
        QKV.replace(" = ", ": ").replace("\n", ",\n").join("{}"),
        '{"q": [[1, 0], [0, 1], [1, 1]], "k": [[1, 2]], "v": [[3, 4]]}',
    ):
        paste_text(page, text)
        wait(page)
        expect(page.locator("#status")).to_contain_text("3 × 1")
        assert numbers(page, "present_key") == [[1, 2]]
        assert numbers(page, "present_value") == [[3, 4]]


QUERIES, KEYS, VALUES = [[1, 0], [0, 1], [1, 1]], [[1, 2], [3, 4]], [[5, 6, 7], [8, 9, 10]]


def table(rows: list[list[int]], sign: str = " ") -> str:
    return "\n".join(sign.join(map(str, row)) for row in rows)


def printed(rows: list[list[int]]) -> str:
    return str(np.array(rows, float))


SIGNS = {"spaces": " ", "commas": ",", "semicolons": "; ", "tabs": "\t"}
BLOCKS = {
    **{name: "\n\n".join(table(rows, sign) for rows in (QUERIES, KEYS, VALUES)) for name, sign in SIGNS.items()},
    "empty rows of a spreadsheet": "\n,,\n,,\n".join(table(rows, ",") for rows in (QUERIES, KEYS, VALUES)) + "\n,,\n",
    "comments": f"# from numpy\n{table(QUERIES)}\n\n# two\n{table(KEYS)}\n\n{table(VALUES)}",
    "names": f"q\n{table(QUERIES)}\nk\n{table(KEYS)}\nv\n{table(VALUES)}",
    "names with more words": "\n".join(
        f"{name}:\n{table(rows)}\n"
        for name, rows in (("Query matrix", QUERIES), ("The keys", KEYS), ("V (values)", VALUES))
    ),
    "names in another order": f"Values:\n{table(VALUES)}\n\nQ:\n{table(QUERIES)}\n\nkeys =\n{table(KEYS)}",
    "full names, double-spaced": f"query =\n{table(QUERIES)}\n\nKEY\n\n1 2\n\n3 4\n\nvalue:\n{table(VALUES)}",
    "headers of savetxt": f"# k\n{table(KEYS)}\n# q\n{table(QUERIES)}\n# v\n{table(VALUES)}",
    "words": f"cat 1 0\nhat 0 1\nsat 1 1\n\nmat 1 2\nrat 3 4\n\n{table(VALUES)}",
    "words above": "a b c\n1 0 1\n0 1 1\n\nd e\n1 3\n2 4\n\nf g\n5 8\n6 9\n7 10",
    "printed one after the other": "\n".join(map(printed, (QUERIES, KEYS, VALUES))),
    "printed by torch": "\n\n".join(f"tensor({rows}, dtype=torch.float64)" for rows in (QUERIES, KEYS, VALUES)),
    "printed with names": f"Q:\n{printed(QUERIES)}\nK\n{printed(KEYS)}\nvalues =\n{printed(VALUES)}",
}


def test_blocks_are_query_key_and_value(open_page: Open) -> None:
    page = open_page()
    for name, text in BLOCKS.items():
        paste_text(page, text)
        wait(page)
        expect(page.locator("#status")).to_contain_text("3 × 2")
        found = [numbers(page, stage) for stage in ("query", "present_key", "present_value")]
        if name == "words above":
            found = [[list(row) for row in zip(*rows, strict=True)] for rows in found]
        assert found == [QUERIES, KEYS, VALUES], name
    paste_text(page, BLOCKS["words"])
    wait(page)
    expect(page.locator("#row th[scope=row]").first).to_have_text("mat")


def test_one_block_is_the_input(open_page: Open) -> None:
    """Also one with an empty line after each row, and rows of lists."""
    page = open_page()
    for text in (
        "1 0\n0 1\n1 1",
        "\n\n1 0\n\n0 1\n\n1 1\n",
        "x\n1 0\n0 1\n1 1",
        "inputs:\n1 0\n0 1\n\n1 1",
        "[1, 0]\n[0, 1]\n[1, 1]",
    ):
        paste_text(page, text)
        wait(page)
        expect(page.locator("#status")).to_contain_text("3 × 3")
        assert [numbers(page, stage) for stage in ("query", "present_key", "present_value")] == [QUERIES] * 3, text


def test_other_blocks_are_errors(open_page: Open) -> None:
    page = open_page()
    expected = "expected one block (input), three (query, key, value), or names like q: above them, got"
    for text, message in (
        (f"{table(QUERIES)}\n\n{table(KEYS)}", f"line 5, column 1: {expected} 2 blocks"),
        ("\n\n".join([table(KEYS)] * 4), f"line 4, column 1: {expected} 4 blocks"),
        (f"{printed(KEYS)}\n{printed(KEYS)}", f"line 3, column 1: {expected} 2 blocks"),
        (f"{table(KEYS)}\n\n1 2\n3 4 5\n\n{table(KEYS)}", "line 5, column 5: expected 2 columns as in line 4, got 5"),
        ("q\n1 0\nk\n1 2\nQuery:\n3 4", "line 6, column 1: expected each name once, got query"),
        ("1,5;2,5\n3;4", "line 1, column 1: expected a decimal point, got 1,5"),
        ("a b\n1 0\n0 1\n\n1 2\n3 4\n\n5 6\n7 8", "line 5, column 1: expected words above all blocks or none, got key"),
        ("q\n\nk\n1 2", "line 3, column 1: expected rows of numbers, got the end"),
    ):
        paste_text(page, text)
        expect(page.locator("#pasted + #problem")).to_have_text(message)
    # Of another width than query, or of another length than key: the service names them.
    for text, field in (("q\n1 0\nk\n1 2 3\nv\n1", "/key"), ("q\n1 0\nk\n1 2\n3 4\nv\n1", "/value")):
        paste_text(page, text)
        expect(page.locator("#problem")).to_contain_text(f"{field}: expected")


# As notebooks write maps: rows @ W_q, and omega_q @ columns + beta_q.
MAPPED = [[1, 2], [3, 5]]
MAPS = {
    "W_q": "x = [[1, 0], [0, 1], [1, 1]]\nW_q = [[1, 2], [3, 5]]",
    "Wq": '{"inputs": [[1, 0], [0, 1], [1, 1]], "Wq": [[1, 2], [3, 5]]}',
    "w_query": "X = array([[1, 0], [0, 1], [1, 1]])\nw_query = tensor([[1., 2.], [3., 5.]], requires_grad=1)",
    "blocks": "1 0\n0 1\n1 1\n\nW_Q\n1 2\n3 5",
    "omega_q": "X = [[1, 0, 1], [0, 1, 1]]\nomega_q = [[1, 3], [2, 5]]\nbeta_q = [[0], [0]]",
    "blocks of columns": "x:\n1 0 1\n0 1 1\n\nomega_q:\n1 3\n2 5\n\nbeta_q:\n0\n0",
}


def test_maps_are_written_as_in_notebooks(open_page: Open) -> None:
    page = open_page()
    for name, text in MAPS.items():
        paste_text(page, text)
        wait(page)
        expect(page.locator("#status")).to_contain_text("3 × 3")
        turned = "omega" in name or "columns" in name
        found = numbers(page, "query"), numbers(page, "present_key")
        rows = [*MAPPED, [4, 7]], QUERIES
        assert found == (tuple([list(row) for row in zip(*part, strict=True)] for part in rows) if turned else rows), (
            name
        )
        page.locator("#pipeline button[value=query]").click(position={"x": 12, "y": 8})
        expect(page.locator("#steps")).to_contain_text("Linear map")


def test_maps_beside_a_projection_are_refused(open_page: Open) -> None:
    page = open_page()
    for text, name in (
        ('{"x": [[1]], "W_q": [[1]], "projection": {"query": {"weight": [[2]]}}}', "/W_q: expected"),
        ("x = [[1]]\nW_q = [[1]]\nWq = [[2]]", "/Wq: expected"),
    ):
        paste_text(page, text)
        expect(page.locator("#problem")).to_contain_text(name)


def test_files_may_be_named_for_maps(folder: Path, open_page: Open) -> None:
    np.save(folder / "inputs.npy", np.array(QUERIES, float))
    (folder / "W_q.csv").write_text("a,b\n1,2\n3,5\n")
    np.save(folder / "w_k.npy", np.array([[2.0, 0.0], [0.0, 2.0]]))
    page = open_page()
    page.locator("#example").select_option("data")
    page.evaluate("performance.clearMeasures()")
    page.locator("#file").set_input_files([folder / name for name in ("inputs.npy", "W_q.csv", "w_k.npy")])
    wait(page)
    assert numbers(page, "query") == [*MAPPED, [4, 7]]
    assert numbers(page, "present_key") == [[2, 0], [0, 2], [2, 2]]


def test_blocks_of_an_output_are_one_array(open_page: Open) -> None:
    """What a kernel returned has one array, however it is printed."""
    page = open_page()
    paste_text(page, "[[1, 0], [0, 1], [1, 1]]")
    wait(page)
    page.locator("#compare-title").click()
    page.locator("#actual").fill("1 0\n0 1\n\n1 1")
    page.locator("#compare button").click()
    expect(page.locator("#report .verdict")).to_contain_text("wrong")


def test_masks_of_a_program_are_read(open_page: Open) -> None:
    page = open_page()
    page.locator("#example").select_option("data")
    for mask in (
        "mask = [[1, 0], [1, 1]]",
        "mask = [[ True False]\n [ True  True]]",
        "bias = [[0, -inf], [0, float('-inf')]]",
    ):
        page.evaluate("performance.clearMeasures()")
        page.locator("#pasted").fill(f"x = [[1, 0], [0, 1]]; {mask}")
        wait(page)
        assert numbers(page, "attention_weights")[0] == [1, 0]


def test_wrong_texts_are_told_with_their_place(open_page: Open) -> None:
    page = open_page()
    for text, message in (
        ("[[1, 2 x]]", "line 1, column 8: expected a number, a comma or ], got x"),
        ("[[1, 2],\n [3, x]]", "line 2, column 6: expected a number, [ or ], got x"),
        ("[[1, nan]]", "line 1, column 6: expected a finite number or -inf, got nan"),
        ("[[1 2 ... 9]]", "line 1, column 7: expected a number, a comma or ], got ..."),
        ("[[1-2]]", "line 1, column 3: expected a number, [ or ], got 1-2"),
        ("q = [[1]]\nk = np.zeros((2, 3))", "line 2, column 5: expected a number, a list or an array, got np.zeros"),
        ("{'q': [[1]] 'k': [[1]]}", "line 1, column 13: expected a comma or }, got '"),
        ("{'q'}", "line 1, column 5: expected a colon, got }"),
        ("1,2\n3,x", "line 2, column 3: expected a number, got x"),
        ("1 2\n\n3 4 5", "line 3, column 5: expected 2 columns as in line 1, got 5"),
        ("hello", "line 1, column 1: expected a number, [ or {, got hello"),
        ("[" * 40, "line 1, column 34: expected at most 32 brackets within each other, got ["),
        ("# nothing", "line 1, column 10: expected rows of numbers, got the end"),
    ):
        paste_text(page, text)
        expect(page.locator("#pasted + #problem")).to_have_text(message)


def test_names_of_all_objects_are_fields_that_the_service_refuses(open_page: Open) -> None:
    page = open_page()
    page.locator("#example").select_option("data")
    for text in ("__proto__ = {'x': 1}\nq = [[1]]", "{'__proto__': {'x': 1}, 'q': [[1]]}", "toString = 1"):
        page.locator("#pasted").fill("[[1]]")
        expect(page.locator("#problem")).to_be_hidden()
        page.locator("#pasted").fill(text)
        expect(page.locator("#problem")).to_contain_text("toString" if "toString" in text else "__proto__")
    assert page.evaluate("[({}).x, Object.keys(Object.prototype)]") == [None, []]


def test_long_wrong_texts_are_told_at_once(open_page: Open) -> None:
    page = open_page()
    module = "import('./page/request.js').then(({ requestOfText }) => requestOfText(text)).catch(String)"
    for text in ("[" + " " * 200_000 + "?", "1" + " " * 200_000 + "x", "#" * 200_000 + "\n[x", "'" * 200_001):
        assert "expected a number" in page.evaluate(f"text => {module}", text)


def test_tables_are_files_of_their_fields(folder: Path, open_page: Open) -> None:
    (folder / "q.csv").write_text("token,x,y\ncat,1,0\nhat,0,1\n")
    (folder / "key.TSV").write_text("1\t0\n0\t1\n")
    (folder / "v.txt").write_text("array([[1., 2.],\n       [3., 4.]])")
    (folder / "mask.csv").write_text("1,0\n1,1\n")
    page = open_page()
    page.locator("#example").select_option("data")
    page.locator("#file").set_input_files([folder / name for name in ("q.csv", "key.TSV", "v.txt", "mask.csv")])
    expect(page.locator("#status")).to_contain_text("2 × 2 · 1 head")
    assert numbers(page, "present_value") == [[1, 2], [3, 4]]
    assert numbers(page, "attention_weights")[0] == [1, 0]
    (folder / "key.TSV").write_text("1\t0\n0\tone\n")
    page.locator("#file").set_input_files(folder / "key.TSV")
    expect(page.locator("#problem")).to_have_text("key.TSV: line 2, column 3: expected a number, got one")


DROP = """([selector, name, text]) => {
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([text], name));
  const over = new DragEvent("dragover", {dataTransfer, bubbles: true, cancelable: true});
  const drop = new DragEvent("drop", {dataTransfer, bubbles: true, cancelable: true});
  const target = document.querySelector(selector);
  return [over, drop].map(event => !target.dispatchEvent(event));
}"""


def test_files_can_be_dropped_on_the_page(open_page: Open) -> None:
    page = open_page()
    assert page.evaluate(DROP, ["main", "some.csv", "1,0\n0,1\n"]) == [True, True]
    expect(page.locator("#status")).to_contain_text("2 × 2")
    expect(page.locator("#example")).to_have_value("data")
    page.locator("#compare-title").click()
    page.locator("#actual").fill("x")
    assert page.evaluate(DROP, ["#actual", "output.csv", "1,0\n0,1\n"]) == [True, True]
    expect(page.locator("#actual")).to_have_value("")
    page.locator("#compare button").click()
    expect(page.locator("#report .verdict")).to_contain_text("wrong")
    expect(page.locator("#status")).to_contain_text("2 × 2")


@pytest.mark.parametrize(
    "name", ["__proto__.x", "a.__proto__.x", "constructor.prototype.x", "toString", "input.push.x"]
)
@pytest.mark.parametrize("ending", ["safetensors", "npz"])
def test_a_tensor_named_as_what_all_objects_have_is_refused(
    name: str, ending: str, folder: Path, open_page: Open
) -> None:
    file = folder / f"a.{ending}"
    if ending == "npz":
        np.savez(file, request=json.dumps({"input": [[1]]}), **{name: np.eye(2)})  # type: ignore[arg-type]
    else:
        save_file({name: np.eye(2)}, file, {"request": json.dumps({"input": [[1]]})})
    page = open_page()
    page.locator("#example").select_option("data")
    page.locator("#file").set_input_files(file)
    expect(page.locator("#problem")).to_contain_text("no field has the name")
    assert page.evaluate("[({}).x, [].push.x, Object.keys(Object.prototype)]") == [None, None, []]


def test_prototypes_in_a_file_of_json_are_fields_that_the_service_refuses(folder: Path, open_page: Open) -> None:
    (folder / "a.json").write_text('{"__proto__": {"input": [[1]]}, "input": [[1]]}')
    page = open_page()
    page.locator("#example").select_option("data")
    page.locator("#file").set_input_files(folder / "a.json")
    expect(page.locator("#problem")).to_contain_text("__proto__")


def test_without_a_request_no_picture_looks_current(open_page: Open) -> None:
    page = open_page()
    paste_text(page, "")
    expect(page.locator("#short")).to_have_attribute("inert", "")
    expect(page.locator("#status")).to_have_text("Nothing computed")
    expect(page.locator("#problem")).to_be_hidden()
    page.locator("[name=softcap]").fill("3")
    page.wait_for_timeout(200)
    expect(page.locator("#problem")).to_be_hidden()
    page.reload()
    expect(page.locator("#status")).to_have_text("Nothing computed")
    expect(page.locator("#notice")).to_contain_text("no data")
    expect(page.locator("#pasted")).to_be_visible()
    expect(page.locator("#problem")).to_be_hidden()
    expect(page.locator("#short")).to_be_hidden()
    page.locator("#example").select_option("causal")
    expect(page.locator("#short")).not_to_have_attribute("inert", "")
    expect(page.locator("#notice")).to_be_empty()


def test_the_own_request_starts_from_what_was_shown(open_page: Open) -> None:
    page = open_page(example="causal", num_heads=2, query=2, key=1, stage="masked_scores")
    shown = numbers(page, "masked_scores"), page.locator("#readout").text_content()
    page.evaluate("performance.clearMeasures()")
    page.locator("#example").select_option("data")
    wait(page)
    assert (numbers(page, "masked_scores"), page.locator("#readout").text_content()) == shown
    text = page.locator("#pasted").input_value()
    request = json.loads(text)
    assert request["num_heads"] == 2
    assert "include" not in request
    assert request["query"] == BY_NAME["causal"].request["query"]
    for row in request["query"]:
        assert f"{json.dumps(row)}" in [line.strip().rstrip(",") for line in text.splitlines()]
    page.locator("#pasted").fill('{"input": [[1, 0], [0, 1]]}')
    expect(page.locator("#status")).to_contain_text("2 × 2")
    page.locator("#example").select_option("six_tokens_softmax")
    expect(page.locator("#status")).to_contain_text("1 × 6")
    page.locator("#example").select_option("data")
    expect(page.locator("#status")).to_contain_text("2 × 2")


def test_edits_of_the_own_request_keep_options_and_the_cell(open_page: Open) -> None:
    """While its lengths stay, also after a text that cannot be read; an option that the text changes is the text's."""
    page = open_page()
    paste_text(page, "input = [[1, 0], [0, 1], [1, 1]]")
    wait(page)
    fill(page, "is_causal", True)
    fill(page, "scale", 0.5)
    for key in ("ArrowDown", "ArrowRight"):
        page.locator("#large").press(key)
    page.locator("#pipeline button[value=masked_scores]").click()
    for text in ("input = [[1, 0], [2", 'input = [[1, 0], [2, 1], [1, 1]]\nquery_tokens = ["I", "see", "you"]'):
        page.locator("#pasted").fill(text)
        expect(page.locator("#problem")).to_be_visible(visible="query" not in text)
    readout = page.locator("#readout")
    expect(readout).to_have_text("query 1 “\u2068see\u2069”, key 1 “\u2068see\u2069”: 2.500000")  # 5 · 0.5
    expect(page.locator("[name=is_causal]")).to_be_checked()
    page.locator("#pasted").fill("input = [[1, 0], [2, 1], [1, 1]]\nscale = 2")
    expect(readout).to_have_text("query 1, key 1: 10.000000")
    expect(page.locator("[name=is_causal]")).to_be_checked()
    page.locator("#pasted").fill("input = [[1, 0], [2, 1]]")
    expect(readout).to_contain_text("query 0, key 0: 0.330238")  # 1 / (1 + exp(1 / √2))
    expect(page.locator("[name=is_causal]")).not_to_be_checked()


def test_the_own_request_starts_small_where_the_example_is_large(open_page: Open) -> None:
    page = open_page(example="sentence", text="a " * 100, dim=100)
    page.locator("#example").select_option("data")
    expect(page.locator("#status")).to_contain_text("3 × 3")
    assert len(json.loads(page.locator("#pasted").input_value())["input"]) == 3


def test_an_example_that_is_not_there_is_the_first_one(open_page: Open) -> None:
    page = open_page(example="nonsense")
    expect(page.locator("#example")).to_have_value("trained_head")
    expect(page.locator("#status")).to_contain_text("14 × 14")


def test_an_error_without_a_control_is_shown_at_the_last_change(open_page: Open) -> None:
    page = open_page(example="causal")
    page.locator("[name=num_heads]").fill("3")
    expect(page.locator("[name=num_heads] + #problem")).to_contain_text("a multiple of num_heads = 3")
    page.locator("[name=num_heads]").fill("2")
    expect(page.locator("#problem")).to_be_hidden()


@pytest.mark.parametrize(
    "fields",
    [{"stage": "foo"}, {"query": "abc", "head": "-1"}, {"query": "0.5", "key": "1e9"}, {"stage": '"]'}],
    ids=str,
)
def test_a_bad_choice_in_the_address_is_the_nearest_good_one(fields: dict[str, str], open_page: Open) -> None:
    page = open_page(example="causal", **fields)
    expect(page.locator("#readout")).to_contain_text("query 0, key 3:" if "key" in fields else "query 0, key 0:")
    expect(page.locator("#large-title")).to_have_text("Weights")


@pytest.mark.parametrize("dim", ["513", "1000000", "1e300", "1e999", "-5", "0", "0.5", "x"])
def test_the_features_of_a_sentence_in_the_address_are_bounded(dim: str, open_page: Open) -> None:
    page = open_page(example="sentence", text="a b", dim=dim)
    expect(page.locator("#status")).to_contain_text("2 × 2")
    open_details(page, "share")
    page.locator("#copy-curl").click()
    request = json.loads(page.locator("#copied-text").input_value().splitlines()[1])
    assert len(request["input"][0]) == (512 if dim in ("513", "1000000", "1e300") else 1)
    if dim == "1000000":
        expect(page.locator("#dim")).to_have_value("512")


def test_a_typed_number_of_features_is_bounded(open_page: Open) -> None:
    page = open_page(example="sentence", text="a b")
    page.locator("#dim").fill("1000000")
    expect(page.locator("#dim")).to_have_value("512")


def test_the_numbers_of_a_sentence_are_bounded(open_page: Open, page: Page, address: str) -> None:
    open_page(example="sentence", text="a b")
    page.evaluate("location.hash = `example=sentence&dim=512&text=${'a+'.repeat(100_000)}`")
    expect(page.locator("#problem")).to_contain_text("expected at most 4194304 numbers")


# Numbers of the request, and of what is shown of its answer, which is only reached with a good request.
NUMBERS = [
    ["num_heads", "scale", "softcap", "window.left", "window.right", "query_offset", "chunk_size"],
    ["seed", "batch", "head", "query", "key", "feature"],
]


@pytest.mark.parametrize("value", ["1000000000000", "-1e300", "Infinity"])
@pytest.mark.parametrize("names", NUMBERS, ids=["of the request", "of what is shown"])
def test_any_number_in_the_address_leaves_the_page_working(
    names: list[str], value: str, page: Page, address: str
) -> None:
    """It is bounded, or refused by the service; then the next example is computed."""
    page.goto(f"{address}/#example=sentence&text=a+b&{urlencode(dict.fromkeys(names, value))}")
    expect(page.locator("#status")).not_to_be_empty()
    page.locator("#example").select_option("causal")
    expect(page.locator("#status")).to_contain_text("×")


def test_what_is_no_request_gives_an_error_at_the_text(open_page: Open) -> None:
    page = open_page()
    problem = page.locator("#pasted + #problem")
    for text in ("null", "5", "[]", '"a"', '{"input": null}'):
        paste_text(page, text)
        expect(problem).to_contain_text("expected")
        page.locator("#pasted").fill("[[1]]")
        expect(problem).to_be_hidden()


def test_options_that_leave_numbers_out_are_left_out(open_page: Open, service: Any) -> None:
    """The page needs all numbers, and says which fields of a request it does not send."""
    request = {"input": np.eye(4).tolist(), "num_heads": 2, "scale": 2, "softcap": None, "encoding": "base64"}
    weights = service.post("/attention", json={"input": request["input"], "num_heads": 2, "scale": 2}).json()[
        "attention_weights"
    ]
    fewer = {"select_queries": [1], "select_heads": [1], "top_k": 2, "average_heads": True}
    gradients = {"grad_output": request["input"], "gradients": "all"}
    page = open_page()
    paste_text(page, json.dumps(request | fewer | gradients))
    expect(page.locator("#status")).to_contain_text("without select_queries · without select_heads")
    expect(page.locator("#status")).to_contain_text("without top_k · without gradients")
    page.locator("#heads button").nth(1).click()
    np.testing.assert_allclose(numbers(page, "attention_weights"), weights[1])
    expect(page.locator("[name=softcap]")).to_be_enabled()
    page.locator("#compare-title").click()
    page.locator("#actual").fill(json.dumps(np.eye(4).tolist()))
    page.locator("#compare button").click()
    expect(page.locator("#report .verdict")).to_be_visible()


def test_labels_of_queries_are_those_of_the_keys_in_self_attention(open_page: Open) -> None:
    page = open_page()
    paste_text(page, '{"input": [[1, 0], [0, 1]], "query_tokens": ["x", "y"], "is_causal": true}')
    expect(page.locator("#row th").first).to_have_text("x")
    page.locator("#large").press("ArrowRight")
    expect(page.locator("#readout")).to_contain_text("1 “\u2068y\u2069” comes after position 0")


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_heads", 0), ("softcap", 0), ("window.left", -1), ("chunk_size", 0), ("softcap", "-1")],
)
def test_an_error_is_shown_at_its_control(name: str, value: Any, open_page: Open) -> None:
    page = open_page(example="causal")
    control = page.locator(f"[name='{name}']")
    open_details(page, "more")
    control.fill(str(value))
    fault = page.locator(".fault")
    expect(fault).to_contain_text("expected")
    described = control.get_attribute("aria-describedby")
    assert control.get_attribute("aria-invalid") == "true"
    assert described == fault.get_attribute("id")
    control.fill("")
    expect(fault).to_have_count(0)


WRONG: list[dict[str, Any]] = [
    {"is_causal": 1}, {"is_causal": "maybe"}, {"window": 3}, {"softcap": "abc"}, {"chunk_size": "x"},
    {"num_heads": "two"}, {"scale": "0.5"}, {"num_heads": True}, {"window": {"left": 0, "right": 0, "foo": 3}},
    {"layout": 5}, {"normalization": "max"}, {"query_offset": "1"},
]  # fmt: skip


def test_a_wrong_option_is_sent_as_it_was_pasted(open_page: Open, service: Any) -> None:
    page = open_page()
    for option in WRONG:
        request = {"input": np.eye(4).tolist(), **option}
        answer = service.post("/attention", json=request)
        assert answer.status_code == 422
        paste_text(page, json.dumps(request))
        fault = page.locator(".fault, #problem p").filter(has_text=answer.json()["errors"][0]["expected"])
        expect(fault).to_have_count(1)
        expect(page.locator("#short")).to_have_attribute("inert", "")
        expect(page.locator("#short")).to_have_css("opacity", "0.4")
        expect(page.locator("#status")).to_have_text("Nothing computed")
        page.locator("#example").select_option("causal")
        expect(page.locator("#status")).to_contain_text("4 × 4")
        expect(page.locator("[aria-invalid]")).to_have_count(0)


def test_options_of_a_file_are_sent_as_they_are(folder: Path, open_page: Open, service: Any) -> None:
    np.savez(folder / "request.npz", input=np.eye(4), is_causal=np.array([True, False]))
    content = (folder / "request.npz").read_bytes()
    answer = service.post("/attention", content=content, headers={"Content-Type": "application/x-npz"})
    assert answer.status_code == 422
    page = open_page()
    page.locator("#example").select_option("data")
    page.locator("#file").set_input_files(folder / "request.npz")
    expect(page.locator("[name=is_causal] + .fault")).to_contain_text("expected true or false")


def test_an_option_that_the_user_changes_replaces_a_wrong_one(open_page: Open) -> None:
    page = open_page()
    paste_text(page, '{"input": [[1, 0], [0, 1]], "softcap": "abc", "is_causal": true}')
    expect(page.locator("[name=softcap] + .fault")).to_have_count(1)
    fill(page, "softcap", 2)
    expect(page.locator("#status")).to_contain_text("2 × 2")
    expect(page.locator("[aria-invalid]")).to_have_count(0)
    expect(page.locator("#large .legend")).to_have_count(1)
    fill(page, "is_causal", False)
    expect(page.locator("#large .legend")).to_have_count(0)


def test_of_a_text_and_a_file_the_last_counts(folder: Path, open_page: Open) -> None:
    np.save(folder / "input.npy", np.eye(3))
    page = open_page()
    paste_text(page, "[[1, 0], [0, 1]]")
    expect(page.locator("#status")).to_contain_text("2 × 2")
    page.locator("#file").set_input_files(folder / "input.npy")
    expect(page.locator("#status")).to_contain_text("3 × 3")
    page.locator("#compare-title").click()
    page.locator("#actual-file").set_input_files(folder / "input.npy")
    page.locator("#actual").fill("[[1, 0]]")
    page.locator("#compare button").click()
    expect(page.locator("#compare + #problem")).to_contain_text("/actual/output")
    page.locator("#actual-file").set_input_files(folder / "input.npy")
    page.locator("#compare button").click()
    expect(page.locator("#report .verdict")).to_be_visible()


def test_the_number_of_heads_of_a_layout_is_shown(open_page: Open) -> None:
    page = open_page()
    paste_text(page, json.dumps({"input": np.ones((2, 3, 4)).tolist(), "layout": "hld"}))
    expect(page.locator("[name=num_heads]")).to_have_attribute("placeholder", "2")


def test_words_are_harmless_and_seeds_repeat(open_page: Open) -> None:
    text = "<script>alert(1)</script> שלום 🐈 <img/src=x/onerror=alert(1)> &amp; cat cat"
    page = open_page(example="sentence", text=text, dim=4, seed=7)
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    expect(page.locator("#row th[scope=row]").first).to_have_text("<script>alert(1)</script>")
    first = numbers(page, "query")
    assert first[-1] == first[-2]
    page.locator("#seed").fill("8")
    wait(page)
    expect(page.locator("#status")).to_contain_text("7 × 7")
    page.wait_for_timeout(300)
    assert numbers(page, "query") != first
    assert dialogs == []
    assert page.locator("main script, main img[src=x]").count() == 0


def test_the_address_restores_what_is_shown(open_page: Open, context: BrowserContext) -> None:
    page = open_page(example="causal")
    fill(page, "num_heads", 2)
    fill(page, "is_causal", False)
    fill(page, "window.left", 1)
    page.locator("#heads button").nth(1).click()
    page.locator("#pipeline button[value=masked_scores]").click(position={"x": 12, "y": 8})
    page.locator("#large").press("ArrowDown")
    shown = (numbers(page, "masked_scores"), page.locator("#readout").text_content())
    other = context.new_page()
    other.goto(page.url)
    wait(other)
    assert (numbers(other, "masked_scores"), other.locator("#readout").text_content()) == shown
    assert not other.locator("[name=is_causal]").is_checked()


def test_a_service_with_keys_asks_for_one(context: BrowserContext) -> None:
    with serving(app(api_keys=f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}")) as client:
        page = context.new_page()
        page.goto(str(client.base_url))
        expect(page.locator("#problem")).to_contain_text("key")
        page.locator("#key").fill(KEY)
        page.locator("#key").press("Enter")
        wait(page)
        expect(page.locator("#status")).to_contain_text("14 × 14")
        assert KEY not in page.evaluate(
            "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
        )


def test_the_page_works_below_a_prefix(context: BrowserContext, address: str) -> None:
    page = context.new_page()
    page.route(
        "**/prefix/**",
        lambda route: route.fulfill(response=route.fetch(url=route.request.url.replace("/prefix/", "/"))),
    )
    page.goto(f"{address}/prefix/")
    wait(page)
    expect(page.locator("#status")).to_contain_text("14 × 14")


def test_all_examples_can_be_chosen(open_page: Open) -> None:
    page = open_page()
    assert page.locator("#example option").count() == len(BY_NAME) + 12
    page.locator("#example").select_option("multihead")
    expect(page.locator("#status")).to_contain_text("6 × 6 · 2 heads")
    expect(page.locator("[name=layout]")).to_have_value("dl")
