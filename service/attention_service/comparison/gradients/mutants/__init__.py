"""Known mistakes of backward passes."""

from attention_service.comparison.gradients.mutants import scores as scores
from attention_service.comparison.gradients.mutants import sums as sums
from attention_service.comparison.gradients.mutants import views as views
from attention_service.comparison.gradients.mutants.table import GRADIENT_MUTANTS as GRADIENT_MUTANTS
