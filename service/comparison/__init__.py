"""Compare somebody else's attention with the truth: is it right, and if not, which mistake was made?

- case: a request in float64, some of whose options a mutant changes
- solve: the answer of a case for a sample of its rows
- mutants: the table of known mistakes
- baseline: the error that legal rounding explains
- errors, places, tests: how far two arrays are apart, where, and what tests with a tolerance say
- search: the mistakes that explain an output; power: the mistakes that a request can show
- inputs: requests that are made to tell mistakes apart
- report, compare: what is answered, and how it is made
"""
