"""The subcommands of ``ckpt``: options in, text or JSON and an exit status out. Nothing else uses click."""
