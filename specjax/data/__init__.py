"""Data: prompts, recordings, conversations, corpora, packing, datastores and n-gram tables."""
