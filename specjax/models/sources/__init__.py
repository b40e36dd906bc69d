"""Where models come from: the files of a directory, of a repository of the Hub, or a .gguf file.

``hub`` fetches what a Hub name names. The modules ``gguf_*`` give a .gguf file the form of a
Hugging Face style directory: the keys of config.json, the names of the tensors, the tokenizer.
``tensors`` reads single tensors with little memory.
"""
