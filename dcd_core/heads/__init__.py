"""Draft heads: light modules that draft from an expert's hidden states."""
