"""Drafters that look continuations up in text, tables or the target's own outputs; no training."""
