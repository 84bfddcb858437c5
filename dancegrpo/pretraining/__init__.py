"""Trains the small models that ship with the package, from nothing."""
