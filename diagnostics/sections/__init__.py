"""The sections of the report, one kind of run each, and what they draw. No torch."""
