"""A score term that no release has, planted into a copy of the tree as CONTRIBUTING.md says to add one.

The term has every attribute that terms may have: it hides keys by a position that follows `query_offset`, leaves keys
out by position, adds numbers, multiplies queries, and has gradients of two arrays.
"""

from __future__ import annotations

import ast
import shutil
from pathlib import Path
from typing import Final

from attention_service.attention.terms import CAUSES

ROOT: Final = Path(__file__).resolve().parent.parent.parent
# What the generator of docs, page and library reads and writes.
FOLDERS: Final = ("service", "openapi", "docs", "tests/cases")
FILES: Final = ("CONTRIBUTING.md", "README.md", "CHANGELOG.md")

FREE_BIT: Final = 2 * max(cause.bit for cause in CAUSES.values())
# By file, the places before which a text is inserted.
CHANGES: Final[dict[str, list[tuple[str, str]]]] = {
    "attention/spec.py": [
        (
            "# Where query, key and value come from: the first fields of a request.\n",
            '''@dataclass(frozen=True, slots=True)
class Stairs:
    """Query i sees the keys of its step and of those before: steps are `size` keys long."""

    size: int | None = None
    slopes: Parameter | None = None
    key: Parameter | None = None


''',
        ),
        ('    "grad_relative_keys",\n', '    "grad_stairs",\n'),
        ("    chunk_size: int | None = None\n", "    stairs: Stairs | None = None\n"),
    ],
    "schemas/request.py": [
        (
            "class Window(Part):\n",
            '''class Stairs(Part):
    """Steps of keys: a query sees its own and those before."""

    size: int | None = None
    """Keys of a step."""
    slopes: Vector | None = None
    """(num_heads,), what is subtracted for each step between query and key."""
    key: Matrix | None = None
    """(num_heads, head_dim), whose product with the query is added in every other step."""


''',
        ),
        (
            "    chunk_size: int | None = None\n",
            '    stairs: Stairs | None = None\n    """Stairs of keys. Default: none."""\n',
        ),
    ],
    "schemas/response.py": [
        (
            "    grad_scale: NumberOrTensor",
            '    grad_stairs: dict[str, Tensor] | None = Field(None, description="Gradients of stairs.")\n',
        ),
    ],
    "attention/terms/positions.py": [
        (
            "# In the order in which they are made.\n",
            '''@dataclass(frozen=True, slots=True)
class StairsTerm(ScoreTerm):
    """Query i sees key j only if j // size <= (i + offset) // size. slopes (h,), keys (h, 1, d), offset (b or 1,)"""

    size: int
    slopes: np.ndarray
    keys: np.ndarray
    offset: np.ndarray
    field: ClassVar[str] = "stairs"
    narrows: ClassVar[bool] = True
    reads_query: ClassVar[bool] = True
    reads_offset: ClassVar[bool] = True
    cause: ClassVar[Cause | None] = Cause(FREE_BIT, "#123456", "the stairs (later key {key})", "on a later step")

    @classmethod
    def of(cls, spec: AttentionSpec, frame: Frame) -> Self | None:
        """The term of `stairs`."""
        given = spec.stairs
        if given is None:
            return None
        far = 2**40
        offset = np.array([max(-far, min(far, int(x))) for x in frame.offset(spec)])
        return cls(given.size, given.slopes.astype(frame.dtype), given.key.astype(frame.dtype)[:, None], offset)

    @classmethod
    def example(cls, random: np.random.Generator, sizes: Sizes) -> Any:
        h, d = sizes.num_heads, sizes.head_dim
        return {"size": 5, "slopes": random.uniform(0.1, 0.4, h), "key": random.normal(size=(h, d))}

    def _steps(self, tile: Tile) -> np.ndarray:
        """How many steps each key of a tile is before each query."""
        i = np.arange(tile.rows.start, tile.rows.stop)[:, None] + part_of(self.offset[:, None, None, None], tile)
        return i // self.size - tile.keys // self.size

    def visible(self, tile: Tile, load: Load) -> Array | None:
        return load(self._steps(tile) >= 0)

    @property
    def differs(self) -> bool:
        return bool(np.ptp(self.offset))

    def columns(self, batch: slice, rows: slice, keys: slice) -> slice:
        last = (rows.stop - 1 + int(_of(self.offset, batch).max())) // self.size
        return slice(keys.start, min(keys.stop, (last + 1) * self.size))

    def visible_columns(self, rows: slice, keys: slice) -> slice:
        stop = min(keys.stop, ((rows.start + int(self.offset.min())) // self.size + 1) * self.size)
        return slice(keys.start, max(keys.start, stop))

    def added(self, tile: Tile, load: Load) -> Array | None:
        return load(self._steps(tile).astype(self.slopes.dtype)) * load(-self.slopes[tile.heads, None, None])

    def _odd(self, tile: Tile) -> np.ndarray:
        return (tile.keys // self.size % 2).astype(self.keys.dtype)

    def products(self, query, tile, functions):
        keys = functions.load(self.keys[tile.heads])
        return functions.xp.sum(query * keys, axis=-1, keepdims=True) * functions.load(self._odd(tile))

    @property
    def parameter_shapes(self):
        return {"stairs.slopes": self.slopes.shape, "stairs.key": self.keys.shape}

    def backward(self, grad, tile, functions):
        steps = functions.load(self._steps(tile).astype(self.slopes.dtype))
        return [Part("stairs.slopes", (tile.heads,), -functions.xp.sum(grad * steps, axis=(0, 2, 3)))]

    def products_backward(self, grad, query, tile, functions):
        of_rows = functions.xp.sum(grad * functions.load(self._odd(tile)), axis=-1, keepdims=True)
        of_keys = functions.xp.sum(of_rows * query, axis=(0, 2))[:, None]
        return of_rows * functions.load(self.keys[tile.heads]), [Part("stairs.key", (tile.heads,), of_keys)]

    def largest_product(self, length):
        return length * float(np.linalg.norm(self.keys, axis=-1).max())

    def largest_added(self, sizes: Sizes):
        furthest = np.abs(self.offset).astype(np.float64) + sizes.query_length + sizes.key_length
        return float(np.abs(self.slopes).max()) * (furthest / self.size + 1)

    def added_size(self, tile: tuple[int, int, int, int]) -> int:
        b, h, r, k = tile
        return 2 * b * h * r * k

    def visible_bytes(self, tile: tuple[int, int, int, int]) -> tuple[int, int]:
        b, _, r, k = tile
        return b * r * k, 16 * b * r * k


''',
        ),
        (
            "from attention_service.attention.shapes import Sizes\n",
            "from attention_service.attention.score_term import Part\n",
        ),
        ("SlidingWindow,", "StairsTerm, "),
    ],
}


def attributes() -> set[str]:
    """The names that the class of the term defines."""
    [source] = [text for _, text in CHANGES["attention/terms/positions.py"] if "class StairsTerm" in text]
    body = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)).body
    named = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    return named | {
        node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def plant(folder: Path) -> None:
    """Copy the tree into a folder, and add the term to it as CONTRIBUTING.md says."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    for name, changes in CHANGES.items():
        path = folder / "service" / "attention_service" / name
        text = path.read_text(encoding="utf-8")
        for line, added in changes:
            assert text.count(line) == 1, (name, line)
            text = text.replace(line, added.replace("FREE_BIT", str(FREE_BIT)) + line)
        path.write_text(text, encoding="utf-8")
