"""Drills: proof that a training job survives what is done to it.

A drill runs a command undisturbed, runs it again while something goes wrong, and compares the two bit for bit.
See ``drills --help``.
"""
