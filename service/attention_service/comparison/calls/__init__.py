"""Comparisons of calls of other engines: from what a function returned, in its own axes, to one report.

- question: a call and what came back; parts: its sequences as questions about padded batches; merging: merges as calls
- compare: the comparison; judge: of a part; places: where sequences are wrong
- mistakes: the table of mistakes of addressing; moves: keys at other places; explain: which of them explain an answer
- addresses: other places of tokens; readings, merge_facts: what was read or merged, as facts; confirm: proofs of all parts
- report: what is answered
"""
