"""Trained draft heads and their formats on disk."""
