"""`make test-deep`: 10,000 random configurations for each peer.

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

from tests.peers.peers import PEERS
from tests.peers.run import run

EXAMPLES = 10_000
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
    names = sys.argv[1:] or list(PEERS)
    print(f"seed {seed}, {EXAMPLES} configurations a peer", flush=True)
    for name in names:
        pieces = done.setdefault(name, [])
        while sum(count for count, _ in pieces) < EXAMPLES:
            pieces.append(list(run(name, PIECE, seed + len(pieces))))
            PROGRESS.write_text(json.dumps({"seed": seed, "done": done}))
        count, worst = sum(count for count, _ in pieces), max(worst for _, worst in pieces)
        print(f"  {name:28} {int(count):6} worst deviation {worst:.3f} of what is allowed", flush=True)


if __name__ == "__main__":
    main()
