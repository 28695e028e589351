"""``elastic interval`` and ``elastic plan``: options, where the numbers come from, how results are shown."""
