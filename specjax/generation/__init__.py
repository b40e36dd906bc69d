"""From a model's name and texts to texts: the functional API, put together.

- ``loading``: a model, and perhaps a draft model.
- ``texts``: ``generate_text``, with prompts of every form and several samples of a prompt, and
  ``stream_text``.
- ``auto``: ``tune`` finds the fastest method of a model, and keeps it for ``generate_text``.
- ``refill``: many prompts in a constant number of rows.
- ``stops``: stop strings, looked for between rounds.
- ``rollouts``: texts for the trainers of another library.
"""

from specjax.generation.auto import tune
from specjax.generation.loading import Model, load
from specjax.generation.refill import Finished, decode_all
from specjax.generation.stops import cut, decode_until
from specjax.generation.texts import Completion, Generated, generate_text, stream_text

__all__ = [
    "Completion",
    "Finished",
    "Generated",
    "Model",
    "cut",
    "decode_all",
    "decode_until",
    "generate_text",
    "load",
    "stream_text",
    "tune",
]
