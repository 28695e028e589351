"""Where bytes live: one contract, one file a backend."""
