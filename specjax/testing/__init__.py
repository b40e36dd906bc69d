"""What a test of a method needs. Shipped with the library, because whoever writes a drafter or a rule has to prove it too."""

from specjax.testing.exact import NoiseReused, NotEnumerable, exact_law
from specjax.testing.laws import chi_square, chi_square_tail, sequence_law, total_variation
from specjax.testing.models import random_table, tabular, tiny, tiny_config

__all__ = [
    "NoiseReused",
    "NotEnumerable",
    "chi_square",
    "chi_square_tail",
    "exact_law",
    "random_table",
    "sequence_law",
    "tabular",
    "tiny",
    "tiny_config",
    "total_variation",
]
