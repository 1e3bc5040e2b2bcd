"""The Ray backend. Ray reads these variables of the environment when it is imported."""

import os

# Processes of a cluster that starts here, and those that join it, listen on 127.0.0.1 only, as Ray does on macOS.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
# Ray's own handler of SIGTERM prints a stack, and calls abort() where the process has not ended three seconds later.
os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
