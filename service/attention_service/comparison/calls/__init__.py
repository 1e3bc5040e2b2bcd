"""Comparisons of calls of other engines: from what a function returned, in its own axes, to one report.

- question: a call and what came back; parts: its sequences as questions about padded batches; merging: merges as calls
- compare: the comparison; judge: of a part; places: where sequences are wrong
- mistakes: the table of mistakes of addressing; moves: keys at other places; explain: which of them explain an answer
- addresses: other places of tokens; readings, merge_facts: what was read or merged, as facts
- confirm: whether the mistake of a part is that of the whole call
- report: what is answered
"""
