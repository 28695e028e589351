"""Reports of a drill: one page, one JSON document, one table."""
