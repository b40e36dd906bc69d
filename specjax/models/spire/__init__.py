"""SPIRe's draft model: some layers of a target, with a cache of constant size and feedback memory.

``model`` makes it an ``LM``, ``cache`` has what it remembers, ``directory`` its files.
"""
