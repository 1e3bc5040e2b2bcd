"""Attacks: what a hostile or unlucky client could send, and a server that must stand it. `make test-attack`."""
