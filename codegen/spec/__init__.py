"""Nouns: what is asked, what may be chosen, what it is chosen for."""
