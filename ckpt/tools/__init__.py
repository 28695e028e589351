"""What people run: each tool reads, describes, and leaves the printing to render. None imports torch to look."""
