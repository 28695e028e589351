"""What bytes mean: names, records, blocks, digests. Pure."""
