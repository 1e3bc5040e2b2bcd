"""`make test-deep`: 10,000 random configurations for each peer and of gradients, 1,000 for each option of a model.

    python -m tests.peers.deep [NAME ...]

Runs in pieces and records finished pieces in a file, so that it resumes where it stopped, with the same seed. A file
of another seed is never overwritten: delete it to start anew, or set the seed by PEERS_SEED.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path

import torch

from tests.peers.gradients import GRADIENTS, run_gradients
from tests.peers.options import COMPARISONS, run_option
from tests.peers.peers import PEERS
from tests.peers.run import run

EXAMPLES = {
    **dict.fromkeys(PEERS, 10_000),
    **dict.fromkeys(COMPARISONS, 1_000),
    "gradients": 10_000,
    "gradients of JAX": 500,
}
PIECE = 500
PROGRESS = Path(".peers-progress.json")


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the shapes are small
    progress = json.loads(PROGRESS.read_text()) if PROGRESS.exists() else {}
    seed = int(os.environ.get("PEERS_SEED", progress.get("seed", time.time_ns() % 2**32)))
    if progress.get("seed", seed) != seed:
        sys.exit(f"{PROGRESS} holds the progress of seed {progress['seed']}")
    done: dict[str, list[list[float]]] = progress.get("done", {})
    names = sys.argv[1:] or list(EXAMPLES)
    print(f"seed {seed}", flush=True)
    for name in names:
        pieces = done.setdefault(name, [])
        while sum(count for count, _ in pieces) < EXAMPLES[name]:
            pieces.append(list(piece(name, seed, len(pieces))))
            PROGRESS.write_text(json.dumps({"seed": seed, "done": done}))
        count, worst = sum(count for count, _ in pieces), max(worst for _, worst in pieces)
        print(f"  {name:32} {int(count):6} worst deviation {worst:.3f} of what is allowed", flush=True)


def piece(name: str, seed: int, number: int) -> tuple[int, float]:
    """The number of configurations of a piece, and its worst deviation. number: of the piece; each has its own"""
    if name in PEERS:
        return run(name, PIECE, seed + number)
    if name in GRADIENTS:
        return run_gradients(name, PIECE, seed + number * PIECE)
    return run_option(name, PIECE, seed + number * PIECE)


if __name__ == "__main__":
    main()
