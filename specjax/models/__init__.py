"""Models: the decoder, Hugging Face style directories and files of PyTorch."""
