"""Other libraries judged by conformance suites: what docs/conformance.md says of them.

- adapters: the libraries as implementations
- deviations: where they compute something else, each with a program that shows it
- matrix: the page that compares them
"""
