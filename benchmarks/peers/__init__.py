"""Third-party servers, each in a folder with pinned requirements; `make bench-peers` installs them."""
