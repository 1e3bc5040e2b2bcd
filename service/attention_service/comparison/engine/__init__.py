"""One engine for all that is compared: it knows subjects, not attention.

- candidate: a mistake and its answer; hypothesis: how well it explains what was sent
- subject: what a kind of comparison says of itself
- search: the mistakes that explain what is wrong; power: those that a request can show; suggestion: an input that shows
  more; learn: all of these in order
- comparison: what is asked, and all that is known afterwards
"""
