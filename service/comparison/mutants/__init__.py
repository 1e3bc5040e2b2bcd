"""The known mistakes. Importing the package fills the table."""

from service.comparison.mutants import heads, masks, operands, positions, precision, scores, softmax  # noqa: F401
from service.comparison.mutants.table import MUTANTS, Mutant

__all__ = ["MUTANTS", "Mutant"]
