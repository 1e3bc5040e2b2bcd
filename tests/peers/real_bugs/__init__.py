"""Real bugs of attention kernels: wrong outputs that public threads describe, each rebuilt in NumPy.

Distinct from the known mistakes of the comparison: a kernel here does what its thread says, tile by tile, and `names`
says which known mistakes describe it, if any does.
"""

from typing import Final

from tests.peers.real_bugs import (
    edges,
    gradients,
    heads,
    logsumexps,
    masks,
    memory,
    merges,
    recent,
    scales,
    sinks,
    softmaxes,
)
from tests.peers.real_bugs.parts import Arrays, Bug, Fields

BUGS: Final[tuple[Bug, ...]] = (
    *edges.BUGS, *merges.BUGS, *softmaxes.BUGS, *masks.BUGS, *memory.BUGS, *heads.BUGS, *scales.BUGS, *sinks.BUGS,
    *logsumexps.BUGS, *gradients.BUGS, *recent.BUGS,
)  # fmt: skip

__all__ = ["BUGS", "Arrays", "Bug", "Fields"]
