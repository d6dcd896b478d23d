"""The `undercurrent` command: parse, call, print. Each app keeps its own commands; they are loaded when called."""
