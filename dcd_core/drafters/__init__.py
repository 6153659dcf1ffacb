"""Drafters: one file each, all with the same two methods (propose, observe)."""
