"""The known mistakes. Importing the package fills the table."""

from attention_service.comparison.mutants import heads, masks, merges, operands, positions, precision, scores, softmax  # noqa: F401  # each adds its rows
from attention_service.comparison.mutants.table import MUTANTS, Mutant

__all__ = ["MUTANTS", "Mutant"]
