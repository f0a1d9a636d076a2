"""Experiments that no handout asks for, one file a chapter."""
