"""The terminal: draws events, knows no tensor."""
