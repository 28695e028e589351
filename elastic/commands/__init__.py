"""What ``elastic`` commands do: one module a command, imported when it is called."""
