"""Drafters that look continuations up in text, in tables or in the target's own outputs."""
