"""Trainers for draft heads and amateurs."""
