"""The library calls that any service needs, without a service: parse a request, compute, write the answer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import orjson

from attention_service.codecs.json.parser import simdjson
from benchmarks.ours import Attention, use_all_processors
from benchmarks.workloads import Workload

PARTS = ("parse", "kernel", "write")


class Bare:
    """The three calls for one workload with all weights."""

    def __init__(self, load: Workload, body: bytes) -> None:
        use_all_processors()
        self._body = body
        self._shapes = {name: array.shape for name, array in load.arrays.items()}
        query, key, value = self._parse().values()
        self._attention = Attention(query, key, value, include=("attention_weights",))
        result = self._attention.result()
        self._answer = {name: np.ascontiguousarray(result[name]) for name in load.answers}
        load.check(self._answer)

    def milliseconds(self, times: int) -> dict[str, float]:
        """Return the median milliseconds of each call."""
        calls: dict[str, Callable[[], object]] = {
            "parse": self._parse,
            "kernel": self._attention.compute,
            "write": lambda: orjson.dumps(self._answer, option=orjson.OPT_SERIALIZE_NUMPY),
        }
        found: dict[str, list[float]] = {name: [] for name in PARTS}
        for _ in range(times):
            for name in PARTS:
                start = time.perf_counter()
                calls[name]()
                found[name].append(time.perf_counter() - start)
        return {name: statistics.median(values) * 1e3 for name, values in found.items()}

    def _parse(self) -> dict[str, np.ndarray]:
        """Return query, key and value, read through simdjson's typed buffers without Python floats."""
        document = simdjson.Parser().parse(self._body)
        assert isinstance(document, simdjson.Object)
        found = {}
        for name, shape in self._shapes.items():
            array = document[name]
            assert isinstance(array, simdjson.Array)
            numbers = np.frombuffer(array.as_buffer(of_type="d"), np.float64)
            found[name] = numbers.reshape(shape).astype(np.float32)
        return found
