"""Attention by its definition (Vaswani et al. 2017, section 3.2.1), for any library with the Python array API.

One tile of scores at a time: a score matrix exists as a whole only if the plan returns it.

Shapes in comments: b batch, h heads, g key/value heads, r the queries of a tile, k its keys, d and e features.
"""
