"""What happened in a run: append-only events beside its checkpoints."""
