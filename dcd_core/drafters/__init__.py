"""Drafters: who proposes the tokens of a round. One file each; :mod:`dcd_core.drafters.protocol` says what one does."""
