"""Arguments of calls in types or forms that others also have: read as what they say, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attention_service import call
from tests.test_engines_call import ONES, K, Q, V, fault


@pytest.mark.parametrize("version", ["4", 4.5, [3, 4], True, 5])
def test_a_version_is_an_integer(version: Any) -> None:
    """Windows of a version that were read as those of another would give another answer."""
    assert fault("flash_attn.flash_attn_func", version, q=Q, k=K, v=V, window_size=(1, -1))[0] == "/version"
    call("flash_attn.flash_attn_func", version=np.int64(4), q=Q, k=K, v=V, window_size=(1, -1))  # type: ignore[arg-type]  # of NumPy


@pytest.mark.parametrize(
    ("wrong", "pointer"),
    [
        ({"include": "attention_weights"}, "/include"),
        ({"include": 5}, "/include"),
        ({"include": {"logsumexp": True}}, "/include"),
        ({"include": [["logsumexp"]]}, "/include/0"),
        ({"include": [np.array(["logsumexp", "output"])]}, "/include/0"),
        ({"dtype": 32}, "/dtype"),
        ({"dtype": np.array(["float32", "float16"])}, "/dtype"),
    ],
)
def test_options_of_another_type_are_refused(wrong: dict[str, Any], pointer: str) -> None:
    assert fault("flash_attn.flash_attn_func", q=Q, k=K, v=V, **wrong)[0] == pointer


def test_a_name_of_another_type_is_refused() -> None:
    wrong: list[Any] = [["flash_attn.flash_attn_func"] * 2, None, 3, np.array(["a", "b"])]
    for name in wrong:
        assert fault(name)[0] == "/call"


def test_include_may_be_none() -> None:
    found = call("flash_attn.flash_attn_func", q=Q, k=K, v=V, include=None)
    assert np.array_equal(found.output, call("flash_attn.flash_attn_func", q=Q, k=K, v=V).output)


def test_a_pair_of_caches_is_two_arrays() -> None:
    """Lists with two pages may be one cache or a pair; with three they are one."""
    function = "flashinfer.BatchDecodeWithPagedKVCacheWrapper.run"
    where: dict[str, Any] = {"q": ONES((1, 1, 1)), "indptr": [0, 2], "indices": [0, 1], "last_page_len": [1]}
    pair = [np.zeros((3, 1, 1, 1)), np.array([1.0, 3.0, 9.0]).reshape(3, 1, 1, 1)]
    cache = np.stack(pair, axis=1)
    for right in (pair, tuple(pair), cache, cache.tolist(), [one[:2] for one in pair], cache[:2]):
        assert call(function, paged_kv_cache=right, **where).output.ravel().tolist() == [2.0]
    for wrong in (cache[:2].tolist(), [one.tolist() for one in pair], [one[:2].tolist() for one in pair]):
        pointer, text = fault(function, paged_kv_cache=wrong, **where)
        assert (pointer, "a pair is two arrays" in text) == ("/paged_kv_cache", True)
