"""Requests of hostile and unlucky clients, sent to a running service. `make test-attack` runs them."""
