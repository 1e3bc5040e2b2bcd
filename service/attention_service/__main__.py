"""`python -m attention_service`: the command line; serves when no command is given."""

import sys

from attention_service.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["serve"]))
