"""From a model's name and texts to texts: the functional API, put together.

- ``loading``: a model, and perhaps a draft model.
- ``prompts``: texts, chats and token ids as token ids.
- ``texts``: ``generate_text``.
- ``samples``: several samples of a prompt that is read once.
- ``stops``: stop strings, looked for between rounds.
"""

from specjax.generation.loading import Model, load
from specjax.generation.stops import cut, decode_until
from specjax.generation.texts import Completion, Generated, generate_text

__all__ = ["Completion", "Generated", "Model", "cut", "decode_until", "generate_text", "load"]
