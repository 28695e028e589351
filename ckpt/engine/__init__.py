"""The DCP side: what turns a state into items and objects, and back."""
