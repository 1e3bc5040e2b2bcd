"""`python -m service`: the command line; serves when no command is given."""

import sys

from service.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["serve"]))
