"""Offers what the core does not need: readers of other projects' files."""
