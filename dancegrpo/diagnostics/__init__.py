"""Measurements of a set-up and of the README's claims."""
