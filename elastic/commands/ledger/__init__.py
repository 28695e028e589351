"""``elastic goodput``, ``failures``, ``status``, ``compare``: a run's ledger as text, JSON, page and picture."""
