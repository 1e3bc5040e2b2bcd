#!/usr/bin/env bash
# NumPy 2.4.6: np.negative(view, out=view) of one column of a matrix returns other numbers if the matrix has exactly 8
# columns of 8 bytes, or 4 of 4 bytes. With 7 or 9 columns, with -view, and with view *= -1 it is right. No error, no
# warning. (NumPy 1.26.4 is right, 2.2.6 and 2.3.5 are wrong.) Seen on x86-64, with and without AVX.
#
# Where it bites: a tile of scores is negated in place before exp(-x) of a sigmoid, and a causal mask leaves one column.
#
# Guess before the run: negation in place is the negation for every shape and stride, as for np.exp, np.tanh and np.sqrt,
# or at worst differs by SIMD width in speed.
#
# Seen: [0, 8, 16] becomes [-0, -1, -2]: the numbers are read as if the column lay in one piece, and the result is
# written with the stride of the column.
#
# Output seen:
#   float64 8 columns: right [-0.0, -8.0, -16.0] got [-0.0, -1.0, -2.0]
#   float32 4 columns: right [-0.0, -4.0, -8.0] got [-0.0, -1.0, -2.0]
#   int64 8 columns: right [0, -8, -16] got [0, -1, -2]
#   int32 4 columns: right [0, -4, -8] got [0, -1, -2]
#   np.exp, np.sqrt, np.tanh and np.absolute in place of the same view: right
#   as stated
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.4.6

"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np

assert np.__version__ == "2.4.6"
wrong = {}
for kind in ("float64", "float32", "int64", "int32"):
    for columns in range(2, 33):
        matrix = np.arange(3 * columns).reshape(3, columns).astype(kind)
        right = -matrix[:, :1]
        view = matrix[:, :1]
        np.negative(view, out=view)
        if not np.array_equal(view, right):
            wrong.setdefault(kind, []).append(columns)
            print(kind, columns, "columns: right", right.ravel().tolist(), "got", view.ravel().tolist())

for function in (np.exp, np.sqrt, np.tanh, np.absolute):
    matrix = np.linspace(0.1, 2, 24).reshape(3, 8)
    right = function(matrix[:, :1].copy())
    view = matrix[:, :1]
    function(view, out=view)
    assert np.allclose(view, right), function
print("np.exp, np.sqrt, np.tanh and np.absolute in place of the same view: right")

expected = {"float64": [8], "float32": [4], "int64": [8], "int32": [4]}
assert wrong == expected, wrong
print("as stated")
PYTHON
