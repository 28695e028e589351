"""What the subcommands of ``drills`` do, one module a group of them."""
