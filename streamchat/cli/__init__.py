"""The command line: parse, wire, exit codes."""
