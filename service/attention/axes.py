"""The axes of score matrices: which a request shows, and how masks and biases broadcast to (b, h, q, k)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from service.attention.roles import Sizes
from service.errors import ShapeMismatch, shape


@dataclass(frozen=True, slots=True)
class ScoreAxes:
    """The axes of score matrices in a response.

    sizes: of b, h, q, k    names: those shown, in order, like "hqk", or "kq" when tokens are columns
    """

    sizes: dict[str, int]
    names: str

    @property
    def swapped(self) -> bool:
        """True if k stands before q, because tokens are columns."""
        return self.names.endswith("kq")

    def align(self, array: np.ndarray, field: str) -> np.ndarray:
        """A view of a mask or bias with axes (b, h, q, k), each full or of length 1.

        Rank 1 is always over k; rank 4 is always b, h first; rank 3 beside scores with b and h is per head.
        Errors: ShapeMismatch, also if rank 3 could mean one matrix for each batch entry as well.
        """
        axes = self._axes_of(array, field)
        fits = all(have in (1, self.sizes[name]) for have, name in zip(array.shape, axes, strict=True))
        if not fits:
            wanted = tuple(self.sizes[name] for name in axes)
            raise ShapeMismatch.of(f"/{field}", f"{shape(wanted)}, or 1 on any axis", array, f"axes {', '.join(axes)}")
        ordered = array.swapaxes(-1, -2) if axes.endswith("kq") else array
        sizes = iter(ordered.shape)
        return ordered.reshape([next(sizes) if name in axes else 1 for name in "bhqk"])

    def _axes_of(self, array: np.ndarray, field: str) -> str:
        rank = array.ndim
        if rank == 1:
            return "k"
        if rank == 4:
            return "bhkq" if self.swapped else "bhqk"
        if rank == 3 and "b" in self.names and "h" in self.names:
            b, h, q, k = (self.sizes[name] for name in "bhqk")
            if b == h > 1 and array.shape[0] > 1:
                both = f"{shape((b, 1, q, k))} for one per batch entry or {shape((1, h, q, k))} for one per head"
                raise ShapeMismatch.of(f"/{field}", both, array, "as many heads as batch entries: say which is meant")
            return self.names[1:]
        if 2 <= rank <= len(self.names):
            return self.names[-rank:]
        wanted = shape(tuple(self.sizes[name] for name in self.names))
        raise ShapeMismatch.of(f"/{field}", f"an array that broadcasts to {wanted}, or (b, h, q, k)", array)


def score_axes(layout: str, sizes: Sizes, *, columns: bool, single_query: bool) -> ScoreAxes:
    """The axes of score matrices: b if the layout has it, h if it has it or there are several heads, then q, k."""
    names = ("b" if "b" in layout else "") + ("h" if "h" in layout or sizes.num_heads > 1 else "")
    tail = "k" if single_query else "kq" if columns else "qk"
    lengths = {"b": sizes.batch_size, "h": sizes.num_heads, "q": sizes.query_length, "k": sizes.key_length}
    return ScoreAxes(lengths, names + tail)
