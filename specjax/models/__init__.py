"""Models: the decoder, Hugging Face style directories, head files and files of PyTorch."""
