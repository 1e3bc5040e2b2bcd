"""The known mistakes. Importing the package fills the table."""

from attention_service.attention.spec import AttentionSpec
from attention_service.attention.terms import TERMS
from attention_service.comparison.mutants import heads, masks, merges, operands, positions, precision, scores, softmax  # noqa: F401  # each adds its rows
from attention_service.comparison.mutants.table import LEFT_OUT, MUTANTS, Mutant, absent

# A term is known to be ignored from the day that it exists: one without a row of its own has this.
for _kind in TERMS:
    if _kind not in LEFT_OUT:
        _default = {_kind.field: AttentionSpec._field_defaults[_kind.field]}
        absent(f"{_kind.field}.absent", f"The kernel ignores {_kind.noun()}.", _kind, _default)

__all__ = ["MUTANTS", "Mutant"]
