"""How fast, compared with what. Run by `make bench` and `make bench-kernel`."""
