"""Judge what an attention kernel returned: is it right, and if not, which mistake was made?

In the order of a comparison:

- question: the fields of a request as a question
- operation: comparisons in the pipeline; memory: how much memory one takes
- compare: the comparison itself; actual: the arrays that were sent
- case: a request in float64, some of whose options a mutant changes; problem: its last part, from scores to outputs
- sample: rows of a case, and blocks of them; samples: which rows are chosen; solve: the answer of a case for a sample
- legal: what right kernels may do
- baseline: the error that legal rounding explains; floors: the least that it can be, from the lengths of the vectors
- errors, places, tolerances: how far two arrays are apart, where, and what tests with a tolerance say
- facts, wrong: what is true of wrong arrays, beside their names
- mutants: the table of known mistakes; candidates: their answers; estimates: mistakes with a number that is estimated;
  pairs of mistakes
- rules: how far off is correct, imprecise or wrong, and what proves a mistake
- engine: the search for mistakes of any subject, their proof, power and suggestions
- evidence, outputs, survivors: the output of a kernel as a subject; gradients: likewise, of a backward pass
- inputs: requests that are made to show mistakes, by recipes
- calls: comparisons of calls of other engines
- report, text: what is answered, as JSON and for people
"""
