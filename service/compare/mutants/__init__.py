"""The known mistakes. Importing the package fills the table."""

from service.compare.mutants import heads, masks, operands, positions, precision, scores, softmax  # noqa: F401
from service.compare.mutants.table import MUTANTS, Mutant

__all__ = ["MUTANTS", "Mutant"]
