"""The mathematics of attention, without I/O: the request (spec), the plan, and the result.

Letters, here and everywhere:

    b  batch
    h  query heads (num_heads)          g  key/value heads (num_kv_heads)
    q  tokens of the query              k  tokens of the key and value
    d  features of one token of one head in query and key (head_dim)
    e  the same in value (value_dim)

Inside this package heads always stand before tokens: query (b, h, q, d), key (b, g, k, d), value (b, g, k, e), scores
(b, h, q, k). The layouts of requests are converted when operands are made and results returned. This package imports
the standard library, NumPy and ml_dtypes (for bfloat16), and of this project `errors` only.
"""
