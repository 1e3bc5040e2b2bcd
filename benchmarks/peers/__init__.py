"""Other people's servers, each in its own folder with its pinned requirements; `make bench-peers` installs them."""
